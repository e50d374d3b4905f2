"""Which parameters the variables of a tree are, also in the bodies of loops and calls."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.extend.core import primitives as jex

from haiku_implicit.mox.interface import Path
from haiku_implicit.mox.tree import Body, Equation, ModuleCall, Node, reads, walk

# By variable, the module and the name of the parameter that it is (or a slice of it, one a layer).
Sources = dict[Any, Path]


def sources_in(body: Body, known: Mapping[Any, Path]) -> Sources:
    """The parameters in reach of a body's nodes.

    Args:
      body: the body.
      known: those that are its arguments.
    """
    found = dict(known)
    for node in walk(body, into_bodies=False):
        if isinstance(node, ModuleCall):
            pairs: Any = [*node.given, *zip(node.outputs, node.returns, strict=True)]
            found |= {v: found[x] for v, x in pairs if not isinstance(x, Literal) and x in found}
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
