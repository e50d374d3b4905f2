"""Primitives that place or move arrays, within wrapped functions: the leaves go where the dense array would.

Values are those of the dense twin. The programs have eight devices and a process of their own, as JAX
has one number of devices for a process.
"""

import pytest

from benchmarks import collectives_text
from tests import adapter_cases
from tests.devices import run_on_devices

HEAD = (
    f"from {collectives_text.__name__} import calls, sent\n"
    + """
import warnings
import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
from haiku_implicit import adapters
from haiku_implicit.core import compat
from haiku_implicit.core.sharding import shard_specs
from haiku_implicit.quantized.cpu import build
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

use, NATIVE = hki.use_implicit_args, build.available() and compat.PARTITIONING_RULES
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
Q = hki.QuantizedMatrix.quantize

def mesh_of(kind, *sizes, names=("d", "m")):
    return jax.make_mesh(sizes, names[-len(sizes):], axis_types=(kind,) * len(sizes))

auto, explicit = (mesh_of(kind, 8) for kind in (AxisType.Auto, AxisType.Explicit))

def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)

def lora_on(w, rank=2):
    *lead, n, m = w.shape
    a, b = normal(*lead, n, rank, seed=1) / 16, normal(*lead, rank, m, seed=2) / 16
    return hki.LoRA(w, a, b, alpha=3.0)

w = normal(64, 128)
MADE = {
    "int8": Q(w, "int8"),
    "int4": Q(w, "int4", 8),
    "straddling": Q(w, "int4", 32),
    "per channel": Q(w, "int4"),
    "columns": Q(w, "nf4", 32, -1, scale_dtype="double"),
    "tensor": Q(w, "int8", "tensor"),
    "lora": lora_on(Q(w, "int4", 32)),
    "dora": adapters.DoRA.create(Q(w, "int8"), jax.random.key(0), rank=2),
    "stack": Q(normal(8, 64, 128), "int8"),
    "view": hki.MatrixView.of(normal(64, 8, 16), [-3], [-2, -1], Q, dtype="int4", group_size=16),
    "zeros": hki.Zeros(shape=(64, 128)),
    "constant": hki.SymbolicConstant(2.0, shape=(64, 128)),
}
SPECS = P("m"), P(None, "m")

def close(got, want, label=""):
    want = np.asarray(want)
    np.testing.assert_allclose(
        hki.materialize(got), want, rtol=1e-4, atol=1e-5 * (1 + np.abs(want).max()), err_msg=label
    )

"""
)

PLACED = """
FUNS = dict(
    put=lambda x, place: jax.device_put(x, place),
    constrained=lax.with_sharding_constraint,
    unconstrained=lambda x, place: lax.with_sharding_constraint(
        x, NamedSharding(place.mesh, P(*place.spec, P.UNCONSTRAINED))
    ),
    given=lambda x, place: jax.jit(lambda x: x, in_shardings=place)(x),
    returned=lambda x, place: jax.jit(lambda x: x, out_shardings=place)(x),
)

def is_split(x):
    return any(entry is not None for y in jax.tree.leaves(x) for entry in y.sharding.spec)

with hki.materialization("error"):
    for name, x in MADE.items():
        dense = hki.materialize(x)
        for spec in SPECS:
            place = NamedSharding(auto, spec)
            for label, fun in FUNS.items():
                if label == "unconstrained" and len(spec) == x.ndim:
                    continue
                run = use(lambda x: fun(x, place))
                for _ in range(2 if label == "put" else 1):  # the second eager call runs a kept program
                    got = run(x)
                    assert type(got) is type(x), (name, spec, label, got)
                    assert jax.tree.structure(got) == jax.tree.structure(x)
                    assert is_split(got) or not jax.tree.leaves(x), (name, spec, label)
                    close(got, dense, f"{name} {spec} {label}")
            in_mesh = jax.device_put(x, NamedSharding(explicit, P()))
            with set_mesh(explicit):
                got = use(lambda x: jax.sharding.reshard(x, spec))(in_mesh)
            assert type(got) is type(x) and (is_split(got) or not jax.tree.leaves(x))
            close(got, dense, f"{name} {spec} resharded")
"""

