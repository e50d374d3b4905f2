"""Meshes by the names of axes. What needs several devices is a program of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit import layers
from tests.devices import run_on_devices


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (P(), []),
        (P("dp", None, "tp"), ["dp", "tp"]),
        (P(("dp", "fsdp"), "sp", "tp", None), ["dp", "fsdp", "sp", "tp"]),
        ({"w": P("tp"), "b": P(None, "tp"), "x": {"y": P("dp")}}, ["tp", "dp"]),
        ([P("sp"), None, "tp", (P("dp"), "tp")], ["sp", "tp", "dp"]),
        (P(P.UNCONSTRAINED, "dp"), ["dp"]),
        (None, []),
    ],
)
def test_get_names_from_partition_spec(specs, names):
    assert layers.get_names_from_partition_spec(specs) == names


def test_off_the_mesh_nothing_is_constrained():
    x = {"w": jnp.ones((4, 4)), "q": hki.QuantizedMatrix.quantize(jnp.ones((4, 4)), "int8")}
    assert not layers.names_in_mesh("dp") and layers.names_in_mesh()
    got = layers.with_sharding_constraint(x, P("dp", "tp"))
    assert got["w"] is x["w"] and got["q"] is x["q"]
    jaxpr = jax.make_jaxpr(lambda x: layers.with_sharding_constraint(x, P("dp")))(x)
    assert not jaxpr.jaxpr.eqns


def test_create_mesh_errors():
    count = jax.device_count()
    for dims in (
        (1, 1, 1, count + 1),
        (1, -1, 1, count + 1),
        (-1, -1, 1, 1),
        (0, 1, 1, -1),
        (1, -2, 1, 1),
    ):
        with pytest.raises(ValueError, match=rf"axis_dims: .*number of devices, {count}, got"):
            layers.create_mesh(dims)
    with pytest.raises(ValueError, match="axis_dims: expected a length for each of the axes"):
        layers.create_mesh((1, -1))
    with pytest.raises(RuntimeError):
        layers.create_mesh(backend="abacus")


class Shape:
    """What `get_ranks_and_size` reads of a mesh."""

    def __init__(self, **shape):
        self.shape = shape


# Processes, devices of each, tp, sp, this process: (mp_node_size, dp_node_size, dp and mp rank).
RUNS = [
    ((4, 8, 1, 1, 3), (1, 4, 3, 0)),
    ((4, 8, 8, 1, 2), (1, 4, 2, 0)),
    ((4, 8, 8, 2, 3), (2, 2, 1, 1)),
    ((4, 8, 16, 2, 2), (4, 1, 0, 2)),
]


@pytest.mark.parametrize(("run", "want"), RUNS)
def test_get_ranks_and_size(run, want, monkeypatch):
    processes, local, tp, sp, index = run
    at(monkeypatch, processes, local, index)
    mesh = Shape(dp=1, fsdp=1, tp=tp, sp=sp)
    keys = ("mp_node_size", "dp_node_size", "dp_node_rank", "mp_node_rank")
    assert layers.get_ranks_and_size(mesh) == dict(zip(keys, want, strict=True), mesh=mesh)
    if sp == 1:
        assert layers.get_ranks_and_size(Shape(tp=tp))["dp_node_rank"] == want[2]


@pytest.mark.parametrize("run", [(4, 8, 12), (3, 8, 16), (1, 8, 16)])
def test_ranks_that_are_none(run, monkeypatch):
    processes, local, tp = run
    at(monkeypatch, processes, local, 0)
    with pytest.raises(ValueError, match=f"mesh: a model on {tp} devices .* {processes} processes"):
        layers.get_ranks_and_size(Shape(tp=tp, sp=1))


def at(monkeypatch, processes, local, index):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "local_device_count", lambda: local)
    monkeypatch.setattr(jax, "process_index", lambda: index)


PROGRAM = """
import warnings
import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
from jax.sharding import AxisType, PartitionSpec as P
from haiku_implicit import layers

warnings.simplefilter("ignore", DeprecationWarning)  # of `with mesh:`
use = hki.use_implicit_args
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
x = jax.random.normal(jax.random.key(0), (8, 2, 4, 16))
q = hki.QuantizedCache.quantize(x, "int8", axis=-1)

mesh = layers.create_mesh()
assert dict(mesh.shape) == dict(dp=1, fsdp=8, tp=1, sp=1), mesh
mesh = layers.create_mesh((2, -1, 2, 1), backend="cpu")
assert dict(mesh.shape) == dict(dp=2, fsdp=2, tp=2, sp=1), mesh
assert set(mesh.axis_types) == {AxisType.Auto}
assert layers.get_ranks_and_size(mesh)["dp_node_size"] == 1
spec, elsewhere = P(("dp", "fsdp"), "tp"), P("dp", "experts")

def constrained(x, spec=spec):
    return layers.with_sharding_constraint(x * 1.0, spec)

def split(x):
    return x.sharding.shard_shape(x.shape)

for context in (set_mesh, lambda mesh: mesh):  # the new way and the old
    with context(mesh):
        found = []
        jax.jit(lambda x: found.append(layers.names_in_mesh("dp", "tp")))(x)
        assert found == [True] and layers.names_in_mesh("dp", "tp", "sp")
        assert not layers.names_in_mesh("dp", "experts") and layers.names_in_mesh()
        assert split(jax.jit(constrained)(x)) == (2, 1, 4, 16)
        assert split(layers.with_sharding_constraint(x, spec)) == (2, 1, 4, 16)
        # Where an axis is not of the mesh nothing happens, and nothing without a spec.
        assert layers.with_sharding_constraint(x, elsewhere) is x
        assert layers.with_sharding_constraint(x, P()) is x
        tree = layers.with_sharding_constraint({"a": [x, x], "b": x}, {"a": spec, "b": None})
        assert split(tree["a"][1]) == (2, 1, 4, 16) and tree["b"] is x
        # The leaves of a quantized cache, within a model and outside.
        for got in (
            layers.with_sharding_constraint(q, spec),
            jax.jit(use(lambda q: layers.with_sharding_constraint(-q, spec)))(q),
        ):
            assert split(got.codes) == (2, 1, 4, 16) and split(got.scale) == (2, 1, 4, 1)
        np.testing.assert_array_equal(hki.materialize(got), -hki.materialize(q))
        try:
            layers.with_sharding_constraint(jnp.ones(8), spec)
            raise AssertionError("no error")
        except ValueError as e:
            assert "rank" in str(e), e

# In `shard_map` the mesh's axes are not those of a part.
with set_mesh(mesh):
    part = jax.shard_map(constrained, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(part)(x), x)

explicit = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"), axis_types=(AxisType.Explicit,) * 3)
with set_mesh(explicit):
    for got in (jax.jit(constrained)(x), layers.with_sharding_constraint(x, spec)):
        assert split(got) == (2, 1, 4, 16)
        np.testing.assert_array_equal(got, x)
"""


@pytest.mark.slow
def test_on_several_devices():
    assert run_on_devices(PROGRAM + 'print("done")', 8) == "done"


def test_numbers_are_those_of_one_device():
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(layers.with_sharding_constraint(x, P("dp")), x)
