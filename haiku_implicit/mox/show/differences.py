"""The differences between two module expressions, as lines of text."""

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from haiku_implicit.core.interpreter import jaxprs_of
from haiku_implicit.mox.program.interface import ARGUMENTS, ENTRIES, RESULTS, Interface, described
from haiku_implicit.mox.program.program import Program
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall
from haiku_implicit.mox.show import view


class Origin(NamedTuple):
    """The origin of a value.

    Attributes:
      text: its description.
      key: a key that is equal for equal numbers, constants and arguments.
      node: the node that returns the value, or the body that takes it as an argument.
      number: its index among the values of the expression.
    """

    text: str
    key: Any
    node: Any = None
    number: int = 0


class Line(NamedTuple):
    """The line of a node.

    Attributes:
      text: the line.
      node: the node.
      reads: the origins of the node's operands, or of a body's results, by name.
      settings: the parameters of an equation.
    """

    text: str
    node: Any
    reads: Mapping[str, Origin]
    settings: Mapping[str, str]


def differences(a: Program, b: Program) -> Iterator[str]:
    """Lines for the differences between two expressions: see `diff`."""
    faces = [list(_face_lines(x.interface)) for x in (a, b)]
    for sign, (one, other) in (("-", faces), ("+", faces[::-1])):
        yield from (sign + text for text in one if text not in other)
    old, new = (list(_lines_of(x)) for x in (a, b))
    blocks = _blocks([x.text for x in old], [x.text for x in new])
    same = {
        id(x.node): y.node
        for i, j, k, m in blocks
        for x, y in zip(old[i:j], new[k:m], strict=False)
        if x.text == y.text and j - i == m - k
    }
    partners = set(map(id, same.values()))
    for i, j, k, m in blocks:
        if [x.text for x in old[i:j]] != [x.text for x in new[k:m]]:
            yield from (f"-{x.text}" for x in old[i:j])
            yield from (f"+{x.text}" for x in new[k:m])
            continue
        for x, y in zip(old[i:j], new[k:m], strict=True):
            yield from _changes(x, y, same, partners)


def _blocks(old: Sequence[str], new: Sequence[str]) -> list[Sequence[int]]:
    """Pairs of ranges in two lists of lines that are equal, or that replace each other."""
    if old == new:
        return [(0, len(old), 0, len(new))]
    return [block for _, *block in difflib.SequenceMatcher(None, old, new).get_opcodes()]


def _changes(x: Line, y: Line, same: Mapping[int, Any], partners: set[int]) -> Iterator[str]:
    """Lines for the differences between two nodes that look the same.

    A value from a node that only one of the expressions has is left out: that node has its own line.
    """
    for name, one in x.reads.items():
        other = y.reads.get(name, one)
        if one.node is not None and id(one.node) not in same:
            continue
        if other.node is not None and id(other.node) not in partners:
            continue
        partner = None if one.node is None else same[id(one.node)]
        if partner is not other.node or one.key != other.key:
            which = [f"#{x.number} " if one.text == other.text else "" for x in (one, other)]
            yield f"-{x.text}: {name} is {which[0]}{one.text}"
            yield f"+{y.text}: {name} is {which[1]}{other.text}"
    for name in sorted(x.settings.keys() | y.settings.keys()):
        if x.settings.get(name) != y.settings.get(name):
            yield f"-{x.text}: {name}={x.settings.get(name)}"
            yield f"+{y.text}: {name}={y.settings.get(name)}"


# --- lines of one expression ------------------------------------------------------------------------


def _face_lines(face: Interface) -> Iterator[str]:
    """Lines for arguments, parameters, state and results."""
    for field in (*ENTRIES, "rng", "args", "results"):
        for path, slot in face.slots(field).items():
            name = "/".join(path) if field in ENTRIES else described(slot.tree)
            yield f"{(ARGUMENTS | RESULTS)[field]} {name}: {_types(slot.atoms)}"


def _types(atoms: Sequence[Atom]) -> str:
    return ", ".join(x.aval.str_short(short_dtypes=True) for x in atoms)


