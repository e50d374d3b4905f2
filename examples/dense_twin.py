"""Compares a model from your own checkout, with other weights in it, with its dense twin.

The common parts of the scripts on published models: imports from a checkout, changes of the weights,
the table of costs and errors, and the check of gradients.
"""

import functools
import importlib
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from bars import tqdm
from errors import InputError
from haiku_implicit import mox

LIMIT = 64_000  # bytes: smaller arrays may become dense


class Part(NamedTuple):
    """A part of a model: a transformed function, its parameters, and the arguments of `apply`."""

    name: str
    transformed: Any
    params: Any
    args: tuple[Any, ...]


def modules_of(repo: str | None, names: list[str], folder: str = "src") -> list[Any]:
    """Imports modules, from a folder of a checkout, such as `src`, if one is given.

    Raises:
      InputError: if there is no such folder, or something can't be imported.
    """
    source = [str(pathlib.Path(repo).expanduser() / folder)] if repo else []
    if source and not pathlib.Path(source[0]).is_dir():
        raise InputError(f"--repo: there is no folder {source[0]}")
    # Without the folder of these scripts: their names hide the packages of the checkout.
    here = pathlib.Path(__file__).resolve().parent
    others = [path for path in sys.path if pathlib.Path(path).resolve() != here]
    try:
        with mock.patch.object(sys, "path", [*source, *others]):
            return [importlib.import_module(name) for name in names]
    except ImportError as error:
        where = f"from {repo}" if repo else "without --repo"
        raise InputError(
            f"{names[0]} could not be imported {where}: {error}. Give the folder of a checkout "
            "(--repo), and install what it depends on"
        ) from error


def with_products_for_cpus(transformed: Any, params: Any, state: Any, args: Any) -> Any:
    """Replaces the model's bfloat16 products, which XLA lacks on CPUs, by ordinary ones."""
    made = mox.make_mox(transformed)(*args, params=params, state=state)
    while nodes := made.query('//dot_general[@precision="BF16_BF16_F32"]'):
        options = {**nodes[0].eqn.params, "precision": None}
        made = made.sub(
            nodes[0], lambda x, y, options=options: jax.lax.dot_general_p.bind(x, y, **options)
        )
    return mox.to_transformed(made)


# --- weights ----------------------------------------------------------------------------------------


def random_params(transformed: Any, *args: Any) -> tuple[Any, Any]:
    """Makes random parameters and state of a model, without the zeros that many layers start from.

    Matrices have the scale of their number of inputs, vectors are close to one.

    Args:
      transformed: the result of `hk.transform_with_state`.
      *args: the arguments of the Haiku function.
    """
    shapes, state = jax.eval_shape(transformed.init, jax.random.PRNGKey(0), *args)
    rng = np.random.default_rng(0)

    def values(x: Any) -> jax.Array:
        noise = rng.standard_normal(x.shape, np.float32)
        if x.ndim > 1 and x.size > max(x.shape):
            return jnp.asarray(noise * x.shape[-2] ** -0.5, x.dtype)
        return jnp.asarray(1 + noise / 10, x.dtype)

    return jax.tree.map(values, shapes), jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)


def read_weights(folder: str) -> Any:
    """Reads the parameters and the state of a checkpoint, as AlphaGenome reads them."""
    (ocp,) = modules_of(None, ["orbax.checkpoint"])
    try:
        return ocp.StandardCheckpointer().restore(pathlib.Path(folder).expanduser().resolve())
    except (OSError, ValueError) as error:
        raise InputError(f"--weights: {error}") from error


def params_from(weights: Mapping[str, Mapping[str, Any]], shapes: Any) -> dict[str, Any]:
    """Selects the parameters of a part from the parameters of the whole model.

    A module of the part is the one module of the model whose path ends with the part's path, without
    the number of a stack of layers in front. The model's stack may have more layers than the part's.

    Raises:
      InputError: if there is not exactly one such module, or if a shape differs.
    """
    found: dict[str, Any] = {}
    for module, entries in shapes.items():
        there = module_with_end(weights, module)
        found[module] = {}
        for name, x in entries.items():
            value = weights[there].get(name)
            if value is None or value.shape[1:] != x.shape[1:] or len(value) < len(x):
                shape = "missing" if value is None else value.shape
                raise InputError(f"--weights: {there}/{name} is {shape}, expected {x.shape}")
            found[module][name] = jnp.asarray(value[: len(x)], x.dtype)
    return found


