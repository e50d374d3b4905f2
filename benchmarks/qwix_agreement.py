r"""Compares quantized products and their gradients with Qwix 0.1.8: the largest differences.

Both compute on the same arrays in one process. A difference is the largest over all elements,
relative to Qwix's largest element. If Qwix raises, the table says so. In dtypes of two bytes, in which
Qwix rounds scales and quotients as well, the table has the errors of both instead: the root mean
square, relative to the dense product in float32. With static activation scales both start from the
same statistics of earlier batches; the last bit of their averages depends on the order of sums. If
that moves a gradient over a tie, the difference is one code (about 0.002).

    pip install qwix==0.1.8
    python -m benchmarks.qwix_agreement --output=benchmarks/results/qwix_agreement.json
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from qwix._src import averaging
from qwix._src.core import (
    conv_general_qt,
    dot_general_qt,
    ragged_dot_qt,
    stochastic_rounding,
)

from benchmarks import result_files
from haiku_implicit.quantization import (
    QtRule,
    QuantStats,
    conv_general_dilated,
    dot_general,
    einsum,
    ragged_dot,
)

_OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/qwix_agreement.json", "where the results are written"
)

NAMES = ("out", "dlhs", "drhs")
MATRICES = (((1,), (0,)), ((), ()))
BATCHES = (((2,), (1,)), ((0,), (0,)))
GROUP_SIZES = (5, 0, 11)
KEY = jax.random.key(7)

_DTYPES = {
    "int8": jnp.int8,
    "int4": jnp.int4,
    "uint8": jnp.uint8,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product with one rule.

    Attributes:
      operation: its name in the table.
      rule: the rule of both.
      ours, theirs: functions of the two operands.
      shapes: the operands' shapes.
      dtype: the operands' dtype.
    """

    operation: str
    rule: QtRule
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: Any = jnp.float32


def difference(case: Case) -> dict[str, Any]:
    """Returns the largest relative differences of the result and of both gradients."""
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [
        jax.random.normal(k, shape, case.dtype) for k, shape in zip(keys, case.shapes, strict=False)
    ]
    found = _with_gradients(case.ours, operands, keys[2])
    try:
        wanted = _with_gradients(case.theirs, operands, keys[2])
    except Exception as e:
        return {"qwix_raises": f"{type(e).__name__}: {e}".strip(": ").splitlines()[0][:120]}
    if case.dtype == jnp.float32:
        return {
            name: float(np.abs(np.asarray(a - b)).max() / np.abs(np.asarray(b)).max())
            for name, a, b in zip(NAMES, found, wanted, strict=True)
        }
    exact = _with_gradients(jnp.matmul, [x.astype(jnp.float32) for x in operands], keys[2])
    return {
        f"{whose} error, {name}": str(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)))
        for whose, results in (("our", found), ("Qwix's", wanted))
        for name, a, b in zip(NAMES, results, exact, strict=True)
    }


def _with_gradients(fun: Callable[..., Any], operands: Any, key: Any) -> list[Any]:
    out, pullback = jax.vjp(fun, *operands)
    cotangent = jax.random.normal(key, out.shape).astype(out.dtype)
    return [x.astype(jnp.float32) for x in (out, *pullback(cotangent))]


# --- Qwix ----------------------------------------------------------------------------------------


def dot_config(rule: QtRule) -> Any:
    """Returns the configuration of Qwix's own provider for a rule, for activations x weights."""
    config = rule.config(lhs_is_weight=False, rhs_is_weight=True)
    options = config.flat() | _collecting(rule)
    axes = options.pop("channelwise_noise_axes")
    for side in ("dlhs", "drhs"):
        method = options.pop(f"{side}_stochastic_rounding")
        if method is not None:
            noise = stochastic_rounding.get_noise_fn(method, KEY, axes)
            options[f"{side}_stochastic_rounding_noise_fn"] = noise
    return dot_general_qt.DotGeneralQtConfig(**_with_dtypes(options))


