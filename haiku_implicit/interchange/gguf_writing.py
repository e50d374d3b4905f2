"""`save_gguf`: writes a Haiku model's parameters to a GGUF file, for llama.cpp and related programs."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.core import progress
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.predicates import compiled
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Array, Params
from haiku_implicit.files.replacing import replaced
from haiku_implicit.interchange import ggml
from haiku_implicit.interchange.gguf_header import Header, alignment_of, fields_of, header
from haiku_implicit.interchange.gguf_reading import header_of_model
from haiku_implicit.interchange.names import Names, Place, places_of
from haiku_implicit.params.trees import trees

# A kind; several, to use the first whose blocks fit; or one or several for each pattern of names.
Kind = str | Sequence[str] | None
Kinds = Kind | Mapping[str, Kind]


def save_gguf(
    path: str | os.PathLike[str],
    params: Params,
    names: Names,
    *,
    kind: Kinds = None,
    metadata: Mapping[str, Any] | None = None,
    metadata_from: str | os.PathLike[str] | None = None,
) -> None:
    """Writes parameters to a GGUF file.

    A weight that is quantized in the format of a GGUF file is written bit for bit, unless `kind` says
    another format. Such weights come from GGUF files and from `quantize_params(dtype='q4_k')`, also
    with inputs (GPTQ). `to_ggml` quantizes all others. Tensors are written one by one, under a progress
    bar. An existing file is kept until the new one is complete.

    Args:
      path: the file.
      params: parameters without adapters: `merge_adapters` first.
      names: the place of each tensor of the file in `params`, as for `load_gguf`: 'module/name', a
        `Place`, a list of places that have the same values, or None to leave a tensor out. The keys of
        a mapping are the tensors to write; for a function, these are the tensors of `metadata_from`,
        which is then required. A `Place` with a shape also requires it, to know which axes of the
        parameter the tensor joins, unless the parameter is a `MatrixView`.
      kind: a kind that `from_ggml` reads, 'F32', 'F16' or 'BF16', for all tensors with at least two
        axes; tensors with one axis (norms, biases) are 'F32'. For several kinds, the first one whose
        blocks fit the rows. A mapping gives kinds to patterns of tensors' names; the first pattern that
        matches the whole name counts: `{'token_embd.weight': 'Q8_0', '.*': ('Q4_K', 'Q5_0')}`. None
        (the default) keeps the weight's format.
      metadata: more keys of the file: texts, numbers, booleans, and lists of them, also nested. An
        integer is written as `uint32` (`int32` below zero), a float as `float32`, a NumPy number with
        its dtype. None removes a key of `metadata_from`.
      metadata_from: a GGUF file whose metadata (architecture, sizes, tokenizer) is copied.

    Raises:
      ImportError: without the package `gguf`.
      ValueError: for a weight with an adapter; a parameter or a tensor that `names` does not know; a
        kind that is unknown, missing, or whose blocks do not fit; metadata without an architecture. It
        is raised before anything is written.
      OSError: if a file can't be read or written.

    Example:
      >>> import os, tempfile, gguf, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((64, 3)), 'b': jnp.zeros(3)}}
      >>> names = {'output.weight': 'linear/w', 'output.bias': 'linear/b'}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'model.gguf')
      ...   hki.save_gguf(path, params, names, kind='Q8_0', metadata={'general.architecture': 'mine'})
      ...   for t in gguf.GGUFReader(path).tensors:
      ...     print(t.name, t.tensor_type.name, t.shape.tolist())
      output.weight Q8_0 [64, 3]
      output.bias F32 [3]
    """
    ggml.gguf_package()  # an ImportError before others
    source = None if metadata_from is None else _opened(metadata_from)
    tensors = _planned(params, names, source, kind)
    named = [t[:3] for t in tensors]
    fields = fields_of(metadata or {}, source.fields if source else {}, named)
    alignment, beginning = alignment_of(fields), header(fields, named)
    with replaced(path) as temporary, open(temporary, "wb") as file:
        file.write(beginning)
        with progress.bar("tensors", len(tensors)) as run:
            for t in tensors:
                data = run(t.name, _data_of, t)
                file.write(data.data)
                file.write(bytes(-data.nbytes % alignment))


# --- tensors ---------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A tensor of the file: its name, kind and shape, and its weight with the axes of the tensor."""

    name: str
    kind: str
    shape: tuple[int, ...]
    path: str
    weight: Callable[[], Any]


