"""The tables of the pages of types: what arrays hold, and which operations keep them implicit.

Each table is found out by running a small array of the type, and stands in a page between the lines
`<!-- fields LoRA -->` (or `operations`, `transformations`, `comparison`) and `<!-- end -->`.

`python docs/type_tables.py` writes all of them anew; a test compares them with the pages.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, get_args

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import haiku_implicit as hki
from haiku_implicit import adapters
from haiku_implicit.arrays.deferred import Deferred
from haiku_implicit.core import dispatch
from haiku_implicit.core.array import data_names, is_implicit, num_batch_axes, short
from haiku_implicit.core.sharding import shard_specs

DOCS = pathlib.Path(__file__).resolve().parent
N, M, RANK = 64, 32, 4
MARKED = re.compile(
    r"(<!-- (fields|operations|transformations|comparison) ?(\w*) -->\n).*?(<!-- end -->)",
    re.DOTALL,
)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def matrix() -> jax.Array:
    return normal(N, M)


def quantized() -> Any:
    return hki.QuantizedMatrix.quantize(matrix(), "int8", group_size=32)


def lora() -> Any:
    return hki.LoRA(matrix(), normal(N, RANK), normal(RANK, M), alpha=8.0)


def trained(**rule: Any) -> Any:
    rules = [hki.quantization.QtRule(weight_qtype="int8", act_qtype="int8", **rule)]
    return hki.quantized_training({"m": {"w": matrix()}}, rules)["m"]["w"]


def static_quantized() -> Any:
    """Of a model that has seen one batch."""
    t = hk.without_apply_rng(hk.transform_with_state(lambda x: hk.Linear(M, False, name="m")(x)))
    t = hki.with_quant_stats(hki.transform_implicit(t))
    params = {"m": {"w": trained(act_static_scale=True)}}
    _, state = t.apply(params, {}, normal(8, N))
    return hki.convert_trained(params, state)["m"]["w"]


def adapter(method: str, **options: Any) -> Any:
    params = hki.add_adapter({"m": {"w": matrix()}}, 0, method, **options)
    return hki.with_vector_bank(params)["m"]["w"]


def places(values: jax.Array) -> tuple[Any, ...]:
    index = jnp.arange(values.shape[0])
    return values, index, index % M, (N, M)


# An array of each type, by the type's name. All stand for matrices [64, 32], but where that can't be.
ARRAYS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "QuantizedMatrix": quantized,
    "TrellisMatrix": lambda: hki.TrellisMatrix.encode(matrix(), 3),
    "ScaledMatrix": lambda: hki.ScaledMatrix(quantized(), jnp.linspace(0.5, 1.0, N)),
    "MatrixView": lambda: hki.MatrixView.of(
        normal(N, 4, 8), [-3], [-2, -1], hki.QuantizedMatrix.quantize, dtype="int8", group_size=32
    ),
    "Concatenated": lambda: hki.Concatenated((lora(), normal(N, 8)), -1),
    "QuantizedCache": lambda: hki.QuantizedCache.quantize(matrix(), "int8", axis=-1),
    "Repeated": lambda: hki.Repeated(
        hki.QuantizedCache.quantize(normal(2, 16, M), "int8", axis=-1), -3, 2
    ),
    "QuantizedBlocks": lambda: hki.QuantizedBlocks.quantize(matrix(), "int8"),
    "TrainedQuantized": trained,
    "FakeQuantized": lambda: hki.FakeQuantized(matrix(), (("dtype", "int8"),)),
    "StaticQuantized": static_quantized,
    "SymbolicConstant": lambda: hki.SymbolicConstant(2.0, shape=(N, M), dtype=jnp.float32),
    "Zeros": lambda: hki.Zeros(shape=(N, M)),
    "Deferred": lambda: Deferred(quantized(), (("square", ()),)),
    "DoRA": lambda: adapter("dora", rank=RANK, alpha=8.0),
    "LoHa": lambda: adapter("loha", rank=RANK),
    "LoKr": lambda: adapter("lokr", rank=RANK),
    "LoCon": lambda: hki.adapters.LoCon.create(normal(4, 4, 16, 8), jax.random.key(0), rank=2),
    "VeRA": lambda: adapter("vera", rank=RANK),
    "RandomMatrix": lambda: adapters.RandomMatrix(jnp.uint32(1), (N, M), 1.0),
    "VBLoRA": lambda: adapter("vblora", rank=RANK, num_vectors=8, vector_length=16),
    "VectorBank": lambda: adapters.VectorBank(normal(8, 16)),
    "MiSS": lambda: adapter("miss", rank=RANK),
    "HiRA": lambda: adapter("hira", rank=RANK),
    "C3A": lambda: adapter("c3a", block_size=8),
    "GraLoRA": lambda: adapter("gralora", rank=RANK),
    "RandLoRA": lambda: adapter("randlora", rank=RANK),
    "IA3": lambda: adapter("ia3"),
    "OFT": lambda: adapter("oft", block_size=8),
    "BOFT": lambda: adapter("boft", block_size=8, factors=2),
    "FourierFT": lambda: adapter("fourierft", coefficients=50),
    "SHiRA": lambda: adapter("shira", entries=50),
    "LowRankDiagonal": lambda: adapter("low_rank_diagonal", rank=RANK),
    "TrainedRows": lambda: adapter("trained_rows", ids=[3, 17]),
    "InputDropout": lambda: adapters.InputDropout(matrix(), jax.random.key(0), 0.1),
    "Sum": lambda: adapters.Sum(quantized(), adapters.Diagonal(normal(M), num_rows=N)),
    "Rotated": lambda: adapters.Rotated(quantized(), adapters.BlockDiagonal(normal(8, 8, 8))),
    "Diagonal": lambda: adapters.Diagonal(normal(M), num_rows=N),
    "BlockDiagonal": lambda: adapters.BlockDiagonal(normal(8, 8, 8)),
    "Kronecker": lambda: adapters.Kronecker(normal(8, 8), normal(8, 4)),
    "Sparse": lambda: adapters.Sparse(*places(normal(50))),
    "Fourier": lambda: adapters.Fourier(*places(normal(50))),
    "Hadamard": lambda: adapters.Hadamard.random(N),
    "Circulant": lambda: adapters.Circulant(normal(8, 4, 8)),
    "BlockLowRank": lambda: adapters.BlockLowRank(normal(2, N // 2, 2, 2), normal(2, 2, 2, M // 2)),
}

COMPARED = {
    "LoRA": "LoRA",
    "Quantized": "QuantizedMatrix",
    "Scaled": "ScaledMatrix",
    "Cache": "QuantizedCache",
    "Trained": "TrainedQuantized",
    "Constant": "SymbolicConstant",
    "Zeros": "Zeros",
}


@functools.cache
def array(name: str) -> Any:
    return ARRAYS[name]()


# --- what an array holds -------------------------------------------------------------------------


def fields(name: str) -> str:
    """The fields of the array, and what they take."""
    x = array(name)
    trains, _ = hki.partition({"m": {"w": x}}, trainable_dense=False)
    trains = trains["m"]["w"]
    rows = ["| field | holds | bytes | trained |", "|---|---|---|---|"]
    for field in data_names(type(x)):
        value = getattr(x, field)
        if value is None:
            continue
        leaves = jax.tree.leaves(value)
        whole = len(jax.tree.leaves(getattr(trains, field, None)))
        some = {0: "no", len(leaves): "yes"}.get(whole, "in part") if leaves else "no"
        rows.append(f"| `{field}` | {held(value)} | {size(leaves):,} | {some} |")
    dense = x.size * x.dtype.itemsize
    known = ", ".join(f"`{k}={v!r}`" for k, v in static(x).items())
    end = f"It stands for `{short(x)}`: {x.nbytes:,} bytes, and {dense:,} as a dense array."
    about = f"\n\nStatic fields: {known}." if known else ""
    body = "\n".join(rows) if len(rows) > 2 else "No field holds an array, so there are no leaves."
    return f"{body}\n\n{end}{about}"


def size(leaves: list[Any]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def held(value: Any) -> str:
    """`float32[64,4]`, with the name of a type in front; of a tuple, each."""
    if isinstance(value, tuple | list):
        return ", ".join(map(held, value))
    if is_implicit(value):
        return f"`{type(value).__name__}` `{short(value)}`"
    if not hasattr(value, "shape"):  # a container
        return held(jax.tree.leaves(value))
    return f"`{short(value)}`"


def static(x: Any) -> dict[str, Any]:
    """The static fields that a reader has a use for."""
    hidden = {"shape", "dtype", "bits", "weak_type", "kind", "rules", *data_names(type(x))}
    found = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.name not in hidden}
    return {n: v for n, v in found.items() if v is not None}


# --- what keeps it implicit ----------------------------------------------------------------------


def equivalent(x: Any) -> Any:
    """The array on which operations without a rule run."""
    equal = x.equivalent()
    return x if equal is NotImplemented else equal


def outcome(operation: Callable[[Any], Any], x: Any) -> str:
    """`kept`, `used`, `dense`, `error` or the result's type; empty where a dense array can't do it."""
    try:
        jax.eval_shape(operation, jax.ShapeDtypeStruct(x.shape, x.dtype))
    except (TypeError, ValueError, IndexError):
        return ""
    fun = hki.use_implicit_args(operation)
    with hki.materialization("allow"), hki.materialization_report() as report:
        try:
            out = jax.eval_shape(fun, x)
        except ValueError:
            return "error"
    if report.count:
        return "dense"
    if not is_implicit(out):
        # (HiRA's products run on the dense weight, which no report counts.)
        return "used" if is_implicit(equivalent(x)) else "dense"
    return "kept" if type(out) is type(x) else type(out).__name__


@functools.cache
def outcomes(name: str) -> dict[str, str]:
    x = array(name)
    own = {"in a convolution": convolved} if x.ndim == 4 else {}
    every = {**hki.testing.OPERATIONS, **own}
    # (Some versions of JAX write the columns as gathers, others as slices.)
    left_out = {"identity", "every other column", "last column"}
    left_out |= {"vector @ w"} if x.ndim != 2 else set()
    found = {what: outcome(every[what], x) for what in every if what not in left_out}
    return {what: result for what, result in found.items() if result}


def convolved(w: Any) -> Any:
    x = jnp.ones((1, 8, 8, w.shape[-2]), w.dtype)
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def operations(name: str) -> str:
    """Which operations keep the type, use it, or make it dense, and the primitives with a rule."""
    by_result = collections.defaultdict(list)
    for what, result in outcomes(name).items():
        by_result[result].append(what)
    texts = {
        "kept": f"stays a `{name}`",
        "used": "dense result, computed without making the weight dense",
        "dense": "makes it dense",
        "error": "raises an error",
    }
    order = ["kept", *sorted(set(by_result) - {*texts}), "used", "dense", "error"]
    rows = ["| result | operations |", "|---|---|"]
    for result in order:
        if result in by_result:
            text = texts.get(result, f"becomes a `{result}`")
            rows.append(f"| {text} | {', '.join(by_result[result])} |")
    own = primitives(type(array(name)))
    rules = f"Primitives with rules for this type: {', '.join(f'`{p}`' for p in own)}."
    if not own:
        rules = "Its equivalent type has the rules."
    elif len(own) > 40:
        rules = "It has rules for nearly all of `jax.lax`."
    return "\n".join(rows) + f"\n\n{rules}"


def primitives(kind: type) -> list[str]:
    """The primitives with a rule that names the type, or a type that it is made from."""
    found = {
        primitive.name
        for primitive, methods in dispatch.rules().items()
        for method in methods
        if any(names(annotation, kind) for annotation in method.types)
        or names(method.varargs, kind)
    }
    return sorted(found)


def names(annotation: Any, kind: type) -> bool:
    kinds = get_args(annotation) or (annotation,)
    return any(
        isinstance(k, type)
        and issubclass(k, hki.ImplicitArray)
        and k is not hki.ImplicitArray
        and issubclass(kind, k)
        for k in kinds
    )


# --- transformations, files, merging -------------------------------------------------------------


def transformations(name: str) -> str:
    x = array(name)
    rows = [
        ("`jit`", jitted(x)),
        ("`vmap` over two of them", mapped(x)),
        ("`scan` over two of them", scanned(x)),
        ("carry of a loop that halves it", carried(name)),
        *[(f"split over a mesh by `{written(s)}`", split(x, s)) for s in specs_of(x.ndim)],
        ("`hki.save`, then `hki.load`", saved(x)),
        ("`hki.merge_adapters`", merged(x)),
    ]
    lines = [f"| {way} | {result} |" for way, result in rows if result]
    return "\n".join(["| transformation | result |", "|---|---|", *lines])


def jitted(x: Any) -> str:
    out = jax.eval_shape(jax.jit(hki.use_implicit_args(lambda w: w)), x)
    leaves = len(jax.tree.leaves(x))
    assert type(out) is type(x)
    if not leaves:
        return "a part of the program: an argument without arrays"
    return f"an argument of {leaves} array{'s' * (leaves > 1)}; a result of the same type"


def mapped(x: Any) -> str:
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)
    if not jax.tree.leaves(x):
        return "nothing to slice: each example sees the whole array"
    if num_batch_axes(two) <= num_batch_axes(x):
        return "not possible, it has no batch axes: materialize it before"
    seen = []
    jax.eval_shape(jax.vmap(hki.use_implicit_args(lambda w: seen.append(w.shape))), two)
    shape = ",".join(map(str, seen[0]))
    return f"slices its leaves; each example sees `{x.dtype}[{shape}]`"


def scanned(x: Any) -> str:
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)
    if not jax.tree.leaves(x) or num_batch_axes(two) <= num_batch_axes(x):
        return ""
    with hki.materialization("allow"), hki.materialization_report() as report:
        run = hki.use_implicit_args(lambda ws: jax.lax.scan(lambda c, w: (c, w), 0, ws)[1])
        out = jax.eval_shape(run, two)
    kept = "stays implicit" if type(out) is type(x) and not report.count else "makes it dense"
    return f"{kept}, one in each step"


def carried(name: str) -> str:
    result = outcomes(name).get("in a loop")
    return {"kept": "stays implicit", "dense": "makes it dense", None: ""}.get(
        result, f"comes out as `{result}`" if result != "used" else "comes out dense"
    )


def specs_of(ndim: int) -> list[PartitionSpec]:
    """Along the first axis, and along the last one."""
    rest = [None] * (ndim - 1)
    return [PartitionSpec("x", *rest), PartitionSpec(*rest, "x")]


def split(x: Any, spec: PartitionSpec) -> str:
    """The leaves by `hki.shardings`, and whether `shard_map` takes the array as it is."""
    if not jax.tree.leaves(x):
        return ""
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    dense = shard_specs(x, spec, mesh) is NotImplemented
    in_map = "in `shard_map` it becomes dense" if dense else ""
    try:
        places = hki.shardings({"m": {"w": x}}, spec, mesh)["m"]["w"]
    except ValueError:
        return f"`hki.shardings` raises an error; {in_map}"
    names = collections.defaultdict(list)
    for name in data_names(type(x)):
        found = dict.fromkeys(text(s.spec) for s in jax.tree.leaves(getattr(places, name)))
        if found:
            names[" and ".join(found)].append(f"`{name}`")
    parts = ", ".join(f"{', '.join(own)} {how}" for how, own in names.items())
    return f"{parts}; {in_map}" if in_map else parts


def text(spec: PartitionSpec) -> str:
    if all(part is None for part in spec):
        return "whole"
    return f"by `{written(spec)}`"


def written(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


def saved(x: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "file")
        hki.save(path, {"w": x})
        again = hki.load(path)["w"]
    assert jax.tree.structure(again) == jax.tree.structure(x)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), again, x)
    assert all(jax.tree.leaves(same))
    return "the same type, the same bits"


def merged(x: Any) -> str:
    out = jax.eval_shape(hki.merge_adapters, {"m": {"w": x}})["m"]["w"]
    if type(out) is type(x):
        return "left as it is"
    assert not is_implicit(out)
    return "a dense array"


# --- the pages -----------------------------------------------------------------------------------


def comparison(_: str) -> str:
    """The types beside one another."""
    rows = [f"| | {' | '.join(COMPARED)} |", "|---" * (len(COMPARED) + 1) + "|"]
    for what in outcomes("LoRA"):
        cells = [outcomes(name).get(what, "") for name in COMPARED.values()]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(rows)


TABLES = dict(
    fields=fields, operations=operations, transformations=transformations, comparison=comparison
)


def with_tables(text: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]](m[3])}\n{m[4]}", text)


def pages() -> list[pathlib.Path]:
    return [p for p in sorted(DOCS.rglob("*.md")) if MARKED.search(p.read_text())]


def main() -> None:
    for page in pages():
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