def conv_config(rule: QtRule) -> Any:
    """Returns the configuration of Qwix's own provider for convolutions."""
    return conv_general_qt.ConvGeneralQtConfig(**_common(rule, conv_general_qt.ConvGeneralQtConfig))


def ragged_config(rule: QtRule) -> Any:
    """Returns the configuration of Qwix's own provider for `ragged_dot`."""
    return ragged_dot_qt.RaggedDotQtConfig(**_common(rule, ragged_dot_qt.RaggedDotQtConfig))


def _common(rule: QtRule, cls: type) -> dict[str, Any]:
    options = rule.config(lhs_is_weight=False, rhs_is_weight=True).flat()
    options |= _collecting(rule)
    names = {f.name for f in dataclasses.fields(cls)}
    return _with_dtypes({k: v for k, v in options.items() if k in names})


# The statistics of earlier batches: their number, and the sum of their limits.
COUNT = 3
SUMS = {"absmax": 5.0, "min": -4.5, "max": 5.5}


def _collecting(rule: QtRule) -> dict[str, Any]:
    """Returns the function by which Qwix's provider keeps the average, after these batches."""

    def average(calibration: Any) -> Any:
        calibration = jax.tree.map(
            lambda x: x.mean(axis=rule.act_batch_axes, keepdims=True), calibration
        )
        aggregator = averaging.SimpleMovingAverage()
        stat = aggregator.init(calibration)
        stat |= {f"sum_of_{k}": stat[f"sum_of_{k}"] + SUMS[k] for k in calibration}
        stat = aggregator.update(stat | {"count": jnp.array(COUNT)}, calibration)
        return aggregator.get_calibration(stat, calibration)

    return {"lhs_collect_quant_stat": average} if rule.act_static_scale else {}


def _history(rule: QtRule, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the statistics of the same batches for this library; `shape` is the limits' shape."""
    if not rule.act_static_scale:
        return {}
    names = ("min", "max") if rule.act_calibration_method == "minmax" else ("absmax",)
    sums = {name: jnp.full(shape, SUMS[name]) for name in names}
    return {"stats": QuantStats(sums, jnp.array(float(COUNT)), mode="update")}


def _with_dtypes(options: dict[str, Any]) -> dict[str, Any]:
    return {k: _DTYPES.get(v, v) if k.endswith("_qtype") else v for k, v in options.items()}


def qwix_einsum(subscripts: str, lhs: Any, rhs: Any, rule: QtRule) -> Any:
    """Computes an einsum as Qwix's provider does."""

    def dot(lhs: Any, rhs: Any, numbers: Any, *args: Any, **kwargs: Any) -> Any:
        return dot_general_qt.dot_general_qt(lhs, rhs, numbers, dot_config(rule))

    with jax.disable_jit():
        return jnp.einsum(subscripts, lhs, rhs, _dot_general=dot)


# --- cases ---------------------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    """Yields all cases: each operation with its rules."""
    forward = list(itertools.product(("int8", "int4", "fp8"), (None, "int8", "fp8")))
    backward = (None, "int8", "fp8_e5m2")
    for (weight, act), bwd, tile in itertools.product(forward, backward, (None, 32, 128, 0.5)):
        yield _dot(QtRule(weight_qtype=weight, act_qtype=act, bwd_qtype=bwd, tile_size=tile))
    both = dict(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    for options in (
        dict(bwd_weight_grad_tile_size=8),
        dict(bwd_weight_grad_tile_size=8, tile_size=128),
        dict(disable_channelwise_axes=True),
        dict(bwd_stochastic_rounding="uniform"),
        dict(bwd_stochastic_rounding="low_bit_uniform", channelwise_noise_axes=(0, 1)),
        dict(weight_calibration_method="absmax,0.7", act_calibration_method="rms,2"),
        dict(weight_calibration_method="fixed,-2,2"),
        dict(additional_qt_config={"use_original_residuals": True}),
        dict(additional_qt_config={"dlhs_residual_qtype": "int8", "use_original_residuals": True}),
        dict(act_calibration_method="minmax"),
        dict(act_calibration_method="minmax", bwd_qtype=None),
        dict(weight_qtype="nf4"),
        dict(weight_qtype="nf4", bwd_qtype=None),
    ):
        yield _dot(QtRule(**(both | options)))
    yield _dot(QtRule(**both), dtype=jnp.bfloat16)
    yield _dot(QtRule(**both), dtype=jnp.float16)
    yield _dot(QtRule(**both), ((3, 8, 32), (3, 32, 6)), BATCHES, "dot_general, batched")
    for weight, bwd in itertools.product(("int8", "int4", "fp8"), backward):
        rule = QtRule(weight_qtype=weight, act_qtype=weight, bwd_qtype=bwd)
        for subscripts, *shapes in (
            ("btd,dhk->bthk", (2, 4, 32), (32, 2, 8)),
            ("hd,btd->bth", (16, 32), (2, 4, 32)),
        ):
            yield _einsum(subscripts, rule, shapes)
        if bwd is not None:  # without it, Qwix's own provider does not determine the residuals
            yield from _others(rule)
    yield from _static()
    yield from _microscaled()
    yield from _other_widths()
    yield from _transformed()


def _microscaled() -> Iterator[Case]:
    """Yields cases with tiles whose size and scales are a part of the format."""
    for qtype, tile in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)):
        both = dict(weight_qtype=qtype, act_qtype=qtype, tile_size=tile)
        yield _dot(QtRule(weight_qtype=qtype, tile_size=tile))
        yield _dot(QtRule(weight_qtype=qtype, act_qtype="int8", tile_size=tile, bwd_qtype="int8"))
        for bwd in (None, "int8", "fp8_e5m2"):
            yield _dot(QtRule(**both, bwd_qtype=bwd))
        yield _dot(QtRule(**both, bwd_qtype="int8", disable_channelwise_axes=True))
        tiled = dict(dlhs_tile_size=tile, drhs_tile_size=tile)
        rule = QtRule(**both, bwd_qtype=qtype, additional_qt_config=tiled)
        yield _dot(rule, ((64, 256), (256, 32)))