def module_with_end(weights: Mapping[str, Any], module: str) -> str:
    """Returns the name in a whole model of a part's module.

    Raises:
      InputError: if there is not exactly one.
    """
    own = module.split("/")
    end = "/" + "/".join(own[1:] if own[0].startswith("__layer_stack") else own)
    there = [path for path in weights if f"/{path}".endswith(end)]
    if len(there) != 1:
        raise InputError(f"--weights: {len(there)} modules are called ...{end}, expected one")
    return there[0]


def with_params(weights: Mapping[str, Mapping[str, Any]], params: Any) -> dict[str, dict[str, Any]]:
    """Puts the parameters of a part back into the whole model's, of which `params_from` took them."""
    whole = {module: dict(entries) for module, entries in weights.items()}
    for module, entries in params.items():
        there = module_with_end(whole, module)
        for name, new in entries.items():
            value = jnp.asarray(whole[there][name])
            whole[there][name] = value.at[: len(new)].set(new.astype(value.dtype))
    return whole


# --- the comparison ---------------------------------------------------------------------------------


def changes(part: Part) -> Iterator[tuple[str, Any]]:
    """Yields the parameters of a part in other forms, with a name for each form."""
    axes = hki.infer_matrix_axes(part.transformed.apply, part.params, *part.args)

    def quantized(dtype: str) -> Any:
        return hki.quantize_params(part.params, dtype=dtype, group_size=32, matrix_axes=axes)

    def with_lora(params: Any) -> Any:
        params = hki.add_lora(params, jax.random.key(0), rank=4, matrix_axes=axes)
        trained, frozen = hki.partition(params, trainable_dense=False)
        # The factors `b` start at zero, which would hide LoRA.
        return hki.combine(jax.tree.map(lambda x: x + 0.01, trained), frozen)

    yield "int8", quantized("int8")
    int4 = quantized("int4")
    yield "int4", int4
    yield "LoRA", with_lora(part.params)
    yield "LoRA on int4", with_lora(int4)


def compare(part: Part, rtol: float, runs: int) -> None:
    """Prints the costs of a part with each change, and its distance from its dense twin.

    The dense twin has the same weights as plain arrays, and runs without this library.

    Args:
      part: the part.
      rtol: the largest allowed error of results, relative to the greatest one.
      runs: how often each program is timed.
    """
    seconds, _ = timed(jax.jit(part.transformed.apply), (part.params, *part.args), runs)
    rows = [Row("dense", size_of(part.params), seconds)]
    bar = tqdm(list(changes(part)), desc=part.name, leave=False, disable=not sys.stderr.isatty())
    for name, params in bar:
        bar.set_postfix_str(name)
        rows.append(measured(part, name, params, runs))
    count = sum(x.size for x in jax.tree.leaves(part.params))
    print(f"\n{part.name}: {count / 1e6:.1f} M parameters")
    print(f"{'':14}{'MB':>8}{'ms':>9}{'off by':>10}{'gradients':>11}  became dense")
    for row in rows:
        off = [f"{x:.1e}" if x is not None else "" for x in (row.off_by, row.gradients_off_by)]
        print(
            f"{row.name:14}{row.size / 1e6:8.1f}{row.seconds * 1e3:9.1f}{off[0]:>10}{off[1]:>11}"
            f"  {row.became_dense}"
        )
    for row in rows:
        assert max(row.off_by or 0, row.gradients_off_by or 0) <= rtol, f"{row} is off by > {rtol}"


class Row(NamedTuple):
    """The costs of a form of the parameters: bytes, seconds of a call, and relative errors."""

    name: str
    size: int
    seconds: float
    off_by: float | None = None
    gradients_off_by: float | None = None
    became_dense: str = ""


def measured(part: Part, name: str, params: Any, runs: int) -> Row:
    """Runs a part with these parameters, and its dense twin."""
    dense, implicit = part.transformed.apply, hki.transform_implicit(part.transformed).apply
    with hki.materialization("allow"), hki.materialization_report() as report:
        run = jax.jit(implicit).lower(params, *part.args).compile()
    assert all(event.nbytes <= LIMIT for event, _ in report), f"{part.name}, {name}:\n{report}"
    became_dense = f"{report.count} arrays, {report.nbytes / 1e3:.1f} kB" if report else "nothing"
    seconds, got = timed(run, (params, *part.args), runs)
    want = jax.jit(dense)(hki.materialize(params), *part.args)
    row = Row(name, size_of(params), seconds, difference(got, want), None, became_dense)
    if name != "LoRA on int4":
        return row
    factors, frozen = hki.partition(params, trainable_dense=False)

    def loss(apply: Any, factors: Any, frozen: Any, *args: Any) -> jax.Array:
        out = jax.tree.leaves(apply(hki.combine(factors, frozen), *args))
        return jnp.stack([jnp.mean(x.astype(jnp.float32) ** 2) for x in out]).sum()

    def twin(params: Any, *args: Any) -> Any:
        return dense(hki.materialize(params), *args)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, apply)))(factors, frozen, *part.args)
        for apply in (implicit, twin)
    )
    return row._replace(gradients_off_by=difference(got, want))


