"""Which parameters are meant, and whether they fit: what creators, getters and tree functions share."""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Union

import chex
import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core.array import ImplicitArray, is_implicit
from haiku_implicit.numerics.formats import RECIPES
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix

Predicate = Callable[[str, str, Any], bool]
Targets = Union[Predicate, str, re.Pattern[str]]  # noqa: UP007 (a callable can't be or-ed)
Initializer = Callable[[Any, tuple[int, ...], Any], jax.Array]

# What Haiku's modules call the parameters that are added or multiplied element by element, alone or
# behind the name of a part (`gating_b`, `query_bias`); a `w_b` is a weight beside a `w_a`.
_ELEMENTWISE = re.compile(r"(?!w_b$)(?:.*_)?(?:b|bias|biases|offset|scale)")
# What `lora_getter` calls the factors beside the parameter `w`.
LORA_SUFFIXES = ("_lora_a", "_lora_b")


def chooser(targets: Targets | None, default: Predicate | None) -> Predicate:
    """The predicate that `targets` stands for.

    Args:
      targets: a predicate; a regular expression that the whole of `module/name` has to match; or None
        for the default.
      default: the predicate for None, if there is one.

    Raises:
      TypeError: for anything else.
      ValueError: for a text that is no regular expression.
    """
    if targets is None and default is not None:
        return default
    if callable(targets):
        return targets
    if not isinstance(targets, str | re.Pattern):
        raise TypeError(
            "targets: expected a regular expression over 'module/name' or a predicate "
            f"(module_name, name, value) -> bool, got {targets!r}"
        )
    try:
        pattern = re.compile(targets)
    except re.error as e:
        raise ValueError(f"targets: {targets!r} is no regular expression: {e}") from None
    return lambda module_name, name, value: bool(pattern.fullmatch(path(module_name, name)))


def path(module_name: str, name: str) -> str:
    """`module/name`."""
    return f"{module_name}/{name}" if module_name else name


def is_weight(module_name: str, name: str, value: Any) -> bool:
    """Whether a parameter is a matrix, or a stack of them, that multiplies: the default target.

    Biases and scales that Haiku gives several axes of length one are none.
    """
    return (
        _is_float(value)
        and len(value.shape) >= 2
        and not _ELEMENTWISE.fullmatch(name)
        and not name.endswith(LORA_SUFFIXES)
    )


def in_tree(predicate: Predicate) -> Predicate:
    """The same for stored parameters: `hk.experimental.layer_stack` has stacked those of its layers."""

    def for_layers(module_name: str, name: str, value: Any) -> bool:
        stacked = module_name.count("__layer_stack_")
        return len(value.shape) >= 2 + stacked and predicate(module_name, name, value)

    return for_layers


def takes_lora(rank: int) -> Predicate:
    """The default of LoRA: dense or quantized weights with room for the rank."""

    def predicate(module_name: str, name: str, value: Any) -> bool:
        return (
            is_weight(module_name, name, value)
            and (not is_implicit(value) or isinstance(value, QuantizedMatrix | ScaledMatrix))
            and rank <= min(value.shape[-2:])
        )

    return predicate


def takes_quantization(options: dict[str, Any]) -> Predicate:
    """The default of quantization: dense weights, also within LoRA, that the groups divide.

    An axis of length one (a depthwise kernel `[h, w, 1, m]`) would give a scale to each number.
    """
    axis = options["axis"]

    def predicate(module_name: str, name: str, value: Any) -> bool:
        inner = value.w if isinstance(value, LoRA) else value
        return (
            is_weight(module_name, name, value)
            and not is_implicit(inner)
            and value.shape[axis] > 1
            and _divides(options, value.shape[axis], value.shape[-3 - axis])
        )

    return predicate


def _prescribed_group_size(dtype: Any) -> int | None:
    """The group size that a format has by its definition, if any."""
    return RECIPES[dtype].group_size if isinstance(dtype, str) and dtype in RECIPES else None


def _divides(options: dict[str, Any], length: int, rows: int) -> bool:
    """Whether the groups, and tiles of rows, divide the axes of a matrix."""
    size = options["group_size"]
    size = size if size is not None else _prescribed_group_size(options["dtype"])
    if size is None or size == "tensor":
        return True
    tile, group = size if isinstance(size, tuple | list) else (1, size)
    return bool(length % group == 0 and rows % tile == 0)


# --- validation --------------------------------------------------------------------------------


def check_rank(rank: Any) -> None:
    """Raises unless `rank` is a positive integer."""
    _check("rank", rank, "a positive integer", _assert_positive_int)


def check_group_size(group_size: Any) -> None:
    """Raises unless `group_size` is what `QuantizedMatrix.quantize` takes, whatever the weight."""

    def size_or_tile(x: Any) -> None:
        for part in x if isinstance(x, tuple | list) and len(x) == 2 else [x]:
            _assert_positive_int(part)

    if group_size is not None and group_size != "tensor":
        expected = "None, 'tensor', a positive integer or a pair of them"
        _check("group_size", group_size, expected, size_or_tile)


