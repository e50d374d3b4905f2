"""Every implicit type on a mesh with explicit axes, where shardings are a part of arrays' types.

What `jax.make_mesh` makes by default. The programs have two devices and a process of their own, as JAX
has one number of them for a process.
"""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.core.array import dense_struct
from tests.cases import Outer
from tests.devices import run_on_devices

HEAD = """
import sys
import jax, jax.numpy as jnp, numpy as np, haiku as hk, haiku_implicit as hki
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from haiku_implicit.core.sharding import shard_specs
from tests.cases import CASES, make_quantized

use = hki.use_implicit_args
mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Explicit,))
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
failures = []

def at(*spec, mesh=mesh):
    return NamedSharding(mesh, P(*spec))

def outcome(fun, *args):
    try:
        return fun(*args)
    except Exception as e:
        return e

def compare(label, got, want):
    "Dense results: the same numbers, sharded the same; an error where the dense twin raises one."
    if isinstance(want, Exception):
        if not isinstance(got, Exception):
            failures.append(f"{label}: {jax.typeof(got)}, expected {type(want).__name__}")
        return
    if isinstance(got, Exception):
        failures.append(f"{label}: {type(got).__name__}: {str(got)[:300]}")
        return
    for a, b in zip(jax.tree.leaves(hki.materialize(got)), jax.tree.leaves(want), strict=True):
        if not np.allclose(a, b, rtol=1e-4, atol=1e-5):
            failures.append(f"{label}: {a}, expected {b}")
        # A constant is not in a mesh.
        in_mesh = not (isinstance(got, hki.ImplicitArray) and not jax.tree.leaves(got))
        if in_mesh and jax.typeof(a).sharding.spec != jax.typeof(b).sharding.spec:
            failures.append(f"{label}: {jax.typeof(a)}, expected {jax.typeof(b)}")

"""

FUNCTIONS = """
def scan(w, x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c @ w), c), x, None, length=2)

def write(w, x):
    return jax.lax.dynamic_update_slice(x, w, (0, 0))

def loss(x, w):
    return jnp.sin(x @ w).sum()

ids = jnp.array([1, 0, 3, 3])
FEW = dict(
    product=lambda w, x: x @ w,
    other_way=lambda w, x: w @ x,
    by_x=lambda w, x: jax.grad(loss)(x, w),
    scan=scan,
    write=write,
)
MORE = dict(
    heads=lambda w, x: (x @ w).reshape(4, 2, 2),
    two_axes=lambda w, x: jnp.einsum("bsk,kn->bsn", jnp.stack([x, x], 1), w),
    transposed=lambda w, x: jax.nn.relu(x @ w.T) @ w,
    vmap=lambda w, x: jax.vmap(lambda row: jnp.sin(row @ w))(x),
    jitted=lambda w, x: jax.jit(lambda w, x: jnp.sin(x @ w))(w, x),
    checkpoint=lambda w, x: jax.grad(jax.checkpoint(loss))(x, w),
    elementwise=lambda w, x: jnp.exp(w * 2 + 1) * x,
    sharded=lambda w, x: jnp.einsum("bk,kn->bn", x, w, out_sharding=P("m")),
    resharded=lambda w, x: jax.sharding.reshard(w, P(None, "m")) * 2,
    rows=lambda w, x: w.at[ids].get(out_sharding=P("m")),
    random=lambda w, x: jax.random.gamma(jax.random.key(0), jnp.exp(w)),
)

cases = dict(CASES)
from tests.cases import Case
cases["int4 double"] = Case(
    lambda k, s: hki.QuantizedMatrix.quantize(jax.random.normal(k, s), "int4", 2, scale_dtype="double")
)
few = "lora of int4", "int4 double", "zeros"
quick = sys.argv[1] == "few"
functions = FEW if quick else FEW | MORE
on_dense = {label: jax.jit(fun) for label, fun in functions.items()}

for name in few if quick else cases:
    case = cases[name]
    if not jnp.issubdtype(case.dtype, jnp.inexact):
        continue
    made = case(1)
    dense = jnp.asarray(case.dense(made)).astype(case.dtype)
    with set_mesh(mesh):
        w, twin = jax.device_put((made, dense), at())
        for spec in (P("m"), P(None, "m"), P()):
            x = jax.device_put(np.cos(np.arange(16.0)).reshape(4, 4).astype(case.dtype), at(*spec))
            for label, fun in functions.items():
                if label == "random" and name != "lora of int4":  # slow to compile
                    continue
                if jax.tree.leaves(made):
                    want = outcome(on_dense[label], twin, x)
                else:  # its dense array is where JAX makes arrays
                    want = outcome(jax.jit(lambda x: fun(made.materialize(), x)), x)
                run = use(fun) if quick else jax.jit(use(fun))
                compare(f"{name} {spec} {label}", outcome(run, w, x), want)
        compare(f"{name} materialized", outcome(hki.materialize, w), twin)
"""

