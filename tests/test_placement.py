"""Where implicit parameters lie on a mesh. A test of several devices runs another program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.core import compat
from haiku_implicit.core.sharding import fitted, shard_specs
from tests.cases import Outer
from tests.devices import run_on_devices
from tests.random_arrays import normal

MESH = compat.auto_mesh((2, 4), ("data", "model"))
AXES = {"att/w": ([-3], [-2, -1])}
BASE = {
    "linear": {"w": jnp.ones((64, 32)), "b": jnp.zeros(32)},
    "att": {"w": jnp.ones((64, 4, 8))},
}
RULES = [("linear/w", P("data", "model")), ("att/w", P(None, "model")), (".*", P())]


def quantized(**options):
    return hki.quantize_params(BASE, matrix_axes=AXES, **options)


def specs_of(params, specs, mesh=MESH):
    found = hki.shardings(params, specs, mesh)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.spec)
        for path, x in jax.tree_util.tree_leaves_with_path(found)
    }


def test_codes_and_scales_are_split_in_their_order_of_storage():
    found = specs_of(quantized(dtype="int4", group_size=16), RULES)
    assert found["linear/w/codes"] == found["linear/w/scale"] == ("model", "data")
    # The columns [heads, width] of the view are split by heads.
    assert found["att/w/matrix/codes"] == ("model", None)
    assert found["linear/b"] == ()


def test_adapters_are_split_along_the_axes_that_they_have():
    params = hki.add_lora(quantized(dtype="int8"), 0, rank=2)
    found = specs_of(params, RULES)
    assert found["linear/w/a"] == ("data", None) and found["linear/w/b"] == (None, "model")
    assert found["linear/w/w/codes"] == ("model", "data")
    # A scale per channel belongs to all parts of the channel.
    assert found["linear/w/w/scale"] == ("model", None)
    dora = specs_of(hki.add_adapter(quantized(dtype="int8"), 0, "dora", rank=2), RULES)
    assert dora["linear/w/w/codes"] == ("model", "data") and dora["linear/w/a"] == ("data", None)
    assert dora["linear/w/magnitude"] == ("model",)


def test_weights_in_quantization_aware_training_are_split_as_dense_ones():
    rules = [hki.quantization.QuantRule(weight_qtype="int8", module_path="linear")]
    aware = hki.quantization_aware({"linear": BASE["linear"]}, rules)
    assert specs_of(aware, RULES)["linear/w/value"] == ("data", "model")


def test_of_structs_and_of_optimizer_states():
    params = quantized(dtype="int4", group_size=16)
    structs = jax.eval_shape(lambda: params)
    assert specs_of(structs, RULES) == specs_of(params, RULES)
    state = {"mu": params, "count": jnp.zeros((), jnp.int32)}
    rules = [(f".*{pattern}", spec) for pattern, spec in RULES]
    assert specs_of(state, rules)["mu/linear/w/codes"] == ("model", "data")


def test_parts_of_loras_are_split_as_the_whole_is():
    """As in an optimizer's state; other parts of adapters, and of views, are replicated."""
    params = hki.add_lora(quantized(dtype="int8"), 0, rank=2)
    trained, _ = hki.partition(params, trainable_dense=False)
    whole, of_part = specs_of(params, RULES), specs_of(trained, RULES)
    assert of_part["linear/w/a"] == whole["linear/w/a"] == ("data", None)
    assert of_part["linear/w/b"] == whole["linear/w/b"] == (None, "model")
    assert of_part["att/w/matrix/b"] == ()
    state = jax.eval_shape(optax.adam(1e-3).init, trained)
    of_state = specs_of(state, [(f".*/{pattern}", spec) for pattern, spec in RULES])
    assert of_state["0/count"] == () and of_state["0/nu/linear/w/b"] == (None, "model")
    # 64 rows and 32 columns: what can't be cut is replicated, as the weight itself can't be.
    assert specs_of(trained["linear"], P(None, ("data", "model")), MESH)["w/b"] == (
        None,
        ("data", "model"),
    )
    odd = {"l": {"w": hki.LoRA(jnp.ones((6, 4)), jnp.ones((6, 2)), jnp.ones((2, 4)))}}
    assert specs_of(hki.partition(odd)[0], P("model"))["l/w/a"] == (None, None)
    dora = hki.add_adapter(quantized(dtype="int8"), 0, "dora", rank=2)
    trained, _ = hki.partition(dora, trainable_dense=False)
    assert specs_of(trained, RULES)["linear/w/a"] == ()