def check_alpha(alpha: Any) -> None:
    """Raises unless `alpha` is None or a finite number."""

    def finite(x: Any) -> None:
        chex.assert_scalar(x)
        assert math.isfinite(x)

    if alpha is not None:
        _check("alpha", alpha, "None or a finite number", finite)


def check_axis(axis: Any) -> None:
    """Raises unless `axis` is -2 or -1."""

    def one_of_two(x: Any) -> None:
        chex.assert_scalar_in(x, -2, -1)

    _check("axis", axis, "-2 or -1", one_of_two)


def _assert_positive_int(x: Any) -> None:
    assert not isinstance(x, bool)
    chex.assert_scalar_positive(int(x))
    assert isinstance(x, int | np.integer)


def _check(name: str, value: Any, expected: str, check: Callable[[Any], None]) -> None:
    try:
        check(value)
    except (AssertionError, TypeError, ValueError):
        raise ValueError(f"{name}: expected {expected}, got {value!r}") from None


def check_matrix(path: str, value: Any, what: str) -> None:
    """Raises unless a parameter is a floating-point matrix or a stack of them."""
    if not _is_float(value) or len(value.shape) < 2:
        raise ValueError(
            f"{path}: {what} needs a floating-point parameter of at least two axes, but this one is "
            f"{describe(value)}. Leave it out by targets="
        )


def check_fits(path: str, value: Any, rank: int) -> None:
    """Raises unless a parameter can take LoRA of this rank."""
    check_matrix(path, value, "LoRA")
    try:
        chex.assert_scalar_in(int(rank), 1, min(value.shape[-2:]))
    except AssertionError:
        raise ValueError(
            f"{path}: LoRA of rank {rank} does not fit {describe(value)}; the rank can be "
            f"{min(value.shape[-2:])} at most. Give a smaller rank=, or leave the parameter out by "
            "targets="
        ) from None


def describe(value: Any) -> str:
    """`float32[2,3]`, with the type for an implicit array."""
    kind = f"{type(value).__name__} " if is_implicit(value) else ""
    shape = ",".join(map(str, value.shape))
    return f"{kind}{np.dtype(value.dtype).name}[{shape}]"


def no_match(targets: Targets | None, names: Iterable[str], default: str) -> ValueError:
    """The error for targets that match none of the names, with those that look most like them."""
    names = list(names)
    if targets is None:
        what = f"targets: none of the {len(names)} parameters is {default}"
    elif callable(targets):
        what = f"targets: the predicate is true of none of the {len(names)} parameters"
    else:
        pattern = targets if isinstance(targets, str) else targets.pattern
        what = (
            f"targets: {pattern!r} matches none of the {len(names)} parameters (the whole of "
            "'module/name' has to match)"
        )
        if pattern in names:
            return ValueError(f"{what}. It is a parameter's name: give re.escape of it")
        names = difflib.get_close_matches(pattern, names, n=5, cutoff=0.0) or names
        return ValueError(f"{what}. Nearest: {', '.join(names)}")
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return ValueError(f"{what}. There are: {shown}")


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, np.floating))


# --- making the implicit array of one parameter --------------------------------------------------


def make_lora(
    path: str, value: Any, key: Any, rank: int, alpha: float | None, init: Initializer | None
) -> LoRA:
    """`value` plus a correction that is zero at first: `a` random, `b` zeros."""
    check_fits(path, value, rank)
    *batch, n, m = value.shape
    a = (init or kaiming_uniform)(key, (*batch, n, rank), value.dtype)
    return LoRA(value, a, jnp.zeros((*batch, rank, m), value.dtype), alpha)


def kaiming_uniform(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Uniform in ±1/sqrt(n) for a factor `[..., n, r]`: what the LoRA paper's code and PEFT draw."""
    bound = 1 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def make_zeros(value: Any) -> Zeros:
    """Symbolic zeros of the shape and dtype of `value`."""
    return Zeros(shape=tuple(value.shape), dtype=value.dtype)


def make_quantized(path: str, value: Any, options: dict[str, Any]) -> ImplicitArray:
    """`value` quantized; of a LoRA weight, its `w`."""
    if isinstance(value, LoRA):
        return value._replace(w=make_quantized(path, value.w, options))
    check_matrix(path, value, "quantization")
    if is_implicit(value):
        raise ValueError(
            f"{path}: this is {describe(value)}, and only a dense parameter (or the dense w of LoRA) "
            "can be quantized. Leave it out by targets=, or materialize it first"
        )
    try:
        return QuantizedMatrix.quantize(value, **options)
    except (TypeError, ValueError) as e:
        raise type(e)(f"{path} ({describe(value)}): {e}") from e
