"""Parameters: which are weights (the default of `targets`), and how errors describe a parameter."""

import contextlib
import math
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from haiku_implicit.core.array import is_implicit, short
from haiku_implicit.core.keys import KeySource, as_key
from haiku_implicit.core.predicates import Predicate, path_of
from haiku_implicit.core.typing import Array
from haiku_implicit.params.trees.one_by_one import is_one_of_many

# Names that Haiku's modules give to parameters that are added or multiplied element by element, also
# with the name of a part before them (`gating_b`, `query_bias`), and a number after them (`biases_0`).
# But `w_b` is a weight, like `w_a`.
_ELEMENTWISE = re.compile(r"(?!w_b$)(?:.*_)?(?:b|(?:bias|biases|offset|scale)(?:_\d+)?)")
# Names of learned tables of positions: these are added to activations, not multiplied.
_POSITIONS = re.compile(
    r"pos|positions?|wpe|(?:.*_)?pos(?:ition(?:s|al)?)?_?(?:emb|enc(?!oder)|table)[a-z]*"
)
# Suffixes that a getter of LoRA adds to a weight's name for its factors.
LORA_SUFFIXES = ("_lora_a", "_lora_b")


class Parameter(NamedTuple):
    """An array of a tree, dense or implicit, with its module and name.

    Attributes:
      module_name, name: the keys of the array in the tree.
      value: the array.
      is_matrix: whether its last two axes are known to be a matrix, and all others batch axes.
    """

    module_name: str
    name: str
    value: Array
    is_matrix: bool = False

    @property
    def path(self) -> str:
        """The path `module/name`."""
        return path_of(self.module_name, self.name)

    @property
    def stacked(self) -> int:
        """The number of leading axes that are known to stack weights."""
        return len(self.value.shape) - 2 if self.is_matrix else stacked_axes(self.module_name)

    def key_from(self, key: KeySource) -> jax.Array:
        """A random key for this parameter, independent of other parameters."""
        if callable(key):
            return as_key(key())
        return jax.random.fold_in(key, zlib.crc32(self.path.encode()))


def is_floating(value: Array) -> bool:
    """Whether a value, dense or implicit, is of a floating dtype."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, np.floating))


def is_matrix(value: Array) -> bool:
    """Whether a value is a floating-point matrix, or a stack of them."""
    return is_floating(value) and len(value.shape) >= 2


def is_dense_matrix(value: Array) -> bool:
    """Whether a value is a dense floating-point matrix, or a stack of them."""
    return not is_implicit(value) and is_matrix(value)


def is_weight(module_name: str, name: str, value: Array) -> bool:
    """Whether a parameter is a matrix, or a stack of them, that multiplies: the default target.

    Biases and scales do not count, though Haiku gives some of them several axes of length one. Tables
    of positions, which are added, do not count either, nor do empty arrays.
    """
    return is_matrix(value) and not why_no_weight(name, value)


def why_no_weight(name: str, value: Array) -> str:
    """The reason for which a matrix is no weight by default; `''` for a weight."""
    if 0 in value.shape:
        return "it is empty"
    kinds = {
        "of a bias or a scale": _ELEMENTWISE.fullmatch(name),
        "of a table of positions": _POSITIONS.fullmatch(name),
        "of a factor of LoRA": name.endswith(LORA_SUFFIXES),
    }
    return next((f"its name is that {kind}" for kind, found in kinds.items() if found), "")


def is_complex_weight(module_name: str, name: str, value: Array) -> bool:
    """Whether a complex parameter would be a weight if it were real."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, np.complexfloating):
        return False
    return is_weight(module_name, name, jax.ShapeDtypeStruct(value.shape, np.float32))


def stacked_axes(module_name: str) -> int:
    """The number of leading axes that `hk.experimental.layer_stack` adds to a stored parameter."""
    return 0 if is_one_of_many() else module_name.count("__layer_stack_")


def is_unsaid_stack(parameter: Parameter) -> bool:
    """Whether a dense weight is taken as a stack of matrices, without a sign that it is one.

    The axes of `layer_stack` and the modules of Haiku's convolutions are such signs.
    """
    is_stack = math.prod(parameter.value.shape[parameter.stacked : -2]) > 1
    return is_stack and not is_implicit(parameter.value) and not is_kernel(parameter)


def is_kernel(parameter: Parameter) -> bool:
    """Whether a parameter is in a convolution, by the name of its module, and has a window."""
    is_convolution = "conv" in parameter.module_name.rpartition("/")[2].lower()
    return is_convolution and len(parameter.value.shape) - parameter.stacked > 2


def in_tree(predicate: Predicate) -> Predicate:
    """A predicate of weights, adapted to stored parameters: the axes of stacked layers do not count."""

    def of_stored(module_name: str, name: str, value: Array) -> bool:
        enough = len(value.shape) >= 2 + stacked_axes(module_name)
        return enough and predicate(module_name, name, value)

    return of_stored


def describe(value: Array) -> str:
    """A value's dtype and shape, as in `float32[2,3]`, after its type if it is implicit."""
    kind = f"{type(value).__name__} " if is_implicit(value) else ""
    return kind + short(value)


@contextlib.contextmanager
def editing(path: str, value: Array) -> Iterator[None]:
    """The block that edits a parameter: errors begin with its path, dtype and shape.

    The program may have set strict promotion; edits are written for the standard one, as rules are.
    """
    try:
        with jax.numpy_dtype_promotion("standard"):
            yield
    except (TypeError, ValueError) as e:
        raise type(e)(f"{path} ({describe(value)}): {e}") from e