def _planned(params: Params, names: Names, source: Header | None, kind: Kinds) -> list[_Tensor]:
    """Plans the tensors of the file, and checks that all can be written."""
    by_path = {p.path: p.value for p in trees.parameters_of(params)}
    shapes = {row.name: row.shape for row in source.rows} if source else {}
    kinds = _Rules(kind)
    tensors, used = [], set()
    for name in _tensor_names(names, shapes):
        same: list[_Tensor] = []  # one for each place of this tensor
        for place in places_of(names, name, "names"):
            if place.path not in by_path:
                nearest = difflib.get_close_matches(place.path, by_path, n=3, cutoff=0.0)
                raise value_error(
                    f"{name}: names has {place.path!r} for it, which is not a parameter. Nearest: "
                    f"{', '.join(nearest)}"
                )
            used.add(place.path)
            same.append(_tensor(name, by_path[place.path], place, shapes.get(name), kinds))
        _check_same(same)
        tensors += same[:1]
    missing = [path for path in by_path if path not in used]
    if missing:
        raise value_error(
            f"{missing[0]}: names has no tensor for it. Give it one, or leave this parameter out of "
            "params"
        )
    kinds.check_used([t.name for t in tensors])
    return tensors


def _check_same(tensors: Sequence[_Tensor]) -> None:
    """Raises unless parameters that share a tensor in the file have the same values."""
    for other in tensors[1:]:
        one, two = (ggml.dense_of(t.weight()) for t in (tensors[0], other))
        if not np.array_equal(one, two, equal_nan=True):
            raise value_error(
                f"{other.name}: names has {tensors[0].path!r} and {other.path!r} for it, which have "
                "different values. Give each a tensor of its own"
            )


def _tensor_names(names: Names, shapes: Mapping[str, Any]) -> Iterable[str]:
    if isinstance(names, Mapping):
        return names
    if not shapes:
        raise value_error(
            "names: a function does not say what tensors there are. Give a mapping, or metadata_from=, "
            "a file that has the same ones"
        )
    return shapes


def _tensor(
    name: str, value: Array, place: Place, shape: Sequence[int] | None, kinds: _Rules
) -> _Tensor:
    matrix = getattr(value, "matrix", value)  # of a `MatrixView`
    if isinstance(matrix, Adapter):
        raise value_error(
            f"{place.path}: a {type(matrix).__name__} adapter is on this weight, which a GGUF file "
            "can't hold. Merge it first: haiku_implicit.merge_adapters(params) gives dense weights, to "
            "which kind= then applies; requantize=True rounds again to the format of the weight below"
        )
    own = _transposed_shape(name, value, place, shape)
    axes = place.axes_for(len(own))
    inverse = tuple(np.argsort(axes).tolist())

    def weight() -> Array:
        """The parameter with the axes of the tensor. (The data of a quantized one do not change.)"""
        return use_implicit_args(lambda w: jnp.transpose(jnp.reshape(w, own), inverse))(value)

    laid_out = weight() if hasattr(value, "materialize") else value
    final = tuple(own[i] for i in inverse)
    return _Tensor(name, kinds.of(name, place.path, laid_out, final), final, place.path, weight)


