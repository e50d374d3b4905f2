"""Mutants: small changes of a module's text, each of which a test should notice.

The operators are those of mutmut and cosmic-ray, at one place each. Not changed are docstrings, type
annotations, `__all__`, decorators, and texts: what is in an f-string or in a `raise`, and strings with a
space in them. Nor is `zip(..., strict=True)`, which asserts what holds in each call.
"""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

SWAPPED = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "/"),
    ast.Pow: (r"\*\*", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
RENAMED = {"any": "all", "all": "any", "min": "max", "max": "min"}
CHANGED = "XX"


class Mutant(NamedTuple):
    """A changed module.

    Attributes:
      file: its path in the repository.
      place: the class and function.
      operator: what kind of change it is.
      before: the first line that differs, without its indent.
      after: what became of that line.
      lines: the first and the last line of what is changed; those of the statement around it.
      body: whether it is in a function, and so may run anew in each test.
      text: the whole module.
    """

    file: str
    place: str
    operator: str
    before: str
    after: str
    lines: tuple[int, int]
    statement: tuple[int, int]
    body: bool
    text: str

    @property
    def key(self) -> tuple[str, ...]:
        """Its name, also if lines have moved."""
        return self.file, self.place, self.operator, self.before, self.after

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.lines[0]} ({self.place}; {self.operator})\n"
            f"  - {self.before}\n  + {self.after}"
        )


def mutants(root: pathlib.Path, file: str) -> tuple[list[Mutant], int]:
    """All mutants of a module, and how many strings are left as they are, because they are texts."""
    source = (root / file).read_bytes()
    tree = ast.parse(source)
    visitor = _Changes(source)
    visitor.visit(tree)
    lines = source.decode().splitlines()
    found, seen = [], {source}
    for change in visitor.changes:
        raw = source[: change.start] + change.new.encode() + source[change.end :]
        if raw in seen:  # another one does the same
            continue
        seen.add(raw)
        try:
            compile(raw, file, "exec")
        except SyntaxError:
            continue
        text = raw.decode()
        new_lines = text.splitlines()
        at = next(i for i, (a, b) in enumerate(zip(lines, new_lines, strict=False)) if a != b)
        found.append(
            Mutant(
                file=file,
                place=change.place,
                operator=change.operator,
                before=lines[at].strip(),
                after=new_lines[at].strip(),
                lines=change.lines,
                statement=change.statement,
                body=change.body,
                text=text,
            )
        )
    return found, visitor.texts


class _Change(NamedTuple):
    start: int
    end: int
    new: str
    operator: str
    place: str
    lines: tuple[int, int]
    statement: tuple[int, int]
    body: bool


class _Changes(ast.NodeVisitor):
    """Collects the changes of a module."""

    def __init__(self, source: bytes):
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.changes: list[_Change] = []
        self.texts = 0
        self.place: list[str] = []
        self.statement: ast.stmt | None = None
        self.functions = 0

    # --- helpers -----------------------------------------------------------------------------------

    def _start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _add(self, operator: str, node: ast.AST, new: str, start: int = -1, end: int = -1) -> None:
        within = self.statement if self.statement is not None else node
        self.changes.append(
            _Change(
                start=self._start(node) if start < 0 else start,
                end=self._end(node) if end < 0 else end,
                new=new,
                operator=operator,
                place=".".join(self.place) or "module",
                lines=(node.lineno, node.end_lineno),
                statement=(within.lineno, within.end_lineno),
                body=self.functions > 0,
            )
        )

    def _swap(
        self, operator: str, node: ast.AST, op: ast.AST, left: ast.AST, right: ast.AST
    ) -> None:
        if type(op) not in SWAPPED:
            return
        pattern, new = SWAPPED[type(op)]
        start, end = self._end(left), self._start(right)
        between, count = re.subn(pattern, new, self.source[start:end].decode(), count=1)
        if count:
            self._add(operator, node, between, start, end)

    def _negate(self, test: ast.expr) -> None:
        swapped = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not swapped and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._add("negated test", test, f"(not ({self._text(test)}))")

    # --- statements --------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        outer = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node
        super().visit(node)
        self.statement = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.place.append(node.name)
        # Defaults are evaluated once, but matter where the function is called.
        self.functions += 1
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for child in node.body:
            self.visit(child)
        self.functions -= 1
        self.place.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.place.append(node.name)
        for child in node.body:
            self.visit(child)
        self.place.pop()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            self._add("deleted call", node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("deleted raise", node, "pass")
        self.texts += any(isinstance(x, ast.Constant) for x in ast.walk(node))

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            self._add("returned None", value, "None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add("continue for break", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("break for continue", node, "break")

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._is_type(node) or any(_name(t) == "__all__" for t in node.targets):
            return
        unpacks = any(isinstance(t, ast.Tuple | ast.List) for t in node.targets)
        if not unpacks and not isinstance(node.value, ast.Constant):
            self._add("assigned None", node.value, "None")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            if not isinstance(node.value, ast.Constant):
                self._add("assigned None", node.value, "None")
            self.visit(node.value)

    def _is_type(self, node: ast.Assign) -> bool:
        """A name for a type: in a module, with a capital, of a subscript or a call of `TypeVar`."""
        value, name = node.value, _name(node.targets[0])
        call = isinstance(value, ast.Call) and _name(value.func) == "TypeVar"
        return not self.place and name[:1].isupper() and (call or isinstance(value, ast.Subscript))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        start, end = self._end(node.target), self._start(node.value)
        self._add("plain assignment", node, " = ", start, end)
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is None:
                nothing = "__import__('contextlib').nullcontext()"
                self._add("no context", item.context_expr, nothing)
        self.generic_visit(node)

    # --- expressions -------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._swap("comparison", node, op, left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap("and, or", node, node.op, left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("without not", node, f"({self._text(node.operand)})")
        if isinstance(node.op, ast.USub):
            self._add("without minus", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.BitOr | ast.BitAnd):
            # The other operator would be an error of types, which every test sees.
            self._add("left operand", node, f"({self._text(node.left)})")
            self._add("right operand", node, f"({self._text(node.right)})")
        self._swap("arithmetic", node, node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add("no condition", test, "True")
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        if not (isinstance(node.body, ast.Constant) and node.body.value is None):
            self._add("returned None", node.body, "None")
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in RENAMED and isinstance(node.func, ast.Name):
            self._add("any, all, min, max", node.func, RENAMED[name])
        for keyword in node.keywords:
            if keyword.arg not in (None, "strict"):
                rest = [k for k in node.keywords if k is not keyword]
                new = ast.unparse(ast.Call(node.func, node.args, rest))
                self._add(f"without {keyword.arg}=", node, new)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.keyword) and child.arg == "strict"):
                self.visit(child)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        # A text, most often; and before Python 3.12 nodes in it have no right places.
        self.texts += 1

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, str(not value))
        elif isinstance(value, int | float):
            self._add("constant", node, str(value + 1))
        elif isinstance(value, str) and " " in value.strip():
            self.texts += 1
        elif isinstance(value, str):
            self._add("constant", node, repr(CHANGED + value))


def _name(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def all_mutants(root: pathlib.Path, files: list[str]) -> Iterator[tuple[list[Mutant], int]]:
    """The mutants of each file."""
    for file in files:
        yield mutants(root, file)
