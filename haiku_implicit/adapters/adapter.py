"""`Adapter`: the base of weights made of a frozen weight and a few trained numbers."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from haiku_implicit.arrays.wrapper import Wrapper
from haiku_implicit.core.box import dense
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.sharding import padded_spec


@dataclasses.dataclass
class Adapter(Wrapper, core_ndim=2):
    """A weight made of a frozen weight and trained arrays.

    A subclass defines `equivalent` by types that have rules for products and parts: `LoRA`,
    `ScaledMatrix`, `Sum`, `Rotated`. So it does not need rules. Its class method
    `create(w, key, **options)` makes an adapter of a weight `[..., n, m]`, dense or implicit, which it
    does not change; it draws random numbers with the key, and raises a `ValueError` for options that do
    not fit. `haiku_implicit.add_adapter` takes the class, or its name.

    Class keywords:
      method: the name of the class for `add_adapter`; by default the class's name in lower case.

    Attributes:
      w: `[..., n, m]`, the frozen weight; itself implicit if it is quantized, for example.
      field_axes: of a subclass: for fields besides `w`, the axes after the batch axes: 'n' or 'm' for
        axes of the weight, else '.'. So a mesh splits them like the weight.
      one_key: of a subclass: whether all weights of a tree draw with the same key.
      keeps_base: of a subclass: whether the base can be computed from the weight and the adapter, as
        `unmerge_adapters` does.

    Example:
      >>> import dataclasses, jax.numpy as jnp, haiku_implicit as hki
      >>> from typing import Any
      >>> @dataclasses.dataclass
      ... class Stretched(hki.adapters.Adapter):
      ...   factor: Any
      ...   @classmethod
      ...   def create(cls, w, key, *, start=1.0):
      ...     return cls(w, jnp.full((*w.shape[:-2], w.shape[-1]), start))
      ...   def equivalent(self):
      ...     return hki.ScaledMatrix(self.w, self.factor, -1)
      >>> params = {'linear': {'w': jnp.ones((4, 3))}}
      >>> hki.add_adapter(params, 0, Stretched, start=2.0)['linear']['w']
      Stretched(float32[4,3], w=float32[4,3], factor=float32[3])
      >>> type(hki.add_adapter(params, 0, 'stretched')['linear']['w']).__name__
      'Stretched'
    """

    field_axes: ClassVar[dict[str, str]] = {}
    one_key: ClassVar[bool] = False
    keeps_base: ClassVar[bool] = True

    w: Any = dataclasses.field(metadata=FROZEN)

    def __init_subclass__(cls, *, method: str | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _methods.setdefault(method or cls.__name__.lower(), []).append(cls)

    @classmethod
    def room(cls, shape: tuple[int, ...], **options: Any) -> int:
        """The largest rank for a weight of a shape, if the type has ranks."""
        return min(shape[-2:])

    @classmethod
    def options_for(cls, ndim: int, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `create` for a weight of `ndim` axes, not counting axes of stacked layers."""
        return options

    @classmethod
    def with_shared(cls, params: Any, key: jax.Array, **options: Any) -> Any:
        """Adds modules for arrays that weights of this type share to a tree with such weights."""
        return params

    def equivalent(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no equivalent()")

    def materialize(self) -> jax.Array:
        return dense(self.equivalent())

    def field_specs(self, spec: Any, mesh: Any) -> dict[str, Any]:
        """The specs of the fields: the weight like the dense array, trained fields by `trained_specs`.

        Trained fields are not split over explicit axes of a mesh: there JAX does not have a rule for
        sums over axes by which both operands are split, which an adapter may need.
        """
        explicit = AxisType.Explicit in mesh.axis_types
        return {"w": spec} if explicit else {"w": spec, **self.trained_specs(spec)}

    def trained_specs(self, spec: Any) -> dict[str, Any]:
        """The specs of fields besides the weight, by the weight's axes that they have."""
        *lead, n, m = padded_spec(spec, self.ndim)
        entries = {"n": n, "m": m}
        return {
            name: PartitionSpec(*lead, *(entries.get(axis) for axis in axes))
            for name, axes in self.field_axes.items()
        }

    def completed(self) -> Self:
        """The weight with an array for each number that is None for its default.

        `create` makes these arrays. Weights of one shape then have one structure, so exchanging one for
        another does not compile anything.
        """
        return self

    def with_number(self, name: str, value: float, lead: tuple[int, ...]) -> Self:
        """Fills a field that is None with an array of a number."""
        if getattr(self, name) is not None:
            return self
        return self._replace(**{name: filled(value, lead)})

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the batch axes, which all fields have."""
        return tuple(np.shape(self.w)[:-2])


# The classes of each method's name, in the order of their definition.
_methods: dict[str, list[type[Adapter]]] = {}


def method_names() -> list[str]:
    """The names of the methods for `add_adapter`, sorted."""
    return sorted(name for name, found in _methods.items() if any(map(_can_create, found)))


def method_named(name: str) -> type[Adapter] | None:
    """The class of a method; None for an unknown name.

    The last of several definitions counts, as when a notebook cell ran twice.

    Raises:
      ValueError: if a class of this library has the name as well.
    """
    found = list(filter(_can_create, _methods.get(name, [])))
    package = __name__.partition(".")[0]
    if len({cls.__module__.partition(".")[0] == package for cls in found}) > 1:
        names = " and ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in found)
        raise ValueError(f"method: {name!r} is the name of {names}. Give the class")
    return found[-1] if found else None


def _can_create(cls: type[Adapter]) -> bool:
    return callable(getattr(cls, "create", None))


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws a first factor `[..., n, r]`, uniform in ±1/sqrt(n)."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def filled(value: float, batch: tuple[int, ...]) -> jax.Array:
    """The number of an option as an array with batch axes, float32."""
    return jnp.full(batch, float(value), jnp.float32)


def alpha_or(alpha: float | None, rank: int, batch: tuple[int, ...]) -> jax.Array:
    """The option `alpha` as an array; by default a scale `alpha / rank` of 1."""
    return filled(rank if alpha is None else alpha, batch)


def places(
    key: jax.Array, shape: tuple[int, ...], count: int, name: str
) -> tuple[jax.Array, jax.Array]:
    """Draws the rows and columns `[..., count]` of different random entries of each matrix.

    The entries of a matrix, row by row, are cut into `count` stretches, and each gives one.

    Args:
      key: a random key.
      shape: `[..., n, m]`.
      count: the number of entries.
      name: the name of the option, for errors.
    """
    *lead, n, m = shape
    if not 0 < count <= n * m:
        raise ValueError(f"{name}: expected 1 to {n * m} for a weight [{n}, {m}], got {count}")
    step = n * m // count
    start = np.arange(count, dtype=np.int64) * step  # (may not fit into JAX's integers)
    start = start.reshape(*(1 for _ in lead), count)
    column = jax.random.randint(key, (*lead, count), 0, step) + start % m
    return jnp.asarray(start // m) + column // m, column % m
