"""Fields of implicit types: children, static metadata, what is never trained, and inferred shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import export

AUX = "haiku_implicit_aux"
FROZEN_KEY = "haiku_implicit_frozen"

STATIC = {AUX: True}

# For `dataclasses.field(metadata=FROZEN)`: a `frozen_field` that mypy understands.
FROZEN = {FROZEN_KEY: True}


def aux_field(**kwargs: Any) -> Any:
    """A dataclass field that is static metadata of the type rather than a child array.

    Its value must be hashable and comparable, since it becomes part of the pytree structure.

    Args:
      **kwargs: what `dataclasses.field` takes.
    """
    metadata = {**kwargs.pop("metadata", {}), **STATIC}
    return dataclasses.field(metadata=metadata, **kwargs)


def frozen_field(**kwargs: Any) -> Any:
    """A dataclass field whose arrays are never trained (`partition` puts them on the frozen side).

    Args:
      **kwargs: what `dataclasses.field` takes.
    """
    metadata = {**kwargs.pop("metadata", {}), **FROZEN}
    return dataclasses.field(metadata=metadata, **kwargs)


class Inferred:
    """`shape` or `dtype`: the value given to the constructor, else that of `aval`.

    This data descriptor is also the default of the dataclass field. If the constructor is not given
    the field, it stores the descriptor itself, which `__set__` reads as "not given".
    """

    def __init__(self, name: str, normalize: Callable[[Any], Any]):
        self.name, self.slot, self.normalize = name, f"_{name}", normalize

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        explicit = instance.__dict__.get(self.slot)
        if explicit is None:
            return getattr(instance.aval, self.name)
        return canonical(explicit) if self.name == "dtype" else explicit

    def __set__(self, instance: Any, value: Any) -> None:
        given = None if value is None or value is self else self.normalize(value)
        instance.__dict__[self.slot] = given
        instance.__dict__.pop("_aval", None)


def as_shape(shape: Any) -> tuple[Any, ...]:
    """Integers, and symbolic lengths of `jax.export` as they are."""
    try:
        lengths: Any = shape if isinstance(shape, tuple | list) else np.atleast_1d(shape)
        return tuple(n if export.is_symbolic_dim(n) else int(n) for n in lengths)
    except (TypeError, ValueError):
        raise TypeError(f"shape: expected a sequence of integers, got {shape!r}") from None


def as_dtype(dtype: Any) -> Any:
    """NumPy's dtype, or JAX's own dtype of random keys."""
    return dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def canonical(dtype: Any) -> Any:
    """The dtype that JAX uses for this one: 32 bits in place of 64, except in x64 mode."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