def _other_widths() -> Iterator[Case]:
    """Yields cases with 7 bits, and with activations that are not negative in 8."""
    for tile, bwd in itertools.product((None, 32, 128), (None, "int8")):
        yield _dot(QtRule(weight_qtype="int7", act_qtype="int7", bwd_qtype=bwd, tile_size=tile))
        yield _dot(QtRule(weight_qtype="int8", act_qtype="uint8", bwd_qtype=bwd, tile_size=tile))


def _transformed() -> Iterator[Case]:
    """Yields products within transformations of JAX."""
    ways: dict[str, Callable[..., Any]] = {
        "jit": jax.jit,
        "vmap": lambda fun: jax.vmap(fun, (0, None)),
        "scan": lambda fun: lambda xs, w: jax.lax.scan(lambda _, x: (None, fun(x, w)), None, xs)[1],
    }
    rules = [
        QtRule(weight_qtype=qtype, act_qtype=qtype, tile_size=tile, bwd_qtype="int8")
        for qtype, tile in (
            ("mxfp8", 32),
            ("mxfp4", 32),
            ("nvfp4", 16),
            ("int7", 32),
            ("int8", None),
        )
    ]
    for rule, (name, way) in itertools.product(rules, ways.items()):
        lead = () if name == "jit" else (3,)
        one = _dot(rule, ((*lead, 16, 256), (256, 12)), name=f"{name} of dot_general")
        yield dataclasses.replace(one, ours=way(one.ours), theirs=way(one.theirs))


