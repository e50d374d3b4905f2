"""Primitives, each with functions of one or two arrays that bind it; `test_contract.py` runs them.

In every function `w` is the array that may be implicit and `x` a dense one of the same shape.
"""

import jax
import jax.extend.core.primitives as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from haiku_implicit.core import compat

WINDOW = dict(window_dimensions=(2, 2), window_strides=(1, 1), padding="VALID")
ROWS = np.array([2, 0, 2])
CONV = ("NCH", "OIH", "NCH")
# Rows times the transposed matrices of their groups, as where a `ragged_dot` is differentiated.
TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))

MODULES = (lax, jex, lax.linalg)


def primitive_named(name):
    """The primitive that JAX exports under a name, or None where this version has none."""
    if name == "remat":  # JAX 0.7 does not export it
        return compat.remat_p
    return next((getattr(m, f"{name}_p") for m in MODULES if hasattr(m, f"{name}_p")), None)


UNEXPORTED = {"ragged_dot_general", "composite", "name"}


def mesh():
    """One device as a mesh of one axis."""
    return jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


REPLICATED = PartitionSpec()


def over_axis(fun):
    """`fun` inside a `jax.shard_map`, where collectives have an axis to act on.

    Eagerly it compiles two programs for each operation within, each time: one collective does.
    """

    def run(*args):
        return jax.shard_map(fun, mesh=mesh(), in_specs=PartitionSpec(), out_specs=REPLICATED,
                             check_vma=False)(*args)  # fmt: skip

    return run


def over_axis_compiled(fun):
    return jax.jit(over_axis(fun))


def unary(name, *args, **kwargs):
    """The function of `jax.lax` of this name on `w`."""
    return lambda w, x: getattr(lax, name)(w, *args, **kwargs)


class Both:
    """A function of two arrays that `w` is both of (run alone; not in programs of all operations)."""

    def __init__(self, fun):
        self.fun = fun

    def __call__(self, w, x):
        return self.fun(w, w)


def binary(fun):
    """A function of two arrays with `w` on either side and on both."""
    return [lambda w, x: fun(w, x), lambda w, x: fun(x, w), Both(fun)]


def bound(name, **params):
    """The primitive itself: it has no public function, or one that does more."""
    return lambda *args: getattr(jex, f"{name}_p").bind(*args, **params)


def on(fun):
    """The function on `w` alone."""
    return [lambda w, x: fun(w)]


def scattering(fun):
    """A scatter of whole rows, `w` as the operand and as the updates."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    indices = np.array([[2], [0], [3], [1]])
    return binary(lambda a, b: fun(a, indices, b, numbers, unique_indices=True))


def tangent_of_pool(w, x):
    """The tangent of a maximum over windows binds `select_and_gather_add`."""

    def pool(w):
        return lax.reduce_window(w, -jnp.inf, lax.max, **WINDOW)

    return jax.jvp(pool, (w,), (x,))[1]


def gradient_of_pool(w, x):
    """The gradient of a maximum over windows binds `select_and_scatter_add`."""

    def pool(w):
        return lax.reduce_window(w, -jnp.inf, lax.max, **WINDOW).sum()

    return jax.grad(pool)(w)


def select_and_scatter(a, b):
    return jex.select_and_scatter_p.bind(
        a, b[:3, :3], jnp.zeros((), a.dtype), window_dimensions=(2, 2), window_strides=(1, 1),
        padding=((0, 0), (0, 0)), **jaxprs_of_select_and_scatter(a.dtype),
    )  # fmt: skip


def jaxprs_of_select_and_scatter(dtype):
    scalar = jax.ShapeDtypeStruct((), dtype)
    select, scatter = (
        jax.make_jaxpr(lax.ge)(scalar, scalar),
        jax.make_jaxpr(lax.add)(scalar, scalar),
    )
    return dict(select_jaxpr=select.jaxpr, select_consts=(), scatter_jaxpr=scatter.jaxpr,
                scatter_consts=())  # fmt: skip


def through_reference(w, x):
    """Writes `w` into a mutable array, and reads it."""
    reference = jax.new_ref(x)
    reference[...] = w
    return reference[...] * 2


def take_rows(w, x):
    return jnp.take(w, ROWS, axis=0)


def take_points(w, x):
    return w[np.array([0, 3, 1]), np.array([2, 2, 0])]


@jax.custom_jvp
def cube(x):
    return x**3


@cube.defjvp
def cube_jvp(primals, tangents):
    return cube(*primals), 3.5 * primals[0] ** 2 * tangents[0]  # wrong on purpose: it must be used


@jax.custom_vjp
def double(x):
    return 2 * x


double.defvjp(lambda x: (double(x), None), lambda _, g: (2.5 * g,))  # wrong on purpose, too


def solve(matrix, b):
    return lax.custom_linear_solve(
        lambda v: matrix @ v, b, lambda _, v: jnp.linalg.solve(matrix, v),
        lambda _, v: jnp.linalg.solve(matrix.T, v),
    )  # fmt: skip


def called(name):
    """A function as a call of the given primitive."""

    def run(w, x):
        jaxpr = jax.make_jaxpr(lambda w, x: jnp.sin(w) @ x)(dense_like(w), dense_like(x))
        params = dict(call_jaxpr=jaxpr if name == "closed_call" else jaxpr.jaxpr)
        return compat.bind(getattr(jex, f"{name}_p"), [w, x], params)[0]

    return binary(run)


def dense_like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


UNARY = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh cumlogsumexp
cummax cummin cumprod cumsum digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p
logistic neg round rsqrt sign sin sinh sqrt square tan tanh""".split()

