"""Module expressions in files: what comes back is the same program, and nothing else ever comes back."""

import collections
import copy
import functools
import json
import os
import random
import re
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haiku._src.integration import descriptors
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas

import haiku_implicit as hki
from haiku_implicit.mox import eval_mox, load, make_mox, save, to_transformed
from haiku_implicit.mox.format import values
from haiku_implicit.mox.program.program import pruned
from haiku_implicit.quantized.products.matmul import quantized_matmul
from tests.haiku_models import MODELS, RNG, X
from tests.tiers import few

CUSTOM = {}


def custom(fun):
    """Lists a model with functions that have derivatives of their own."""
    CUSTOM[fun.__name__] = fun
    return fun


@jax.custom_jvp
def leaky(x, n):
    """Has an integer argument and result, and a rule that is not the derivative, and calls itself."""
    return jnp.where(x > 0, x, 0.1 * x), n + 1


@leaky.defjvp
def leaky_jvp(primals, tangents):
    slope = jnp.where(primals[0] > 0, 3.0, leaky(*primals)[0])
    return leaky(*primals), (tangents[0] * slope, np.zeros((), jax.dtypes.float0))


@jax.custom_vjp
def product(x, y):
    return x * y


def product_forward(x, y):
    return product(x, y), (x, y)


def product_backward(residuals, cotangent):
    x, y = residuals
    return cotangent * y * 2, (cotangent * x).sum()


product.defvjp(product_forward, product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped(x, limit):
    return x


clipped.defvjp(
    lambda x, limit: (x, None),
    lambda limit, _, cotangent: (jnp.clip(cotangent, -limit, limit),),
)


@custom
def own_jvp(x):
    return leaky(hk.Linear(3)(x), 2)[0]


@custom
def own_vjp(x):
    return product(hk.Linear(3)(x), x.sum()) + jax.nn.logsumexp(x)


@custom
def limits(x):
    """The same program with two rules: the limit is not in it."""
    return clipped(clipped(hk.Linear(3)(x) * 9, 0.1) * 5, 0.7)


@custom
def in_scan(x):
    step = lambda c, row: (jax.nn.relu(c + row), product(c, row.sum()))  # noqa: E731
    return jax.lax.scan(step, x[0], x)


@custom
def in_vmap(x):
    return jax.vmap(lambda row: jax.nn.relu(row) + product(row, row.sum()))(x)


@custom
def in_remat(x):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda x: jax.nn.relu(jnp.sin(x) @ x.T), policy=policy)(x)


@custom
def activations(x):
    x = hk.Linear(3)(x)
    names = "relu silu gelu relu6 softplus elu celu selu log_sigmoid softmax log_softmax".split()
    return [getattr(jax.nn, name)(x) for name in names] + [jax.nn.logsumexp(x), jnp.sinc(x)]


def many_primitives(x):
    key, square = hk.next_rng_key(), x[:4, :4] + jnp.eye(4)
    return [
        (jnp.sort(x), jnp.argsort(x), jax.lax.top_k(x, 2), jnp.cumsum(x), jnp.quantile(x, 0.3)),
        (
            jnp.linalg.solve(square, x[:4]),
            tuple(jnp.linalg.svd(x)),
            tuple(jnp.linalg.qr(x)),
            jnp.linalg.inv(square),
        ),
        {
            "fft": jnp.fft.fft(x),
            "conv": jax.lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"),
        },
        jax.lax.reduce(x, 1.0, lambda a, b: a * b + a, (0,)),
        jax.lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, (2, 2), (1, 1), "SAME"),
        (
            jax.random.normal(key, (3,)),
            jax.random.split(jax.random.key(3)),
            jax.random.gamma(key, 2.0),
        ),
        (x.at[0].set(3.0), jnp.take(x, jnp.array([0, 1]), 0), x.astype("bfloat16") * 2, 1j * x),
        (jnp.nan + x, jnp.inf * x, -0.0 * x, jnp.float32(np.nextafter(np.float32(0.1), 1)) * x),
        jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        (
            jnp.array([1, -2], "int4"),
            # (XLA does not compile constants in 8 bits without its fusion emitters.)
            jnp.asarray(np.arange(8.0).astype(jnp.bfloat16)),
            jax.random.key(5),
        ),
    ]


def old_random_bits(x):
    with jax.threefry_partitionable(False):
        return x + jax.random.uniform(hk.next_rng_key(), x.shape)


def attention(x):
    attended = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(x, x, x)
    return attended + hk.dropout(hk.next_rng_key(), 0.3, hk.Linear(8)(x))


def named_result(x):
    core = hk.LSTM(3)
    return hk.dynamic_unroll(core, x[:, None], core.initial_state(1))


def inner_derivatives(x):
    loss = lambda x: jax.nn.relu(hk.Linear(3)(x)).sum()  # noqa: E731
    return hk.grad(loss)(x), jax.hessian(lambda y: jax.nn.softplus(y).sum())(x[0])


ALL = {f.__name__: f for f in (many_primitives, old_random_bits, attention, named_result)}
ALL |= {"inner_derivatives": inner_derivatives} | CUSTOM | MODELS