MODELS = """
def by_leaves(fun, tree):  # gradients of what is floating
    return jax.grad(fun, allow_int=True)(tree)

model = hk.transform(lambda x: hk.nets.MLP([32, 16])(x))
x = np.cos(np.arange(8 * 3 * 16.0)).reshape(8, 3, 16).astype(np.float32)
params = model.init(jax.random.key(0), x)
apply = hki.transform_implicit(model).apply
int4 = hki.quantize_params(params, dtype="int4", group_size=8)
rule = hki.quantization.QtRule(
    weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", tile_size=8
)
VARIANTS = dict(
    int8=hki.quantize_params(params),
    lora=hki.add_lora(int4, 0, rank=2),
    activations=hki.quantize_params(params, activation="int8"),
    trained=hki.quantized_training(params, [rule]),
    double=hki.quantize_params(params, dtype="nf4", group_size=8, scale_dtype="double"),
)

for name, variant in VARIANTS.items():
    loss = lambda p, x: jnp.sin(apply(p, None, x)).sum()
    alone = [apply(variant, None, x), jax.grad(loss, 1)(variant, x), by_leaves(lambda p: loss(p, x), variant)]
    with set_mesh(mesh):
        for spec in (P("m"), P(None, None, "m")):
            placed, x_at = jax.device_put(variant, at()), jax.device_put(x, at(*spec))
            twin = jax.device_put(hki.materialize(params), at())
            like = jax.typeof(model.apply(twin, None, x_at)).sharding.spec
            shardings = at(), None, at(*spec)
            runs = [
                (jax.jit(apply, in_shardings=shardings)(placed, None, x_at), alone[0], like),
                (apply(placed, None, x_at), alone[0], like),
                (jax.jit(jax.grad(loss, 1))(placed, x_at), alone[1], spec),
                (jax.jit(lambda p: by_leaves(lambda p: loss(p, x_at), p))(placed), alone[2], None),
            ]
            for i, (got, want, like) in enumerate(runs):
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                    if a.dtype == jax.dtypes.float0:
                        continue
                    scale = np.abs(b).max() + 1e-5  # codes may be rounded the other way
                    if np.abs(np.asarray(a) - b).max() > 2e-2 * scale:
                        failures.append(f"{name} {spec} run {i}: {a}, expected {b}")
                if like is not None and tuple(jax.typeof(got).sharding.spec)[: len(like)] != tuple(like):
                    failures.append(f"{name} {spec} run {i}: {jax.typeof(got)}, expected {like}")
"""

SHARDINGS_OF_JIT = """
auto = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
x, w = np.ones((4, 8), np.float32), np.arange(128, dtype=np.float32).reshape(8, 16)
a, b = np.ones((8, 2), np.float32), np.ones((2, 16), np.float32)
int8 = hki.QuantizedMatrix.quantize(jnp.asarray(w), "int8")
VARIANTS = dict(
    lora=hki.LoRA(jnp.asarray(w), jnp.asarray(a), jnp.asarray(b)),
    int8=int8,
    nested=hki.LoRA(int8, jnp.asarray(a), jnp.asarray(b)),
    uneven=hki.QuantizedMatrix.quantize(jnp.asarray(w[:4]), "int4", group_size=4),
    zeros=hki.Zeros(shape=(8, 16), dtype=jnp.float32),
)

def entries(spec):  # JAX may leave out those at the end
    last = max((i for i, entry in enumerate(spec) if entry is not None), default=-1)
    return tuple(spec)[: last + 1]

def leaf_specs(value):
    return [entries(leaf.sharding.spec) for leaf in jax.tree.leaves(value)]

def specs_of(value, spec, mesh):
    specs = shard_specs(value, P(*spec), mesh)
    return [entries(s) for s in jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))]

for mesh_of_jit in (mesh, auto):
    for name, value in VARIANTS.items():
        inputs = x[:, : value.shape[0]]
        for spec in ((), ("m",), (None, "m")):
            sharding = at(*spec, mesh=mesh_of_jit)

            def product(w, x):
                whole = at(mesh=mesh_of_jit)
                return jax.jit(lambda w, x: x @ w, in_shardings=(sharding, whole))(w, x)

            def returned(w):
                return jax.jit(lambda w: w, out_shardings=sharding)(w)

            label = f"{name} {spec} {mesh_of_jit.axis_types}"
            dense = np.asarray(hki.materialize(value))
            splits = shard_specs(value, P(*spec), mesh_of_jit) is not NotImplemented
            for run in (lambda f: f, jax.jit):
                got, want = run(use(product))(value, inputs), product(dense, inputs)
                got = hki.materialize(got)
                np.testing.assert_allclose(got, want, rtol=1e-5)
                if splits and name != "zeros" and leaf_specs(got) != leaf_specs(want):
                    failures.append(f"{label}: {got.sharding}, expected {want.sharding}")
                got = run(use(returned))(value)
                np.testing.assert_allclose(hki.materialize(got), dense, rtol=1e-5)
                if splits and type(got) is not type(value):
                    failures.append(f"{label}: {got}")
                if splits and leaf_specs(got) != specs_of(value, spec, mesh_of_jit):
                    failures.append(f"{label}: {leaf_specs(got)}")
"""