BINARY = """add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter
polygamma pow rem sub zeta""".split()

FLOAT = {
    **{name: [unary(name)] for name in UNARY},
    **{name: binary(getattr(lax, name)) for name in BINARY},
    "add_jaxvals": binary(bound("add_jaxvals")),
    "eq_to": binary(bound("eq_to")),
    "le_to": binary(bound("le_to")),
    "lt_to": binary(bound("lt_to")),
    # -- three and more operands
    "clamp": [
        lambda w, x: lax.clamp(w, x, x + 1),
        lambda w, x: lax.clamp(x, w, x + 1),
        lambda w, x: lax.clamp(x - 1, x, w),
    ],
    "regularized_incomplete_beta": [
        lambda w, x: lax.betainc(w, x, x),
        lambda w, x: lax.betainc(x, w, x),
        lambda w, x: lax.betainc(x, x, w),
    ],
    "select_n": binary(lambda a, b: lax.select_n(np.tri(4, dtype=bool), a, b)),
    # -- contractions
    "dot_general": [
        *binary(lambda a, b: a @ b),
        *binary(lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ())))),
        *binary(lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())))),
        *binary(lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,))))),
        *binary(lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((1,), (1,))))),
        *binary(lambda a, b: lax.dot_general(a, b, (((0, 1), (1, 0)), ((), ())))),
        *binary(lambda a, b: lax.dot_general(a, b, (((), ()), ((), ())))),
        lambda w, x: x[0] @ w,
        lambda w, x: w @ x[0],
    ],
    "conv_general_dilated": binary(
        lambda a, b: lax.conv_general_dilated(
            a[None], b[:, :, None], (1,), "SAME", dimension_numbers=CONV
        )
    ),
    # -- shapes
    "broadcast_in_dim": [
        lambda w, x: lax.broadcast_in_dim(w, (2, 4, 4), (1, 2)),
        lambda w, x: lax.broadcast_in_dim(w, (4, 2, 4), (0, 2)),
        lambda w, x: lax.broadcast_in_dim(w, (4, 4, 1), (0, 1)),
    ],
    "reshape": [
        lambda w, x: w.reshape(16),
        lambda w, x: w.reshape(2, 2, 4),
        lambda w, x: w.reshape(4, 2, 2),
    ],
    "squeeze": on(bound("squeeze", dimensions=())),
    "transpose": [lambda w, x: w.T, lambda w, x: lax.transpose_p.bind(w, permutation=(0, 1))],
    "rev": [lambda w, x: lax.rev(w, (0,)), lambda w, x: lax.rev(w, (0, 1))],
    "slice": [
        lambda w, x: lax.slice(w, (1, 0), (3, 4)),
        lambda w, x: lax.slice(w, (0, 1), (4, 4), (1, 2)),
    ],
    "dynamic_slice": [
        lambda w, x: lax.dynamic_slice(w, (jnp.argmax(x[0]), 1), (2, 2)),
    ],
    "dynamic_update_slice": binary(lambda a, b: lax.dynamic_update_slice(a, b, (0, 0))),
    "pad": [
        lambda w, x: lax.pad(w, jnp.float32(2), ((1, 0, 0), (0, 2, 1))),
        lambda w, x: lax.pad(w, jnp.float32(0), ((-1, 0, 0), (0, -1, 0))),
    ],
    "concatenate": [
        lambda w, x: lax.concatenate([w, x], 0),
        lambda w, x: lax.concatenate([x, w, w], 1),
    ],
    "split": [lambda w, x: lax.split(w, (1, 3), 0), lambda w, x: lax.split(w, (2, 2), 1)],
    "stack": [lambda w, x: lax.stack([w, x], 0), lambda w, x: lax.stack([w, w], 1)],
    "unstack": [lambda w, x: lax.unstack(w, 0), lambda w, x: lax.unstack(w, 1)],
    "tile": [lambda w, x: lax.tile(w, (2, 3))],
    "gather": [take_rows, take_points, lambda w, x: w[:, ROWS]],
    "scatter": scattering(lax.scatter),
    "scatter_add": scattering(lax.scatter_add),
    "scatter_sub": scattering(lambda *args, **kwargs: lax.scatter_sub(*args, **kwargs)),
    "scatter_mul": scattering(lax.scatter_mul),
    "scatter_min": scattering(lax.scatter_min),
    "scatter_max": scattering(lax.scatter_max),
    # -- reductions, windows, order
    "reduce_sum": [lambda w, x: w.sum(), lambda w, x: w.sum(0), lambda w, x: w.sum(1)],
    "reduce_prod": [lambda w, x: w.prod(0)],
    "reduce_max": [lambda w, x: w.max(0), lambda w, x: w.max()],
    "reduce_min": [lambda w, x: w.min(1)],
    "reduce": [lambda w, x: lax.reduce(w, np.float32(0), lambda a, b: a + b + a * b, (0,))],
    "reduce_window": [
        lambda w, x: lax.reduce_window(w, np.float32(1), lambda a, b: a * b + 0 * a, **WINDOW)
    ],
    "reduce_window_sum": [lambda w, x: lax.reduce_window(w, np.float32(0), lax.add, **WINDOW)],
    "reduce_window_max": [
        lambda w, x: lax.reduce_window(w, -np.float32(np.inf), lax.max, **WINDOW)
    ],
    "reduce_window_min": [lambda w, x: lax.reduce_window(w, np.float32(np.inf), lax.min, **WINDOW)],
    "select_and_gather_add": binary(tangent_of_pool),
    "select_and_scatter_add": [gradient_of_pool],
    "select_and_scatter": binary(select_and_scatter),
    "argmax": [lambda w, x: lax.argmax(w, 0, jnp.int32)],
    "argmin": [lambda w, x: lax.argmin(w, 1, jnp.int32)],
    "sort": [lambda w, x: lax.sort(w), *binary(lambda a, b: lax.sort((a, b), num_keys=1))],
    "top_k": [lambda w, x: lax.top_k(w, 2)],
    "approx_top_k": [lambda w, x: lax.approx_max_k(w, 2)],
    # -- dtypes and identities
    "convert_element_type": [
        lambda w, x: w.astype(jnp.bfloat16),
        lambda w, x: w.astype(jnp.int32),
        lambda w, x: w.astype(jnp.complex64),
    ],
    "bitcast_convert_type": [lambda w, x: lax.bitcast_convert_type(w, jnp.int32)],
    "reduce_precision": [lambda w, x: lax.reduce_precision(w, 5, 4)],
    "integer_pow": [lambda w, x: lax.integer_pow(w, 3), lambda w, x: lax.integer_pow(w, -2)],
    "copy": [lambda w, x: lax.copy_p.bind(w)],
    "device_put": [lambda w, x: jax.device_put(w)],
    "optimization_barrier": [lambda w, x: lax.optimization_barrier((w, x))],
    "sharding_constraint": [
        lambda w, x: lax.with_sharding_constraint(w, NamedSharding(mesh(), PartitionSpec("i"))),
    ],
    "name": [lambda w, x: checkpoint_name(w, "w")],
    "stop_gradient": [lambda w, x: lax.stop_gradient(w) * x],
    # -- linear algebra
    "cholesky": [lambda w, x: lax.linalg.cholesky(w, symmetrize_input=False)],
    "eig": [lambda w, x: lax.linalg.eig(w)],
    "eigh": [lambda w, x: lax.linalg.eigh(w, symmetrize_input=False)],
    "hessenberg": [lambda w, x: lax.linalg.hessenberg(w)],
    "householder_product": [
        lambda w, x: lax.linalg.householder_product(w, x[0]),
        lambda w, x: lax.linalg.householder_product(x, w[0]),
    ],
    "lu": [lambda w, x: lax.linalg.lu(w)],
    "qr": [lambda w, x: lax.linalg.qr(w)],
    "schur": [lambda w, x: lax.linalg.schur(w)],
    "svd": [lambda w, x: lax.linalg.svd(w, full_matrices=False)],
    "triangular_solve": binary(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)
    ),
    "tridiagonal": [lambda w, x: lax.linalg.tridiagonal(w)],
    "tridiagonal_solve": [
        lambda w, x: lax.linalg.tridiagonal_solve(jnp.zeros(4), jnp.ones(4), jnp.zeros(4), w),
    ],
    "fft": [lambda w, x: lax.fft(w, "RFFT", (4,))],
    # -- random numbers
    "random_gamma": [lambda w, x: jax.random.gamma(jax.random.key(1), w)],
    # -- others
    "log2": [unary("log2")],
    "one_minus_square": [unary("one_minus_square")],
    "polynomial": binary(lambda a, b: lax.polynomial(a, [b, b, a])),
    "cholesky_update": [lambda w, x: lax.linalg.cholesky_update(w, x[0])],
    "symmetric_product": binary(lambda a, b: lax.linalg.symmetric_product(a, b)),
    "ragged_dot_general": [
        *binary(lambda a, b: lax.ragged_dot(a, b[None], np.array([4]))),
        lambda w, x: lax.ragged_dot(x, jnp.stack([w, x, w]), np.array([1, 0, 2])),
        lambda w, x: lax.ragged_dot_general(x, jnp.stack([w, w]), np.array([3, 1]), TRANSPOSED),
    ],
    "composite": [lambda w, x: lax.composite(jnp.sin, "my.sin")(w)],
    "swap": [through_reference],
    "dce_sink": [lambda w, x: (lax.dce_sink(w), x)[1]],
    # -- collectives
    "psum": [over_axis(lambda w, x: lax.psum(w, "i"))],
    "pmax": [over_axis_compiled(lambda w, x: lax.pmax(w, "i"))],
    "pmin": [over_axis_compiled(lambda w, x: lax.pmin(w, "i"))],
    "ppermute": [over_axis_compiled(lambda w, x: lax.ppermute(w, "i", [(0, 0)]))],
    "all_gather": [over_axis_compiled(lambda w, x: lax.all_gather(w, "i"))],
    "all_to_all": [over_axis_compiled(lambda w, x: lax.all_to_all(w, "i", 0, 0, tiled=True))],
    # -- primitives that carry a jaxpr (`test_higher_order.py` has more of them)
    "jit": binary(jax.jit(lambda a, b: jnp.sin(a) @ b)),
    "call": called("call"),
    "closed_call": called("closed_call"),
    "remat": binary(jax.checkpoint(lambda a, b: jnp.sin(a) @ b)),
    "scan": [
        lambda w, x: lax.scan(lambda c, r: (c @ w, r @ c), x, x),
        lambda w, x: lax.scan(lambda c, r: (jnp.sin(c), r @ c), w, x),
        lambda w, x: lax.scan(lambda c, r: (c * r, c[0] @ r), x, w),
        lambda w, x: lax.scan(lambda c, _: (c, c), w, None, length=2),
    ],
    "while": [
        lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x)),
        lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, w)),
        lambda w, x: lax.while_loop(lambda c: (c < w).all(), lambda c: c + 1, x),
    ],
    "cond": [
        lambda w, x: lax.cond(x[0, 0] > 0, lambda a: a @ x, lambda a: a, w),
        lambda w, x: lax.switch(jnp.argmax(x[0]), [lambda a: a, lambda a: -a, lambda a: x + a], w),
    ],
    "custom_jvp_call": [lambda w, x: cube(w) @ x, lambda w, x: jax.nn.relu(w) @ x],
    "custom_vjp_call": [lambda w, x: double(w) @ x],
    "linear_solve": [lambda w, x: solve(w, x[0]), lambda w, x: solve(x, w)],
}

