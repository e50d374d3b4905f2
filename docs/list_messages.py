"""The messages in the library's sources, for the last part of docs/errors.md on the site.

`docs/make_site.py` puts them after the lines `<!-- messages FOLDERS -->`; `...` stands for names and
numbers. Messages are built in variables, tables and functions, so these are all texts of the sources.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

LIBRARY = pathlib.Path(__file__).resolve().parents[1] / "haiku_implicit"
MARK = re.compile(r"(?m)^<!-- messages (.+) -->$")
# Functions whose texts are no messages: help of flags, lists of names, patterns.
OTHER_TEXTS = {"text", "switch", "number", "DEFINE_bool", "split", "named", "compile"}


def with_messages(page: str) -> str:
    """Puts the messages below each mark; each message goes to the first mark that names its folder."""
    marks = [match[1].split() for match in MARK.finditer(page)]
    if not marks:
        return page
    # Not a list for each file: a message may have its words from two files, and the search wants all
    # words in one section.
    lists: dict[str, set[str]] = {" ".join(mark): set() for mark in marks}
    for path, texts in messages().items():
        [mark, *_] = [m for m in marks if any(path.startswith(f) or f == "." for f in m)]
        lists[" ".join(mark)].update(texts)
    # Parts, which begin in the middle, come last.
    in_order = lambda texts: sorted(texts, key=lambda x: (not x[0].isalnum(), x))  # noqa: E731
    return MARK.sub(lambda found: "\n".join(f"- `{x}`" for x in in_order(lists[found[1]])), page)


def messages() -> dict[str, list[str]]:
    """Each file of the library, with its messages."""
    files = sorted(LIBRARY.rglob("*.py"))
    return {f.relative_to(LIBRARY).as_posix(): [*texts(ast.parse(f.read_text()))] for f in files}


def texts(node: ast.AST, in_text: bool = False) -> Iterator[str]:
    """The texts with words in a syntax tree, but no docstrings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.FunctionDef) and node.name.startswith("__treescope"):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in OTHER_TEXTS:
        return
    is_text = isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
    if is_text and not in_text:
        text = re.sub(r"(\.\.\.){2,}", "...", text_of(node).strip())
        text = re.sub(r"^[.,;:] ", "", text)
        if tells(text):
            yield text
    for part in ast.iter_child_nodes(node):
        yield from texts(part, is_text)


def text_of(node: ast.expr) -> str:
    """A text in one line, with `...` for all but its constant parts, and without its link."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("`", "'").replace("\n", " ")
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values)).strip()
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "" if "see(" in ast.unparse(node) else "..."


def tells(text: str) -> bool:
    """Whether a text has words of its own."""
    is_code = re.search(r"(;\}?|[{>])$", text)
    return " " in text and len(re.findall(r"[A-Za-z]+", text)) > 2 and not is_code
