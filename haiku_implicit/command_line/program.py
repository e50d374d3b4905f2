"""The commands of a program: their flags, help, calls, files and output."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from absl import flags

from haiku_implicit.core.messages import printable, value_error
from haiku_implicit.core.typing import Tree
from haiku_implicit.files.loading import load
from haiku_implicit.files.replacing import checked_target
from haiku_implicit.params.adapters.parts import AdapterParts

# Exit codes, as the shell expects them.
DONE, FAILED, WRONG_USE = 0, 1, 2


# Ends of file names that other programs would take for other formats.
_OTHERS = (".gguf", ".npz", ".npy", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".h5", ".json")


# Python's messages about a text that is not a number.
_NO_NUMBER = re.compile(
    r"(?:invalid literal for int\(\) with base 10|could not convert string to float): "
)


class UsageError(Exception):
    """Arguments that a command does not take; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Said:
    """The message of a command that is done.

    Attributes:
      fields: the message with --json; `warnings` are added.
      line: the message without --json.
    """

    fields: dict[str, Any]
    line: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the program.

    Attributes:
      name: its name.
      about: a line about it.
      arguments: the names of its arguments, in their order.
      defines: functions that define its flags, each in a `flag_values=`.
      run: runs it with the flags and the arguments. Returns a message to print, or None.
    """

    name: str
    about: str
    arguments: tuple[str, ...]
    defines: tuple[Callable[..., Any], ...]
    run: Callable[..., Said | None]

    @property
    def usage(self) -> str:
        """A line with the command's name and arguments."""
        return f"haiku-implicit {self.name} {' '.join(self.arguments)} [--flags]"

    def flags(self) -> flags.FlagValues:
        """The command's flags, before they are parsed."""
        values = flags.FlagValues()
        flags.DEFINE_bool("help", False, "Says all this.", short_name="h", flag_values=values)
        for define in self.defines:
            define(flag_values=values)
        return values

    def help(self) -> str:
        """The text for --help: the command's usage and flags."""
        lines = [f"{self.about}\n", f"  {self.usage}\n"]
        values = self.flags()
        for name in sorted(set(values) - {"h"}):
            flag = values[name]
            kind = flag.flag_type()
            default = "" if flag.default in (None, False) else f" (default: {flag.default_as_str})"
            lines.append(f"  --{name}: {flag.help}{default} [{kind}]")
        return "\n".join(lines)

    def call(self, arguments: Sequence[str]) -> None:
        """Parses flags and arguments, and runs the command.

        Raises:
          UsageError: for an unknown or invalid flag, or another number of arguments.
        """
        values = self.flags()
        try:
            _, *given = values([self.name, *arguments])
        except flags.Error as e:
            raise UsageError(_NO_NUMBER.sub("expected a number, got ", str(e))) from e
        if values.help:
            say(self.help())
            return
        if len(given) != len(self.arguments):
            wanted = " ".join(self.arguments)
            raise UsageError(f"expected {wanted}, got {' '.join(given) or 'nothing'}")
        if "-" in given:
            raise UsageError(
                "'-': standard input and output are not read or written. Give the name of a file"
            )
        with self._warnings_as_lines() as warned:
            said = self.run(values, *given)
        if said is not None:
            texts = [self.told(w.message) for w in warned]
            say(as_json({**said.fields, "warnings": texts}) if values.json else said.line)

    @contextlib.contextmanager
    def _warnings_as_lines(self) -> Iterator[list[warnings.WarningMessage]]:
        """Collects the warnings for users, and prints each as a line on the error stream at the end."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            try:
                yield found
            finally:
                for w in found:
                    say(f"warning: {self.told(w.message)}", sys.stderr)

    def told(self, error: Exception | Warning | str) -> str:
        """The text of an error or a warning, in one line, with flags instead of arguments."""
        text = str(error)
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        text = " ".join(text.split()) or type(error).__name__
        names = "|".join(map(re.escape, sorted(set(self.flags()) - {"h", "help"})))
        return re.sub(rf"(?<![-\w.])(?:(?=({names})=)|^(?=({names}): ))", "--", text)


def command(
    arguments: str, *defines: Callable[..., Any]
) -> Callable[[Callable[..., Said | None]], Command]:
    """Makes a command of the function that runs it: with its name, and with its docstring as help."""

    def of(run: Callable[..., Said | None]) -> Command:
        name, about = run.__name__.replace("_", "-"), inspect.getdoc(run) or ""
        return Command(name, about, tuple(arguments.split()), defines, run)

    return of


def as_json(found: Any) -> str:
    """Converts a result to JSON for `--json`. (Without Python's `NaN`, which standard JSON lacks.)"""
    return json.dumps(found, allow_nan=False)


def main_of(commands: Sequence[Command], about: str) -> Callable[[Sequence[str] | None], int]:
    """Makes the `main` of a program: its first argument is the command; it returns the exit code.

    Args:
      commands: the commands of the program.
      about: a line about the program.
    """
    by_name = {command.name: command for command in commands}

    def main(argv: Sequence[str] | None = None) -> int:
        _open_streams()
        try:
            code = run(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of the output has read enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        except OSError as e:  # a full disk
            return _said(str(e), FAILED)
        return code

    def run(given: list[str]) -> int:
        if not given or given[0] in ("help", "-h", "--help", "-help"):
            say(_overview(commands, about))
            return DONE if given else WRONG_USE
        if given[0] not in by_name:
            nearest = difflib.get_close_matches(given[0], by_name, n=1)
            meant = f" Did you mean {nearest[0]}?" if nearest else ""
            return _said(
                f"unknown command {given[0]!r}; there are {', '.join(by_name)}.{meant}", WRONG_USE
            )
        command = by_name[given[0]]
        try:
            command.call(given[1:])
        except UsageError as e:
            return _said(f"{command.told(e)}\nusage: {command.usage}", WRONG_USE)
        except BrokenPipeError:
            raise
        except (ValueError, TypeError, OSError, ImportError) as e:
            return _said(command.told(e), FAILED)
        except KeyboardInterrupt:
            return _said("interrupted; nothing was written", 130)
        return DONE

    return main


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints lines, on standard output by default.

    Names from files and arguments may be in them, so characters that are not printable, or not in the
    stream's encoding, are escaped.
    """
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    text = printable(text, keep="\n")
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _open_streams() -> None:
    """Opens streams that the shell has closed, as by `>&-`: Python sets them to None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _overview(commands: Sequence[Command], about: str) -> str:
    width = max(len(command.name) for command in commands)
    lines = [f"{about}\n", "  haiku-implicit COMMAND ARGUMENTS [--flags]\n"]
    lines += [f"  {command.name:<{width}}  {command.about}" for command in commands]
    return "\n".join([*lines, "\n`haiku-implicit COMMAND --help` lists the flags of one."])


def _said(message: str, code: int) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{red}error:{plain} ")
    say(message, sys.stderr)
    return code


def check_target(values: flags.FlagValues, target: str, kind: str = "safetensors") -> None:
    """Checks, before any work, that a target can be written and does not exist yet.

    Args:
      values: the flags, with `--overwrite`.
      target: the file or folder.
      kind: what is written: 'safetensors', 'gguf', or a 'folder'.

    Raises:
      UsageError: if it exists, and `--overwrite` is not given; for the name of another kind of file.
      OSError: if its folder is missing.
    """
    suffix = os.path.splitext(target)[1].lower()
    if suffix in _OTHERS and kind == "safetensors":
        raise UsageError(
            f"{target}: what is written is a file of safetensors, and {suffix} is the name of another "
            "kind. `haiku-implicit convert` writes GGUF"
        )
    if kind != "folder":
        checked_target(target)
    if os.path.exists(target) and not values.overwrite:
        raise UsageError(f"{target} is there already; --overwrite writes over it")


def json_in(values: flags.FlagValues, name: str) -> Any:
    """The value of a flag whose text is JSON."""
    try:
        return json.loads(str(values[name].value))
    except ValueError as e:
        raise UsageError(f"--{name}: not JSON: {e}") from e


def part_of(tree: Tree, values: flags.FlagValues, path: str) -> Tree:
    """The part of a file's tree that --key names."""
    for key in values.key.split("/") if values.key else ():
        if not isinstance(tree, Mapping) or key not in tree:
            found = ", ".join(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
            raise value_error(f"{path}: --key: there is no {key!r}; there is {found}")
        tree = tree[key]
    return tree


def read(values: flags.FlagValues, path: str) -> Tree:
    """Reads the parameters in a file: a mapping of modules to mappings of arrays."""
    tree = part_of(load(path), values, path)
    if isinstance(tree, AdapterParts):
        raise value_error(
            f"{path}: this is an adapter apart from its base; `merge --adapter` takes one"
        )
    modules = tree.items() if isinstance(tree, Mapping) else ()
    for name, own in modules:
        if not isinstance(own, Mapping) or not all(hasattr(x, "shape") for x in own.values()):
            raise value_error(
                f"{path}: expected a model's parameters, a mapping of modules to mappings of arrays; "
                f"{name!r} is no module. --key=NAME takes a part of the file"
            )
    if not modules:
        raise value_error(f"{path}: expected a model's parameters, got {type(tree).__name__}")
    return tree


# --- flags -----------------------------------------------------------------------------------------


def text(name: str, about: str, default: str | None = None) -> Callable[..., Any]:
    """Defines a flag of text."""
    return functools.partial(flags.DEFINE_string, name, default, about)


def number(name: str, about: str, default: int | None = None, least: int = 1) -> Callable[..., Any]:
    """Defines a flag of an integer."""
    return functools.partial(flags.DEFINE_integer, name, default, about, lower_bound=least)


def switch(name: str, about: str) -> Callable[..., Any]:
    """Defines a flag that is on or off, and off by default."""
    return functools.partial(flags.DEFINE_bool, name, False, about)


# The flags of commands that read parameters, and of commands that write a TARGET.
KEY = text("key", "The part of the file that holds the parameters, as in --key=params.")
WRITING = (
    switch("json", "Says what was written as JSON."),
    switch("overwrite", "Write over a file that is there."),
    KEY,
)