# With `w` and `x` of shape `[2, 1, 4, 4]`: what models and JAX itself do to the axes of a batch of
# matrices (`layer_stack` slices them in a scan).
BATCHED = {
    "ragged_dot_general": [
        lambda w, x: lax.ragged_dot(x[0, 0], w.squeeze(1), np.array([1, 2])),
        lambda w, x: lax.ragged_dot_general(x[1, 0], w.squeeze(1), np.array([0, 3]), TRANSPOSED),
        lambda w, x: jax.vmap(lax.ragged_dot)(x[:, 0], w, np.array([[4], [3]])),
    ],
    "squeeze": [lambda w, x: w.squeeze(1)],
    "reshape": [
        lambda w, x: w.reshape(2, 4, 4),
        lambda w, x: w.reshape(1, 2, 4, 4),
        lambda w, x: w.reshape(2, 1, 16),
        lambda w, x: w.reshape(8, 4),
        lambda w, x: w.reshape(2, 2, 2, 1, 4),
    ],
    "slice": [
        lambda w, x: lax.slice(w, (1, 0, 0, 0), (2, 1, 4, 4)),
        lambda w, x: lax.slice(w, (0, 0, 1, 2), (2, 1, 3, 4)),
        lambda w, x: lax.slice(w, (0, 0, 0, 0), (2, 1, 4, 4), (2, 1, 1, 1)),
        lambda w, x: w[1],
        lambda w, x: w[0, 0, 2],
    ],
    "dynamic_slice": [
        lambda w, x: lax.dynamic_slice(w, (jnp.argmax(x[:, 0, 0, 0]), 0, 0, 0), (1, 1, 4, 4)),
        lambda w, x: lax.dynamic_slice(w, (1, 0, 1, 2), (1, 1, 3, 2)),
        lambda w, x: lax.dynamic_index_in_dim(w, 5, 0, keepdims=False),  # out of bounds: clamped
    ],
    "dynamic_update_slice": binary(lambda a, b: lax.dynamic_update_slice(a, b[:1], (1, 0, 0, 0))),
    "gather": [
        lambda w, x: w[jnp.array([1, 0, 1])],
        lambda w, x: jnp.take(w, jnp.array([1, -1, 7]), axis=0),
        lambda w, x: w[:, 0, jnp.array([3, 1])],
    ],
    "split": [lambda w, x: lax.split(w, (1, 1), 0), lambda w, x: lax.split(w, (1, 3), 2)],
    "concatenate": [
        lambda w, x: lax.concatenate([w, w], 0),
        lambda w, x: lax.concatenate([w, x, w], 1),
        lambda w, x: lax.concatenate([w, w], 3),
    ],
    "stack": [lambda w, x: lax.stack([w, w], 0), lambda w, x: lax.stack([w, x], 4)],
    "unstack": [lambda w, x: lax.unstack(w, 0), lambda w, x: lax.unstack(w, 3)],
    "tile": [lambda w, x: lax.tile(w, (2, 3, 1, 1)), lambda w, x: lax.tile(w, (1, 1, 2, 1))],
    "transpose": [
        lambda w, x: w.transpose(1, 0, 2, 3),
        lambda w, x: w.transpose(0, 1, 3, 2),
        lambda w, x: w.transpose(1, 0, 3, 2),
        lambda w, x: w.transpose(2, 0, 3, 1),
    ],
    "broadcast_in_dim": [
        lambda w, x: lax.broadcast_in_dim(w, (3, 2, 1, 4, 4), (1, 2, 3, 4)),
        lambda w, x: lax.broadcast_in_dim(w, (2, 3, 4, 4), (0, 1, 2, 3)),
        lambda w, x: lax.broadcast_in_dim(w, (2, 1, 3, 4, 4), (0, 1, 3, 4)),
        lambda w, x: lax.broadcast_in_dim(w, (2, 1, 4, 3, 4), (0, 1, 2, 4)),
        lambda w, x: lax.broadcast_in_dim(w, (2, 1, 4, 4, 1), (0, 1, 2, 3)),
    ],
    "rev": [lambda w, x: lax.rev(w, (0,)), lambda w, x: lax.rev(w, (1, 3))],
    "pad": [
        lambda w, x: lax.pad(
            w, jnp.zeros((), w.dtype), ((1, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0))
        ),
        lambda w, x: lax.pad(
            w, jnp.ones((), w.dtype), ((0, 0, 1), (0, 0, 0), (0, 1, 0), (0, 0, 0))
        ),
    ],
    "reduce_sum": [lambda w, x: w.sum(0), lambda w, x: w.sum((0, 2)), lambda w, x: w.sum()],
    "select_n": binary(lambda a, b: lax.select_n(np.arange(32).reshape(2, 1, 4, 4) % 3 == 0, a, b)),
    "dot_general": [
        *binary(jnp.matmul),
        *binary(lambda a, b: jnp.einsum("lbij,lbkj->lbik", a, b)),
        *binary(lambda a, b: jnp.einsum("lbij,mbjk->lmik", a, b)),
        *binary(lambda a, b: jnp.einsum("lbij,lbjk->ik", a, b)),
        *binary(lambda a, b: jnp.einsum("lbij,lbij->ij", a, b)),
        lambda w, x: x[0, 0] @ w,
        lambda w, x: w @ x[0, 0],
        lambda w, x: x[0, 0, 0] @ w,
    ],
    "add": binary(lax.add),
    "mul": binary(lax.mul),
    "convert_element_type": [lambda w, x: w.astype(jnp.bfloat16)],
    "copy": [lambda w, x: lax.copy_p.bind(w)],
    "scan": [
        lambda w, x: lax.scan(lambda c, v: (c @ v[0], c), x[0, 0], w),
        lambda w, x: lax.scan(lambda c, v: (c + v[0], v), x[0, 0], w, reverse=True),
        lambda w, x: lax.map(lambda v: jnp.sin(v[0]), w),
        lambda w, x: lax.scan(lambda c, _: (c, c[0]), w, None, length=2),
    ],
}