def _lines_of(mox: Program) -> Iterator[Line]:
    face = mox.interface
    env = _named("the random key", face.rng.atoms)
    env |= _named("array {} of the arguments", face.args.atoms)
    for field in ("params", "state"):
        for path, slot in face.slots(field).items():
            env |= _named(f"the {ARGUMENTS[field]} {'/'.join(path)}", slot.atoms)
    results = {"result": face.results}
    results |= {f"the new state {'/'.join(path)}": x for path, x in face.new_state.items()}
    returned: dict[str, Any] = {}
    for name, slot in results.items():
        several = len(slot.atoms) > 1
        returned |= {f"{name} {i}" if several else name: v for i, v in enumerate(slot.atoms)}
    yield from _lines_of_body(mox.body, "model", env, returned, 0)


def _named(name: str, atoms: Sequence[Atom]) -> dict[Any, Origin]:
    several = len(atoms) > 1 and "{}" not in name
    texts = [f"{name} ({i})" if several else name.format(i) for i in range(len(atoms))]
    return {v: Origin(text, text) for v, text in zip(atoms, texts, strict=True)}


def _lines_of_body(
    body: Body, text: str, env: dict[Any, Origin], returned: Mapping[str, Any], depth: int
) -> Iterator[Line]:
    """The line of a body, and the lines of its nodes.

    Args:
      body: the body.
      text: its line.
      env: the origins of its arguments. The origins of its other variables are added.
      returned: its results, by name.
      depth: the depth of the nodes.
    """
    consts = dict(zip(body.constvars, body.consts, strict=False))
    env |= {v: Origin(_text_of(x), _bits(x)) for v, x in consts.items()}
    handed = [*body.constvars, *body.invars]
    own = {v: Origin(f"argument {i} of {body.name}", i, body) for i, v in enumerate(handed)}
    env |= own | env
    lines = list(_lines(body.children, env, depth))
    reads = {name: _origin(v, env) for name, v in returned.items()}
    yield Line(text, body, reads, {})
    yield from lines


def _lines(nodes: Sequence[Any], env: dict[Any, Origin], depth: int) -> Iterator[Line]:
    indent = "  " * depth
    for node in nodes:
        if isinstance(node, ModuleCall):
            env |= {v: _origin(x, env) for v, x in node.given}
            shown = not view.is_hidden(node)
            if shown:
                yield Line(f"{indent}{node!r}", node, {}, {})
            yield from _lines(node.children, env, depth + shown)
            env |= {v: _origin(x, env) for v, x in zip(node.outputs, node.returns, strict=True)}
            continue
        reads = {f"operand {i}": _origin(x, env) for i, x in enumerate(node.inputs)}
        yield Line(f"{indent}{node!r}", node, reads, _settings(node))
        for body in node.bodies:
            returned = {f"result {i}": v for i, v in enumerate(body.returns)}
            yield from _lines_of_body(body, f"{indent}  {body!r}", {}, returned, depth + 2)
        which = "the result" if len(node.outputs) == 1 else "result {}"
        for i, v in enumerate(node.outputs):
            env[v] = Origin(f"{which.format(i)} of {node!r}", i, node, len(env))


def _origin(atom: Atom, env: Mapping[Any, Origin]) -> Origin:
    if isinstance(atom, Literal):
        return Origin(_text_of(atom.val), _bits(np.asarray(atom.val, atom.aval.dtype)))  # type: ignore[attr-defined]
    return env[atom]


def _settings(node: Equation) -> dict[str, str]:
    """The parameters of an equation as texts, and the JAX setting that it was traced with."""
    params = {k: x for k, x in node.eqn.params.items() if not any(jaxprs_of({k: x}))}
    found = {k: str(view.text_of(x)) for k, x in params.items()}
    found |= {k: _text_of(x) for k, x in params.items() if isinstance(x, np.ndarray | jax.Array)}
    ctx: Any = node.eqn.ctx
    return found | {"threefry_partitionable": str(ctx.threefry_partitionable)}


def _bits(x: Any) -> Any:
    x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    x = np.asarray(x)
    return str(x.dtype), x.shape, x.tobytes()


def _text_of(x: Any) -> str:
    """A short text for a constant: its values, or a digest of them."""
    kind, shape, data = _bits(x if hasattr(x, "dtype") else np.asarray(x))
    if not shape:
        return str(x)
    label = f"the constant {kind}[{','.join(map(str, shape))}]"
    if len(data) <= 64:
        return f"{label} {np.asarray(x).tolist()}"
    return f"{label} with the digest {hashlib.sha256(data).hexdigest()[:8]}"
