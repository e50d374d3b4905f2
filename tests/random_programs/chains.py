"""Random compositions of JAX's transformations, of functions of parameters and `x`."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Function = Callable[[Any, Any], Any]


def draw_chain(rng: random.Random) -> list[str]:
    """Names of up to three transformations, the innermost first."""
    return [rng.choice(list(TRANSFORMS)) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]


def composed(chain: list[str], fun: Function) -> Function:
    """The function, transformed."""
    for name in chain:
        fun = TRANSFORMS[name](fun)
    return fun


def scalar(tree: Any) -> Any:
    """A number that depends on all finite floating numbers of a tree.

    A NaN, as of an index that is out of bounds, is masked, as a model that has some would do it.
    """

    def total(x):
        known = jnp.isfinite(x)
        return jnp.sum(jnp.where(known, jnp.sin(jnp.where(known, x, 0)), 0))

    return sum(total(x) for x in jax.tree.leaves(tree) if is_float(x))


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def grad_by_x(fun: Function) -> Function:
    return lambda params, x: jax.grad(lambda x: scalar(fun(params, x)))(x)


def grad_by_params(fun: Function) -> Function:
    """By every floating leaf, the scales of quantized weights among them."""

    def transformed(params, x):
        leaves, treedef = jax.tree.flatten(params)
        chosen = {i: leaf for i, leaf in enumerate(leaves) if is_float(leaf)}

        def of(chosen):
            merged = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
            return scalar(fun(treedef.unflatten(merged), x))

        return jax.grad(of)(chosen)

    return transformed


def jvp(fun: Function) -> Function:
    def tangent(x):
        x = jnp.asarray(x)
        return 0.3 * jnp.cos(x) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)

    def transformed(params, x):
        return jax.jvp(fun, (params, x), jax.tree.map(tangent, (params, x)))

    return transformed


def vmap_of_x(fun: Function) -> Function:
    return lambda params, x: jax.vmap(lambda x: fun(params, x))(jnp.stack([x, 0.1 + 0.5 * x]))


def vmap_of_params(fun: Function) -> Function:
    def two(x):
        return jnp.stack([x, 0.5 * x if is_float(x) else x])

    return lambda params, x: jax.vmap(fun, (0, None))(jax.tree.map(two, params), x)


def remat(fun: Function) -> Function:
    return jax.checkpoint(fun)


def scan(fun: Function) -> Function:
    def transformed(params, x):
        def step(carry, _):
            out = fun(params, carry)
            return carry + 0.1 * jnp.tanh(scalar(out)), out

        return lax.scan(step, x, None, length=2)

    return transformed


def shard_map(fun: Function) -> Function:
    """Another `x` on each device."""

    def local(params, x):
        out = fun(params, x * (1 + 0.1 * lax.axis_index("d")))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], out)

    specs = PartitionSpec(), PartitionSpec()
    return lambda params, x: jax.shard_map(
        local, mesh=mesh(), in_specs=specs, out_specs=PartitionSpec("d"), check_vma=False
    )(params, x)


def mesh() -> Any:
    return jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "jit": jax.jit,
    **{
        fun.__name__: fun
        for fun in (
            grad_by_x, grad_by_params, jvp, vmap_of_x, vmap_of_params, remat, scan, shard_map,
        )
    },
}  # fmt: skip


def placed(rng: random.Random, params: Any) -> Any:
    """The parameters on all devices, each leaf split along an axis that is drawn, where one fits."""

    def place(leaf):
        axes = [i for i, n in enumerate(leaf.shape) if n and n % jax.device_count() == 0]
        entries: list[Any] = [None] * leaf.ndim
        if axes:
            entries[rng.choice(axes)] = "d"
        return jax.device_put(leaf, NamedSharding(mesh(), PartitionSpec(*entries)))

    return jax.tree.map(place, params)
