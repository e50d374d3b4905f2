"""Names from files, escaped for printing: a terminal would obey their control characters."""


def printable(text: str, keep: str = "") -> str:
    r"""Escapes the characters of a text that are not printable, as Python does.

    Args:
      text: any text.
      keep: characters that stay unchanged.

    Example:
      >>> print(printable("name\n\x1b[31m"))
      name\n\x1b[31m
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
