"""Names from files, as they may be printed: a terminal does what its control characters say."""


def printable(text: str, keep: str = "") -> str:
    r"""A text in which characters that are not printed are escaped, as in Python.

    Args:
      text: with anything in it.
      keep: characters that stay as they are.

    Example:
      >>> print(printable("name\n\x1b[31m"))
      name\n\x1b[31m
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
