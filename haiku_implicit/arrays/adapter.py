"""`Adapter`: the base of weights made of a frozen weight and a few trained numbers."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import data_names
from haiku_implicit.core.box import dense
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.messages import see, value_error
from haiku_implicit.core.typing import Array, Params
from haiku_implicit.core.wrapper import Wrapper
from haiku_implicit.quantized.numbers.options import is_positive_integer


@dataclasses.dataclass
class Adapter(Wrapper, core_ndim=2):
    """A weight made of a frozen weight and trained arrays.

    A subclass defines `equivalent` by types that have rules for products and parts: `LoRA`,
    `ScaledMatrix`, `Sum`, `Rotated`. So it does not need rules. Its class method
    `create(w, key, **options)` makes an adapter of a weight `[..., n, m]`, dense or implicit, which it
    does not change; it draws random numbers with the key, and raises a `ValueError` for options that do
    not fit. `haiku_implicit.add_adapter` takes the class, or its name.

    Class keywords:
      method: the name of the class for `add_adapter`; by default the class's name in lower case. An
        empty one for a class that only other code makes.

    Attributes:
      w: `[..., n, m]`, the frozen weight; itself implicit if it is quantized, for example.
      method: of a subclass: its name for `add_adapter`.
      field_axes: of a subclass: the axes of fields besides `w`, as for every implicit type.
      separable: of a subclass: False by default, as an adapter may compute norms of whole columns.
      one_key: of a subclass: whether all weights of a tree draw with the same key.
      keeps_base: of a subclass: whether the base can be computed from the weight and the adapter, as
        `unmerge_adapters` does.
      positive_options: of a subclass: the options of `create` that are whole numbers above zero.
      peft_flag: of a subclass: the key in PEFT's configuration of LoRA that is true for this type, ''
        for LoRA itself; None if PEFT's files of LoRA can't hold the type.
      peft_tensors: of a subclass: PEFT's names of the tensors besides the two factors, by field.

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
    separable = False
    one_key: ClassVar[bool] = False
    keeps_base: ClassVar[bool] = True
    method: ClassVar[str] = ""
    positive_options: ClassVar[tuple[str, ...]] = ("rank",)
    peft_flag: ClassVar[str | None] = None
    peft_tensors: ClassVar[dict[str, str]] = {}

    w: Array = dataclasses.field(metadata=FROZEN)

    def __init_subclass__(cls, *, method: str | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.method = cls.__name__.lower() if method is None else method
        _kinds.append(cls)

    @classmethod
    def room(cls, shape: tuple[int, ...], **options: Any) -> int:
        """The largest rank for a weight of a shape, if the type has ranks."""
        return min(shape[-2:])

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Raises for options of `create` that fit no weight."""
        for name in cls.positive_options:
            if name in options and not is_positive_integer(options[name]):
                raise value_error(f"{name}: expected a positive integer, got {options[name]!r}")

    @classmethod
    def options_for(cls, path: str, ndim: int, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `create` for one weight.

        Args:
          path: its path, `module/name`.
          ndim: the number of its axes, without those of stacked layers.
          options: the options that the user gave.
        """
        return options

    @classmethod
    def with_shared(cls, params: Params, key: jax.Array, **options: Any) -> Params:
        """Adds modules for arrays that weights of this type share to a tree with such weights."""
        return params

    @classmethod
    def without_base(cls, **fields: Any) -> Self:
        """An adapter with None for its base and for missing fields, as `AdapterParts` holds it."""
        new = object.__new__(cls)
        new.__dict__.update(dict.fromkeys(data_names(cls)) | fields)
        new.__dict__.update(_shape=None, _dtype=None)
        return new

    def materialize(self) -> jax.Array:
        equal = self.equivalent()
        if equal is NotImplemented:
            raise NotImplementedError(
                f"{type(self).__name__} has no equivalent() {see('arguments-and-types')}"
            )
        return dense(equal)

    def widened(self, x: jax.Array) -> jax.Array:
        """A trained array in the wider of its dtype and the dtype of the weight."""
        if self.w is None or x.dtype.itemsize >= np.dtype(self.dtype).itemsize:
            return x
        return x.astype(self.dtype)

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


# All classes of adapters, in the order of their definition.
_kinds: list[type[Adapter]] = []


def kinds() -> list[type[Adapter]]:
    """The classes that have a name for `add_adapter`, in the order of their definition."""
    return [cls for cls in _kinds if cls.method and callable(getattr(cls, "create", None))]


def method_names() -> list[str]:
    """The names of the methods for `add_adapter`, sorted."""
    return sorted({cls.method for cls in kinds()})


def method_named(name: str) -> type[Adapter] | None:
    """The class of a method; None for an unknown name.

    The last of several definitions counts, as when a notebook cell ran twice.

    Raises:
      ValueError: if a class of this library has the name as well.
    """
    found = [cls for cls in kinds() if cls.method == name]
    package = __name__.partition(".")[0]
    if len({cls.__module__.partition(".")[0] == package for cls in found}) > 1:
        names = " and ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in found)
        raise value_error(f"method: {name!r} is the name of {names}. Give the class")
    return found[-1] if found else None


def filled(value: float, batch: tuple[int, ...]) -> jax.Array:
    """The number of an option as an array with batch axes, float32."""
    return jnp.full(batch, float(value), jnp.float32)


def alpha_or(alpha: float | None, rank: int, batch: tuple[int, ...]) -> jax.Array:
    """The option `alpha` as an array; by default a scale `alpha / rank` of 1."""
    return filled(rank if alpha is None else alpha, batch)
