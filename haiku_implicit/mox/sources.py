"""Which parameters the variables of a tree are, also in the bodies of loops and calls."""

import dataclasses
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat
from haiku_implicit.mox.interface import Path
from haiku_implicit.mox.tree import Body, Equation, ModuleCall, Node, reads, steps, walk

# By variable, the module and the name of the parameter that it is (or a slice of it, one a layer).
Sources = dict[Any, Path]


def sources_in(body: Body, known: Mapping[Any, Path]) -> Sources:
    """The parameters in reach of a body's nodes.

    Args:
      body: the body.
      known: those that are its arguments.
    """
    found = dict(known)
    for step in steps(body.children):
        if isinstance(step, tuple) and not isinstance(step[1], Literal) and step[1] in found:
            found[step[0]] = found[step[1]]
    return found


def sources_of_body(node: Equation, body: Body, known: Mapping[Any, Path]) -> Sources:
    """The parameters in reach of the nodes in a body of an equation."""
    pairs = zip(body.invars, arguments_of(node, body), strict=True)
    return sources_in(
        body, {v: known[x] for v, x in pairs if not isinstance(x, Literal) and x in known}
    )


def arguments_of(node: Equation, body: Body) -> Sequence[Any]:
    """What an equation gives to one of its bodies, in the outer program."""
    inputs = list(node.inputs)
    if node.primitive is jex.while_p:
        num_cond, num_body = node.eqn.params["cond_nconsts"], node.eqn.params["body_nconsts"]
        carry = inputs[num_cond + num_body :]
        consts = inputs[:num_cond] if body.name == "cond_jaxpr" else inputs[num_cond:][:num_body]
        return [*consts, *carry]
    # The first operand of a condition is the index of the branch.
    return inputs[len(inputs) - len(body.invars) :]


def prefix_of_paths(body: Body, known: Sources) -> str:
    """What is in front of the paths of the modules in a body: the path of a stack of layers, say.

    A stack transforms its layer for itself, and the paths in it begin anew. The parameters that a
    module reads have the whole path.
    """
    for node in walk(body, into_bodies=False):
        if isinstance(node, ModuleCall) and node.path:
            for module, _ in read_by(node, known):
                if f"/{module}".endswith(f"/{node.path}"):
                    return module[: -len(node.path)].rstrip("/")
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where one is in a tree: what tells the full paths of the modules there.

    Attributes:
      body: the body.
      params: the parameters among the arguments of the whole tree, by variable.
      prefix: what is in front of the paths in the body.
      around: the equations that it is in, the outermost first.
      outer: where the last of these is; None in the whole tree.
    """

    body: Body
    params: Mapping[Any, Path]
    prefix: str = ""
    around: tuple[Equation, ...] = ()
    outer: "Place | None" = None

    @functools.cached_property
    def known(self) -> Sources:
        """The parameters in reach, by variable."""
        if self.outer is None:
            return sources_in(self.body, self.params)
        return sources_of_body(self.around[-1], self.body, self.outer.known)

    def inside(self, node: Equation, body: Body) -> "Place":
        """The place of a body of an equation."""
        new = Place(body, self.params, self.prefix, (*self.around, node), self)
        if node.marked is None:  # there are no modules in it
            return new
        prefix = prefix_of_paths(body, new.known)
        return dataclasses.replace(new, prefix=prefix) if prefix else new

    def path_of(self, node: ModuleCall) -> str:
        """The full path of a module, as in the parameters."""
        return f"{self.prefix}/{node.path}" if self.prefix and node.path else node.path


def read_by(node: Node, known: Sources) -> Iterator[Path]:
    """The parameters that a node reads, those in the bodies of its equations too."""
    for x in walk(node, into_bodies=False):
        if isinstance(x, Body):
            continue
        yield from (known[v] for v in reads(x) if not isinstance(v, Literal) and v in known)
        if isinstance(x, Equation) and any(
            v in known for v in x.inputs if not isinstance(v, Literal)
        ):
            for body in x.bodies:
                inner = sources_of_body(x, body, known)
                for child in body.children:
                    yield from read_by(child, inner)


# --- dependence ------------------------------------------------------------------------------------


def depends(body: Body, flags: Sequence[bool]) -> list[bool]:
    """Which results of a program depend on some of its arguments.

    Args:
      body: the program.
      flags: for each argument, whether it is one of them.
    """
    found = {v for v, flag in zip(body.invars, flags, strict=True) if flag}
    for step in steps(body.children):
        if isinstance(step, tuple):
            found |= {step[0]} if _any_of([step[1]], found) else set()
        elif _any_of(step.inputs, found):
            found.update(
                v for v, flag in zip(step.outputs, _of_results(step, found), strict=True) if flag
            )
    return [_any_of([x], found) for x in body.returns]


def _any_of(atoms: Sequence[Any], found: Container[Any]) -> bool:
    return any(not isinstance(x, Literal) and x in found for x in atoms)


def _of_results(node: Equation, found: Container[Any]) -> list[bool]:
    """Which results of an equation depend on variables."""
    everything = [True] * len(node.outputs)
    if node.primitive in (jex.scan_p, jex.while_p):
        return _of_loop(node, found)
    if node.primitive is jex.cond_p and _any_of(node.inputs[:1], found):
        return everything
    whole = [len(body.returns) == len(node.outputs) for body in node.bodies]
    if not whole or not all(whole) or any(len(x.invars) > len(node.inputs) for x in node.bodies):
        return everything
    flags = [
        depends(body, [_any_of([x], found) for x in arguments_of(node, body)])
        for body in node.bodies
    ]
    return [any(each) for each in zip(*flags, strict=True)]


def _of_loop(node: Equation, found: Container[Any]) -> list[bool]:
    """The same of a loop: what is carried depends on what it depended on before."""
    body = next(x for x in node.bodies if x.name != "cond_jaxpr")
    flags = [_any_of([x], found) for x in arguments_of(node, body)]
    if node.primitive is jex.while_p:
        num_carry = len(node.outputs)
        start = len(body.invars) - num_carry
    else:
        start, num_carry = compat.scan_arity(node.eqn.params, list(node.inputs))
    while True:
        results = depends(body, flags)
        carry = [x or y for x, y in zip(flags[start:], results[:num_carry], strict=False)]
        new = [*flags[:start], *carry[:num_carry], *flags[start + num_carry :]]
        if new == flags:
            break
        flags = new
    for cond in (x for x in node.bodies if x.name == "cond_jaxpr"):
        consts = arguments_of(node, cond)[: len(cond.invars) - num_carry]
        if any(depends(cond, [*(_any_of([x], found) for x in consts), *flags[start:]])):
            return [True] * len(node.outputs)
    return [*flags[start:][:num_carry], *results[num_carry:]]