def reloaded(mox, folder, **options):
    save(folder / "mox.json", mox)
    return load(folder / "mox.json", **options)


def program_of(mox, arguments):
    """The text of a program. JAX shows the names of functions with rules, which are not kept."""
    text = str(jax.make_jaxpr(functools.partial(eval_mox, mox))(*arguments))
    return re.sub(r"(jvp|bwd|fwd|computation)=(<function.*>|\S+)", "", text)


def hlo_of(mox, arguments):
    return jax.jit(functools.partial(eval_mox, mox)).lower(*arguments).as_text()


def made(fun, *args, transform=hk.transform_with_state):
    """A model's expression, and arguments for it."""
    model = transform(fun)
    first = model.init(RNG, *args)
    first = first if isinstance(model, hk.TransformedWithState) else (first,)
    return make_mox(model)(*args), (*first, RNG, *args)


def assert_same(x, y):
    """Results are equal to the bit."""
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", few(ALL, "mlp", "own_vjp", "cond", "while_loop", "scan", "vmap"))
def test_the_program_is_the_same(name, tmp_path):
    mox, arguments = made(ALL[name], X)
    new = reloaded(mox, tmp_path)
    assert program_of(new, arguments) == program_of(mox, arguments)
    assert hlo_of(new, arguments) == hlo_of(mox, arguments)
    assert new.xml() == mox.xml()
    assert list(map(repr, new.query("//*", constructors=True))) == list(
        map(repr, mox.query("//*", constructors=True))
    )


@pytest.mark.parametrize("name", few(ALL, "mlp", "named_result"))
def test_results_and_parameters_have_the_same_bits(name, tmp_path):
    mox, arguments = made(ALL[name], X)
    new = reloaded(mox, tmp_path)
    results = [jax.jit(functools.partial(eval_mox, x))(*arguments) for x in (mox, new)]
    assert_same(*results)
    assert_same(to_transformed(new).init(RNG, X), to_transformed(mox).init(RNG, X))


def loss(mox, rest, params, x):
    out = eval_mox(mox, params, *rest, x)
    floats = [y for y in jax.tree.leaves(out) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum(jnp.sin(y).sum() for y in floats)


def second(fun):
    """The derivative of a function of the derivatives."""
    first = jax.grad(fun, (0, 1))
    return jax.grad(
        lambda *args: sum(jnp.sin(y).sum() for y in jax.tree.leaves(first(*args))), (0, 1)
    )


DERIVATIVES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "second": second,
    "vmapped": lambda f: jax.vmap(jax.grad(f, (0, 1)), (None, 0)),
    "jvp": lambda f: lambda params, x: jax.jvp(f, (params, x), (params, x)),
    "hessian": lambda f: jax.hessian(f, 1),
}
# JAX has no forward mode for functions with a rule for reverse mode.
ONLY_REVERSE = {"own_vjp", "limits", "in_scan", "in_vmap"}
CASES = [
    (name, way)
    for name in [*CUSTOM, "inner_derivatives", "layer_stack"]
    for way in DERIVATIVES
    if not (name in ONLY_REVERSE and way in ("jvp", "hessian"))
]


@pytest.mark.parametrize("name, way", few(CASES, ("own_jvp", "second"), ("limits", "grad")))
def test_derivatives_have_the_same_bits(name, way, tmp_path):
    mox, (params, *rest, x) = made(ALL[name], X)
    new = reloaded(mox, tmp_path)
    x = jnp.stack([x, x + 1]) if way == "vmapped" else x
    ways = [DERIVATIVES[way](functools.partial(loss, y, rest)) for y in (mox, new)]
    assert_same(*(jax.jit(fun)(params, x) for fun in ways))


@pytest.mark.parametrize("name", few(ALL, "mlp"))
def test_a_loaded_expression_can_be_saved_again(name, tmp_path):
    mox, arguments = made(ALL[name], X)
    new = reloaded(reloaded(mox, tmp_path), tmp_path)
    assert program_of(new, arguments) == program_of(mox, arguments)
    assert new.xml() == mox.xml()


def test_what_is_changed_can_be_saved(tmp_path):
    mox, _ = made(lambda x: hk.nets.MLP([8, 3])(x), X, transform=hk.transform)
    changed = mox.sub('//custom_jvp_call[@name="relu"]', lambda x: jnp.tanh(hk.Linear(8)(x)))
    new = reloaded(changed, tmp_path)
    params = to_transformed(changed).init(RNG, X)
    assert_same(eval_mox(new, params, RNG, X), eval_mox(changed, params, RNG, X))
    assert_same(to_transformed(new).init(RNG, X), params)
    assert new.xml() == changed.xml()
    once_more = new.sub('//module_call[@name="linear_1"]', hk.Linear)
    with pytest.raises(ValueError, match="initializer|not in the file"):
        mlp = lambda x: hk.Linear(3, w_init=hk.initializers.RandomNormal())(x)  # noqa: E731
        shown = reloaded(made(mlp, X)[0], tmp_path)
        shown.sub("**", hk.Linear)
    assert once_more.query("count(//dot_general)") == 3