INT = {
    **{name: [unary(name)] for name in ("abs", "clz", "neg", "population_count", "sign")},
    **{
        name: binary(getattr(lax, name)) for name in ("add", "sub", "mul", "max", "min", "eq", "lt")
    },
    "not": [unary("bitwise_not")],
    "and": binary(lax.bitwise_and),
    "or": binary(lax.bitwise_or),
    "xor": binary(lax.bitwise_xor),
    # Not `w` by itself: what 0/0 is in integers differs between XLA's compilers, in JAX 0.12 between
    # eager and compiled code.
    "div": binary(lax.div)[:2],
    "rem": binary(lax.rem)[:2],
    "shift_left": binary(lax.shift_left),
    "shift_right_logical": binary(lax.shift_right_logical),
    "shift_right_arithmetic": binary(lax.shift_right_arithmetic),
    "mulhi": binary(lambda a, b: lax.mulhi(a, b)),
    "reduce_and": on(bound("reduce_and", axes=(0,))),
    "reduce_or": on(bound("reduce_or", axes=(0,))),
    "reduce_xor": on(bound("reduce_xor", axes=(0,))),
    "reduce_sum": [lambda w, x: w.sum(0)],
    "cumsum": [unary("cumsum")],
    "sort": [unary("sort")],
    "dot_general": binary(lambda a, b: a @ b),
    "gather": [lambda w, x: x[w % 4], take_rows],
    "scatter_add": [lambda w, x: x.at[w[0] % 4].add(w)],
    "dynamic_slice": [lambda w, x: lax.dynamic_slice(w, (2, 0), (1, 4))],
    "select_n": [lambda w, x: lax.select_n(lax.clamp(0, w, 1), x, x)],
    "convert_element_type": [lambda w, x: w.astype(jnp.float32), lambda w, x: w.astype(bool)],
    "integer_pow": [lambda w, x: lax.integer_pow(w, 2)],
    "reduce_max": [lambda w, x: w.max(1)],
    "argmax": [lambda w, x: lax.argmax(w, 0, jnp.int32)],
    "broadcast_in_dim": [lambda w, x: lax.broadcast_in_dim(w, (2, 4, 4), (1, 2))],
    "random_seed": [lambda w, x: jax.random.key_data(jax.vmap(jax.vmap(jax.random.key))(w))],
}

