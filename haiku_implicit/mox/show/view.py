"""Finds nodes: by XPath in an XML view of the tree, by globs over module paths, or by predicates."""

import difflib
import enum
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from haiku_implicit.core.messages import imported, see, type_error, value_error
from haiku_implicit.core.typing import Array, Aval
from haiku_implicit.mox.program import tree
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, Node

# The attributes of every call of a module. Constructor arguments of these names get the prefix `arg.`.
_OWN = ("type", "name", "path", "method", "inputs", "outputs")

_BOOLEAN_AS_TEXT = re.compile(
    r"""(?:@|attribute::)(?P<name>[\w.-]+)\s*!?=\s*(?P<q>["'])(?P<text>true|false|none)(?P=q)"""
    r"""|(?P<q2>["'])(?P<text2>true|false|none)(?P=q2)\s*!?=\s*(?:@|attribute::)(?P<name2>[\w.-]+)""",
    re.IGNORECASE,
)

# Queries by attributes and not by positions. libxml2 would look at each node's children for them, but a
# single walk through all nodes has the same result.
_WITH_ATTRIBUTE = re.compile(r"""//((?:\*|[\w-]+)\[@[\w.-]+=(?:"[^"]*"|'[^']*')\])""")


class View:
    """The XML of a tree, with the node of each element.

    Args:
      root: the tree.
      constructors: whether calls of `__init__` are elements. If not, their equations, if any, belong to
        the caller.
    """

    def __init__(self, root: Body, constructors: bool = False):
        self.etree = imported("lxml.etree", "XPath needs lxml", "'haiku-implicit[mox]'")
        self.constructors = constructors
        self.root = self.etree.Element("mox")
        self.nodes: dict[Any, Node] = {self.root: root}
        self._add(self.root, root)

    def query(self, xpath: str) -> Any:
        """The result of an XPath: nodes in the order in which they run, texts, or a single value."""
        self._check_booleans(xpath)
        found = _WITH_ATTRIBUTE.fullmatch(xpath)
        try:
            faster = f"/descendant::{found[1]}" if found else xpath
            result = self.root.xpath(faster, smart_strings=False)
        except (self.etree.XPathError, ValueError) as e:
            raise value_error(f"query: {xpath!r} is not an XPath expression: {e}") from None
        if not isinstance(result, list):
            return result
        return [self.nodes.get(x, x) if self.etree.iselement(x) else x for x in result]

    def _check_booleans(self, xpath: str) -> None:
        """Raises if an XPath compares an attribute with a text that means True, False or None."""
        for found in _BOOLEAN_AS_TEXT.finditer(xpath):
            name, text = found["name"] or found["name2"], found["text"] or found["text2"]
            if text != "true" and self.root.xpath("//@*[name()=$n and .=$t]", n=name, t=text):
                continue  # the model has this text
            means = f"@{name}" if text.lower() == "true" else f"not(@{name})"
            raise value_error(
                "query: an attribute that is False or None is not there. In place of "
                f"{found[0]} write {means}"
            )

    def text(self) -> str:
        """The view as XML."""
        return str(self.etree.tostring(self.root, encoding="unicode", pretty_print=True))

    def _add(self, parent: Any, node: Any) -> None:
        make, nodes = self.etree.SubElement, self.nodes
        for child in node.children:
            if isinstance(child, Equation):
                element = make(parent, _xml_name(child.primitive.name), _of_equation(child))
                for body in child.bodies:
                    inner = make(element, "body", {"name": body.name})
                    nodes[inner] = body
                    self._add(inner, body)
            elif is_hidden(child) and not (self.constructors and child.method):
                self._add(parent, child)
                continue
            else:
                tag = "function" if child.cls is None else "module_call"
                element = make(parent, tag, _of_call(child))
                self._add(element, child)
            nodes[element] = child


def _of_equation(node: Equation) -> dict[str, str]:
    """The attributes of an equation's element."""
    found = {"inputs": _avals(node.inputs), "outputs": _avals(node.outputs)}
    if params := node.eqn.params:
        _put_texts(found, params, ("inputs", "outputs"))
        if name := tree.function_name(node.eqn):
            found["name"] = clean(name)
    return found


def _of_call(node: ModuleCall) -> dict[str, str]:
    """The attributes of a call's element."""
    found = dict(type=node.type_name, name=node.name, path=node.path, method=node.method)
    found = {name: clean(text) for name, text in found.items()}
    found |= dict(inputs=_avals(node.inputs), outputs=_avals(node.outputs))
    _put_texts(found, node.config, _OWN)
    return found


