"""Functions of one array with a native kernel on CPUs, as JAX primitives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from haiku_implicit.core.typing import EqnParam
from haiku_implicit.quantized.cpu import build
from haiku_implicit.quantized.products.partitioned import devices_of


def kernel_primitive(
    name: str,
    fun: Callable[..., Any],
    kernel: Callable[..., Any],
    *,
    params: Sequence[str],
    serves: Callable[..., bool] = lambda aval, **_: True,
) -> Primitive:
    """Makes a primitive of a function; the caller adds its abstract value and its derivative.

    Args:
      name: the name of the primitive.
      fun: computes the function with operations of XLA, for any leading axes of its array.
      kernel: calls a native kernel instead, on one CPU.
      params: the names of the function's keyword arguments, which are static.
      serves: whether the kernel takes an array with this abstract value.
    """
    primitive = Primitive(name)

    def batch(operands: Sequence[jax.Array], axes: Sequence[int], **params: EqnParam) -> Any:
        return primitive.bind(jnp.moveaxis(operands[0], axes[0], 0), **params), 0

    def lower_on_cpu(ctx: Any, x: Any, **params: EqnParam) -> Any:
        (aval,), devices = ctx.avals_in, devices_of(ctx.module_context)
        # (The partitioner would gather the operand of a foreign call on each device.)
        on_one = devices is not None and devices.number == 1 and 0 not in aval.shape
        use_kernel = on_one and serves(aval, **params) and build.available()
        chosen = kernel if use_kernel else fun
        return mlir.lower_fun(chosen, multiple_results=False)(ctx, x, **params)

    @functools.partial(jax.jit, static_argnames=tuple(params))
    def run(x: Any, **params: EqnParam) -> Any:
        """Compiles the primitive outside of any trace; under `disable_jit` it calls the function."""
        is_traced = isinstance(x, jax.core.Tracer)
        return primitive.bind(x, **params) if is_traced else fun(x, **params)

    primitive.def_impl(run)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    mlir.register_lowering(primitive, lower_on_cpu, platform="cpu")
    return primitive
