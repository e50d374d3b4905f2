"""`jax.export`: functions of implicit arrays in files, and for arrays of any length."""

import dataclasses
import subprocess
import sys
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import haiku_implicit as hki
from haiku_implicit.core import serialization
from haiku_implicit.quantization import QtRule, QuantStats
from haiku_implicit.quantized.cpu.build import available as native_kernels
from tests.cases import CASES, SHAPE
from tests.random_arrays import normal
from tests.tiers import few

QUICK = ["lora", "lora of int4", "int8", "zeros", "constant", "nought"]
FLOATS = [name for name, case in CASES.items() if case.dtype == jnp.float32]
X = normal((5, SHAPE[0]))

pytestmark = pytest.mark.usefixtures("may_be_dense")


def exported(fun, *args):
    """The function, exported, written, and read again."""
    found = export.export(jax.jit(fun))(*args)
    return export.deserialize(found.serialize())


def static_quantized():
    stats = QuantStats({"absmax": jnp.array([[2.0]])}, jnp.array(1.0), mode="fixed")
    return hki.StaticQuantized.of(CASES["int8"]().with_activation("int8"), stats)


def blocks():
    return hki.QuantizedBlocks.quantize(CASES["trained"]().value, "int8", 8)


OTHERS = {"static": static_quantized, "blocks": blocks}


def made(name):
    return OTHERS[name]() if name in OTHERS else CASES[name]()


@pytest.mark.parametrize("name", few([*CASES, *OTHERS], *QUICK, "static"))
def test_files_hold_functions_of_each_type(name):
    w = made(name)
    call = exported(hki.use_implicit_args(lambda w, x: (x * w, w)), w, w)
    product, same = call.call(w, w)
    dense = np.asarray(hki.materialize(w))
    np.testing.assert_allclose(hki.materialize(product), dense * dense, rtol=1e-5)
    assert jax.tree.structure(same) == jax.tree.structure(w)
    np.testing.assert_array_equal(hki.materialize(same), dense)


@pytest.mark.slow
def test_a_new_program_reads_the_file(tmp_path):
    w = CASES["lora of int4"]()
    path = tmp_path / "exported"
    forward = jax.jit(hki.use_implicit_args(lambda w, x: x @ w))
    path.write_bytes(export.export(forward)(w, X).serialize())
    script = f"""
import jax.numpy as jnp, haiku_implicit as hki, pathlib
from jax import export
call = export.deserialize(pathlib.Path({str(path)!r}).read_bytes())
q = hki.QuantizedMatrix.quantize(jnp.ones((4, 4)), "int4", group_size=2, zero_point=True)
print(call.call(hki.LoRA(q, jnp.ones((4, 2)), jnp.ones((2, 4)), alpha=2.0), jnp.ones((5, 4)))[0, 0])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.strip() == "12.0", run.stderr


PROCESS = """
import collections, pathlib, sys
import haiku as hk, jax, numpy as np
import haiku_implicit as hki
from jax import export

folder, events = pathlib.Path(sys.argv[1]), collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, 64])(x)))
apply = jax.jit(hki.transform_implicit(net).apply)
x = np.linspace(-1, 1, 5 * 96, dtype=np.float32).reshape(5, 96)
path = folder / "params.safetensors"
if not path.exists():
    params = hki.quantize_params(net.init(jax.random.key(0), x), dtype="int4", group_size=32)
    lora, base = hki.partition(hki.add_lora(params, 1, rank=4), trainable_dense=False)
    params = hki.combine(jax.tree.map(lambda x: x + 0.1, lora), base)
    hki.save(path, params)
    (folder / "exported").write_bytes(export.export(apply)(params, x).serialize())
params = hki.load(path)
exported = jax.jit(export.deserialize((folder / "exported").read_bytes()).call)
for fun in (exported, apply):
    events.clear()
    y = np.asarray(fun(params, x))
    counts = [events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses")]
    print(*counts, fun.lower(params, x).as_text().count("QuantizedMatmul"), y.tobytes().hex())
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    """It reads parameters, the exported function, and the compiled program: native kernels, too."""
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", PROCESS, str(tmp_path)], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        found.append([line.split() for line in run.stdout.splitlines()])
    for first, second in zip(*found, strict=True):  # the exported function, and the model itself
        assert [first[:2], second[:2]] == [["0", "1"], ["1", "0"]]  # hits and misses
        assert first[2:] == second[2:]  # the kernels in the program, and all bits of the result
    outside_of_files = 2 if native_kernels() else 0
    assert [int(line[2]) for line in found[1]] == [0, outside_of_files]
    exported, own = (np.frombuffer(bytes.fromhex(line[3]), np.float32) for line in found[1])
    np.testing.assert_allclose(exported, own, rtol=1e-4, atol=1e-5)
    assert np.abs(own).max() > 0.1


def models(w, x):
    y = jnp.maximum(x @ w, 0.125) * 2.0 + jnp.sum(w, 0)
    z = jax.nn.softmax(jnp.einsum("bi,ji->bj", y, w)) + x.sum(0)
    rows = jnp.broadcast_to(w, (x.shape[0], *w.shape))
    return (
        z,
        jnp.einsum("bi,bij->bj", x, rows),
        rows,
        jnp.cumsum(rows, 0),
        rows.mean(0),
        rows.max(0),
    )


@pytest.mark.every(6)
@pytest.mark.parametrize("name", few(FLOATS, *QUICK))
def test_symbolic_lengths(name):
    w = CASES[name]()
    (b,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, SHAPE[0]), jnp.float32)
    implicit = hki.use_implicit_args(models)
    call = exported(implicit, w, x)
    for rows in (1, 5):
        found = hki.materialize(call.call(w, X[:rows]))
        wanted = models(hki.materialize(w), X[:rows])
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", few(FLOATS, *QUICK[:3]))
def test_gradients_with_symbolic_lengths(name):
    w = CASES[name]()
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), jnp.float32)
    loss = lambda w, x: jnp.mean(jnp.sin(x @ w) ** 2)  # noqa: E731
    found = exported(hki.value_and_grad(loss, 1), w, x).call(w, X)
    wanted = jax.value_and_grad(loss, 1)(hki.materialize(w), X)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    own = hki.grad(loss)
    grads, direct = exported(own, w, x).call(w, X), own(w, X)
    assert jax.tree.structure(grads) == jax.tree.structure(direct)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(direct), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", few(["int8", "int4", "nf4", "int8 activations"], "int8"))