def size_of(params: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params))


def timed(run: Callable[..., Any], args: Any, runs: int) -> tuple[float, Any]:
    """Returns the median seconds of a call after the first one, and the result."""
    out = jax.block_until_ready(run(*args))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times), out


def difference(got: Any, want: Any) -> float:
    """Returns the greatest difference, relative to the greatest value of an array.

    For arrays below a ten thousandth of the greatest value, the difference is relative to that bound:
    gradients that should be zero have only rounding errors.
    """
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    arrays = [[np.asarray(x, np.float32) for x in pair] for pair in pairs]
    least = 1e-4 * max(np.abs(y).max() for _, y in arrays)
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), least)) for x, y in arrays)


# --- gradients --------------------------------------------------------------------------------------


def check_gradients(
    model: Any, params: Any, loss_of: Callable[[Callable[..., Any], Any], jax.Array]
) -> None:
    """Compares the gradients of adapters with those of the dense twin, and the costs of the programs.

    A deep model in float32 magnifies rounding. So the twin is also compared with itself, with its
    weights changed in the last bit.

    Args:
      model: the transformed function.
      params: its parameters, with adapters.
      loss_of: gives the loss of the model's `apply` and all parameters.

    Raises:
      InputError: if our gradients differ by more than ten times as much, or something became dense.
    """
    trained, rest = hki.partition(params, trainable_dense=False)
    # Factors that start at zero would hide the others.
    trained = jax.tree.map(lambda x: x + 0.01, trained)

    def twin_of(params: Any, *args: Any) -> Any:
        return model.apply(hki.materialize(params), *args)

    def gradients_by(apply: Callable[..., Any]) -> Compiled:
        loss = lambda trained, rest: loss_of(apply, hki.combine(trained, rest))  # noqa: E731
        return compiled(jax.value_and_grad(loss), trained, rest)

    with hki.materialization("allow"), hki.materialization_report() as report:
        ours = gradients_by(hki.transform_implicit(model).apply)
    twin = gradients_by(twin_of)
    off = print_differences(ours.run, twin.run, trained, rest)
    largest = max((event.nbytes for event, _ in report), default=0)
    print(f"became dense: {report.count} arrays, the largest of {largest} bytes")
    ratios = [f"{a / b:.2f}" for a, b in zip(ours.seconds, twin.seconds, strict=True)]
    print(
        "seconds to those of the dense twin: trace {} x, lower {} x, compile {} x".format(*ratios)
    )
    if off[0] > 10 * max(off[1], 1e-6) or largest > LIMIT:
        raise InputError("the gradients are not those of the dense twin, or arrays became dense")


def print_differences(
    ours: Callable[..., Any], twin: Callable[..., Any], trained: Any, rest: Any
) -> list[float]:
    """Returns how far our gradients, and those of a changed twin, are off the dense twin's."""
    wanted = twin(trained, rest)
    in_last_bit = lambda x: jnp.nextafter(x, jnp.inf) if x.ndim and x.dtype.kind == "f" else x  # noqa: E731
    other = jax.tree.map(in_last_bit, rest)
    rows = {"adapters": ours(trained, rest), "twin, last bit": twin(trained, other)}
    off = []
    for name, found in rows.items():
        loss, grads = (difference(a, b) for a, b in zip(found, wanted, strict=True))
        print(f"{name:14} off the dense twin: loss {loss:.1e}, gradients {grads:.1e}")
        off.append(grads)
    return off


class Compiled(NamedTuple):
    """A compiled program, and the seconds of CPUs that it took to trace, lower and compile it."""

    run: Callable[..., Any]
    seconds: tuple[float, float, float]


def compiled(function: Callable[..., Any], *args: Any) -> Compiled:
    times = [time.process_time()]
    traced = jax.jit(function).trace(*args)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    run = lowered.compile()
    times.append(time.process_time())
    trace, lower, compile = (b - a for a, b in itertools.pairwise(times))
    return Compiled(run, (trace, lower, compile))
