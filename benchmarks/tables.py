"""Makes Markdown tables, and writes them into documents."""

import pathlib
import re
from collections.abc import Mapping, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]
    )


def replace(documents: Sequence[pathlib.Path], tables: Mapping[str, str]) -> None:
    """Replaces the text between each `<!-- NAME -->` and `<!-- end -->`, in one of some documents.

    Raises:
      ValueError: for a name that is not in the documents exactly once.
    """
    texts = {document: document.read_text() for document in documents}
    for name, content in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        count = sum(len(pattern.findall(text)) for text in texts.values())
        if count != 1:
            names = " and ".join(map(str, documents))
            raise ValueError(f"{names}: expected one '<!-- {name} -->', found {count}")
        for document, text in texts.items():
            texts[document] = pattern.sub(
                lambda m, content=content: m[1] + content + "\n" + m[2], text
            )
    for document, text in texts.items():
        document.write_text(text)
