"""Quantized weights in a mesh with explicit axes: results are right, and sharded as dense ones are.

A program of its own with several devices, as JAX has one number of them for a process.
"""

import pytest

from tests.devices import run_on_devices

HEAD = """
import sys
import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from haiku_implicit.core.sharding import shard_specs

mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)
OPTIONS = {"int8": dict(dtype="int8"), "uint4": dict(dtype="uint4", group_size=64, axis=-1)}
options = OPTIONS[sys.argv[1]]

def sharded(x, spec):
    specs = shard_specs(x, spec, mesh) if isinstance(x, hki.ImplicitArray) else spec
    at = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
    return jax.tree.map(jax.device_put, x, at)

def weights(shape, spec):  # of more than one block, so that parts of the codes are cut out
    q = hki.QuantizedMatrix.quantize(jax.random.normal(jax.random.key(0), shape), **options)
    return sharded(q, spec), sharded(hki.materialize(q), spec)

def xs(*shape, spec):
    return sharded(jax.random.normal(jax.random.key(1), shape), spec)

def check(fun, pair, *args):
    q, w = pair
    close(jax.jit(hki.use_implicit_args(fun))(q, *args), jax.jit(fun)(w, *args))

def close(got, want):
    got, want = jax.tree.leaves(hki.materialize(got)), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        # Sums of 512 terms of float32 in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-4)
        assert a.sharding.spec == b.sharding.spec, (a.sharding, b.sharding)

def raises(fun, *args):
    try:
        fun(*args)
    except Exception as e:
        return str(e).split("\\n")[0]
    raise AssertionError("no error")

def product(w, x):
    return jnp.sin(x @ w)

"""

PRODUCTS = """
for spec, x_spec in (
    (P(), P("i")), (P(None, "j"), P()), (P("i"), P()), (P(), P(None, "i")), (P("i"), P("i")),
    (P(None, "j"), P("i")), (P("i", "j"), P()),
):
    check(product, weights((512, 256), spec), xs(4, 512, spec=x_spec))

rows, columns = weights((512, 256), P("i")), weights((512, 256), P(None, "j"))
x = xs(4, 512, spec=P("i"))
close(hki.use_implicit_args(lambda w, x: x @ w)(columns[0], x), x @ columns[1])  # eager
by_columns = xs(4, 512, spec=P(None, "i"))
check(lambda w, x: jnp.einsum("bk,kn->bn", x, w, out_sharding=P("j")), rows, by_columns)
check(lambda w, x: jnp.einsum("kn,bk->nb", w, x, out_sharding=P("j", "i")), columns, x)

# What is an error with a dense weight is the same one.
for pair, x in ((rows, by_columns), (weights((512, 256), P(None, "i")), x)):
    errors = [raises(jax.jit(hki.use_implicit_args(product)), w, x) for w in pair]
    assert errors[0] == errors[1], errors
"""

TRANSFORMED = """
columns = weights((512, 256), P(None, "j"))
batch = xs(4, 2, 512, spec=P("i"))

def by_x(w, x):
    return jax.grad(lambda x: product(w, x).sum())(x)

check(by_x, columns, batch)
got, want = (jax.jit(jax.grad(lambda x, w: hki.use_implicit_args(product)(w, x).sum()))(batch, w)
             for w in columns)
close(got, want)

def by_scale(q, x, prepared=lambda q: q):
    def loss(scale):
        return hki.use_implicit_args(product)(prepared(q._replace(scale=scale)), x).sum()
    return jax.grad(loss)(q.scale)

alone = jax.tree.map(np.asarray, columns[0])
got = jax.jit(by_scale)(columns[0], batch)
want = by_scale(alone, np.asarray(batch), hki.materialize)
np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
assert got.sharding.spec == columns[0].scale.sharding.spec

check(jax.vmap(product, (None, 0)), columns, batch)
outside = jax.jit(jax.vmap(hki.use_implicit_args(product), (None, 0)))(columns[0], batch)
close(outside, jax.jit(jax.vmap(product, (None, 0)))(columns[1], batch))
scan = lambda w, x: jax.lax.scan(lambda c, y: (c + 1, product(w, y)), 0, x)[1]
check(scan, columns, xs(2, 4, 512, spec=P(None, "i")))
check(lambda w: jnp.sin(w), columns)

stack = weights((4, 192, 256), P("i", None, "j"))
check(product, stack, xs(4, 3, 192, spec=P("i")))
looped = lambda w, x: jax.lax.scan(lambda x, w: (jnp.sin(x @ w / 16), 0), x, w)[0]
check(looped, weights((3, 256, 256), P()), xs(4, 256, spec=P("i")))
lora = hki.LoRA(columns[0], jnp.ones((512, 2)), jnp.ones((2, 256)))
check(product, (lora, columns[1] + 2), xs(4, 512, spec=P("i")))
"""


# (A process each, so that not each script has each dtype.)
@pytest.mark.slow
@pytest.mark.parametrize("script, dtype", [(PRODUCTS, "int8"), (TRANSFORMED, "uint4")])
def test_as_dense_in_an_explicit_mesh(script, dtype):
    body = "\n".join("    " + line for line in script.splitlines())
    in_mesh = 'set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh\n'
    program = (
        f'{HEAD}{in_mesh}with hki.materialization("allow"), set_mesh(mesh):\n{body}\nprint("done")'
    )
    assert run_on_devices(program, 4, dtype) == "done"