UINT = {
    "threefry2x32": [lambda w, x: jex.threefry2x32_p.bind(w, x, x, w)],
    "population_count": [unary("population_count")],
    "shift_right_logical": binary(lax.shift_right_logical),
}

COMPLEX = {
    **{
        name: [unary(name)]
        for name in ("abs", "conj", "exp", "imag", "neg", "real", "sign", "square")
    },
    **{name: binary(getattr(lax, name)) for name in ("add", "sub", "mul", "div", "eq")},
    "dot_general": binary(lambda a, b: a @ b),
    "fft": [lambda w, x: lax.fft(w, "FFT", (4,))],
    "reduce_sum": [lambda w, x: w.sum(0)],
    "transpose": [lambda w, x: w.T],
}

TABLES = {jnp.float32: FLOAT, jnp.int32: INT, jnp.uint32: UINT, jnp.complex64: COMPLEX}

# Primitives that no function above binds, and why.
EXCEPTIONS = {
    "no array operand": "after_all axis_index create_token empty2 iota rng_uniform",
    "the operand is a typed random key": "random_bits random_fold_in random_split",
    "the key is a vector of 4 words": "rng_bit_generator",
    "the operand is a reference": "get",
    "the operand is a vector of integers": "lu_pivots_to_permutation",
    "only within JAX's own transformations": "custom_lin zeros_like ormqr",
    "is gone once it is traced": "stage",
    "the CPU has none": "ragged_all_to_all",
    "in test_higher_order.py": "xla_pmap",
}