def _put_texts(found: dict[str, str], values: Mapping[str, Any], reserved: Sequence[str]) -> None:
    """Adds attributes for the values that are neither None nor False, and are not programs."""
    for name, value in values.items():
        if value is None or value is False or isinstance(value, Jaxpr | ClosedJaxpr):
            continue
        name = _xml_name(f"arg.{name}" if name in reserved else name)
        text = text_of(value)
        if text is not None:
            found[name] = clean(text)
        if isinstance(value, tuple | list):
            found[f"{name}.given"] = clean(str(value))


def text_of(x: Any) -> str | None:
    """The text of a value. A sequence of equal values, such as `(2, 2)`, is written as one value."""
    if type(x) in (int, str):  # the most common types
        return str(x)
    if x is None or x is False:
        return None
    if x is True:
        return "true"
    if isinstance(x, enum.Enum):
        return x.name
    if isinstance(x, str | int | float | complex | np.generic):
        return str(x)
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        return _text_of_sequence(x)
    if isinstance(x, Mapping):
        return " ".join(f"{key}={text_of(value)}" for key, value in x.items())
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if isinstance(x, np.dtype):
        return _dtype_name(x)
    return _name_of(x)


def _text_of_sequence(xs: Sequence[Array]) -> str | None:
    if set(map(type, xs)) == {int}:  # a shape, axes
        return str(xs[0]) if len(set(xs)) == 1 else " ".join(map(str, xs))
    texts = [str(x) if isinstance(x, tuple | list) else text_of(x) or str(x) for x in xs]
    return text_of(xs[0]) if texts and len(set(texts)) == 1 else " ".join(texts)


_dtype_name = functools.lru_cache(lambda dtype: dtype.name)


def _name_of(x: Any) -> str:
    """The name of a function or a class; for another object, its text or the name of its class."""
    if isinstance(x, functools.partial):
        return _name_of(x.func)
    name = getattr(x, "__name__", None)
    if isinstance(name, str):
        return name
    return type(x).__name__ if " at 0x" in (text := str(x)) else text


def _avals(atoms: Sequence[Atom]) -> str:
    return " ".join([_aval(atom.aval) for atom in atoms])


@functools.lru_cache(maxsize=4096)
def _aval(aval: Aval) -> str:
    return str(aval.str_short())


# The characters that XML allows in a name, without the colon.
_START = (
    "A-Za-z_\xc0-\xd6\xd8-\xf6\xf8-\u02ff\u0370-\u037d\u037f-\u1fff\u200c\u200d\u2070-\u218f"
    "\u2c00-\u2fef\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufffd\U00010000-\U000effff"
)
_NO_XML_NAME = re.compile(f"[^{_START}0-9.\xb7\u0300-\u036f\u203f\u2040-]")
_XML_START = re.compile(f"[{_START}]")


@functools.lru_cache(maxsize=4096)
def _xml_name(name: str) -> str:
    name = _NO_XML_NAME.sub("_", name)
    return name if _XML_START.match(name) else f"_{name}"


_NO_XML_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """Replaces the control characters in a text that XML can't have."""
    return text if text.isascii() and text.isprintable() else _NO_XML_TEXT.sub("\ufffd", text)


# --- without XML -----------------------------------------------------------------------------------


def visible(root: Body) -> Iterator[Node]:
    """The nodes of a tree without calls of constructors, in the order in which they run."""
    return (node for node in tree.walk(root) if not is_hidden(node))


def calls(root: Body) -> list[ModuleCall]:
    """The calls of modules in a tree, without calls of constructors.

    If a module itself is called, its other methods and properties are left out.
    """
    found = list(tree.calls(root))
    itself = {node.path for node in found if node.method in _CALLS}
    return [x for x in found if x.method in _CALLS or x.path not in itself]


_CALLS = ("__call__", "")  # of a module, and of an inserted function


def with_path(root: Body, pattern: str) -> list[ModuleCall]:
    """The calls of modules whose path matches a glob.

    Raises:
      KeyError: if no path matches.
    """
    there = calls(root)
    parts = tuple(pattern.split("/"))
    found = [node for node in there if _match(tuple(node.path.split("/")), parts)]
    if not found:
        paths = list(dict.fromkeys(node.path for node in there))
        close = difflib.get_close_matches(pattern, paths) or _with_close_names(pattern, paths)
        there_are = ", ".join(close or paths[:5]) or "no modules"
        raise KeyError(
            f"no module has the path {pattern!r}. There are {there_are} {see('module-expressions')}"
        )
    return found