# --- parts of models -----------------------------------------------------------------------------------


PARTS = {
    "extract": lambda mox, node: mox.extract(node),
    "a layer": lambda mox, node: mox.extract(node, layer=0),
    "truncate": lambda mox, node: mox.truncate(node),
    "wrap": lambda mox, node: mox.wrap(node, lambda original, *args, **kw: original(*args, **kw)),
    "taps": lambda mox, node: mox.taps(node),
}
# Of each model, the first calls: the outermost module, and some in it.
MOST_CALLS = 4


def parts_of(mox, way):
    """Parts of an expression that can be had this way."""
    for node in mox.select(hk.Module)[:MOST_CALLS]:
        try:
            yield PARTS[way](mox, node)
        except ValueError as e:  # each says why
            assert repr(node) in str(e) or "no value can be tapped in the body of" in str(e)


def arguments_of(part, variables):
    """Arguments for a part: the model's variables, and ones."""
    face = part.interface
    ones = [
        RNG if v in face.rng.atoms else jnp.full(v.aval.shape, 0.5).astype(v.aval.dtype)
        for v in face.invars
    ]
    args, kwargs = face.arguments(ones)
    given = dict(zip(("params", "state"), variables, strict=True), rng=RNG)
    return [given[name] for name in face.leading] + args[len(face.leading) :], kwargs


def check_parts(name, way, folder):
    mox, (params, state, *_) = made(ALL[name], X)
    count = 0
    for part in parts_of(mox, way):
        new = reloaded(part, folder)
        args, kwargs = arguments_of(part, (params, state))
        assert_same(new.apply(*args, **kwargs), part.apply(*args, **kwargs))
        of_params = [lambda p, y=y: scalar(y.apply(p, *args[1:], **kwargs)) for y in (part, new)]  # noqa: B023
        if name not in NO_GRADIENT:
            assert_same(*(jax.grad(fun)(args[0]) for fun in reversed(of_params)))
        assert new.xml() == part.xml()
        count += 1
    return count


def scalar(out):
    floats = [y for y in jax.tree.leaves(out) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((jnp.sin(y).sum() for y in floats), 0.0)


NO_GRADIENT = {"while_loop", "many_primitives"}
PARTED = [(name, way) for name in ALL for way in PARTS]


@pytest.mark.parametrize(
    "name, way",
    few(PARTED, ("layer_stack", "a layer"), ("own_vjp", "truncate")),
)
def test_parts_of_models_have_the_same_bits(name, way, tmp_path):
    check_parts(name, way, tmp_path)


@pytest.mark.parametrize("way", few(PARTS, "extract"))
def test_there_are_parts(way, tmp_path):
    assert check_parts("layer_stack" if way == "a layer" else "mlp", way, tmp_path) > 0


@pytest.mark.slow
def test_a_part_in_another_process(tmp_path):
    mox, (params, *_) = made(ALL["mlp"], X)
    part = mox.extract("**/linear_1")
    save(tmp_path / "mox.json", part)
    np.save(tmp_path / "x.npy", X[:, :1] * np.ones(5, "float32"))
    np.savez(tmp_path / "params.npz", **params["mlp/~/linear_1"])
    code = (
        "import sys, numpy as np; from haiku_implicit.mox import load; "
        "params = {'mlp/~/linear_1': dict(np.load('params.npz'))}; "
        "np.save('out.npy', load('mox.json').apply(params, None, np.load('x.npy')))"
    )
    env = dict(os.environ, PYTHONPATH=os.getcwd())
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
    wanted = part.apply(params, None, jnp.asarray(np.load(tmp_path / "x.npy")))
    assert_same(np.load(tmp_path / "out.npy"), np.asarray(wanted))


def wide():
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


@jax.custom_vjp
def times(x, number):
    return x * number


times.defvjp(
    lambda x, number: (x * number, (x, number)),
    lambda saved, g: (3 * g * saved[1], (g * saved[0]).sum()),
)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("number", [2.0, 2, True])
def test_a_number_of_python_among_the_arguments_of_a_rule(number, dtype, tmp_path):
    """It is a float64 there, and its cotangent has the dtype of the array."""
    with wide():
        x = X.astype(dtype)
        mox = make_mox(hk.transform(lambda x: times(jnp.sin(x), number)))(x)
        new = reloaded(mox, tmp_path)
        for fun in (lambda f: f, jax.jit):
            assert_same(*(fun(y.apply)({}, None, x) for y in (mox, new)))
            assert_same(
                *(fun(jax.grad(lambda x, y=y: y.apply({}, None, x).sum()))(x) for y in (mox, new))
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CUSTOM, "mlp", "attention", "scan", "layer_stack", "while_loop"])
def test_parts_of_models_in_64_bits(name, tmp_path):
    with wide():
        for way in PARTS:
            check_parts(name, way, tmp_path)


