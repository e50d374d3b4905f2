"""What the programs here raise where a file or a flag cannot be used, and how they end then."""

import sys
from collections.abc import Callable

from absl import app


class InputError(Exception):
    """A file or text that cannot be used; the message is one line that says what is wrong."""


def main_of(run: Callable[[], None]) -> Callable[[list[str]], None]:
    """The `main` of a program: it takes flags alone, and ends with one line for an `InputError`."""

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected argument {argv[1]!r}")
        try:
            run()
        except InputError as error:
            sys.exit(f"error: {error}")

    return main