MOVED = """
ring = [(i, (i + 1) % 8) for i in range(8)]
FUNS = dict(
    rows=lambda x: lax.all_gather(x, "m", axis=0, tiled=True),
    columns=lambda x: lax.all_gather(x, "m", axis=1, tiled=True),
    stacked=lambda x: lax.all_gather(x, "m"),
    within=lambda x: lax.all_gather(x, "m", axis=1),
    ring=lambda x: lax.ppermute(x, "m", ring),
    gap=lambda x: lax.ppermute(x, "m", ring[:-1]),
    scattered=lambda x: lax.psum_scatter(x, "m", scatter_dimension=1, tiled=True),
    summed=lambda x: lax.psum(x, "m"),
    shape=lambda x: x * x.shape[0] + x.shape[1],
    product=lambda x: jnp.einsum("i...,i->...", x, jnp.arange(1.0 * x.shape[0])),
)
MADE_DENSE = {"rows": {"view"}, "stacked": set(), "ring": set(), "product": {"constant"}}
wrong = []
few = "straddling", "lora", "zeros"
for check, names in ((True, MADE), (False, few)):
    for name in names:
        x = MADE[name]
        dense = hki.materialize(x)
        for spec in SPECS:
            funs = {k: f for k, f in FUNS.items() if not (k == "scattered" and x.ndim > 2)}
            def all_of(x):
                return [f(x) for f in funs.values()]
            mapped = jax.shard_map(all_of, mesh=auto, in_specs=spec, out_specs=P("m"), check_vma=check)
            want = jax.jit(mapped)(dense)
            # Made dense by what `shard_map` returns, which is not what is tested here.
            with hki.materialization_report() as report, hki.materialization("allow"):
                got = jax.jit(use(mapped))(x)
            made_dense = {e.primitive for e, _ in report}
            for label, a, b in zip(funs, got, want, strict=True):
                close(a, b, f"{name} {spec} {label} {check}")
            if spec == P("m") and check:
                for label, given_up in MADE_DENSE.items():
                    mapped = jax.shard_map(FUNS[label], mesh=auto, in_specs=spec, out_specs=P("m"))
                    with hki.materialization_report() as report, hki.materialization("allow"):
                        jax.eval_shape(use(mapped), x)
                    own = {e.primitive for e, _ in report} - {"shard_map"}
                    if bool(own) != (name in given_up):
                        wrong.append((label, name, own))
assert not wrong, wrong
"""

FITTED = """
x, y = normal(16, 256, seed=3), normal(16, 64, seed=4)
FORMATS = dict(
    int8=("int8", 128), int4=("int4", 128), uint3=("uint3", 64), nf4=("nf4", 128),
    tiles=("int8", (32, 128)), double=("int4", 64, -2, False, None, "double"), q5_1=("q5_1",),
    per_channel=("uint4",), columns=("int4", 64, -1), mxfp4=("mxfp4",),
)
AXES = {"columns": P(None, "m")}
wide = normal(256, 64, seed=5)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for name, options in FORMATS.items():
        q = Q(wide, *options)
        for tree in ({"w": q}, {"w": lora_on(q)}) if name in ("int4", "tiles") else ({"w": q},):
            dense = hki.materialize(tree["w"])
            spec = AXES.get(name, P("m"))
            placed = hki.place(tree, spec, auto)
            assert jax.tree.structure(placed) == jax.tree.structure(tree) or "double" in (name, *options)
            inner = placed["w"] if isinstance(placed["w"], hki.QuantizedMatrix) else placed["w"].w
            np.testing.assert_array_equal(hki.materialize(inner), hki.materialize(q))
            assert shard_specs(inner, spec, auto) is not NotImplemented
            assert inner.codes.addressable_shards[0].data.size * 8 == inner.codes.size
            if isinstance(tree["w"], hki.LoRA):
                continue
            f = use(lambda p, x: x @ p["w"])
            own = jax.device_put(x, NamedSharding(auto, P(None, "m") if spec == P("m") else P()))
            compiled = jax.jit(f).lower(placed, own).compile()
            close(compiled(placed, own), x @ dense, name)
            # As they are: codes are split, and scales where they can be.
            split = jax.device_put(tree, hki.shardings(tree, spec, auto))
            codes = split["w"].codes
            assert codes.addressable_shards[0].data.size * 8 == codes.size
            both = jax.jit(jax.value_and_grad(lambda x: use(lambda p, x: jnp.sin(x @ p["w"]).sum())(split, x)))
            want = jax.jit(jax.value_and_grad(lambda x: jnp.sin(x @ dense).sum()))(x)
            for a, b in zip(both(own), want, strict=True):
                close(a, b, name)
            close(jax.jit(use(lambda p, y: y @ p["w"].T))(split, y), y @ dense.T, name)
            # In shard_map the groups are made to fit.
            of_x = P(None, "m") if spec == P("m") else P()
            mapped = jax.shard_map(
                lambda w, x: lax.psum(x @ w, "m") if spec == P("m") else x @ w,
                mesh=auto, in_specs=(spec, of_x), out_specs=P() if spec == P("m") else spec,
            )
            with hki.materialization("error"):
                close(jax.jit(use(mapped))(q, x), x @ dense, name)
said = [str(s.message) for s in said]
assert any("would fit" in s or "fit" in s for s in said), said
assert "hki" not in "".join(said) and all("place" in s for s in said), said

# Eight shards of three of int4 rows: what can't be cut is whole, and one warning says so.
odd = {"a": {"w": Q(normal(30, 64), "int8")}, "b": {"w": normal(12, 8)}, "c": {"w": normal(16)}}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    placed = hki.place(odd, P("m"), auto)
(message,) = said
assert "a/w: " in str(message.message) and "b/w: " in str(message.message), message
assert placed["b"]["w"].sharding.is_fully_replicated and placed["c"]["w"].sharding.spec == P("m")
for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(odd), strict=True):
    np.testing.assert_array_equal(a, b)

# Where activations are rounded by groups, smaller ones would be other numbers.
rounded = Q(wide, "int8", 128, activation="int8,groups")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    placed = hki.place({"w": rounded}, P("m"), auto)["w"]
assert placed.group_size == 128
f = jax.jit(use(lambda w, x: x @ w))
close(f(placed, x), f(rounded, x))
"""

