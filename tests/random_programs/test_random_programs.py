"""Random models, parameters and transformations against dense twins; and what long runs of them found.

`python -m tests.random_programs` is the long run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import haiku_implicit as hki
from tests.devices import run_on_devices
from tests.random_programs import agree, models
from tests.random_programs.wrong import Wrong
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")
CHUNK = 20


@pytest.mark.parametrize("first", few(range(0, 1000, CHUNK)))
def test_a_thousand_programs(first):
    compared = sum(agree.check(agree.draw(seed)) for seed in range(first, first + CHUNK))
    assert compared > CHUNK / 2  # a few can't be run with dense arrays either


def test_some_programs():
    assert sum(agree.check(agree.draw(seed)) for seed in range(1000, 1004)) == 4


@pytest.mark.slow
def test_programs_on_four_devices():
    program = """
import haiku_implicit as hki
from tests.random_programs import agree
with hki.materialization("allow"):
    print(sum(agree.check(agree.draw(seed)) for seed in range(2000, 2040)))
"""
    printed = run_on_devices(program, 4)
    assert printed.isdecimal(), printed
    assert int(printed) > 20


def test_a_wrong_number_is_found():
    case = agree.draw(1000)
    broken = case._replace(
        program=("bilinear", {}, []),
        params={"net_bilinear": {"w": Wrong(jnp.ones((models.WIDTH, models.WIDTH)))}},
        state={},
        chain=["grad_by_x", "jit"],
    )
    with pytest.raises(agree.Disagreement, match=r"off by .*\n.*bilinear"):
        agree.check(broken)


# --- found by long runs ------------------------------------------------------------------------------------


def test_numbers_of_the_program_in_a_shard_map_that_is_not_compiled():
    """An operation on two literals could not be folded there, and was an error."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), PartitionSpec()

    def body(w, x):
        return w * x + jnp.subtract(1, np.float32(0.9))

    fun = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0])
    w, x = hki.SymbolicConstant(2.0, shape=(3,)), jnp.arange(3.0)
    for run in (lambda f: f, jax.jit):
        np.testing.assert_allclose(
            hki.materialize(run(hki.use_implicit_args(fun))(w, x)), 2 * x + 0.1, rtol=1e-6
        )


def test_dora_of_a_constant():
    """The lengths of its columns were taken for a dense array."""
    w = hki.SymbolicConstant(0.5, shape=(4, 3))
    params = hki.add_adapter({"linear": {"w": w}}, 0, "dora", rank=2, targets=".*")
    np.testing.assert_allclose(
        hki.materialize(params["linear"]["w"]), np.full((4, 3), 0.5), rtol=1e-6
    )


@pytest.mark.slow
def test_matrices_side_by_side_with_groups_of_different_sizes(may_be_dense):
    """Their scales have no common shape."""
    values = np.random.default_rng(0)
    a, b = (jnp.asarray(values.normal(size=(6, n)), jnp.float32) for n in (2, 4))
    for groups in ((3, 1), (2, 6)):
        pair = [
            hki.QuantizedMatrix.quantize(w, "uint8", group_size=g)
            for w, g in zip((a, b), groups, strict=True)
        ]
        got = hki.use_implicit_args(lambda a, b: jnp.concatenate([a, b], axis=1))(*pair)
        want = jnp.concatenate([hki.materialize(w) for w in pair], axis=1)
        np.testing.assert_array_equal(hki.materialize(got), want)


@pytest.mark.slow
def test_an_axis_that_is_split_by_a_part_of_a_mesh_axis():
    """XLA splits the six columns by two of four devices, of which JAX makes no partition spec."""
    program = """
import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
from jax.sharding import AxisType, NamedSharding, PartitionSpec
values = np.random.default_rng(0)
x, w, v = (jnp.asarray(values.normal(size=n), jnp.float32) for n in ((4, 18), (18, 6), 36))
q = hki.QuantizedMatrix.quantize(w, "int8")
fun = lambda x, q, v: jnp.tanh(x @ q) @ v.reshape(6, 6)
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
split = jax.device_put(v, NamedSharding(mesh, PartitionSpec("d")))
got = jax.jit(hki.use_implicit_args(fun))(x, q, split)
np.testing.assert_allclose(got, fun(x, hki.materialize(q), v), rtol=1e-5, atol=1e-5)
print("equal")
"""
    assert run_on_devices(program, 4) == "equal"
