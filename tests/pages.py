"""The pages of the documentation, and the code in them."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
# Pages to be followed from top to bottom: each block goes on with what those before it have made.
PROGRAMS = [
    "coming_from.md",
    "dispatch.md",
    "neighbors.md",
    "own_type.md",
    "quick_start.md",
    "recipes.md",
]
# Pages whose tables list the pages of a folder, a page for each type and for each hook.
INDICES = {"types": "api/types.md", "hooks": "haiku_hooks.md"}


def code_blocks(document):
    """The Python code in a document, and its output if a block without a language follows at once."""
    pattern = r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?"
    return re.findall(pattern, document.read_text(), re.DOTALL)


def name_of(page):
    return page.relative_to(DOCS).as_posix()


SINGLE = [page for page in PAGES if name_of(page) not in PROGRAMS]