TABLES = """
ids = np.array([3, 1, 0, 15])
LOOKUPS = dict(
    rows=lambda w, i: w.at[i].get(out_sharding=P("m")),
    whole=lambda w, i: w.at[i].get(out_sharding=P()),
    clipped=lambda w, i: w.at[i].get(mode="clip", out_sharding=P(None, "m")),
    columns=lambda w, i: w.at[:, i].get(out_sharding=P(None, "m")),
    take=lambda w, i: jnp.take(w, i, axis=0),
)
table = jax.random.normal(jax.random.key(0), (16, 32))
a, b = np.ones((16, 2), np.float32), np.ones((2, 32), np.float32)
int4 = hki.QuantizedMatrix.quantize(table, "int4", group_size=8, axis=-1)
TABLES = dict(
    int8=hki.QuantizedMatrix.quantize(table, "int8"),
    int4=int4,
    lora=hki.LoRA(int4, jnp.asarray(a), jnp.asarray(b)),
)

def split(x, spec):
    specs = shard_specs(x, P(*spec), mesh) if isinstance(x, hki.ImplicitArray) else P(*spec)
    places = jax.tree.map(lambda s: at(*s), specs, is_leaf=lambda s: isinstance(s, P))
    return jax.tree.map(jax.device_put, x, places)

with set_mesh(mesh):
    for name, value in TABLES.items():
        for spec in ((), ("m",), (None, "m")):
            w, twin = split(value, spec), split(hki.materialize(value), spec)
            for of_ids in ((), ("m",)):
                i = split(ids, of_ids)
                for label, fun in LOOKUPS.items():
                    got, want = outcome(use(fun), w, i), outcome(fun, twin, i)
                    compare(f"{name} {spec} {of_ids} {label}", got, want)
"""


TWO_AXES = """
normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / 4
x, h, w = normal(0, 12, 48), normal(1, 12, 72), normal(2, 48, 72)
quantize = hki.QuantizedMatrix.quantize

def adapted(method):
    params = hki.add_adapter({"w": quantize(w, "int8")}, 0, method, targets="w", rank=2)
    trained, frozen = hki.partition(params)
    return hki.combine(jax.tree.map(lambda y: y + 0.1, trained), frozen)["w"]

def agree(label, fun, value, spec, x, of_x):
    placed = hki.place({"w": value}, spec, mesh)["w"]
    twin = jax.device_put(hki.materialize(value), at(*spec, mesh=mesh))
    x = jax.device_put(x, at(*of_x, mesh=mesh))
    by_x = lambda fun: jax.grad(lambda w, x: jnp.sin(fun(w, x)).sum(), 1)
    for name, of in dict(product=lambda fun: fun, by_x=by_x).items():
        got, want = outcome(jax.jit(use(of(fun))), placed, x), outcome(jax.jit(of(fun)), twin, x)
        if isinstance(want, Exception):  # older versions can't have all of it
            assert jax.__version_info__ < (0, 8), want
        else:
            compare(f"{label} {spec} {name}", got, want)
    return placed

# Within a shard_map over one explicit axis the other one cuts groups, for which there is no type.
def partial(w, x):
    local = lambda x, w: jax.lax.psum(x @ w, "a")
    specs = (P(None, "a"), P("a"))
    return jax.shard_map(local, in_specs=specs, out_specs=P(), axis_names={"a"})(x, w)

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
stored = dict(
    int4=quantize(w, "int4", 8),
    coarse=quantize(w, "nf4", 24),
    lora=hki.LoRA(quantize(w, "int4", 8), normal(3, 48, 2), normal(4, 2, 72)),
)
with set_mesh(mesh):
    for name, value in stored.items():
        for spec in (P("b"), P("b", "a"), P(("a", "b"))):
            agree(f"partial {name}", partial, value, spec, x, (None, "a"))

    # The weight's columns are contracted, which are split by the axis that the batch is.
    transposed = lambda w, h: jnp.dot(h, w.T, out_sharding=P("a"))
    for spec in (P(None, "a"), P("b", "a")):
        agree("transposed", transposed, adapted("dora"), spec, h, ("a",))

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
loss = lambda w: jnp.sin(x @ w).sum()
with set_mesh(mesh):
    for method in ("lora", "dora", "vera"):
        value = adapted(method)
        trained, frozen = hki.partition(value)
        on_one = jax.grad(lambda t: use(loss)(hki.combine(t, frozen)))(trained)
        for spec in (P("a"), P(None, "a")):
            placed = agree(f"mixed {method}", lambda w, x: x @ w, value, spec, x, ())
            trained, frozen = hki.partition(placed)
            grads = jax.jit(jax.grad(lambda t: use(loss)(hki.combine(t, frozen))))(trained)
            for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(on_one), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
"""


