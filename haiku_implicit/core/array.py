"""`ImplicitArray`: a pytree that stands for a tensor without being one dense buffer."""

import abc
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, Union, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from haiku_implicit.core import compat, serialization
from haiku_implicit.core.fields import (
    AUX,
    FROZEN_KEY,
    STATIC,
    Inferred,
    as_dtype,
    as_shape,
    canonical,
)
from haiku_implicit.core.messages import see, type_error
from haiku_implicit.core.typing import Array, Tree, TreeDef

# The keywords of a class, as the docstring of `ImplicitArray` describes them.
_CLASS_KEYWORDS = ("commute_ops", "warn_on_materialize", "may_be_wrapped", "core_ndim", "linear_in")


@dataclasses.dataclass(eq=False, repr=False)
class ImplicitArray(abc.ABC):
    """A tensor of known shape and dtype that is held in a form other than one dense buffer.

    A subclass is a dataclass (`@dataclasses.dataclass`) whose fields are arrays, other implicit
    arrays or trees of them, and, marked with `aux_field`, static metadata. It must define
    `materialize`. `primitive_handler` adds rules for JAX primitives; if none applies, the array is
    materialized, with a warning.

    Shape and dtype come from the first of these that gives one: the keyword of the constructor,
    `compute_shape()` / `compute_dtype()`, the class attributes `default_shape` / `default_dtype`, and
    the result of `materialize` (by abstract evaluation). A type that can tell its shape from its
    arrays should do so in `compute_shape`: the shape then stays right when JAX slices or stacks those
    arrays (`jax.vmap`, `jax.lax.scan`).

    Class keywords:
      commute_ops: whether a rule of this type may be called with the operands of a commutative
        primitive swapped, the implicit one first. True by default.
      warn_on_materialize: whether materializing this type is worth a warning. True by default.
      may_be_wrapped: whether rules may put another type around this one, as for a weight that awaits a
        product. True by default; False for an activation that keeps its type, such as a cache.
      core_ndim: how many of the last axes make one tensor of this type (2 for a matrix, 0 for a
        wrapper of any array). All axes before them are batch axes, which every leaf has too.
        `jax.lax.scan` and `vmap` can slice and stack such a type, and there are rules for slicing,
        stacking and reordering its batch axes. None (the default): this type lacks batch axes.
      linear_in: the names of fields; if all of them are doubled, the tensor is doubled. A product with
        a number, a quotient by one, the negative and a cast (as in mixed precision) then keep the
        type, without rules: the fields are scaled, and leaves of the tensor's dtype are cast. None
        (the default): nothing is known.

    Attributes:
      shape: `tuple[int, ...]`, the shape of the dense tensor.
      dtype: `np.dtype`, the dtype of the dense tensor.
      field_axes: of the class: which axis of a field is which axis of the tensor, so that a mesh of
        devices can split both. For each field a letter for each of its axes after the batch axes: 'm'
        for the tensor's last axis, 'n' for the one before, then 'l', 'k', ...; '.' for an axis of the
        field's own. (An upper-case letter: if its length is 1, all shards have it whole.) A field that
        is not named has all axes of the tensor if it has its shape and dtype, and only batch axes
        otherwise. None (the default): only fields with the tensor's shape and dtype are split, and
        `jax.shard_map` makes the array dense.
      separable: of the class: whether a shard of the tensor depends only on the same shards of its
        fields. If not, `jax.shard_map` makes the array dense, and fields that are neither named nor
        like the tensor are whole on each device. True by default.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> import haiku_implicit as hki
      >>> @dataclasses.dataclass
      ... class Outer(hki.ImplicitArray):
      ...   u: jax.Array
      ...   v: jax.Array
      ...   def materialize(self):
      ...     return self.u[:, None] * self.v[None, :]
      >>> w = Outer(jnp.arange(3.0), jnp.ones(2))
      >>> w
      Outer(float32[3,2], u=float32[3], v=float32[2])
      >>> w.size, w.nbytes
      (6, 20)
      >>> print(hki.use_implicit_args(lambda x: x + 1)(hki.Zeros(shape=(2,), dtype=jnp.float32)))
      SymbolicConstant(float32[2], value=1.0)
    """

    default_shape: ClassVar[tuple[int, ...] | None] = None
    default_dtype: ClassVar[Any] = None
    commute_ops: ClassVar[bool] = True
    warn_on_materialize: ClassVar[bool] = True
    may_be_wrapped: ClassVar[bool] = True
    core_ndim: ClassVar[int | None] = None
    linear_in: ClassVar[tuple[str, ...] | None] = None
    field_axes: ClassVar[Mapping[str, str] | None] = None
    separable: ClassVar[bool] = True

    # The fields that `aux_field` would make, in the form that type checkers understand.
    shape: Inferred[tuple[int, ...]] = dataclasses.field(
        default=Inferred("shape", as_shape), kw_only=True, metadata=STATIC
    )
    dtype: Inferred[np.dtype[Any]] = dataclasses.field(
        default=Inferred("dtype", as_dtype), kw_only=True, metadata=STATIC
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _names(cls)  # raises a clear error for a class without its decorator
        return super().__new__(cls)

    def __init_subclass__(cls, **keywords: Any):
        own = {name: keywords.pop(name, None) for name in _CLASS_KEYWORDS}
        super().__init_subclass__(**keywords)
        if isinstance(own["linear_in"], str):
            own["linear_in"] = (own["linear_in"],)
        for name, value in own.items():
            if value is not None:
                setattr(cls, name, value)
        # `@dataclass` does not replace methods that the class defines. Its own would compare arrays
        # with `==` and print them whole.
        for name in ("__repr__", "__eq__", "__hash__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(ImplicitArray, name))
        if "materialize" in cls.__dict__:
            cls.materialize = _of_dense_fields(cls.materialize)  # type: ignore[assignment,method-assign]
        jax.tree_util.register_pytree_with_keys(
            cls,
            flatten_with_keys=_flatten_with_keys,
            unflatten_func=functools.partial(_unflatten, cls),
            flatten_func=_flatten,
        )
        serialization.register_node(
            cls, functools.partial(_names, cls), functools.partial(_unflatten, cls)
        )

    def __post_init__(self) -> None:
        """Runs after the constructor. Override it to validate, and call `super().__post_init__()`.

        It does not run when JAX unflattens, which it also does with placeholders for arrays.
        """
        # Drops an explicit shape that equals the children's, so that it stays right when JAX slices or
        # stacks them. (`dataclasses.replace` passes an inferred shape as an explicit one.)
        if self.__dict__.get("_shape") is not None and self.compute_shape() == self.shape:
            self.__dict__["_shape"] = None

    @abc.abstractmethod
    def materialize(self) -> jax.Array:
        """Returns the dense array, of `self.shape` and `self.dtype`, that this array stands for.

        In the method, fields that hold implicit arrays read as dense ones.
        """

    def equivalent(self) -> Array:
        """Returns another array for the same tensor, whose rules apply if this type has none.

        As in a rule, fields that hold implicit arrays read as dense ones, and operations on them are
        dispatched. `materialize` is then `return dense(self.equivalent())`.

        Returns:
          An implicit array of other types, which have rules. Or `NotImplemented` (the default): the
          type relies on its own rules.
        """
        return NotImplemented

    def requantize(self, w: Array) -> Array:
        """Returns another weight, `w`, stored in this way; `NotImplemented` by default."""
        del w
        return NotImplemented

    def new_scales(self, w: Array, scale: Array, axis: int) -> Array:
        """Returns the scale for `w` of a `ScaledMatrix` of such a matrix: by default, `scale`."""
        del w, axis
        return scale

    def restored(self) -> Self:
        """Returns this array as rules and `materialize` read it: unchanged, by default.

        Functions that map over trees, such as a cast of all leaves, do not know the types in them.
        Override this method if it can detect leaves that were cast, and restore or reject them.
        """
        return self

    def compute_shape(self) -> tuple[int, ...] | None:
        """Returns the shape according to the children, or None if only `materialize` can tell."""
        return None

    def compute_dtype(self) -> np.dtype | None:
        """Returns the dtype according to the children, or None if only `materialize` can tell."""
        return None

    def before_dense(self, primitive_name: str) -> None:  # noqa: B027 (types need not have it)
        """Runs before an operation makes this array dense; does nothing by default.

        A type may warn here. It also runs for each array inside the one that becomes dense.

        Args:
          primitive_name: the name of the primitive.
        """

    def with_leading_axis(self, size: int | None) -> Array:
        """Returns this array with updated static fields after its leaves gained or lost a leading axis.

        The leaves are already stacked or sliced. Override this method if static metadata other than an
        explicit shape depends on the number of axes.

        Args:
          size: the length of the leading axis that the leaves have gained, or None if they have lost
            their first axis.

        Returns:
          The array, or `NotImplemented` if its type lacks batch axes (`core_ndim=None`).
        """
        if self.core_ndim is None:
            return NotImplemented
        leaves, treedef = flatten_one_level(self)
        leaves = [x.with_leading_axis(size) if is_implicit(x) else x for x in leaves]
        if any(x is NotImplemented for x in leaves):
            return NotImplemented
        stacked = jax.tree_util.tree_unflatten(treedef, leaves)
        explicit = stacked.__dict__.get("_shape")
        if explicit is not None:
            stacked.shape = explicit[1:] if size is None else (size, *explicit)
        return stacked

    def as_part(self, counts: Sequence[int]) -> Array:
        """Returns this array with the static fields of one shard, for leaves that are cut separately.

        Override this method if static fields other than an explicit shape describe lengths.

        Args:
          counts: the number of shards along each axis.

        Returns:
          The array, or `NotImplemented` if it can't be cut like this.
        """
        explicit = self.__dict__.get("_shape")
        if explicit is None:
            return self
        lengths = list(zip(explicit, counts, strict=True))
        if any(n % count for n, count in lengths):
            return NotImplemented
        return self._replace(shape=tuple(n // count for n, count in lengths))

    def divided(self, counts: Sequence[int]) -> Array:
        """Returns the same values in a form whose fields can be cut, such as one with smaller groups.

        Args:
          counts: the number of shards along each axis.

        Returns:
          An array of this type, or this array if no form can be cut; `NotImplemented` (the default) if
          only arrays within this one have such forms.
        """
        return NotImplemented

    @property
    def aval(self) -> jax.core.ShapedArray:
        """The abstract value (shape and dtype) of the dense array."""
        aval = self.__dict__.get("_aval")
        if aval is None:
            try:
                aval = self.__dict__["_aval"] = _abstract_value(self)
            except Exception as e:  # each type has its own error for None instead of an array
                if not (empty := empty_names(self)):
                    raise
                raise _incomplete(self, empty, "so that there is no shape and dtype") from e
        return aval

    @property
    def ndim(self) -> int:
        """The number of axes of the dense array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the dense array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that all leaves hold together (the dense array has `size * itemsize`)."""
        return sum(
            math.prod(np.shape(x)) * jnp.result_type(x).itemsize
            for x in jax.tree_util.tree_leaves(self)
        )

    def __len__(self) -> int:
        if not self.shape:
            raise type_error(f"len() of a {type(self).__name__} without axes")
        return self.shape[0]

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop("_aval", None)
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_aval"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __jax_array__(self) -> jax.Array:
        error = TypeError(
            f"{self!r} was used as if it were a dense array. Wrap the function that uses it "
            "in haiku_implicit.use_implicit_args (a Haiku model in transform_implicit), make the "
            "dense array with haiku_implicit.materialize(x), or, inside a function that is already "
            "wrapped, use haiku_implicit.box(x). haiku_implicit.apply_updates adds the updates of an "
            "optimizer."
            f" {see('used-as-dense')}"
        )
        check_complete([self], error)
        raise error

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.__jax_array__()  # type: ignore[return-value]

    def __array_function__(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Raises for the NumPy functions that answer False if an argument cannot become an array."""
        # None for what takes `like=`, such as np.asarray.
        run = getattr(function, "__wrapped__", None)
        if run is None or function in (np.array_equal, np.array_equiv):
            return self.__jax_array__()
        return run(*args, **kwargs)

    def _operator(self, *args: Any) -> jax.Array:
        """Operators work on the tracers that a wrapped function sees, not on implicit arrays."""
        return self.__jax_array__()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operator
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = _operator
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _operator
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _operator
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _operator
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _operator
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = _operator

    # Their results are no arrays.
    __divmod__ = __rdivmod__ = __iter__ = __contains__ = cast(Any, _operator)
    __bool__ = __float__ = __int__ = __complex__ = __index__ = cast(Any, _operator)

    def __eq__(self, other: object) -> Any:
        """Raises for an array or a number, like other operators. Anything else is not equal."""
        if isinstance(
            other, ImplicitArray | jax.Array | np.ndarray | np.generic | complex | float | int
        ):
            return self.__jax_array__()
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # `jax.Array` has none either

    def __getattr__(self, name: str) -> Any:
        """Runs if an attribute is missing. For `w.T`, `w.astype`, ..., the error names the way out."""
        if hasattr(type(self), name):  # a property raised an AttributeError: raise it again
            return object.__getattribute__(self, name)
        if hasattr(jax.Array, name) and not name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}. Use it in a function wrapped in "
                "haiku_implicit.use_implicit_args, or on haiku_implicit.materialize(x)."
                f" {see('used-as-dense')}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        parts = [f"{short(self)}"]
        for name in data_names(type(self)):
            value = getattr(self, name, None)
            if value is not None:
                parts.append(f"{name}={_brief(value)}")
        parts += [f"{name}={getattr(self, name, None)!r}" for name in _own_aux_names(type(self))]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """Renders the array for treescope, the only caller: shape, dtype, bytes and fields."""
        from treescope import rendering_parts, repr_lib

        # A part that `partition` returns lacks arrays, and with them its shape.
        known = ("shape", "dtype") if (logical := short(self)) != "?" else ()
        names = (*known, *data_names(type(self)), *_own_aux_names(type(self)))
        fields = {name: getattr(self, name, None) for name in names}
        shown = repr_lib.render_object_constructor(type(self), fields, path, subtree_renderer)
        if not known:
            return shown
        dense = self.size * self.dtype.itemsize
        about = f" # {logical}, {dense:,} bytes as a dense array, {self.nbytes:,} held"
        comment = rendering_parts.comment_color(rendering_parts.text(about))
        return rendering_parts.siblings_with_annotations(shown, extra_annotations=[comment])

    def _replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, without running the constructor's validation."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__getstate__())
        for name, value in changes.items():
            setattr(new, name, value)
        return new


ArrayValue = Union[ImplicitArray, jax.Array]  # noqa: UP007 (Plum orders a typing.Union)


def has_equivalent(kind: type[ImplicitArray]) -> bool:
    """Whether a type defines `ImplicitArray.equivalent`."""
    return kind.equivalent is not ImplicitArray.equivalent


def is_implicit(x: Any) -> bool:
    """Whether `x` is an implicit array. As `is_leaf=` it makes tree functions treat them as leaves."""
    return isinstance(x, ImplicitArray)


# --- fields and the pytree ---------------------------------------------------------------------


@functools.cache
def _names(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the child fields and of the static fields (`shape` and `dtype` by their slots).

    This can't be done in `__init_subclass__`, which runs before `@dataclass`.
    """
    _check_decorated(cls)
    data: list[str] = []
    aux: list[str] = []
    for field in dataclasses.fields(cls):
        if field.name in ("shape", "dtype"):
            aux.append(f"_{field.name}")
        else:
            (aux if field.metadata.get(AUX) else data).append(field.name)
    return tuple(data), tuple(aux)


def _check_decorated(cls: type) -> None:
    """Raises if a class annotates fields without `@dataclass`, or names unknown ones in `linear_in`."""
    own = {f.name for f in dataclasses.fields(cls)}
    if unknown := [name for name in getattr(cls, "linear_in", None) or () if name not in own]:
        raise type_error(f"{cls.__name__}: linear_in: it has no field {', '.join(unknown)}")
    known = own | {*dir(ImplicitArray)}
    for base in cls.__mro__:
        if not issubclass(base, ImplicitArray) or "__dataclass_fields__" in base.__dict__:
            continue
        fields = [
            name
            for name, kind in inspect.get_annotations(base).items()
            if name not in known and "ClassVar" not in str(kind)
        ]
        if fields:
            raise type_error(
                f"the fields {', '.join(fields)} of {base.__name__} are annotated, but the class is "
                "not a dataclass. Write @dataclasses.dataclass above it (and ClassVar[...] for what "
                "belongs to the class)"
            )


def data_names(cls: type) -> tuple[str, ...]:
    """The names of the fields of an implicit type that hold arrays."""
    return _names(cls)[0]


def static_items(x: "ImplicitArray") -> dict[str, Any]:
    """The static metadata of an implicit array; an inferred `shape` or `dtype` is None."""
    names, values = _names(type(x))[1], _flatten(x)[1]
    return {name.lstrip("_"): value for name, value in zip(names, values, strict=True)}


def frozen_names(cls: type) -> frozenset[str]:
    """The names of the fields of an implicit type that are declared frozen."""
    return frozenset(f.name for f in dataclasses.fields(cls) if f.metadata.get(FROZEN_KEY))


def _own_aux_names(cls: type) -> tuple[str, ...]:
    return tuple(name for name in _names(cls)[1] if name not in ("_shape", "_dtype"))


def _flatten(x: ImplicitArray) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    data, aux = _names(type(x))
    values = x.__dict__
    return tuple([values.get(n) for n in data]), tuple([values.get(n) for n in aux])


def _flatten_with_keys(x: ImplicitArray) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    children, aux = _flatten(x)
    keys = (jax.tree_util.GetAttrKey(n) for n in data_names(type(x)))
    return tuple(zip(keys, children, strict=True)), aux


def _unflatten(cls: type, aux: tuple[Any, ...], children: tuple[Any, ...]) -> ImplicitArray:
    data_fields, aux_fields = _names(cls)
    x: ImplicitArray = object.__new__(cls)
    x.__dict__.update(zip(data_fields, children, strict=True))
    x.__dict__.update(zip(aux_fields, aux, strict=True))
    return x


def flatten(tree: Tree) -> tuple[list[Array], TreeDef]:
    """`jax.tree_util.tree_flatten` with an untyped structure, as JAX's stub of it lacks its methods."""
    return jax.tree_util.tree_flatten(tree)


def flatten_one_level(x: Any) -> tuple[list[Array], TreeDef]:
    """Flattens a tree into leaves and structure; implicit arrays *within* `x` are leaves."""
    return jax.tree_util.tree_flatten(x, is_leaf=lambda y: y is not x and is_implicit(y))


def num_batch_axes(x: ImplicitArray) -> int:
    """The number of leading axes of `x` that are batch axes, which every leaf has too."""
    core = x.core_ndim
    if core is None:
        return 0
    children = [num_batch_axes(y) for y in flatten_one_level(x)[0] if is_implicit(y)]
    return max(0, min([x.ndim - core, *children]))


def is_nested(x: ImplicitArray) -> bool:
    """Whether `x` holds other implicit arrays."""
    return any(is_implicit(y) for y in flatten_one_level(x)[0])


def _of_dense_fields(materialize: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Extends a `materialize` method to arrays that hold other implicit arrays.

    The interpreter passes a tracer for each of these; a call by a user passes the implicit arrays.
    """

    @functools.wraps(materialize)
    def run(self: ImplicitArray) -> Any:
        leaves, treedef = flatten_one_level(self)
        if not any(map(is_implicit, leaves)):
            return materialize(self)
        dense = [x.materialize() if is_implicit(x) else x for x in leaves]
        return materialize(jax.tree_util.tree_unflatten(treedef, dense))

    return run


def has_symbolic_shape(x: Any) -> bool:
    """Whether an implicit array, or one in it, has a symbolic length as static metadata."""
    if not is_implicit(x):
        return False
    own = x.__dict__.get("_shape") or ()
    return any(map(export.is_symbolic_dim, own)) or any(
        map(has_symbolic_shape, flatten_one_level(x)[0])
    )


# --- shape and dtype ---------------------------------------------------------------------------


def known_struct(x: Array) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of an implicit array, or None if its fields do not determine them.

    They do not in a half that `partition` returns, nor in many optimizer states.
    """
    try:
        return jax.ShapeDtypeStruct(tuple(x.shape), np.dtype(x.dtype))
    except Exception:  # each type has its own error for other values in its fields
        return None


def same_struct(x: Array, y: Array) -> bool:
    """Whether two arrays have the same shape and dtype."""
    return getattr(x, "shape", None) == y.shape and getattr(x, "dtype", None) == y.dtype


def dense_struct(x: Array) -> jax.ShapeDtypeStruct:
    """Returns a `jax.ShapeDtypeStruct` for an implicit array, and anything else unchanged."""
    if not is_implicit(x):
        return x
    leaves = jax.tree_util.tree_leaves(x)
    # Over explicit mesh axes the sharding is a part of the dense array's type, even if the array is
    # not split. An array without leaves is in the current mesh, as `jnp.zeros` would be.
    explicit = any(compat.explicit_sharding(y) is not None for y in leaves)
    sharding = None
    if explicit or (not leaves and compat.in_explicit_mesh()):
        with compat.within_mesh_of(x):
            sharding = compat.sharding_of_result(*_materializing(x))
    return compat.struct(x.shape, x.dtype, x.aval.weak_type, like=leaves, sharding=sharding)


class IncompleteError(AttributeError, ValueError):
    """Raised for an array that lacks fields, such as one of the halves that `partition` returns.

    It is an `AttributeError`, so that `hasattr(x, "shape")` is False.
    """


def materialized_struct(x: ImplicitArray) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `materialize` returns for dense children, by abstract evaluation."""
    with compat.within_mesh_of(x):
        return jax.eval_shape(*_materializing(x))


def _materializing(x: ImplicitArray) -> tuple[Callable[[list[Any]], jax.Array], list[Any]]:
    """`materialize` as a function of dense children, and the structs of these children."""
    leaves, treedef = flatten_one_level(x)

    def dense(leaves: list[Array]) -> jax.Array:
        return jax.tree_util.tree_unflatten(treedef, leaves).materialize()

    return dense, [dense_struct(y) for y in leaves]


def _abstract_value(x: ImplicitArray) -> jax.core.ShapedArray:
    cls = type(x)
    shape, dtype = x.__dict__.get("_shape"), x.__dict__.get("_dtype")
    shape = x.compute_shape() if shape is None else shape
    dtype = x.compute_dtype() if dtype is None else dtype
    shape = cls.default_shape if shape is None else shape
    dtype = cls.default_dtype if dtype is None else dtype
    if shape is None or dtype is None:
        try:
            out = materialized_struct(x)
        except RecursionError:
            missing = "shape" if shape is None else "dtype"
            raise type_error(
                f"{cls.__name__}: its {missing} is not known. Give {missing}= to the constructor, or "
                f"define compute_{missing}() or default_{missing} in the class."
            ) from None
        shape = out.shape if shape is None else shape
        dtype = out.dtype if dtype is None else dtype
    return jax.core.ShapedArray(as_shape(shape), canonical(dtype))


def empty_names(x: ImplicitArray) -> list[str]:
    """The names of fields that hold None instead of an array, unless None is their default."""
    may = {f.name for f in dataclasses.fields(x) if f.default is None}
    return [name for name in data_names(type(x)) if name not in may and getattr(x, name) is None]


def check_complete(arrays: Iterable[Array], error: Exception) -> None:
    """Raises the cause of an error if one of the arrays lacks fields or values."""
    # An `IncompleteError` names the cause already; a `NotImplementedError` has another one.
    if isinstance(error, IncompleteError | NotImplementedError):
        return
    for x in filter(is_implicit, arrays):
        if empty := empty_names(x):
            raise _incomplete(x, empty, "so that it stands for no array") from error
        check_complete(flatten_one_level(x)[0], error)
        check_values(type(x).__name__, x, error)


def check_values(name: str, x: Any, error: Exception | None = None) -> None:
    """Raises if leaves of `x` are `jax.ShapeDtypeStruct`s, which may be the cause of an error."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(x)):
        raise TypeError(
            f"{name}: has no values, but is a jax.ShapeDtypeStruct. jax.eval_shape(function, params) "
            "gives the structs of what a function of parameters returns"
            f" {see('no-values')}"
        ) from error


def check_no_half(name: str, x: Any) -> None:
    """Raises for a half of an implicit array, as `partition` returns it."""
    if is_implicit(x) and known_struct(x) is None:
        raise a_half(name, x)


def a_half(name: str, x: Any) -> ValueError:
    """The error for a parameter that is a half of an implicit array."""
    return ValueError(
        f"{name}: a half of {type(x).__name__}, as partition returns it. "
        "Put both together first: haiku_implicit.combine(trained, frozen)"
        f" {see('one-half')}"
    )


def _incomplete(x: ImplicitArray, empty: Sequence[str], lost: str) -> IncompleteError:
    is_none = f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} None"
    return IncompleteError(
        f"{type(x).__name__}: {is_none}, {lost}. If this is one of the halves that "
        "haiku_implicit.partition returns, put them together again: haiku_implicit.combine"
        f" {see('one-half')}"
    )


def short(x: Any) -> str:
    """A text such as `float32[2,3]` for anything with a shape and a dtype."""
    try:
        name = getattr(x.dtype, "name", None) or np.dtype(x.dtype).name  # random keys: the first
        return f"{name}[{','.join(map(str, x.shape))}]"
    except Exception:  # a repr must not fail: pytrees are unflattened with placeholders for leaves
        return "?"


def _brief(value: Any) -> str:
    # An implicit array may have no shape yet: pytrees are unflattened with placeholders for leaves.
    is_dense = not is_implicit(value) and hasattr(value, "shape") and hasattr(value, "dtype")
    return short(value) if is_dense else repr(value)
