"""Makes Markdown tables, and writes them into documents."""

import pathlib
import re
from collections.abc import Mapping, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]
    )


def replace(document: pathlib.Path, tables: Mapping[str, str]) -> None:
    """Replaces a document's text between each `<!-- NAME -->` and `<!-- end -->`.

    Raises:
      ValueError: for a name that is not in the document exactly once.
    """
    text = document.read_text()
    for name, content in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, content=content: m[1] + content + "\n" + m[2], text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{document}: expected one '<!-- {name} -->', found {count}")
    document.write_text(text)
