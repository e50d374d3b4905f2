"""Fields of implicit types: children, static metadata, frozen fields, and inferred shapes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import export

from haiku_implicit.core.messages import type_error
from haiku_implicit.core.typing import Array, DType

AUX = "haiku_implicit_aux"
FROZEN_KEY = "haiku_implicit_frozen"

STATIC = {AUX: True}

T = TypeVar("T")

# For `dataclasses.field(metadata=FROZEN)`: a `frozen_field` that mypy understands.
FROZEN = {FROZEN_KEY: True}


def aux_field(**kwargs: Any) -> Any:
    """A dataclass field that is static metadata of the type rather than a child array.

    Its value must be hashable and comparable, since it becomes part of the pytree structure.

    Args:
      **kwargs: the arguments of `dataclasses.field`. `metadata={"later": True}` marks a field that the
        class got when files of it existed: digests then leave out its default.
    """
    return dataclasses.field(metadata={**kwargs.pop("metadata", {}), **STATIC}, **kwargs)


def frozen_field(**kwargs: Any) -> Any:
    """A dataclass field whose arrays are never trained (`partition` puts them on the frozen side).

    Args:
      **kwargs: the arguments of `dataclasses.field`.
    """
    return dataclasses.field(metadata={**kwargs.pop("metadata", {}), **FROZEN}, **kwargs)


class Inferred(Generic[T]):
    """The descriptor of `shape` and `dtype`: the constructor's value, else the value in `aval`.

    This data descriptor is also the default of the dataclass field. If the constructor is not given
    the field, it stores the descriptor itself, which `__set__` reads as "not given".
    """

    def __init__(self, name: str, normalize: Callable[[Any], Any]):
        self.name, self.slot, self.normalize = name, f"_{name}", normalize

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        explicit = instance.__dict__.get(self.slot)
        if explicit is None:
            return getattr(instance.aval, self.name)
        return canonical(explicit) if self.name == "dtype" else explicit

    def __set__(self, instance: Any, value: Any) -> None:
        given = None if value is None or value is self else self.normalize(value)
        instance.__dict__[self.slot] = given
        instance.__dict__.pop("_aval", None)


def as_shape(shape: Sequence[int]) -> tuple[Any, ...]:
    """Converts a shape to integers; symbolic lengths of `jax.export` stay unchanged."""
    try:
        lengths: Array = shape if isinstance(shape, tuple | list) else np.atleast_1d(shape)
        return tuple(n if export.is_symbolic_dim(n) else int(n) for n in lengths)
    except (TypeError, ValueError):
        raise type_error(f"shape: expected a sequence of integers, got {shape!r}") from None


def as_dtype(dtype: DType) -> Any:
    """Converts to NumPy's dtype; JAX's own dtype of random keys stays unchanged."""
    return dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def product_dtype(x: DType, w: DType) -> Any:
    """The dtype of `x`, once it is scaled or rotated before a product with `w`: the wider one of both.

    JAX promotes no floats of 8 bits.
    """
    narrow = np.dtype(x).itemsize == 1 and jax.dtypes.issubdtype(x, np.floating)
    return np.dtype(w) if narrow else jax.numpy.promote_types(x, w)


def canonical(dtype: DType) -> Any:
    """Returns the dtype that JAX uses for this one: 32 bits instead of 64, except in x64 mode."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