LONE = "a\ud800b"


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x * hk.get_parameter(LONE, (), init=jnp.ones),
        lambda x: {LONE: x},
        lambda x: jax.jit(functools.partial(jnp.sin))(x) + len(Named(LONE)(x)),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(fun, tmp_path):
    with pytest.raises(ValueError, match=r"save: .*\\ud800.*half of a surrogate pair"):
        save(tmp_path / "mox.json", make_mox(hk.transform(fun))(X))
    assert os.listdir(tmp_path) == []


class Named(hk.Module):
    def __init__(self, label):
        super().__init__()
        self.label = label

    def __call__(self, x):
        return x


def test_names_in_every_script(tmp_path):
    mox, arguments = made(
        lambda x: {"\u00e4\u4e2d\U0001f600": x * hk.get_parameter("\u03b2", (), init=jnp.ones)}, X
    )
    assert_same(eval_mox(reloaded(mox, tmp_path), *arguments), eval_mox(mox, *arguments))


# --- Haiku's modules and larger models -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", descriptors.ALL_MODULES, ids=lambda x: x.name)
def test_modules_of_haiku(module, tmp_path):
    def fun(x):
        return module.create()(x)

    x = jax.random.uniform(jax.random.key(0), module.shape).astype(module.dtype)
    mox, arguments = made(fun, x)
    new = reloaded(mox, tmp_path)
    assert program_of(new, arguments) == program_of(mox, arguments)
    assert new.xml() == mox.xml()
    # Equal programs give equal bits, so that one of each pair is enough to run, and init none.
    inits = (jax.make_jaxpr(to_transformed(y).init)(RNG, x) for y in (mox, new))
    first, again = (str(pruned(closed).jaxpr) for closed in inits)
    # JAX 0.7 shows a number of float32 as the model gave it, here with the digits of a float64.
    short = lambda text: re.sub(r"\d\.\d{9,}", lambda found: str(np.float32(found[0])), text)  # noqa: E731
    assert short(first) == short(again)
    evaluate_to_the_same(fun, [new], arguments)


def evaluate_to_the_same(fun, moxes, arguments):
    """The bits of the model itself."""
    original = jax.jit(hk.transform_with_state(fun).apply)(*arguments)
    for mox in moxes:
        assert_same(jax.jit(functools.partial(eval_mox, mox))(*arguments), original)


def resnet(x):
    return hk.nets.ResNet50(10)(x, is_training=True)


def bert_model(x):
    from models import bert

    config = bert.BertConfig(50, 16, 2, 2, 32, 8)
    tokens = (jnp.abs(x) * 49).astype(jnp.int32)
    return bert.embed_sentences(config, tokens, jnp.ones(x.shape, bool))


def llama_model(x):
    from models import llama

    config = llama.LlamaConfig(50, 16, 2, 2, 2, 32)
    return llama.Llama(config)((jnp.abs(x) * 49).astype(jnp.int32))


def decoding_llama(x):
    """With its cache of keys and values, in Haiku's state."""
    from models import llama

    config = llama.LlamaConfig(50, 16, 2, 2, 2, 32)
    return llama.Llama(config)((jnp.abs(x) * 49).astype(jnp.int32), cache_length=12)


