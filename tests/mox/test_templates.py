"""Equations of files have the parameters that JAX's own have: not one less, and not one more."""

import jax
import jax.numpy as jnp
import pytest

from haiku_implicit.mox.format import equations
from tests.primitive_ops import TABLES, UNEXPORTED, primitive_named

# Those that `primitive_ops.EXCEPTIONS` has, as functions of a key.
OTHERS = {
    "iota": lambda key: jax.lax.iota(jnp.int32, 3),
    "random_bits": lambda key: jax.random.bits(key, (2,)),
    "random_clone": jax.random.clone,
    "random_fold_in": lambda key: jax.random.fold_in(key, 1),
    "random_split": jax.random.split,
    "random_unwrap": jax.random.key_data,
    "random_wrap": lambda key: jax.random.wrap_key_data(jax.random.key_data(key)),
    "rng_bit_generator": lambda key: jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (2,)),
    "rng_uniform": lambda key: jax.lax.rng_uniform(0.0, 1.0, (2,)),
    "lu_pivots_to_permutation": lambda key: jax.lax.linalg.lu_pivots_to_permutation(
        jnp.zeros(2, jnp.int32), 2
    ),
    "platform_index": lambda key: jax.lax.platform_dependent(1.0, cpu=jnp.sin, default=jnp.cos),
}

# They may be there or not.
OPTIONAL = {
    "cond": {"branches_platforms"},
    "scan": {"linear", "_split_transpose"},
}


def equations_of(table, dtype):
    """An equation of each primitive that functions of a table bind, and that a file can have."""
    w = jax.ShapeDtypeStruct((4, 4), dtype)
    programs = [
        jax.make_jaxpr(fun)(w, w)
        for name, functions in table.items()
        for fun in functions[:1]
        if primitive_named(name) is not None or name in UNEXPORTED
    ]
    return savable(programs)


def savable(programs):
    found = {}
    for program in programs:
        for eqn in equations.equations_of(program):
            if equations.primitives().get(eqn.primitive.name) is eqn.primitive:
                found.setdefault(eqn.primitive.name, eqn)
    return found


def bind(eqn, params):
    """Reads an equation of a file with these parameters."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def fun(*operands):
        return equations.from_file(eqn.primitive.name, params, operands, len(eqn.outvars))

    return jax.eval_shape(fun, *structs)


def check(eqns):
    passed = []
    for name, eqn in eqns.items():
        params = dict(equations.to_file(eqn.primitive, eqn.params, eqn.invars))
        bind(eqn, params)
        changed = {cut: {k: x for k, x in params.items() if k != cut} for cut in params}
        for parameter, new in (changed | {"made_up": params | {"made_up": 3}}).items():
            if parameter in OPTIONAL.get(name, ()):
                continue
            try:
                bind(eqn, new)
                passed.append((name, parameter))
            except (ValueError, TypeError):
                pass
    assert not passed


@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", TABLES, ids=lambda x: x.__name__)
def test_an_equation_has_the_parameters_of_its_primitive(dtype):
    check(equations_of(TABLES[dtype], dtype))


def test_equations_of_keys_and_of_no_arrays():
    key = jax.eval_shape(lambda: jax.random.key(0))
    eqns = savable(jax.make_jaxpr(fun)(key) for fun in OTHERS.values())
    assert not OTHERS.keys() - eqns
    check(eqns)


def test_errors_name_the_parameters():
    eqn = savable([jax.make_jaxpr(jnp.tanh)(1.0)])["tanh"]
    with pytest.raises(ValueError, match="tanh has to have the parameter 'accuracy'"):
        bind(eqn, {})
    with pytest.raises(ValueError, match="tanh does not have the parameters 'a', 'b'"):
        bind(eqn, {"accuracy": None, "a": 1, "b": 2})


def in_mesh():
    axis_types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((1,), ("i",), axis_types=axis_types)
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)


@pytest.mark.parametrize("setting", [jax.disable_jit, in_mesh], ids=lambda x: x.__name__)
def test_what_is_set_around_does_not_matter(setting):
    eqns = savable([jax.make_jaxpr(lambda x: jnp.tanh(jax.jit(jnp.sin)(x)))(1.0)])
    equations.new_equations.cache_clear()
    with setting():
        check({name: eqns[name] for name in ("jit", "tanh")})
    mesh = equations.template("jit")["ctx_mesh"]
    assert mesh is None or mesh.empty