MESHES = """
small, big = normal(256, 512) / 16, normal(512, 256, seed=1) / 16
bias = hki.Zeros(shape=(512,))
MAKE = dict(
    int8=lambda w: Q(w, "int8"), int4=lambda w: Q(w, "int4", 32), lora=lambda w: lora_on(Q(w, "int4", 32))
)
x = normal(64, 256, seed=2)

def mlp(p, x):
    return jnp.tanh(x @ p["a"] + p["bias"]) @ p["b"]

def loss(p, x):
    return use(lambda p, x: jnp.sin(mlp(p, x)).sum())(p, x)

def ran(mesh, tree, rules, of_x):
    with set_mesh(mesh):
        placed = jax.device_put(tree, hki.shardings(tree, rules, mesh))
        own = jax.device_put(x, NamedSharding(mesh, of_x))
        runs = [jax.jit(f).lower(placed, own).compile() for f in (use(mlp), jax.grad(loss, 1))]
        return [f(placed, own) for f in runs], [calls(f.as_text()) for f in runs]

for name, make in MAKE.items():
    tree = {"a": make(small), "b": make(big), "bias": bias}
    want = jax.jit(use(mlp))(tree, x), jax.jit(jax.grad(loss, 1))(tree, x)
    for rules, of_x in (
        ([(".*", P())], P("m")),
        ([("a", P("m")), (".*", P())], P()),
        ([("a", P(None, "m")), ("b", P("m")), (".*", P())], P()),
    ):
        found = []
        for mesh in (auto, explicit):
            try:
                with set_mesh(mesh):
                    twin = jax.device_put(
                        hki.materialize(tree), hki.shardings(hki.materialize(tree), rules, mesh)
                    )
                    jax.jit(mlp)(twin, jax.device_put(x, NamedSharding(mesh, of_x)))
            except Exception:  # the dense model does not run on explicit axes
                assert mesh is explicit
                continue
            values, native = ran(mesh, tree, rules, of_x)
            for a, b in zip(values, want, strict=True):
                close(a, b, f"{name} {rules} {mesh.axis_types}")
            found.append(native)
        assert all(n == found[0] for n in found) and bool(found[0][0]) == NATIVE, found

# A shard_map over some of the axes: values and gradients, kernels, and no more bytes than dense weights.
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = mesh_of(kind, 2, 4)
    for name, q in {"zeros": hki.Zeros(shape=(256, 512)), **{k: f(small) for k, f in MAKE.items()}}.items():
        for manual, of_w, of_x, out, at, x_at in (
            ("m", P(None, "m"), P(), P(None, "m"), P(None, "m"), P("d")),
            ("m", P("m"), P(None, "m"), P(), P("m"), P("d", "m")),
            ("d", P(), P("d"), P("d"), P(None, "m"), P("d")),
        ):
            def body(w, x):
                return lax.psum(x @ w, "m") if of_w == P("m") else x @ w
            f = jax.shard_map(body, mesh=mesh, in_specs=(of_w, of_x), out_specs=out, axis_names={manual})
            def loss(f, w, x):
                return hki.materialize(use(lambda w, x: jnp.sin(f(w, x)).sum())(w, x))
            def run(q):
                own = jax.device_put({"w": q}, hki.shardings({"w": q}, at, mesh))["w"]
                own_x = jax.device_put(x, NamedSharding(mesh, x_at))
                step = jax.jit(jax.value_and_grad(lambda w, x: loss(f, w, x), 1)).lower(own, own_x)
                compiled = step.compile()
                return compiled(own, own_x), calls(compiled.as_text()), sent(compiled.as_text())
            with set_mesh(mesh):
                got, native, bytes_sent = run(q)
                if NATIVE and name in MAKE:
                    of_rank = 2 * x.shape[0] * 4 if name == "lora" else 0  # activations of that width
                    most = run(hki.materialize(q))[2] + of_rank
                    assert native == 2 and bytes_sent <= most, (kind, name, manual, native, bytes_sent, most)
            want = jax.jit(jax.value_and_grad(lambda x: loss(lambda w, x: x @ w, q, x)))(x)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3, err_msg=f"{kind} {name} {manual}")

def whole(w, x):
    def columns(w, x):
        return jax.shard_map(
            lambda w, x: x @ w, in_specs=(P(None, "m"), P()), out_specs=P(None, "m"), axis_names={"m"}
        )(w, x)
    return jax.shard_map(columns, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), axis_names={"d"})(w, x)

mesh = mesh_of(AxisType.Auto, 2, 4)
q = MAKE["int4"](small)
with set_mesh(mesh):
    compiled = jax.jit(use(whole)).lower(q, x).compile()
    close(compiled(q, x), x @ hki.materialize(q))
assert calls(compiled.as_text()) == NATIVE, calls(compiled.as_text())
"""