@pytest.mark.parametrize("lead", [(), (4,)], ids=["matrix", "stack"])
def test_quantized_states_of_loras_are_replicated(lead):
    """Their blocks are not along the axes of the factors, which have other specs."""
    params = {"w": hki.QuantizedMatrix.quantize(jnp.ones((*lead, 4096, 96)), "int8")}
    trained, _ = hki.partition(hki.add_lora(params, 0, targets="w", rank=2))
    state = jax.eval_shape(hki.quantized_state(optax.adam(1e-3)).init, trained)
    spec = P(*[None] * len(lead), "data", "model")
    found = specs_of(state, [(".*count", P()), (".*", spec)])
    assert found["inner/0/mu/w/a/codes"] == found["inner/0/mu/w/a/scale"] == ()
    assert found["inner/0/mu/w/b"] == (*[None] * len(lead), None, "model")


def test_numbers_and_texts_lie_nowhere():
    """A checkpoint's tree has them: its places are made of `open_checkpoint(path).structs`."""
    tree = {"step": 3, "name": "tuned", "params": {"linear/w": BASE["linear"]["w"]}}
    found = hki.shardings(tree, [("params/linear/w", P("data")), (".*", P())], MESH)
    assert found["step"] is found["name"] is None
    assert found["params"]["linear/w"] == NamedSharding(MESH, P("data"))


def test_a_tree_of_specs_and_a_prefix_of_one():
    params = quantized(dtype="int8")
    whole = {"linear": {"w": P("data", "model"), "b": None}, "att": {"w": P(None, "model")}}
    assert specs_of(params, whole) == specs_of(params, RULES)
    prefix = specs_of(params, {"linear": P("data"), "att": None})
    assert prefix["linear/w/codes"] == (None, "data") and prefix["linear/b"] == ("data",)


@pytest.mark.parametrize(
    ("options", "specs", "message"),
    [
        ({}, [("x", P())], r"att/w: no pattern matches this whole path, of 'x'. A last pair \('\.\*', PartitionSpec"),
        ({}, {"linear": P()}, "specs: expected a PartitionSpec, a tree like params or a prefix of it, or"),
        ({}, [("(", P())], r"specs: expected pairs of a regular expression and a PartitionSpec, .* \['\('\]"),
        ({}, P("rows"), r"att/w: .*the mesh has {'data': 2, 'model': 4}, no \['rows'\]"),
        ({}, {"linear": P(None, "model"), "att": None}, r"linear/b: float32\[32\]: .* is for 2 axes, the array has 1"),
        ({}, {"linear": None, "att": P(None, ("data", "model"))}, "att/w: .*axis 1, of length 4, can't be cut into 8"),
        ({}, {"linear": None, "att": P(None, None, "model")}, "att/w: MatrixView .*can't be split so"),
    ],
)  # fmt: skip
def test_errors_name_the_parameter_and_the_way_out(options, specs, message):
    with pytest.raises(ValueError, match=message):
        hki.shardings(quantized(dtype="int4", **options), specs, MESH)


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ([("att/w", NamedSharding(MESH, P())), (".*", P())], TypeError, "att/w: .*Give its spec"),
        ([("att/w", "model"), (".*", P())], TypeError, "att/w: specs: expected .*, got 'model'"),
        ({"linear": NamedSharding(MESH, P()), "att": None}, TypeError, "linear/b: .*Give its spec"),
        (P("model", "model"), ValueError, "att/w: .* splits one axis of an array, not two"),
        ({"linear": P()}, ValueError, "or a list of pairs .* (key path|key mismatch).*att"),
    ],
)
def test_wrong_specs(specs, error, message):
    with pytest.raises(error, match=message):
        hki.shardings(quantized(dtype="int4"), specs, MESH)