def _with_close_names(pattern: str, paths: Sequence[str]) -> list[str]:
    """The paths whose last name is similar to the last name of a pattern."""
    names = {path.rpartition("/")[2]: path for path in reversed(paths)}
    return [names[x] for x in difflib.get_close_matches(pattern.rpartition("/")[2], names)]


def is_hidden(node: Node) -> bool:
    """Whether a node is a call of a constructor, or a group that is not shown as a node."""
    return isinstance(node, ModuleCall) and (node.call is None or node.method == "__init__")


def _match(parts: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Whether a module's path matches a pattern: `*` within a part of it, `**` for any parts."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    fits = bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0])
    return fits and _match(parts[1:], patterns[1:])


def is_xpath(where: str) -> bool:
    """Whether a text is an XPath rather than a glob."""
    return where.startswith((".", "/")) or any(x in where for x in ("(", "::", "//", "[@"))


Where = Any
_NODES = (ModuleCall, Equation, Body)


def find(mox: Any, where: Where) -> list[Node]:
    """The nodes that an argument `where` chooses, in the order in which they run.

    Args:
      mox: a module expression.
      where: an XPath, a glob over the paths of modules, a class of modules, a predicate of nodes, a
        node, or a list of these.

    Raises:
      ValueError: if no node is found. The error names similar or existing nodes.
      TypeError: if `where` is something else.
    """
    if isinstance(where, _NODES):
        return [where]
    if isinstance(where, str):
        found = mox.query(where) if is_xpath(where) else mox[where]
        if not isinstance(found, list) or not all(isinstance(x, _NODES) for x in found):
            raise value_error(f"where: {where!r} gives {found!r}, and not nodes")
    elif isinstance(where, Sequence):
        found = _in_order(mox.body, [x for part in where for x in find(mox, part)])
    elif callable(where):
        found = mox.select(where)
    else:
        raise type_error(
            "where: expected an XPath, a glob over paths, a class of modules, a function of a node, a "
            f"node, or a list of these, got {type(where).__name__}"
        )
    if not found:
        raise value_error(
            f"where: nothing in the expression is {where!r}. {_what_there_is(mox, where)}"
        )
    return found


def _in_order(root: Body, nodes: Sequence[Node]) -> list[Node]:
    """Nodes without repetitions, in the order in which they run."""
    places = {id(node): i for i, node in enumerate(tree.walk(root))}
    unique = {id(node): node for node in nodes}
    return sorted(unique.values(), key=lambda node: places.get(id(node), 0))


def _what_there_is(mox: Any, where: Where) -> str:
    """The hint of an error if no node was found: similar names, or existing names."""
    nodes = list(visible(mox.body))
    modules = [x for x in nodes if isinstance(x, ModuleCall) and x.cls is not None]
    types = sorted({x.type_name for x in modules})
    if isinstance(where, type) and where.__name__ in types:
        return (
            f"It has modules of another class {where.__name__}. If it was loaded, give the class: "
            f"load(path, types=[{where.__name__}]); or look for the name: "
            f"'//module_call[@type=\"{where.__name__}\"]'"
        )
    primitives = sorted({x.primitive.name for x in nodes if isinstance(x, Equation)})
    if isinstance(where, str):
        for element in re.findall(r"/(\w+)", where):
            if element in types:
                return f"Calls of {element} are '//module_call[@type=\"{element}\"]'"
        names = {x for node in modules for x in (node.name, node.path)}
        known = {*names, *types, *primitives, "module_call", "function", "body"}
        parts = [x for x in re.findall(r"[\w~/.-]*\w", where) if x.strip("/") not in known]
        close = [y for x in parts for y in difflib.get_close_matches(x.strip("/"), known)]
        if close:
            return f"There are {', '.join(dict.fromkeys(close))}"
    kinds = "" if isinstance(where, type) else f", and the equations {_listed(primitives)}"
    return f"There are modules of the classes {_listed(types)}{kinds}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:12], *(["..."] if len(names) > 12 else [])]) or "(none)"


def select(root: Body, what: type | Callable[[Node], Any]) -> Any:
    """The calls of a class of modules, or the nodes for which a function is true."""
    if isinstance(what, type):
        return [x for x in calls(root) if x.cls is not None and issubclass(x.cls, what)]
    if not callable(what):
        raise type_error(
            f"select: expected a class of modules or a function of a node, got {what!r}"
        )
    try:
        return [x for x in visible(root) if what(x)]
    except AttributeError as e:
        e.add_note(
            "A predicate is called with calls of modules, equations and bodies. An equation has no "
            "path, say: use getattr(node, 'path', '')"
        )
        raise