LARGE = {
    "resnet": (resnet, (1, 32, 32, 3)),
    "bert": (bert_model, (2, 8)),
    "llama": (llama_model, (2, 8)),
    "decoding_llama": (decoding_llama, (2, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_models(name, tmp_path):
    fun, shape = LARGE[name]
    x = jnp.cos(jnp.arange(np.prod(shape))).reshape(shape)
    mox, arguments = made(fun, x)
    new = reloaded(mox, tmp_path)
    assert program_of(new, arguments) == program_of(mox, arguments)
    assert hlo_of(new, arguments) == hlo_of(mox, arguments)
    assert new.xml() == mox.xml()
    evaluate_to_the_same(fun, [mox, new], arguments)
    ways = [jax.jit(jax.grad(functools.partial(loss, y, arguments[1:-1]))) for y in (mox, new)]
    assert_same(*(fun(arguments[0], x) for fun in ways))


# --- what can't be saved -------------------------------------------------------------------------------


POLICIES = jax.checkpoint_policies
NAMED = {
    "only": POLICIES.save_only_these_names("one", "two"),
    "none": POLICIES.save_only_these_names(),
    "but": POLICIES.save_any_names_but_these("two"),
    "anything": POLICIES.save_anything_except_these_names("one"),
    "both": POLICIES.save_from_both_policies(
        POLICIES.dots_saveable,
        POLICIES.save_from_both_policies(
            POLICIES.save_only_these_names("one"), POLICIES.save_only_these_names("two")
        ),
    ),
}


@pytest.mark.parametrize("name", few(NAMED, "only", "both"))
def test_policies_of_checkpoints(name, tmp_path):
    """The gradient's program has what is saved, and computes the rest again."""
    name_one, name_two = (functools.partial(checkpoint_name, name=x) for x in ("one", "two"))

    def layer(x):
        return jnp.sin(name_two(jnp.sin(name_one(jnp.sin(hk.Linear(3)(x))) @ jnp.ones((3, 3)))))

    def counted(mox, params, *rest):
        gradient = jax.grad(lambda params: loss(mox, rest[:-1], params, rest[-1]))
        text = str(jax.make_jaxpr(gradient)(params))
        return collections.Counter(re.sub(r"0x\w+", "", text).split())  # JAX 0.7 shows addresses

    mox, arguments = made(lambda x: hk.remat(layer, policy=NAMED[name])(x), X)
    whole, _ = made(lambda x: hk.remat(layer)(x), X)
    counts = counted(mox, *arguments)
    assert counted(reloaded(mox, tmp_path), *arguments) == counts
    assert (counts["sin"] == counted(whole, *arguments)["sin"]) == (name == "none")


def test_other_policies_can_not_be_saved(tmp_path):
    own = lambda prim, *args, **params: True  # noqa: E731
    for policy in (own, POLICIES.save_from_both_policies(own, POLICIES.dots_saveable)):
        mox, _ = made(lambda x, policy=policy: hk.remat(hk.Linear(3), policy=policy)(x), X)
        with pytest.raises(
            ValueError, match="save: <(remat2|checkpoint).* can't be saved: <function"
        ):
            save(tmp_path / "mox.json", mox)
    for given in ([], ["eval"], ["save_only_these_names", 3], ["save_from_both_policies", {}]):
        with pytest.raises(ValueError):
            values.from_json({"policy": given}, {})


def callback(x):
    return jax.pure_callback(np.sin, x, x)


def printing(x):
    jax.debug.print("{}", x.sum())
    return x


def sharded(x):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("i",))
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def constrained(x):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("i",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    return jax.lax.with_sharding_constraint(x, place)


def foreign(x):
    return jax.ffi.ffi_call("no_such_function", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def own_vmap(x):
    fun = jax.custom_batching.custom_vmap(jnp.sin)
    fun.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))
    return fun(x)


def kernel(x):
    def double(ref, out):
        out[...] = 2 * ref[...]

    return pallas.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def callback_in_rule(x):
    fun = jax.custom_vjp(lambda x: x)
    fun.defvjp(lambda x: (x, x), lambda x, g: (callback(g),))
    return fun(x)


NOT_SAVED = {
    callback: "pure_callback",
    printing: "debug",
    sharded: "shard_map",
    constrained: "sharding_constraint",
    foreign: "ffi_call",
    own_vmap: "custom_vmap_call",
    kernel: "pallas_call",
    callback_in_rule: "pure_callback",
}


class Outer(hk.Module):
    def __init__(self, fun, name=None):
        super().__init__(name=name)
        self.fun = fun

    def __call__(self, x):
        return jax.lax.scan(lambda c, row: (c, self.fun(row[None])), 0, x)[1]


@pytest.mark.parametrize("fun", few(NOT_SAVED, callback, sharded), ids=lambda x: x.__name__)
def test_what_can_not_be_saved_is_named(fun, tmp_path):
    mox = make_mox(hk.transform(lambda x: Outer(fun, name="outer")(x)))(X)
    path = tmp_path / "mox.json"
    path.write_text("before")
    with pytest.raises(ValueError, match=f"{NOT_SAVED[fun]}.*module 'outer'"):
        save(path, mox)
    assert os.listdir(tmp_path) == ["mox.json"] and path.read_text() == "before"


def stored(x):
    w = hki.QuantizedMatrix(jnp.zeros((8, 1), jnp.int8), jnp.ones((8, 1)), None, "int8")
    return quantized_matmul(x[:, :1], w, order=(0, 1), precision=None, dtype=x.dtype)


def rotated(x):
    return hki.adapters.Hadamard.random(x.shape[-1]).times(x)


@pytest.mark.parametrize(("fun", "name"), [(rotated, "hadamard"), (stored, "quantized_matmul")])
def test_operations_of_this_library_in_a_model(fun, name, tmp_path):
    """The error names the way out: the implicit array as a parameter."""
    mox = make_mox(hk.transform(fun))(X)
    message = f"<{name}: .*> in the model, .* can't have {name}: .* eval_mox takes them in place of"
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "mox.json", mox)


def test_arguments_that_can_not_be_saved_are_named(tmp_path):
    model = hk.transform(lambda x, activation: activation(x))
    with pytest.raises(ValueError, match="the arguments can't be saved: .*sin"):
        save(tmp_path / "mox.json", make_mox(model)(X, jnp.sin))
    model = hk.transform(lambda x: collections.OrderedDict(a=x))
    with pytest.raises(ValueError, match="the results can't be saved: it has a OrderedDict"):
        save(tmp_path / "mox.json", make_mox(model)(X))


def test_a_failing_write_keeps_the_old_file(tmp_path, monkeypatch):
    mox, _ = made(MODELS["mlp"], X)
    path = tmp_path / "mox.json"
    path.write_text("before")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        save(path, mox)
    assert os.listdir(tmp_path) == ["mox.json"] and path.read_text() == "before"


# --- what is in a file ---------------------------------------------------------------------------------


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


def test_named_tuples_and_classes_are_made_anew_or_given(tmp_path):
    mox, arguments = made(lambda p, k=3: {"out": Point(p.x * k, hk.Linear(2)(p.y))}, Point(X, X))
    new = reloaded(mox, tmp_path, types=[Point, hk.Linear])
    assert_same(eval_mox(new, *arguments), eval_mox(mox, *arguments))
    assert len(new.select(hk.Linear)) == 1
    unknown = load(tmp_path / "mox.json")
    assert unknown.query("string(//module_call/@type)") == "Linear" and not unknown.select(
        hk.Linear
    )
    with pytest.raises(ValueError, match="the expression was made for"):
        eval_mox(unknown, *arguments)


def test_results_that_are_no_tree_to_jax_stay_so(tmp_path):
    class Unsorted(hk.Module):
        def __call__(self, x):
            return {1: x, "a": x * 2}

    def fun(x):
        out = Unsorted()(x)
        return out[1] + out["a"]

    mox, arguments = made(fun, X)
    new = reloaded(mox, tmp_path)
    assert_same(eval_mox(new, *arguments), eval_mox(mox, *arguments))
    for each in (mox, new):
        with pytest.raises(ValueError, match="returns something that is no tree to JAX"):
            each.sub("unsorted", lambda x: x)


def test_flags_and_defaults_are_kept(tmp_path):
    def fun(x, *more, training, scale=2.0, mode="same"):
        return x * scale if training else x + len(more)

    model = hk.without_apply_rng(hk.transform(fun))
    new = reloaded(make_mox(model)(X, 1.0, training=True), tmp_path)
    assert_same(eval_mox(new, {}, X, 1.0, training=True), X * 2)
    with pytest.raises(ValueError, match="training"):
        eval_mox(new, {}, X, 1.0, training=False)


def test_without_init(tmp_path):
    def fun(x):
        return x * hk.get_parameter("w", x.shape, init=lambda *_: callback(x))

    model = hk.transform(fun)
    new = reloaded(make_mox(model)(X), tmp_path)
    params = model.init(RNG, X)
    assert_same(eval_mox(new, params, None, X), model.apply(params, None, X))
    with pytest.raises(ValueError, match="init: the file .* has none.*pure_callback"):
        to_transformed(new).init(RNG, X)


def test_init_without_results_that_it_drops(tmp_path):
    def fun(x):
        if hk.running_init():
            x = callback(x)
        return hk.Linear(2)(x)

    mox = make_mox(hk.transform(fun))(X)
    assert_same(to_transformed(reloaded(mox, tmp_path)).init(RNG, X), mox.init(RNG, X))


def test_constants_in_every_dtype(tmp_path):
    names = "bool int2 int4 int8 uint16 int32 uint32 bfloat16 float16 float8_e5m2 float32 complex64"
    values = [jnp.array([0, 1, 1]).astype(name) for name in names.split()]
    values += [jnp.array([jnp.nan, -0.0, jnp.inf]), jax.random.split(jax.random.key(2, impl="rbg"))]
    mox, arguments = made(lambda: values)
    assert_same(eval_mox(reloaded(mox, tmp_path), *arguments), (values, {}))


# --- what is not such a file ---------------------------------------------------------------------------


@functools.cache
def document():
    """A file with most of what there is in one."""

    def fun(x):
        x = product(hk.Linear(2)(x), x.sum()) + jnp.asarray(np.arange(2.0, dtype="float32"))
        x = jax.lax.conv(x[None, None], jnp.ones((1, 1, 1, 1)), (1, 1), "SAME")[0, 0]
        x = jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: jax.nn.relu(x) * np.float32("nan"), x)
        return jax.lax.scan(lambda c, row: (c + row, jnp.tanh(c)), x[0], x), {
            "key": jax.random.key(0)
        }

    save(FILE, made(fun, X)[0])
    return json.loads(FILE.read_text())


