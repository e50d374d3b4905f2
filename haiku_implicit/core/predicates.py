"""Arguments like `targets`, which select parameters, and the error if they select none."""

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Union

from haiku_implicit.core.messages import see, shown, type_error
from haiku_implicit.core.typing import Array

# A function of a module's name, a parameter's name and the parameter, like Haiku's own predicates.
Predicate = Callable[[str, str, Array], bool]
# A predicate; a regular expression that the whole of `module/name` has to match; a list of names
# `module/name` and of regular expressions; all; none.
Targets = Union[  # noqa: UP007 (a callable can't be or-ed)
    Predicate, str, re.Pattern[str], Sequence[str | re.Pattern[str]], bool
]
# A list's string without any of these is a name. (A point is in the names of some trees.)
_SPECIAL = re.compile(r"[\\()\[\]{}*+?|^$]")


def path_of(module_name: str, name: str) -> str:
    """Returns `module/name`."""
    return f"{module_name}/{name}" if module_name else name


def predicate_of(
    argument: str, targets: Targets | None, default: Predicate | None = None
) -> Predicate:
    """Returns the predicate for an argument like `targets`.

    Args:
      argument: the name of the argument, for errors.
      targets: its value.
      default: the predicate for None; without one, None is an error.

    Raises:
      TypeError: for anything that is not one of `Targets`.
      ValueError: for a string that is not a regular expression.
    """
    if targets is None and default is not None:
        return default
    if isinstance(targets, bool):
        constant = targets
        return lambda module_name, name, value: constant
    if callable(targets):
        return targets
    if is_list(targets):
        chosen = _in_list(targets)  # type: ignore[arg-type]
        return lambda module_name, name, value: chosen(path_of(module_name, name))
    if not isinstance(targets, str | re.Pattern):
        raise type_error(
            f"{argument}: expected a regular expression over 'module/name', a list of names or "
            "expressions, a predicate (module_name, name, value) -> bool, True or False, "
            f"got {targets!r}"
        )
    pattern = compiled(argument, targets)
    return lambda module_name, name, value: bool(pattern.fullmatch(path_of(module_name, name)))


def compiled(argument: str, pattern: Any) -> re.Pattern[str]:
    """Returns the compiled regular expression of an argument, or of an item in it.

    Raises:
      TypeError: for anything other than a string or a compiled expression.
      ValueError: for a string that is not a regular expression.
    """
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise type_error(f"{argument}: expected a regular expression, got {pattern!r}")
    try:
        return re.compile(pattern)
    except re.error as e:
        glob = ". It is no glob: write .* for any text" if "*" in text else ""
        raise ValueError(
            f"{argument}: {text!r} is not a regular expression: {e}{glob} {see('nothing-matches')}"
        ) from None


def is_list(targets: Any) -> bool:
    """Whether an argument like `targets` is a list, a tuple or a set of names and expressions."""
    return isinstance(targets, list | tuple | set | frozenset) and all(
        isinstance(x, str | re.Pattern) for x in targets
    )


def _in_list(items: Collection[str | re.Pattern[str]]) -> Callable[[str], bool]:
    """Returns the function that tells whether `module/name` is in a list, or matches an item of it."""
    names = frozenset(x for x in items if isinstance(x, str))
    expressions = [re.compile(x) for x in items if not _is_name(x)]
    return lambda path: path in names or any(x.fullmatch(path) for x in expressions)


def _is_name(item: str | re.Pattern[str]) -> bool:
    """Whether a list's item can only be a name."""
    if isinstance(item, re.Pattern):
        return False
    try:
        re.compile(item)
    except re.error:
        return True
    return not _SPECIAL.search(item)


def check_list(argument: str, targets: Any, paths: Sequence[str]) -> None:
    """Checks that each item of a list is a parameter's name, or matches one.

    Raises:
      ValueError: if one does neither.
    """
    known = frozenset(paths)
    for item in targets if is_list(targets) else ():
        if item in known or (not _is_name(item) and any(map(_in_list([item]), paths))):
            continue
        text = item if isinstance(item, str) else item.pattern
        nearest = ", ".join(difflib.get_close_matches(text, paths, n=5, cutoff=0.0))
        what = f"is {text!r}" if _is_name(item) else f"matches {text!r}"
        raise ValueError(
            f"{argument}: no parameter {what}. Nearest: {nearest} {see('nothing-matches')}"
        )


def no_match(
    argument: str,
    targets: Targets | None,
    paths: Sequence[str],
    *,
    kind: str = "parameters",
    wanted: str = "",
    page: str = "nothing-matches",
) -> ValueError:
    """Returns the error for an argument that selects no parameter.

    Args:
      argument: the name of the argument.
      targets: its value.
      paths: `module/name` of each parameter. The error lists those most similar to the pattern.
      kind: the word for them.
      wanted: a description of the parameters that None would select.
      page: the section of the errors' page, if `targets` is None.
    """
    count = f"none of the {len(paths)} {kind}"
    if not isinstance(targets, str | re.Pattern):
        of_value = "the predicate is true of" if callable(targets) else f"{targets!r} chooses"
        what = f"{count} is {wanted}" if targets is None else f"{of_value} {count}"
        page = page if targets is None else "nothing-matches"
        return ValueError(
            f"{argument}: {what}. There are: {shown(list(paths)) or 'no arrays'} {see(page)}"
        )
    pattern = targets if isinstance(targets, str) else targets.pattern
    what = f"{pattern!r} matches {count} (the whole of 'module/name' has to match)"
    if pattern in paths:
        return ValueError(
            f"{argument}: {what}. It is a parameter's name: give re.escape of it"
            f" {see('nothing-matches')}"
        )
    if parts := [path for path in paths if re.search(targets, path)]:
        whole = f".*({pattern}).*" if "|" in pattern else f".*{pattern}.*"
        hint = f"It matches a part of {shown(parts)}: {whole!r} matches the whole"
    else:
        nearest = difflib.get_close_matches(pattern, paths, n=5, cutoff=0.0)
        hint = f"Nearest: {', '.join(nearest or paths)}"
    return ValueError(f"{argument}: {what}. {hint} {see('nothing-matches')}")