def _transposed_shape(name: str, value: Array, place: Place, shape: Any) -> tuple[int, ...]:
    """The shape of the tensor, with its axes in the order of the parameter."""
    if place.shape is None:
        return tuple(value.shape)
    same = tuple(value.shape) == tuple(place.shape)
    if shape is not None:
        own = tuple(shape[i] for i in place.axes_for(len(shape)))
        if not same or math.prod(own) != math.prod(place.shape):
            raise value_error(
                f"{place.path}: expected shape {list(place.shape)} for the tensor {name}{list(shape)}, "
                f"got {list(value.shape)}"
            )
        return own
    if isinstance(value, MatrixView) and same:
        matrix = tuple(value.matrix.shape)  # of a weight that was read with the same `Place`
        if axes_of.reshaped(axes_of.whole(matrix), value.shape) == value.axes:
            return matrix
    raise value_error(
        f"{name}: its Place has a shape, {list(place.shape)}: of this parameter the tensor has some "
        "axes joined, and nothing says which. Give metadata_from=, a file that has this tensor; or the "
        f"parameter with its axes joined, {_joined(place.shape)}, and a Place without a shape"
    )


def _joined(shape: tuple[int, ...]) -> str:
    """The shapes of matrices that can become this shape, as text."""
    cuts = range(1, len(shape))
    return " or ".join(f"[{math.prod(shape[:i])}, {math.prod(shape[i:])}]" for i in cuts)


class _Rules:
    """Rules for the kinds of tensors."""

    def __init__(self, kind: Kinds) -> None:
        rules = kind if isinstance(kind, Mapping) else {".*": kind}
        self._rules = {compiled("kind", p): _checked_kinds(own) for p, own in rules.items()}

    def check_used(self, names: Sequence[str]) -> None:
        """Raises for a pattern that no tensor's whole name matches."""
        for pattern in self._rules:
            if not any(map(pattern.fullmatch, names)):
                text = pattern.pattern
                nearest = difflib.get_close_matches(text, names, n=3, cutoff=0.0)
                raise value_error(
                    f"kind: no tensor's whole name matches {text!r}. Nearest: {', '.join(nearest)}"
                )

    def of(self, name: str, path: str, weight: Array, shape: tuple[int, ...]) -> str:
        """The kind of a tensor, for a weight with the tensor's axes."""
        if len(shape) < 2:
            return "F32"
        kinds = next((own for p, own in self._rules.items() if p.fullmatch(name)), None)
        if kinds is None:
            return _kind_of(name, path, weight)
        for kind in kinds:
            if shape[-1] % ggml.block_elements(kind) == 0:
                return kind
        blocks = ", ".join(f"{ggml.block_elements(kind)} for {kind}" for kind in kinds)
        raise value_error(
            f"{name}: rows of {shape[-1]} elements are not whole blocks ({blocks}). Give this tensor "
            f"another kind, as in kind={{'{name}': 'Q8_0', '.*': ...}}, or one to fall back "
            f"on, as in ('{kinds[0]}', 'F16')"
        )


def _checked_kinds(kinds: Kind) -> tuple[str, ...] | None:
    if kinds is None:
        return None
    several = [kinds] if isinstance(kinds, str) or not isinstance(kinds, Sequence) else kinds
    return tuple(map(ggml.checked_kind, several))


def _kind_of(name: str, path: str, weight: Array) -> str:
    """The kind whose format a weight already has."""
    found = ggml.kind_of(weight)
    if found is None or getattr(weight, "axis", -1) != -1:
        raise value_error(
            f"{name}: {path} is {_described(weight)}, which is not the format of a GGUF file. Give a "
            f"kind, as in kind='Q8_0' or kind={{'{name}': 'Q8_0'}}; its values are quantized "
            "again"
        )
    return found


def _described(weight: Array) -> str:
    kind = type(weight).__name__
    if not hasattr(weight, "group_size"):
        return f"{kind} {weight.dtype.name}{list(weight.shape)}"
    groups = f"groups of {weight.group_size} along the {'rows' if weight.axis == -1 else 'columns'}"
    return f"{weight.format} in {groups} of the tensor, with scales in {weight.scale_dtype}"


def _data_of(t: _Tensor) -> np.ndarray:
    try:
        return np.ascontiguousarray(ggml.to_ggml(t.weight(), t.kind, axis=-1))
    except ValueError as e:
        raise value_error(f"{t.name}, {t.path}: {e}") from e


def _opened(path: str | os.PathLike[str]) -> Header:
    try:
        return header_of_model(path)
    except ValueError as e:
        raise value_error(f"metadata_from: {e}") from e