def _static() -> Iterator[Case]:
    """Yields cases with static activation scales, in the fourth batch."""
    batches = (((2,), (0,)), ((), ()))
    for qtype, bwd in itertools.product(("int8", "int4", "fp8"), (None, "int8")):
        common = dict(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=bwd, act_static_scale=True)
        yield _dot(QtRule(**common, act_batch_axes=(0,)), limits=(1, 1))
        yield _dot(QtRule(**common, act_batch_axes=(0,), tile_size=128), limits=(1, 2))
        for axes, limits in (((0,), (1, 8, 1)), ((0, 1), (1, 1, 1))):
            rule = QtRule(**common, act_batch_axes=axes)
            yield _dot(rule, ((4, 8, 32), (32, 6)), batches, limits=limits)
        if bwd is not None:
            shared = QtRule(**common, disable_channelwise_axes=True)
            yield _dot(shared, ((4, 8, 32), (32, 6)), batches, limits=(1, 1, 1))
            yield from list(_others(QtRule(**common)))[:2]
    common = dict(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    for method in ("minmax", "rms,3", "absmax,0.7"):
        yield _dot(QtRule(**common, act_calibration_method=method), limits=(1, 1))


def _dot(
    rule: QtRule,
    shapes: Any = ((16, 256), (256, 12)),
    numbers: Any = MATRICES,
    name: str = "dot_general",
    dtype: Any = jnp.float32,
    limits: tuple[int, ...] = (),
) -> Case:
    key = KEY if rule.bwd_stochastic_rounding else None
    options = dict(dimension_numbers=numbers, rule=rule, key=key, **_history(rule, limits))
    return Case(
        name,
        rule,
        functools.partial(dot_general, **options),
        lambda a, b: dot_general_qt.dot_general_qt(a, b, numbers, dot_config(rule)),
        shapes,
        dtype,
    )


def _einsum(subscripts: str, rule: QtRule, shapes: Any) -> Case:
    ours = functools.partial(einsum, subscripts, rule=rule, weights=1)
    theirs = functools.partial(qwix_einsum, subscripts, rule=rule)
    return Case(f"einsum {subscripts}", rule, ours, theirs, tuple(shapes))


def _others(rule: QtRule) -> Iterator[Case]:
    for strides, padding in (((1, 1), "SAME"), ((2, 1), ((1, 2), (0, 1)))):
        options = dict(
            window_strides=strides, padding=padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        yield Case(
            f"conv_general_dilated {strides}",
            rule,
            functools.partial(
                conv_general_dilated, **options, rule=rule, **_history(rule, (1,) * 4)
            ),
            functools.partial(_qwix_conv, config=conv_config(rule), **options),
            ((2, 7, 6, 8), (3, 3, 8, 5)),
        )
    sizes = jnp.array(GROUP_SIZES)
    yield Case(
        "ragged_dot",
        rule,
        functools.partial(ragged_dot, group_sizes=sizes, rule=rule),
        lambda a, b: ragged_dot_qt.ragged_dot_qt(a, b, sizes, ragged_config(rule)),
        ((16, 32), (3, 32, 12)),
    )


def _qwix_conv(lhs: Any, rhs: Any, *, config: Any, window_strides: Any, **options: Any) -> Any:
    return conv_general_qt.conv_general_qt(
        lhs,
        rhs,
        config,
        window_strides,
        options["padding"],
        None,
        None,
        options["dimension_numbers"],
    )


# --- the table -----------------------------------------------------------------------------------


def summary(rule: QtRule) -> str:
    """Describes the settings of a rule that are not the defaults."""
    default = QtRule()
    parts = [
        f"{f.name}={getattr(rule, f.name)}"
        for f in dataclasses.fields(rule)
        if getattr(rule, f.name) != getattr(default, f.name)
    ]
    return ", ".join(parts)


def main(argv: Any) -> None:
    """Runs all cases, writes the results and prints them."""
    del argv
    rows = []
    for case in cases():
        about = dict(
            operation=case.operation, rule=summary(case.rule), dtype=jnp.dtype(case.dtype).name
        )
        rows.append(about | difference(case))
        print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    worst = max(max(row.get(k, 0.0) for k in ("out", "dlhs", "drhs")) for row in rows
                if row["dtype"] == "float32")  # fmt: skip
    print(f"{len(rows)} cases; the largest difference in float32: {worst:.1e}")
    path = pathlib.Path(_OUTPUT.value)
    names = ("jax", "jaxlib", "qwix", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names}
    results = dict(versions=versions, backend=jax.default_backend(), rows=rows)
    result_files.write(results, path)


if __name__ == "__main__":
    app.run(main)