def test_none_in_a_pair_is_replicated():
    found = specs_of(quantized(dtype="int8"), [("atte/w", P("model")), (".*", None)])
    assert set(found.values()) <= {(), (None,), (None, None)}


def test_groups_that_shards_would_cut_are_named_once():
    params = quantized(dtype="int4", group_size=32)
    params["other"] = {"w": params["linear"]["w"]}
    rules = [("(linear|other)/w", P(("data", "model"))), (".*", P())]
    with pytest.warns(
        UserWarning, match=r"linear/w: .*cuts groups of 32.*groups of 8 fit; other/w"
    ) as said:
        found = specs_of(params, rules)
    assert len(said) == 1 and "haiku_implicit.place" in str(said[0].message)
    assert found["linear/w/codes"] == (None, ("data", "model"))
    assert found["linear/w/scale"] == (None, None)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "options",
    [("int4", 32), ("uint3", 32), ("int8", (8, 64)), ("nf4", 64, -2, False, None, "double")],
)
def test_smaller_groups_have_the_same_values(options):
    q = hki.QuantizedMatrix.quantize(normal((64, 32)), *options)
    for spec in (P("model"), P(None, "model"), P("model", "data"), P(("data", "model"))):
        new = fitted(q, spec, MESH)
        assert shard_specs(new, spec, MESH) is not NotImplemented
        assert new.dtype == q.dtype and new.codes.nbytes == q.codes.nbytes
        np.testing.assert_array_equal(new.materialize(), q.materialize())
    assert fitted(q, P(), MESH) is q


def test_what_a_type_within_a_weight_cannot_split_is_on_all_devices():
    weight = hki.LoRA(Outer(jnp.ones(4), jnp.ones(8)), jnp.ones((4, 2)), jnp.ones((2, 8)))
    assert specs_of({"m": {"w": weight}}, [(".*", P("data", "model"))]) == {
        "m/w/w/u": (),
        "m/w/w/v": (),
        "m/w/a": ("data", None),
        "m/w/b": (None, "model"),
    }


def test_parts_of_views_and_constants_have_their_own_shapes():
    view = quantized(dtype="int8")["att"]["w"]
    part = shard_specs(view, P("data", "model"), MESH)
    assert part.axes == (((32, 1, 0),), (), ((8, 1, 1),))
    zeros = hki.Zeros(shape=(4, 8))
    assert shard_specs(zeros, P(None, "model"), MESH).shape == (4, 2)
    assert shard_specs(zeros, P("model"), MESH).shape == (1, 8)
    assert shard_specs(zeros, P(("data", "model")), MESH) is NotImplemented


@dataclasses.dataclass
class Declared(hki.ImplicitArray, core_ndim=2):
    """A multiple of an outer product, which says which axes its fields have."""

    field_axes = {"u": "n", "v": "m"}
    u: jax.Array
    v: jax.Array
    factor: jax.Array

    def materialize(self):
        return self.factor[..., None, None] * self.u[..., :, None] * self.v[..., None, :]


@dataclasses.dataclass
class Normed(Declared, core_ndim=2):
    separable = False


@dataclasses.dataclass
class Forgetful(Declared, core_ndim=2):
    field_axes = {"u": "n"}


def test_a_declaration_of_axes_splits_a_type():
    w = Declared(jnp.ones((2, 4)), jnp.ones((2, 8)), jnp.ones(2))
    part = shard_specs(w, P("data", None, "model"), MESH)
    assert (part.u, part.v, part.factor) == (P("data", None), P("data", "model"), P("data"))
    assert specs_of({"w": w}, P("data", "model")) == {
        "w/u": ("data", "model"),
        "w/v": ("data", None),
        "w/factor": ("data",),
    }
    assert shard_specs(w, P(None, ("data", "model")), MESH) is NotImplemented  # 4 rows, 8 parts
    assert fitted(w, P(None, ("data", "model")), MESH) is w


