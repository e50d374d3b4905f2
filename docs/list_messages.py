"""The messages in the library's sources, for the last part of docs/errors.md on the site.

`docs/make_site.py` puts them after the lines `<!-- messages FOLDERS -->`; `...` stands for names and
numbers.
"""

import ast
import pathlib
import re

LIBRARY = pathlib.Path(__file__).resolve().parents[1] / "haiku_implicit"
MARK = re.compile(r"(?m)^<!-- messages (.+) -->$")
# Beside exceptions and functions that return them: what warns, and what begins an error's text.
CALLS = re.compile(
    r"(\w*(Error|Warning|Damaged|Unsaveable)|\w+_error|warn\w*|warning|expecting|usage)$"
)


def with_messages(page: str) -> str:
    """Puts the messages below each mark; each message goes to the first mark that names its folder."""
    marks = [match[1].split() for match in MARK.finditer(page)]
    if not marks:
        return page
    lists: dict[str, set[str]] = {" ".join(mark): set() for mark in marks}
    for path, texts in messages().items():
        [mark, *_] = [m for m in marks if any(path.startswith(f) or f == "." for f in m)]
        lists[" ".join(mark)].update(texts)
    return MARK.sub(lambda match: "\n".join(f"- `{x}`" for x in sorted(lists[match[1]])), page)


def messages() -> dict[str, list[str]]:
    """Each file of the library, with its messages."""
    found = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        calls = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)]
        texts = [text_of(x.args[0]) for x in calls if x.args and CALLS.match(name_of(x.func))]
        texts = [re.sub(r"(\.\.\.){2,}", "...", text) for text in texts]
        found[path.relative_to(LIBRARY).as_posix()] = [x for x in texts if tells(x)]
    return found


def name_of(function: ast.expr) -> str:
    """The last name of what is called."""
    return ast.unparse(function).rpartition(".")[2]


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
    return len(re.findall(r"[a-z]{3,}", text)) > 1