# JAX has no reverse-mode derivative of these with respect to arrays.
NOT_DIFFERENTIABLE = set(
    """igamma_grad_a nextafter polygamma zeta regularized_incomplete_beta reduce_window reduce
    select_and_scatter eig hessenberg householder_product schur tridiagonal cholesky_update
    symmetric_product composite pmax pmin while swap""".split()
)

# Their derivatives at a singular matrix, or at equal eigenvalues, divide by differences that are zero.
SINGULAR_DERIVATIVE = set("cholesky eigh linear_solve lu qr svd triangular_solve".split())

# JAX has no batching rule for these, or one that fails (threefry2x32: on some of its operands alone).
NOT_BATCHABLE = set(
    "select_and_scatter cholesky_update ragged_dot_general composite dce_sink threefry2x32".split()
)

# JAX computes the first three on CPUs alone. Of equal elements the last one takes any on a GPU.
ON_CPUS = {"eig", "hessenberg", "schur", "select_and_gather_add"}

# Each of these compiles for half a second, to as many instructions as all the others together. In
# programs of all operations there is one function of each, in loops none; alone they are all run.
SLOW_TO_COMPILE = set(
    """random_gamma igamma igammac igamma_grad_a regularized_incomplete_beta cholesky_update polygamma
    zeta""".split()
)