def test_a_type_whose_parts_need_more_is_only_placed():
    w = Normed(jnp.ones((2, 4)), jnp.ones((2, 8)), jnp.ones(2))
    assert shard_specs(w, P(None, None, "model"), MESH) is NotImplemented
    found = specs_of({"w": w}, P("data", "model"))
    assert found == {"w/u": ("data", "model"), "w/v": ("data", None), "w/factor": (None,)}


def test_a_declaration_that_lacks_an_axis_gives_no_parts():
    w = Forgetful(jnp.ones(4), jnp.ones(8), jnp.ones(()))
    assert shard_specs(w, P(None, "model"), MESH) is NotImplemented
    assert shard_specs(w, P("model"), MESH).u == P("model")


@pytest.mark.parametrize("mesh", [None, 4, ("data",), P()])
def test_what_is_no_mesh(mesh):
    with pytest.raises(TypeError, match=r"mesh: expected a jax.sharding.Mesh, as .* got "):
        hki.shardings(quantized(), P(), mesh)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["all_gather", "ppermute", "psum"])
def test_collectives_over_an_axis_of_vmap(name):
    options = dict(perm=[(0, 1), (1, 0)]) if name == "ppermute" else {}

    def fun(x):
        return getattr(jax.lax, name)(x, "i", **options)

    w = hki.QuantizedMatrix.quantize(normal((2, 8, 4)), "int8")
    want = jax.vmap(fun, axis_name="i")(w.materialize())
    within, around = hki.use_implicit_args(jax.vmap(fun, axis_name="i")), hki.use_implicit_args(fun)
    with hki.materialization("allow"):
        for run in (within, jax.vmap(around, axis_name="i")):
            np.testing.assert_allclose(hki.materialize(run(w)), want, rtol=1e-6)
        assert not hki.materialize(within(hki.Zeros(shape=(2, 8, 4)))).any()


PROGRAM = """
import tempfile
import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki, orbax.checkpoint as ocp
from jax.sharding import AxisType, PartitionSpec as P
from tests.test_placement import RULES, quantized

def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

params = quantized(dtype="int4", group_size=16)
params["linear"]["w"] = params["linear"]["w"].requantize(jax.random.normal(jax.random.key(0), (64, 32)))
lora = hki.add_lora(params, 0, rank=2)
dora = hki.add_adapter(params, 0, "dora", rank=2)

@hki.use_implicit_args
def model(params, x):
    y = jnp.tanh(x @ params["linear"]["w"] + params["linear"]["b"])
    return y, jnp.einsum("bi,iho->bho", x, params["att"]["w"])

def loss(params, x):
    return sum(jnp.square(y).sum() for y in model(params, x))

x = jax.random.normal(jax.random.key(3), (8, 64))
step = hki.value_and_grad(loss)
for tree in (params, lora, dora):
    want, of_one = jax.jit(step)(tree, x)
    for sizes in ((2, 4), (4, 2)):
        places = hki.shardings(tree, RULES, mesh_of(*sizes))
        placed = jax.device_put(tree, places)
        for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(places)):
            assert a.sharding.is_equivalent_to(b, a.ndim)
        got, grads = jax.jit(step, in_shardings=(places, None))(placed, x)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(of_one)):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))
        same = jax.jit(lambda t: t, out_shardings=places)(tree)
        assert jax.tree.leaves(same)[0].sharding == jax.tree.leaves(places)[0]

# Saved from one mesh, restored onto another.
placed = jax.device_put(lora, hki.shardings(lora, RULES, mesh_of(2, 4)))
other = hki.shardings(lora, RULES, mesh_of(4, 2))
structs = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), lora, other)
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
    saver.save(folder + "/c", placed)
    saver.wait_until_finished()
    again = saver.restore(folder + "/c", structs)
for a, b, s in zip(*map(jax.tree.leaves, (again, lora, other))):
    np.testing.assert_array_equal(a, b)
    assert a.sharding.is_equivalent_to(s, a.ndim)
print("done")
"""


@pytest.mark.slow
def test_on_devices():
    """Values and gradients are those of one device, and a checkpoint goes from mesh to mesh."""
    assert run_on_devices(PROGRAM, 8) == "done"