# Ragged products and convolutions within a shard_map over one of two axes: as many native calls as on one
# device, and no more bytes than dense weights or codes.
PARTLY = """
sizes = jnp.array([80, 0, 200, 40, 72, 64, 30, 20])
PRODUCTS = dict(
    ragged=(lambda w, x: lax.ragged_dot(x, w, sizes), normal(8, 64, 64) / 8, normal(512, 64, seed=1)),
    convolution=(
        lambda w, x: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ), normal(3, 64, 64) / 8, normal(8, 16, 64, seed=1),
    ),
)
mesh, columns = mesh_of(AxisType.Auto, 2, 4), P(None, None, "m")

def step(product, q, x):
    def loss(w, x):
        return hki.materialize(use(lambda w, x: jnp.sin(product(w, x)).sum())(w, x))
    return jax.jit(jax.value_and_grad(loss, 1)).lower(q, x).compile()

def run(product, q, at, x, x_at):
    with set_mesh(mesh):
        own = jax.device_put({"w": q}, hki.shardings({"w": q}, at, mesh))["w"]
        own_x = jax.device_put(x, NamedSharding(mesh, x_at))
        compiled = step(product, own, own_x)
        return compiled(own, own_x), calls(compiled.as_text()), sent(compiled.as_text())

for name, (product, w, x) in PRODUCTS.items():
    last = P(*[None] * (x.ndim - 1), "m")
    across = P(*[None] * (x.ndim - 1), "d")
    rows = P("d") if name == "convolution" else P()
    weights = dict(int8=Q(w, "int8"), int4=Q(w, "int4", 8), lora=lora_on(Q(w, "int4", 8)))
    for manual, of_w, of_x, out, at, x_at in (
        ("m", columns, P(), last, columns, rows),
        ("d", P(), rows, rows, columns, rows),
        ("d", P(None, None, "d"), P(), across, P(None, "m", "d"), P()),
    ):
        for check in (True, False):
            if not check and out == P():
                continue  # JAX can't tell then that a result is the same on all devices
            f = jax.shard_map(
                product, mesh=mesh, in_specs=(of_w, of_x), out_specs=out, axis_names={manual}, check_vma=check
            )
            _, _, most = run(f, w, at, x, x_at)
            for kind, q in weights.items():
                label = f"{name} {kind} {manual} {of_w} {check}"
                got, native, bytes_sent = run(f, q, at, x, x_at)
                alone = step(product, q, x)
                for a, b in zip(got, alone(q, x), strict=True):
                    close(a, b, label)
                assert native == calls(alone.as_text()), (label, native)
                assert bytes_sent <= most or not NATIVE, (label, bytes_sent, most)

# Over one of three axes: the rule sees arrays that are split by the other two, in either order.
mesh, w, x = mesh_of(AxisType.Auto, 2, 2, 2, names=("d", "m", "e")), normal(64, 128) / 8, normal(32, 64)
weights = dict(int8=Q(w, "int8"), int4=Q(w, "int4", 8))
for manual in "dme":
    a, b = (axis for axis in "dme" if axis != manual)
    f = jax.shard_map(
        lambda w, x: x @ w, mesh=mesh, in_specs=(P(None, manual), P()), out_specs=P(None, manual),
        axis_names={manual},
    )
    places = (
        (P(a, (manual, b)), P(b)), (P((a, b), manual), P()), (P((b, a), manual), P(a)),
        (P(b, (manual, a)), P(None, (a, b))), (P(None, (manual, b, a)), P((b, a))),
        (P((b, a), manual), P(None, (b, a))),
    )
    for at, x_at in places:
        for kind, q in weights.items():
            got, native, _ = run(f, q, at, x, x_at)
            assert native == 2 * NATIVE, (manual, at, x_at, kind, native)
            for y, z in zip(got, step(lambda w, x: x @ w, q, x)(q, x), strict=True):
                close(y, z, f"{manual} {at} {x_at} {kind}")

# Within one over another axis, with what only a backward pass needs made inside.
for axis in "de":
    local = lambda x, w: lax.psum(jnp.sin(x) @ w, "m")
    g = jax.shard_map(local, in_specs=(P(None, "m"), P("m")), out_specs=P(), axis_names={"m"})
    f = jax.shard_map(
        lambda w, x: g(x, w), mesh=mesh, in_specs=(P(None, axis), P()), out_specs=P(None, axis),
        axis_names={axis},
    )
    for kind, q in weights.items():
        got, _, _ = run(f, q, P("m", axis), x, P())
        for y, z in zip(got, step(lambda w, x: jnp.sin(x) @ w, q, x)(q, x), strict=True):
            close(y, z, f"nested {axis} {kind}")
"""