def run(program, *args, devices=2):
    """Runs a program on several devices, and returns its output."""
    in_context = f'with hki.materialization("allow"):\n{indented(program)}\n'
    code = HEAD + in_context + 'print("\\n".join(failures) or "done")'
    return run_on_devices(code, devices, *args)


def indented(program):
    return "\n".join("    " + line for line in program.splitlines())


ON_ONE_DEVICE = {
    "product": lambda w, x: x @ w,
    "of both": lambda w, x: w @ w,
    "sum": lambda w, x: x + w,
    "scan": lambda w, x: lax.scan(lambda c, _: (jnp.sin(c @ w), c), x, None, length=2),
    "carry": lambda w, x: lax.scan(lambda c, _: (jnp.sin(c), x @ c), w, None, length=2),
    "cond": lambda w, x: x + lax.cond(jnp.sum(x) > 0, lambda: w, lambda: jnp.sin(w)),
    "reshard": lambda w, x: x + jax.sharding.reshard(w, P("m", None)),
    "what no rule handles": lambda w, x: jnp.sin(w) + x,
}


@pytest.mark.every(2)
@pytest.mark.parametrize("fun", ON_ONE_DEVICE.values(), ids=ON_ONE_DEVICE)
def test_types_of_results_on_one_device(fun, may_be_dense):
    """On two, with all types, in the slow tests."""
    mesh = jax.make_mesh((1,), ("m",), axis_types=(AxisType.Explicit,))
    x = jnp.sin(jnp.arange(16.0).reshape(4, 4))
    lora = hki.LoRA(jnp.cos(x), x[:, :2], x[:2], alpha=3.0)
    for w in (lora, hki.QuantizedMatrix.quantize(x + 1, "int8"), Outer(x[0], x[1])):
        with (getattr(jax, "set_mesh", None) or jax.sharding.use_mesh)(mesh):
            placed, dense = jax.device_put((w, hki.materialize(w)), NamedSharding(mesh, P()))
            y = jax.device_put(x, NamedSharding(mesh, P("m")))
            got, want = hki.materialize(hki.use_implicit_args(fun)(placed, y)), fun(dense, y)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["few", "all"])
def test_replicated_weights_are_what_the_dense_twin_is(which):
    assert run(FUNCTIONS, which) == "done"


@pytest.mark.slow
def test_a_model_with_replicated_weights_and_sharded_inputs():
    assert run(MODELS) == "done"


@pytest.mark.slow
def test_in_and_out_shardings_of_an_inner_jit():
    assert run(SHARDINGS_OF_JIT) == "done"


@pytest.mark.slow
def test_rows_and_columns_of_tables_with_an_out_sharding():
    assert run(TABLES) == "done"


@pytest.mark.slow
def test_two_axes_of_which_one_may_be_automatic_or_a_shard_maps():
    assert run(TWO_AXES, devices=4) == "done"


def test_one_leaf_in_the_mesh_is_enough(may_be_dense):
    """The type of a result has the mesh, also if other leaves are not in it yet."""
    mesh = jax.make_mesh((1,), ("m",), axis_types=(AxisType.Explicit,))
    x = jnp.sin(jnp.arange(16.0).reshape(4, 4))
    place = NamedSharding(mesh, P("m"))
    w = hki.LoRA(jax.device_put(x, place), x[:, :2], x[:2])
    assert dense_struct(w).sharding.spec == P("m", None)
    assert dense_struct(hki.LoRA(x, x[:, :2], x[:2])).sharding is None