FILE = None


@pytest.fixture(autouse=True, scope="module")
def file(tmp_path_factory):
    global FILE
    FILE = tmp_path_factory.mktemp("files") / "mox.json"


def rejected(text, match=None):
    data = text if isinstance(text, bytes) else text.encode()
    FILE.with_name("bad.json").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        load(FILE.with_name("bad.json"))


def changed(place, value):
    """The file with something else at a place of it."""
    new = copy.deepcopy(document())
    *way, last = place
    inner = value_at(new, way)
    inner[last] = value(inner[last]) if callable(value) else value
    return json.dumps(new)


def value_at(doc, place):
    return functools.reduce(lambda x, key: x[key], place, doc)


def every_place(x, place=()):
    yield place
    for key, y in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from every_place(y, (*place, key))


def place_of(op):
    """The first place in the file with an equation of this primitive."""
    places = (place[:-1] for place in every_place(document()) if place[-1:] == ("op",))
    return next(place for place in places if value_at(document(), place)["op"] == op)


def calling(bodies, times):
    """A body that calls the last one so many times, each on the result before."""
    params = dict(name="f", keep_unused=False, donated_invars=[False])
    params["jaxpr"] = {"closed": len(bodies) - 1}
    scalar = ["float32", []]
    nodes = [
        {"op": "jit", "in": [i], "params": params, "types": [scalar], "out": [i + 1]}
        for i in range(times)
    ]
    return dict(name="f", inputs=[scalar], constants=[], nodes=nodes, outputs=[times])