def test_models_with_large_quantized_weights(dtype):
    """Outside of files they take a native kernel where there is one."""
    t = hki.transform_implicit(
        hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([96, 64])(x)))
    )
    x = normal((3, 7, 64), 1)
    params = t.init(jax.random.key(2), x)
    act = "int8" if "activations" in dtype else None
    params = hki.quantize_params(params, dtype=dtype.split()[0], group_size=32, activation=act)
    params = hki.add_lora(params, 0, rank=2)
    wanted = jax.jit(t.apply)(params, x)
    for shape in ("3, 7, 64", "b, 7, 64", "b, t, 64"):
        struct = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
        found = exported(t.apply, params, struct).call(params, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tile", few([None, 16], None))
def test_quantized_training_with_symbolic_lengths(tile):
    """The gradients with respect to weights are sums over the symbolic axis."""
    t = hki.transform_implicit(
        hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 8])(x)))
    )
    x = normal((6, 32), 1)
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", tile_size=tile)
    params = hki.quantized_training(t.init(jax.random.key(2), x), [rule])
    step = jax.value_and_grad(lambda params, x: jnp.mean(t.apply(params, x) ** 2))
    wanted = jax.jit(step)(params, x)
    struct = jax.ShapeDtypeStruct(export.symbolic_shape("b, 32"), jnp.float32)
    found = exported(step, params, struct).call(params, x)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# --- types and static metadata of users ----------------------------------------------------------


@dataclasses.dataclass
class Tagged(hki.ImplicitArray):
    value: Any
    tag: Any = hki.aux_field(default=None)

    def materialize(self):
        return self.value


@pytest.mark.parametrize(
    "tag",
    [None, True, 3, -0.0, 1e-300, float("inf"), 1 - 2j, "ä", b"\x00\xff", np.float32(0.1)]
    + [np.dtype(jnp.bfloat16), np.dtype("int32"), np.int8(-3)],
    ids=repr,
)
def test_static_metadata_comes_back(tag):
    w = Tagged(X, tag)
    found = exported(lambda w: w, w).call(w)
    assert found.tag == tag and type(found.tag) is type(tag)
    assert repr(found.tag) == repr(tag)


class Nested(Tagged):
    """Of its own, as NumPy's numbers cannot be compared with tuples."""


def test_tuples_come_back():
    w = Nested(X, (1, (2.5, ("x",)), ()))
    assert exported(lambda w: w, w).call(w).tag == w.tag


class OfStructure(Tagged):
    """Of its own, as JAX 0.7.0 cannot compare structures with anything else."""


def test_structures_of_trees_come_back():
    w = OfStructure(X, jax.tree.structure((0, (None, (0,), ()), hki.Zeros(shape=(2,)))))
    assert exported(lambda w: w, w).call(w).tag == w.tag


class Unknown:
    """Not a value that a file can hold."""


def test_a_kind_of_metadata_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="unknown kind: 'from the future'"):
        serialization.decode({"from the future": [1]})


TAGS = {
    "object": Unknown(),
    "function": jnp.sin,
    "set": frozenset([1]),
    "within a tuple": (1, Unknown()),
}


@pytest.mark.parametrize("tag", TAGS.values(), ids=TAGS)
def test_other_static_metadata_is_an_error(tag):
    found = export.export(jax.jit(lambda w: w))(Tagged(X, tag))
    with pytest.raises(TypeError, match=r"Tagged\.tag: a file cannot hold"):
        found.serialize()


def test_a_symbolic_length_as_static_metadata_is_an_error():
    zeros = hki.Zeros(shape=export.symbolic_shape("b, 4"))
    found = export.export(jax.jit(lambda w, x: x))(zeros, X)
    with pytest.raises(TypeError, match=r"Zeros\.shape: .* cannot hold b"):
        found.serialize()


def test_a_class_may_be_defined_again():
    def define(factor):
        @dataclasses.dataclass
        class Again(hki.ImplicitArray):
            value: Any

            def materialize(self):
                return factor * self.value

        return Again

    for cls in (define(2.0), define(3.0)):
        w = cls(X)
        call = exported(hki.use_implicit_args(lambda w: (w, jnp.sin(w))), w)
        same, sine = call.call(w)
        assert type(same) is cls
        np.testing.assert_allclose(sine, np.sin(hki.materialize(w)), rtol=1e-5)


def test_a_file_of_a_class_that_has_changed_says_so(monkeypatch):
    data = export.export(jax.jit(lambda w: w))(Tagged(X, 3)).serialize()
    assert export.deserialize(data).call(Tagged(X, 3)).tag == 3
    with pytest.raises(
        ValueError, match="Tagged: the file has the fields .*'value'.* Make the file again"
    ):
        export.deserialize(data.replace(b'"tag"', b'"hat"'))
