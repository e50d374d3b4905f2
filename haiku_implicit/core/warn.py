"""Warnings at the line of the program that called the library."""

import contextlib
import os
import sys
import warnings

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


def shown(items: list[str], most: int = 5, separator: str = ", ") -> str:
    """Joins the first few items of a list, with the number of those left out."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more