def with_calls(depth, times):
    """The file with bodies that call each other."""
    new = copy.deepcopy(document())
    bodies = new["model"]["bodies"]
    bodies.append(calling(bodies, 0))
    for _ in range(depth):
        bodies.append(calling(bodies, times))
    return json.dumps(new)


def test_no_json():
    good = json.dumps(document())
    rejected("", "an empty file")
    rejected(good[:-20], "the file")
    rejected("[" * 100_000, "nested too deeply")
    rejected(b"\xff\xfe" + good.encode(), "bad.json")
    rejected("null", "not a module expression")
    rejected("[]", "not a module expression")
    rejected("[1, 2, 3]", "format")
    rejected(good.replace('"version": 1', '"version": 2'), "version 2")
    rejected(good.replace('"version": 1', '"version": NaN'), "NaN")
    rejected(good.replace('"version": 1', '"version": 1, "version": 1'), "twice")
    rejected("9" * 10_000, "the file")


def test_hostile_bodies():
    rejected(with_calls(100, 1), "nested more than 64 deep")
    rejected(with_calls(40, 2), "more than .* equations")  # 2 to the power of 40
    dot = place_of("dot_general")
    rejected(changed((*dot, "op"), "pure_callback"), r"model\.bodies\[\d+\].*pure_callback")
    rejected(changed((*dot, "op"), "custom_lin"), "no primitive")
    rejected(changed((*dot, "in"), [0]), "dot_general")
    rejected(changed((*dot, "in"), [0, 10**6]), "variable 1000000 is not defined yet")
    rejected(changed((*dot, "in"), [0, -1]), "variable -1")
    rejected(changed((*dot, "in"), [0, True]), "whole number")
    rejected(changed((*dot, "out"), [0]), "variable 0 is there already")
    rejected(changed((*dot, "out"), []), "1 results have 0 variables")
    rejected(changed((*dot, "types"), [["float64", [6, 2]]]), "not")
    rejected(changed((*dot, "types"), [["object", [6, 2]]]), "no dtype 'object'")
    rejected(changed((*dot, "types"), [["float32", [2**70]]]), "length")
    rejected(changed((*dot, "params"), {}), "dot_general")
    rejected(
        changed((*dot, "params", "precision"), {"enum": ["Precision", "__class__"]}), "no member"
    )
    rejected(changed((*dot, "params", "precision"), {"enum": ["os", "system"]}), "no class")
    rejected(changed((*dot, "params", "precision"), {"call": "os.system"}), "no value of the kind")
    rejected(changed((*dot, "scope"), 3), "a scope")
    cond = place_of("cond")
    branches = (*cond, "params", "branches")
    rejected(changed((*branches, 1), {"closed": 10**9}), "no body")
    rejected(changed((*branches, 1), 3), "has to be a program")
    model = document()["model"]["body"]
    rejected(changed((*branches, 1), {"closed": model}), "no body|takes")  # itself: a cycle
    scan = place_of("scan")
    rejected(changed((*scan, "params", "length"), 10**12), "scan")
    rejected(changed((*scan, "params", "num_carry"), 0), "scan")
    rejected(changed((*scan, "params", "unroll"), -1), "unroll")


CUTS = [
    ("conv_general_dilated", "precision"),  # read by the compiler alone
    ("conv_general_dilated", "padding"),
    ("tanh", "accuracy"),  # by the rule of the derivative
    ("reduce_sum", "axes"),
    ("dot_general", "precision"),
    ("cond", "branches"),
    ("scan", "unroll"),
]


@pytest.mark.parametrize("op, name", few(CUTS, *CUTS[:3]))
def test_an_equation_without_a_parameter_or_with_a_strange_one(op, name):
    params = (*place_of(op), "params")
    where = r"model\.bodies\[\d+\]\.nodes\[\d+\].*" + op
    rejected(changed(params, lambda x: {k: y for k, y in x.items() if k != name}), where)
    rejected(changed(params, lambda x: {**x, "made_up": 0}), f"{where}.*made_up")


def test_another_version_of_jax_is_named():
    bad = changed(("model", "bodies", 0, "name"), 3)
    rejected(
        bad.replace(f'"jax": "{jax.__version__}"', '"jax": "0.6.0"'), "from JAX '0.6.0', and this"
    )


