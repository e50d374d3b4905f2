"""Looking nodes up: an XML view of the tree for XPath, globs over module paths, and predicates."""

import enum
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from haiku_implicit.mox.tree import Body, Equation, ModuleCall, Node, function_name, walk

# The attributes of every call of a module. Arguments of constructors with one of these names have
# `arg.` in front.
_OWN = ("type", "name", "path", "method", "inputs", "outputs")

_BOOLEAN_AS_TEXT = re.compile(r"""@([\w.-]+)\s*!?=\s*(["'])(true|false|none)\2""", re.IGNORECASE)


class View:
    """The XML of a tree, and the way back from an element to its node.

    Args:
      root: the tree.
      constructors: whether calls of `__init__` are elements. Without them their equations, if any, are
        those of the caller.
    """

    def __init__(self, root: Body, constructors: bool = False):
        self.etree = _lxml()
        self.constructors = constructors
        self.root = self.etree.Element("mox")
        self.nodes: dict[Any, Node] = {self.root: root}
        self._add(self.root, root)

    def query(self, xpath: str) -> Any:
        """The nodes that an XPath finds, in the order in which they run; or its text or number."""
        found = _BOOLEAN_AS_TEXT.search(xpath)
        if found:
            name, text = found[1], found[3]
            raise ValueError(
                f"query: an attribute that is False or None is not there. In place of {found[0]} write "
                + (f"@{name}" if text.lower() == "true" else f"not(@{name})")
            )
        try:
            result = self.root.xpath(xpath, smart_strings=False)
        except self.etree.XPathError as e:
            raise ValueError(f"query: {xpath!r} is not an XPath expression: {e}") from None
        if not isinstance(result, list):
            return result
        return [self.nodes.get(x, x) if self.etree.iselement(x) else x for x in result]

    def text(self) -> str:
        """The view as XML."""
        return str(self.etree.tostring(self.root, encoding="unicode", pretty_print=True))

    def _add(self, parent: Any, node: Any) -> None:
        for child in node.children:
            if _is_hidden(child) and not (self.constructors and child.method):
                self._add(parent, child)
                continue
            element = self.etree.SubElement(parent, tag_of(child), attributes_of(child))
            self.nodes[element] = child
            self._add(element, child)


def tag_of(node: Node) -> str:
    """The name of a node's element."""
    if isinstance(node, Equation):
        return _xml_name(node.primitive.name)
    if isinstance(node, Body):
        return "body"
    return "function" if node.cls is None else "module_call"


def attributes_of(node: Node) -> dict[str, str]:
    """The attributes of a node's element."""
    if isinstance(node, Body):
        return {"name": node.name}
    if isinstance(node, Equation):
        jaxprs = Jaxpr | ClosedJaxpr
        params = {k: v for k, v in node.eqn.params.items() if not isinstance(v, jaxprs)}
        own = {"inputs": _avals(node.inputs), "outputs": _avals(node.outputs)}
        name = function_name(node.eqn)
        return own | _texts(params, own) | ({"name": _clean(name)} if name else {})
    own = dict(type=node.type_name, name=node.name, path=node.path, method=node.method)
    own |= dict(inputs=_avals(node.inputs), outputs=_avals(node.outputs))
    return own | _texts(node.config, _OWN)


def _texts(values: Mapping[str, Any], reserved: Any) -> dict[str, str]:
    """Attributes for the values that are neither None nor False."""
    found = {}
    for name, value in values.items():
        text = _text(value)
        if text is None:
            continue
        name = _xml_name(f"arg.{name}" if name in reserved else name)
        found[name] = _clean(text)
        if isinstance(value, tuple | list):
            found[f"{name}.given"] = _clean(str(value))
    return found


def _text(x: Any) -> str | None:
    """A value as an attribute. A sequence of one value, `(2, 2)`, is written as that value."""
    if x is None or x is False:
        return None
    if x is True:
        return "true"
    if isinstance(x, str):
        return x
    if isinstance(x, enum.Enum):
        return x.name
    if isinstance(x, int | float | complex | np.generic):
        return str(x)
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        texts = [str(y) if isinstance(y, tuple | list) else _text(y) or str(y) for y in x]
        return texts[0] if texts and len(set(texts)) == 1 else " ".join(texts)
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return _name_of(x)


text_of = _text


def _name_of(x: Any) -> str:
    """What an object is called: a function, a class, a dtype, or the class of it."""
    if isinstance(x, functools.partial):
        return _name_of(x.func)
    if isinstance(x, np.dtype):
        return x.name
    name = getattr(x, "__name__", None)
    if isinstance(name, str):
        return name
    return str(x) if " at 0x" not in str(x) else type(x).__name__


def _avals(atoms: Sequence[Any]) -> str:
    return " ".join(atom.aval.str_short() for atom in atoms)


def _xml_name(name: str) -> str:
    name = re.sub(r"[^\w.-]", "_", name)
    return name if re.match(r"[^\W\d]", name) else f"_{name}"


def _clean(text: str) -> str:
    """Without the control characters that XML can't have."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _lxml() -> Any:
    try:
        from lxml import etree
    except ImportError as e:
        raise ImportError("XPath needs lxml: pip install 'haiku-implicit[mox]'") from e
    return etree


# --- without XML -----------------------------------------------------------------------------------


def calls(root: Body) -> Iterator[ModuleCall]:
    """The calls of modules in a tree, without those of constructors."""
    for node in walk(root):
        if isinstance(node, ModuleCall) and not _is_hidden(node):
            yield node


def _is_hidden(node: Any) -> bool:
    """Whether a node is a constructor's call, or a group that is not seen as one."""
    return isinstance(node, ModuleCall) and (node.call is None or node.method == "__init__")


def matches_glob(path: str, pattern: str) -> bool:
    """Whether a module's path is one of a pattern: `*` within a part of it, `**` for any parts."""
    return _match(tuple(path.split("/")), tuple(pattern.split("/")))


def _match(parts: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatch.fnmatchcase(parts[0], patterns[0])
        and _match(parts[1:], patterns[1:])
    )


def is_xpath(where: str) -> bool:
    """Whether a text is an XPath rather than a glob."""
    return where.startswith(("/", "(", ".")) or "::" in where or "[@" in where


Where = Any


def find(mox: Any, where: Where) -> list[Node]:
    """The nodes that an argument `where` chooses, in the order in which they run.

    Args:
      mox: a module expression.
      where: an XPath, a glob over the paths of modules, a class of modules, a predicate of nodes, a
        node, or a list of nodes.
    """
    if isinstance(where, str):
        found = mox.query(where) if is_xpath(where) else mox[where]
        if not isinstance(found, list) or not all(
            isinstance(x, ModuleCall | Equation | Body) for x in found
        ):
            raise ValueError(f"where: {where!r} gives {found!r}, and not nodes")
        return found
    if isinstance(where, ModuleCall | Equation | Body):
        return [where]
    if isinstance(where, Sequence):
        return list(where)
    return mox.select(where)


def select(root: Body, what: type | Callable[[Node], Any]) -> list[Node]:
    """The calls of a class of modules, or the nodes for which a function is true."""
    if isinstance(what, type):
        return [x for x in calls(root) if x.cls is not None and issubclass(x.cls, what)]
    return [x for x in walk(root) if not _is_hidden(x) and what(x)]