ADAPTERS = """
OPTIONS = dict(
    loha=dict(rank=2), ia3={}, vera=dict(rank=4), oft=dict(block_size=8), boft=dict(block_size=8),
)
SPLIT = dict(loha="a1 a2 b1 b2", ia3="factor", vera="e", oft="upper", boft="scale")
mesh = mesh_of(AxisType.Auto, 2, 4)
params = hki.quantize_params({"l": {"w": normal(64, 128)}}, dtype="int4", group_size=16)
x = normal(8, 64, seed=1)
def loss(p, x):
    return use(lambda p, x: jnp.sin(x @ p["l"]["w"]).sum())(p, x)
for name, options in OPTIONS.items():
    tree = hki.add_adapter(params, 0, name, **options)
    moved = jax.tree.map(lambda y: y + 0.01 if jnp.issubdtype(y.dtype, jnp.floating) else y, tree)
    placed = jax.device_put(moved, hki.shardings(moved, P("d", "m"), mesh))
    for field in SPLIT[name].split():
        (y,) = jax.tree.leaves(getattr(placed["l"]["w"], field))
        assert not y.sharding.is_fully_replicated, (name, field)
    run = jax.jit(hki.value_and_grad(loss))
    got, want = run(placed, x), run(moved, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * (1 + float(jnp.abs(b).max())), err_msg=name)
"""

# Values and gradients of each adapter on a quantized weight, split in two ways.
ALL_ADAPTERS = (
    f"from {adapter_cases.__name__} import CASES, M, N"
    + """
mesh = mesh_of(AxisType.Auto, 2, 4)
x = normal(8, N, seed=1)
def loss(p, x):
    return use(lambda p, x: jnp.sin(x @ p["w"]).sum())(p, x)
step = jax.jit(hki.value_and_grad(loss))
for name, case in CASES.items():
    tree = {"w": case((), Q(normal(N, M), "int8", 3))}
    want = step(tree, x)
    for spec, of_x in ((P("d", "m"), P()), (P("m"), P("d"))):
        if name == "fourierft" and spec != P("m"):
            continue  # XLA's FFT on a CPU refuses the layout that XLA gives its operand there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what can't be split so is whole
            placed = hki.place(tree, spec, mesh)
        got = step(placed, jax.device_put(x, NamedSharding(mesh, of_x)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(
                a, b, rtol=1e-3, atol=1e-4 * (1 + float(jnp.abs(b).max())), err_msg=f"{name} {spec}"
            )
"""
)


def run(program):
    return run_on_devices(HEAD + program + '\nprint("done")', 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [PLACED, MOVED, FITTED, MESHES, PARTLY, ADAPTERS, ALL_ADAPTERS],
    ids="placed moved fitted meshes partly adapters all_adapters".split(),
)
def test_on_devices(program):
    assert run(program) == "done"