def test_hostile_tables():
    rejected(changed(("model", "arrays", 0, "data"), lambda x: x[:-4]), r"arrays\[0\].*bytes")
    rejected(changed(("model", "arrays", 0, "data"), "%"), "base64")
    rejected(changed(("model", "arrays", 0, "type"), ["float32", [2**40, 2**20]]), "bytes")
    rejected(changed(("model", "functions", 0, "kind"), "custom_lin"), "kind of function")
    rejected(changed(("model", "functions", 0, "body"), 10**6), "no body")
    name = next(x for x in ("jvp", "bwd") if x in document()["model"]["functions"][0])
    rejected(changed(("model", "functions", 0, name), 0), r"functions\[0\].*(takes|returns)")
    rejected(changed(("model", "interface", "results"), "array"), "results")
    rejected(changed(("model", "interface", "params"), lambda x: [*x, x[0]]), "twice")
    rejected(changed(("model", "interface", "leading"), ["rng", "params"]), "first arguments")
    rejected(
        changed(("model", "interface", "args"), {"namedtuple": ["A b", ["x", None]]}), "interface"
    )
    rejected(changed(("model", "interface", "signature", 0, 0), "y"), "names of the signature")


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**80,
    1.5,
    "",
    "array",
    "x",
    [],
    {},
    [[]],
    {"closed": 0},
    {"open": 1},
]


def mutated(rng):
    """The file with one or two places of it removed, doubled, exchanged or set to something else."""
    new = copy.deepcopy(document())
    places = list(every_place(new))[1:]
    for _ in range(rng.randrange(1, 3)):
        *way, last = rng.choice(places)
        try:
            inner = value_at(new, way)
            kind = rng.randrange(5)
            if kind == 0:
                del inner[last]
            elif kind == 1 and isinstance(inner, list):
                inner.insert(last, inner[last])
            elif kind == 2:
                inner[last] = value_at(new, rng.choice(places))
            elif kind == 3 and type(inner[last]) is int:
                inner[last] += rng.choice([-1, 1])
            else:
                inner[last] = rng.choice(VALUES)
        except (KeyError, IndexError, TypeError):
            continue
    return new


def with_other_parameters(rng):
    """The file with a parameter of an equation removed, renamed or added."""
    new = copy.deepcopy(document())
    params = rng.choice([value_at(new, place) for place in every_place(new) if is_params(place)])
    kind = rng.randrange(3)
    if required := [name for name in params if name not in OPTIONAL and kind < 2]:
        name = rng.choice(required)
        value = params.pop(name)
        if kind == 0:
            return new
        params[f"{name}_"] = value
    params["made_up"] = rng.choice(VALUES)
    return new


def is_params(place):
    return place[-1:] == ("params",) and place[-3:-2] == ("nodes",)


OPTIONAL = {"inline", "linear", "_split_transpose", "branches_platforms"}


@pytest.mark.parametrize("seed, count", few([(0, 10), (1, 300)], (0, 10)))
def test_other_parameters(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        rejected(json.dumps(with_other_parameters(rng)), "nodes")


def check_mutations(seed, count):
    rng, bad = random.Random(seed), FILE.with_name("bad.json")
    outcomes = collections.Counter()
    for _ in range(count):
        try:
            text = json.dumps(mutated(rng))
        except (ValueError, RecursionError):  # a list in itself
            continue
        cut = rng.random() < 0.05
        bad.write_text(text[: rng.randrange(len(text))] if cut else text)
        try:
            load(bad)
            outcomes["read"] += 1
        except ValueError as e:
            assert str(bad) in str(e)
            outcomes["refused"] += 1
    assert outcomes["refused"] > outcomes["read"] / 2


def test_mutations():
    check_mutations(0, 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_mutations(seed):
    check_mutations(seed, 500)


def test_xml_is_a_view():
    mox, _ = made(MODELS["mlp"], X)
    assert mox.xml().startswith("<mox>") and 'type="Linear"' in mox.xml()


@pytest.mark.slow
def test_no_tracer_outlives_the_reading(tmp_path):
    path = tmp_path / "program.json"
    save(path, make_mox(hk.transform(lambda x: jax.nn.relu(x + 1)))(1.0))
    with jax.checking_leaks():
        load(path)


class Configured(hk.Module):
    """A module whose configuration has arrays of any dtype."""

    def __init__(self, values, name=None):
        super().__init__(name=name)
        self.values = values

    def __call__(self, x):
        return x * 2.0


@pytest.mark.parametrize(
    "given",
    [np.array(["a", "b"]), np.array([None, 1]), np.array(["2026-01-01"], "datetime64[D]"), np.longdouble(1)],
    ids=["texts", "objects", "dates", "long"],
)  # fmt: skip
def test_a_configuration_of_dtypes_that_files_do_not_know_is_shown(given, tmp_path):
    mox = make_mox(hk.transform(lambda x: Configured(given)(x)))(jnp.ones(3))
    save(tmp_path / "mox", mox)
    found = eval_mox(load(tmp_path / "mox"), {}, None, jnp.arange(3.0))
    np.testing.assert_array_equal(found, [0, 2, 4])


@pytest.mark.slow
@pytest.mark.parametrize("missing", [5, None, [1]])
def test_why_init_is_missing_is_a_text(missing, tmp_path):
    path = tmp_path / "mox"
    save(path, make_mox(hk.transform(lambda x: hk.Linear(2)(x)))(jnp.ones((1, 3))))
    changed = json.loads(path.read_text()) | {"init": {"missing": missing}}
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="init: missing has to be a text"):
        load(path)