@dataclasses.dataclass
class Summed(hki.ImplicitArray):
    """A type that says nothing of meshes, and whose dense value jitted functions of JAX compute."""

    x: jax.Array

    def materialize(self):
        return jnp.clip(self.x, -0.5) + jnp.where(self.x > 0, self.x, 1.0)


AROUND = {"no mesh": None, "the same": 0}
# Without it implicit arrays can't be on another mesh than the one that is set.
if hasattr(jax.sharding, "use_abstract_mesh"):
    AROUND["another"] = 1


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_reshard_where_a_mesh_is_set_or_not(around, may_be_dense):
    """Dense arrays bring their own mesh, so that it need not be the one that is set."""
    set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
    explicit = dict(axis_types=(AxisType.Explicit,))
    meshes = [jax.make_mesh((1,), (name,), **explicit) for name in "mn"]
    x = jnp.sin(jnp.arange(16.0).reshape(4, 4))
    for w in (hki.QuantizedMatrix.quantize(x, "int4", 2), Outer(x[0], x[1]), Summed(x)):
        placed, dense = jax.device_put((w, hki.materialize(w)), NamedSharding(meshes[0], P()))
        for mesh, outer in itertools.product(meshes, (lambda f: f, jax.jit)):
            place = NamedSharding(mesh, P(mesh.axis_names[0]))
            reshard = lambda w, place=place: jax.sharding.reshard(w, place)  # noqa: E731
            with set_mesh(meshes[around]) if around is not None else contextlib.nullcontext():
                try:
                    want = outer(reshard)(dense)
                except ValueError:
                    assert jax.__version_info__ < (0, 8)  # which can't do that
                    continue
                got = outer(hki.use_implicit_args(reshard))(placed)
            got = hki.materialize(got)
            assert jax.typeof(got) == jax.typeof(want)
            np.testing.assert_array_equal(got, want)


ids = jnp.array([2, 0, 3])
UNDER_VMAP = {
    "product": lambda w, x: x @ w,
    "transposed": lambda w, x: x @ w.T,
    "first": lambda w, x: w @ x,
    "gradient": lambda w, x: jax.grad(lambda x: jnp.sin(x @ w).sum())(x),
    "gradients, summed": lambda w, x: jax.vjp(lambda x: x @ w + (x @ w.T) @ w, x)[1](x)[0],
    "rows": lambda w, x: x + w[ids[:1]],
    "columns": lambda w, x: x + jnp.take(w, ids[:1], axis=1),
    "box": lambda w, x: x @ hki.box(w),
    "a rule of its own": lambda w, x: scaled_gradient(w, x),
}


@jax.custom_vjp
def scaled_gradient(w, x):
    return x @ w


scaled_gradient.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, ct: (kept[0], ct @ kept[0].T))


@pytest.mark.every(9)
@pytest.mark.parametrize("fun", UNDER_VMAP.values(), ids=UNDER_VMAP)
def test_a_mapped_axis_that_is_split(fun, may_be_dense):
    """Also if only the weight is mapped, as in the gradient of a sum, whose cotangents are not."""
    mesh = jax.make_mesh((1,), ("m",), axis_types=(AxisType.Explicit,))
    stack = jnp.sin(jnp.arange(32.0).reshape(2, 4, 4))
    int4 = hki.QuantizedMatrix.quantize(stack, "int4", 2)
    lora = hki.LoRA(int4, stack[:, :, :2], stack[:, :2], alpha=3.0)
    place, other = NamedSharding(mesh, P("m")), NamedSharding(mesh, P())
    with (getattr(jax, "set_mesh", None) or jax.sharding.use_mesh)(mesh):
        for w in (int4, lora, hki.QuantizedMatrix.quantize(stack, "int8")):
            placed = jax.device_put(w, hki.shardings(w, P("m"), mesh))
            dense = jax.device_put(hki.materialize(w), place)
            for x, axis in ((jnp.cos(stack[0]), None), (jnp.cos(stack), 0)):
                y = jax.device_put(x, other if axis is None else place)
                for f in (fun, jax.grad(lambda w, x: fun(w, x).sum(), 1)):
                    got = jax.vmap(hki.use_implicit_args(f), (0, axis))(placed, y)
                    want = jax.vmap(f, (0, axis))(dense, y)
                    assert jax.typeof(got) == jax.typeof(want)
                    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
