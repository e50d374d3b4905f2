"""JAX's own test cases, with implicit arrays for their arguments, against their dense twins.

`jax._src.internal_test_util.test_harnesses` is in JAX's wheel: thousands of calls of primitives, by which
JAX tests its exports. It is no public module; the library itself has nothing of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from tests.random_programs.agree import difference, nudged
from tests.random_programs.chains import grad_by_params, jvp, vmap_of_params


@functools.cache
def harnesses() -> list[Any]:
    """The cases that JAX runs on a CPU."""
    from jax._src.internal_test_util import test_harnesses

    return [h for h in test_harnesses.all_harnesses if h.filter("cpu")]


# --- implicit arrays for arguments -------------------------------------------------------------------------


@dataclasses.dataclass
class Held(hki.ImplicitArray):
    """A user's type without any rule: a dense array."""

    array: hki.ArrayValue

    def compute_shape(self):
        return self.array.shape

    def compute_dtype(self):
        return self.array.dtype

    def materialize(self):
        return self.array


def exact(values: np.random.RandomState, shape: tuple[int, ...], dtype: Any) -> Any:
    """Multiples of 1/8, so that sums of products are exact, and comparisons the same."""
    return jnp.asarray(values.randint(-8, 9, shape) / 8, dtype)


def lora(x: Any, values: np.random.RandomState) -> Any:
    if not _is_matrix(x):
        return None
    return _factors(jnp.asarray(np.round(np.asarray(x, np.float32) * 8) / 8, x.dtype), values)


def _factors(w: Any, values: np.random.RandomState) -> Any:
    *lead, n, m = w.shape
    a, b = exact(values, (*lead, n, 2), w.dtype), exact(values, (*lead, 2, m), w.dtype)
    return hki.LoRA(w, a, b)


def quantized(dtype: str, x: Any, values: np.random.RandomState) -> Any:
    if not _is_matrix(x) or (dtype == "int4" and x.shape[-2] % 2):
        return None
    if not np.isfinite(np.asarray(x, np.float32)).all():
        return None  # an error of `quantize`
    q = hki.QuantizedMatrix.quantize(jnp.asarray(x), dtype)
    scale = jnp.exp2(jnp.round(jnp.log2(jnp.maximum(q.scale, 2.0**-7))))
    return q._replace(scale=scale.astype(q.scale.dtype))


def qlora(x: Any, values: np.random.RandomState) -> Any:
    q = quantized("int8", x, values)
    return q if q is None else _factors(q, values)


def constant(x: Any, values: np.random.RandomState) -> Any:
    value = np.asarray(x).ravel()[:1]
    return hki.SymbolicConstant(value[0], shape=x.shape, dtype=x.dtype) if value.size else None


def _is_matrix(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim >= 2 and min(x.shape) > 0


TYPES: dict[str, Callable[[Any, Any], Any]] = {
    "LoRA": lora,
    "QLoRA": qlora,
    "int8": functools.partial(quantized, "int8"),
    "int4": functools.partial(quantized, "int4"),
    "constant": constant,
    "boxed": lambda x, values: Held(jnp.asarray(x)),
}


# Gathers that promise that slices are within bounds and don't keep it: any result is right. (JAX's gradient is
# zero, that of leaves, which don't have each axis, is not.)
UNDEFINED = (
    "gather_batchdims_shape_2_3_3_start_indices_shape_2_3_slice_sizes_1_3_2",
    "gather_op_shape_10_10_10_offset_dims_2_3_4_start_index_map_1_2_start_indices_shape_1_4_2_slice_sizes_10_10_10",
)

# --- uses --------------------------------------------------------------------------------------------------


def jvp_of_numbers(fun: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Without the tangents of NaN, as a gather out of bounds has them: zero if it is of one array, and NaN
    if it is of the factors of which there is a stack."""

    def masked(y: Any, tangent: Any) -> Any:
        return jnp.where(jnp.isnan(y), 0, tangent) if _is_inexact(y) else tangent

    def transformed(args: Any, x: Any) -> Any:
        out, tangents = jvp(fun)(args, x)
        return out, jax.tree.map(masked, out, tangents)

    return transformed


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


# Of a function of (arguments, None), as transformations of random programs have them.
USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda fun: fun,
    "jvp": jvp_of_numbers,
    "vjp": grad_by_params,
    "vmap": vmap_of_params,
}


def outcome(harness: Any, type_name: str, use: str) -> str:
    """What one case comes to.

    Returns:
      "agrees"; "no operand", if no argument can have the type; "not dense either", if the dense twin raises
      an error or has no defined result; or what is wrong.
    """
    if harness.fullname.startswith(UNDEFINED):
        return "not dense either"
    values = np.random.RandomState(0)
    args = list(harness.dyn_args_maker(values))
    made = [
        TYPES[type_name](x, values) if isinstance(x, np.ndarray | jax.Array) else None for x in args
    ]
    if all(x is None for x in made):
        return "no operand"
    args = [x if y is None else y for x, y in zip(args, made, strict=True)]
    known = {i: x for i, x in enumerate(args) if not _is_data(x)}

    def fun(args: Any, _: Any) -> Any:
        out = harness.dyn_fun(*[known.get(i, x) for i, x in enumerate(args)])
        return jax.tree.map(jnp.asarray, out)

    def boxed(args: Any, _: Any) -> Any:
        return fun([hki.box(x) if isinstance(x, Held) else x for x in args], None)

    args = [None if i in known else x for i, x in enumerate(args)]
    inner = boxed if type_name == "boxed" else fun
    wrapped = hki.use_implicit_args(inner)
    twin = USES[use](lambda args, _: fun(hki.materialize(args), None))
    implicit = USES[use](lambda args, _: hki.materialize(wrapped(args, None)))
    both = jax.jit(lambda args: (implicit(args, None), twin(args, None)))
    try:
        got, want = both(args)
    except Exception as error:
        try:
            jax.jit(lambda args: twin(args, None))(args)
        except Exception:
            return "not dense either"
        return f"{type(error).__name__}: {error}"
    dtypes = [x.dtype for x in args if x is not None]
    coarsest = max(filter(_is_float, dtypes), key=lambda d: jnp.finfo(d).eps, default=jnp.float32)
    return difference(got, want, lambda: both(nudged(args, coarsest))[1], dtypes) or "agrees"


def _is_data(x: Any) -> bool:
    return isinstance(x, np.ndarray | jax.Array | hki.ImplicitArray)


def outcomes(indices: range) -> dict[tuple[int, str, str], str]:
    """What each type and use of some cases comes to."""
    found = {}
    with hki.materialization("allow"):
        for i in indices:
            for type_name in TYPES:
                for use in USES:
                    found[i, type_name, use] = outcome(harnesses()[i], type_name, use)
    jax.clear_caches()
    return found
