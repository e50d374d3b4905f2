"""Texts for users: warnings at the caller's line, errors of chex and of imports, names from files."""

import contextlib
import importlib
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import haiku as hk
import jax

JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
# Files whose frames may be between the program and a warning: folders, and decorators' `contextlib`.
LIBRARIES = (
    JAX,
    os.path.dirname(os.path.abspath(hk.__file__)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    contextlib.__file__,
)

_PREFIX = re.compile(r"\[Chex\] Assertion (\w+) failed:")
_LINK = re.compile(r" ?(\(docs/errors\.md#[\w-]+\))")
# The section of docs/errors.md that lists the messages of a module without a section of their own.
_SECTIONS = {
    "core.serialization": "files",
    "files": "files",
    "interchange": "files",
    "mox": "module-expressions",
    "command_line": "on-the-command-line",
    "": "arguments-and-types",
}


def warn_caller(message: str) -> None:
    """Gives a `UserWarning` at the first frame outside this library, Haiku and JAX.

    Python shows it once for each line and text, as usual.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "sys"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def see(section: str) -> str:
    """Returns the end of a message: the link to a section of docs/errors.md, by its anchor."""
    return f"(docs/errors.md#{section})"


def linked(text: str, section: str) -> str:
    """Puts one link at the end of a message, which may have another error's text in its middle.

    Args:
      text: the message, with any number of links.
      section: the section to link, if the text has no link to a section of its own.
    """
    own = [link for link in _LINK.findall(text) if link not in map(see, _SECTIONS.values())]
    return f"{_LINK.sub('', text)} {[see(section), *own][-1]}"


def value_error(text: str) -> ValueError:
    """Returns a `ValueError` whose text ends in the link to the section that lists it."""
    return ValueError(linked(text, _section()))


def type_error(text: str) -> TypeError:
    """Returns a `TypeError` whose text ends in the link to the section that lists it."""
    return TypeError(linked(text, _section()))


def _section() -> str:
    """The section of the module that calls the caller."""
    module = sys._getframe(2).f_globals["__name__"].partition(".")[2]
    return next(x for name, x in _SECTIONS.items() if module.startswith(name))


def check_function(argument: str, fun: Any) -> None:
    """Raises for what can't be called, such as a transformed function in place of its `apply`."""
    if not callable(fun):
        way_out = "; give its field apply, as in model.apply" if hasattr(fun, "apply") else ""
        raise type_error(f"{argument}: expected a function, got a {type(fun).__name__}{way_out}")


def shown(items: list[str], most: int = 5, separator: str = ", ") -> str:
    """Joins the first few items of a list, with the number of those left out."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


@contextlib.contextmanager
def expecting(sentence: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Turns a failed assertion of chex in a `with` block into an error of this library.

    Args:
      sentence: the expected value, the given value, and the way out. The message of chex follows in
        parentheses, on the same line.
      error: the type of the error.

    Example:
      >>> import chex, jax.numpy as jnp
      >>> with expecting("w: expected a matrix, got shape [3]"):
      ...   chex.assert_rank(jnp.ones(3), 2)
      Traceback (most recent call last):
      ...
      ValueError: w: expected a matrix, got shape [3] (chex.assert_rank: Error in rank ...
    """
    try:
        yield
    except AssertionError as failed:
        said = _PREFIX.sub(r"chex.\1:", " ".join(str(failed).split()))
        raise error(f"{sentence} ({said}) {see('arrays-that-do-not-fit')}") from None


def imported(module: str, need: str, install: str) -> types.ModuleType:
    """Imports a module of an optional package.

    Args:
      module: its name.
      need: the beginning of the error: which task needs which package.
      install: the package or the extra to install.

    Raises:
      ImportError: without the package; it says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(f"{need}: pip install {install} {see('a-missing-package')}") from e


def printable(text: str, keep: str = "") -> str:
    r"""Escapes the characters of a text that are not printable, as Python does.

    Args:
      text: any text.
      keep: characters that stay unchanged.

    Example:
      >>> print(printable("name\n\x1b[31m"))
      name\n\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def text_table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """Formats rows of text as columns below their names.

    Args:
      names: the names of the columns.
      rows: the text of each cell, which stays on one line whatever characters it has.
      numbers: how many of the last columns are aligned to the right.
    """
    lines = [tuple(names), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust] * (len(widths) - numbers) + [str.rjust] * numbers
    return "\n".join(
        "  ".join(side(x, n) for side, x, n in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    )
