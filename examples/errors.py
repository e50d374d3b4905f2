"""The errors that the programs here raise for an unusable file or flag, and their exit."""

import sys
from collections.abc import Callable

from absl import app


class InputError(Exception):
    """A file or text that cannot be used; the message is one line with the reason."""


def main_of(run: Callable[[], None]) -> Callable[[list[str]], None]:
    """Makes a program's `main`, which takes only flags and ends with one line for an `InputError`."""

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected argument {argv[1]!r}")
        try:
            run()
        except InputError as error:
            sys.exit(f"error: {error}")

    return main
