"""Prints the scripts' headings and tables."""

from typing import Any


def heading(text: str) -> None:
    """Prints an underlined line."""
    print(f"\n{text}\n{'-' * len(text)}")


def table(names: list[str], rows: list[list[Any]]) -> None:
    """Prints the rows' columns below their names."""
    texts = [names, *([str(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print("  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip())
