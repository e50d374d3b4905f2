"""Maps the tensors in another library's file to a Haiku model's parameters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.predicates import compiled
from haiku_implicit.files.container import CheckpointError, expect, is_shape
from haiku_implicit.files.file_types import read_json


class Place(NamedTuple):
    """The parameter that a tensor of a file becomes.

    Attributes:
      path: `module/name` of the parameter.
      axes: the tensor's axes in the parameter's order, as for `numpy.transpose`. None is the order
        between PyTorch's layers and Haiku's: the two axes of a weight `w` are swapped, all others stay.
      shape: the parameter's shape, if it differs from the shape of the transposed tensor: `[inputs,
        heads, width]` for a matrix `[inputs, heads * width]`.
    """

    path: str
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    def axes_for(self, ndim: int) -> tuple[int, ...]:
        """The axes of a tensor with `ndim` of them, in the parameter's order.

        >>> Place('linear/w').axes_for(2), Place('embed/embeddings').axes_for(2)
        ((1, 0), (0, 1))
        """
        if self.axes is None:
            is_w = self.path.rpartition("/")[2] == "w"
            if self.shape is not None and len(self.shape) > ndim == 2 and not is_w:
                raise value_error(  # its shape does not say which axis of the matrix is split
                    f"{self.path}: a matrix becomes {list(self.shape)}: say by axes= of its Place "
                    "which axis comes first, (1, 0) for a matrix [outputs, inputs] of which the inputs "
                    "do"
                )
            return (1, 0) if ndim == 2 and is_w else tuple(range(ndim))
        if sorted(self.axes) != list(range(ndim)):
            raise value_error(
                f"{self.path}: axes: expected each of 0 ... {ndim - 1} once, for a tensor with {ndim} "
                f"axes, got {self.axes}"
            )
        return self.axes


# One place, several that get the same tensor, or None for a tensor that the model does not have.
Places = str | Place | Sequence[str | Place] | None
# Maps a tensor's name in a file to its place.
Names = Mapping[str, Places] | Callable[[str], Places]


def place_of(names: Names, tensor: str, where: str) -> Place | None:
    """Looks up the only place of a tensor; None if it is left out.

    Args:
      names: a mapping or a function.
      tensor: its name in the file.
      where: the file, for errors.

    Raises:
      ValueError: for a name that the mapping does not have, several places, or an invalid place.
    """
    places = places_of(names, tensor, where)
    if len(places) > 1:
        raise value_error(
            f"{where}: {tensor}: names gives {len(places)} places for it, expected one"
        )
    return places[0] if places else None


def places_of(names: Names, tensor: str, where: str) -> tuple[Place, ...]:
    """Looks up the places of a tensor; empty if it is left out.

    Args:
      names: a mapping or a function.
      tensor: its name in the file.
      where: the file, for errors.

    Raises:
      ValueError: for a name that the mapping does not have, or an invalid place.
    """
    try:
        found = names(tensor) if callable(names) else names[tensor]
    except KeyError:
        raise value_error(
            f"{where}: {tensor}: names has no place for it. Give 'module/name' of the parameter, or "
            "None to leave it out"
        ) from None
    if found is None:
        return ()
    several = _each(found)
    if not several or not all(isinstance(place, str | Place) for place in several):
        raise value_error(
            f"{where}: {tensor}: names gives {found!r} for it, expected 'module/name', a Place, a list "
            "of them, or None"
        )
    return tuple(Place(place) if isinstance(place, str) else place for place in several)


def _each(places: Any) -> tuple[Any, ...]:
    """Converts one place or several to a tuple. (A `Place` is itself a tuple.)"""
    several = isinstance(places, list | tuple) and not isinstance(places, Place)
    return tuple(places) if several else (places,)


def names_by_pattern(patterns: Mapping[str, Places]) -> Callable[[str], Places]:
    r"""Makes names for models with many layers, from one pattern for all tensors of a kind.

    Args:
      patterns: the places for each regular expression, which has to match the whole name of a tensor.
        A place is 'module/name' or a `Place`, with `\1` for the match of the first group in
        parentheses; a list of these for a tensor that several parameters get, such as embeddings that
        are also the output layer; or None to leave it out. The first pattern that matches counts.

    Returns:
      A function from a tensor's name to its place, for `load_gguf`, `load_hugging_face` and
      `load_peft`. It raises a `KeyError` for a name that no pattern matches.

    Raises:
      ValueError: for an invalid regular expression, or a reference to a group that it does not have.

    Example:
      >>> import haiku_implicit as hki
      >>> names = hki.names_by_pattern({
      ...     r'blk\.(\d+)\.attn_([qkv])\.weight': r'llama/layer_\1/attention/\2_proj/w',
      ...     r'rope_freqs\.weight': None,
      ... })
      >>> names('blk.3.attn_q.weight')
      'llama/layer_3/attention/q_proj/w'
    """
    table = [(_compiled(pattern, places), places) for pattern, places in patterns.items()]

    def names(tensor: str) -> Places:
        for pattern, places in table:
            if (match := pattern.fullmatch(tensor)) is not None:
                found = None if places is None else [_expanded(match, x) for x in _each(places)]
                return found[0] if found and len(found) == 1 else found
        raise KeyError(tensor)

    return names


def _expanded(match: re.Match[str], place: str | Place) -> str | Place:
    if isinstance(place, Place):
        return place._replace(path=match.expand(place.path))
    return match.expand(place)


def read_names(path: str | os.PathLike[str]) -> Callable[[str], Places]:
    r"""Reads names from a JSON file.

    Args:
      path: the file: an object `{pattern: place}`, as for `names_by_pattern`. A place is
        "module/name", `null`, or `{"path": "module/name", "axes": [0, 1], "shape": [64, 4, 8]}` (`axes`
        and `shape` are optional); or a list of places.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError`: if the file does not hold such an object.
      OSError: if the file can't be read.

    Example:
      >>> import json, os, tempfile, haiku_implicit as hki
      >>> path = os.path.join(tempfile.mkdtemp(), 'names.json')
      >>> with open(path, 'w') as file:
      ...   json.dump({r'h\.(\d+)\.attn\.weight': r'gpt/layer_\1/attention/w'}, file)
      >>> hki.read_names(path)('h.11.attn.weight')
      'gpt/layer_11/attention/w'
    """
    found = read_json(path, "correct it there")
    expect(isinstance(found, dict), str(path), "an object {pattern: place}", found)
    try:
        return names_by_pattern({key: _places_in_json(key, x) for key, x in found.items()})
    except ValueError as e:
        raise CheckpointError(f"{path}: {e}") from None


def _places_in_json(pattern: str, places: Any) -> Places:
    return None if places is None else [_place_in_json(pattern, x) for x in _each(places)]


def _place_in_json(pattern: str, place: Any) -> str | Place:
    if isinstance(place, str):
        return place
    known = isinstance(place, dict) and set(place) <= {"path", "axes", "shape"}
    known = known and isinstance(place.get("path"), str)
    expected = "'module/name', null or an object with path, axes and shape"
    expect(known, repr(pattern), expected, place)
    for key in ("axes", "shape"):
        right = place.get(key) is None or is_shape(place[key])
        expect(right, f"{pattern!r}: {key}", "a list of numbers", place.get(key))
    return Place(
        place["path"], *(place.get(key) and tuple(place[key]) for key in ("axes", "shape"))
    )


def _compiled(pattern: str, places: Places) -> re.Pattern[str]:
    found = compiled("names", pattern)
    try:
        for place in () if places is None else _each(places):
            # For an error about a group that the pattern does not have.
            found.sub(place.path if isinstance(place, Place) else place, "")
    except (re.error, IndexError) as e:
        raise value_error(f"names: {pattern!r}: {places!r}: {e}") from None
    return found
