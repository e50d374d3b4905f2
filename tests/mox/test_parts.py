"""Values within models, parts of them, and other names: against models that are written that way."""

import re

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.mox import diff, eval_mox, make_mox, map_mox, to_transformed
from tests.mox.compare import close, same
from tests.random_arrays import normal

X = normal((4, 8), 1)


def mlp(x):
    return hk.nets.MLP([8, 8, 3])(x)


def stack(x):
    def layer(x):
        return x + hk.Linear(8, name="out")(jax.nn.relu(hk.Linear(16, name="in")(x)))

    return hk.Linear(3, name="head")(hk.layer_stack(3, name="stack")(layer)(x))


def made(f):
    t = hk.transform_with_state(f) if f is trained else hk.transform(f)
    return t, make_mox(t)(X), t.init(jax.random.key(0), X)


def trained(x):
    x = hk.BatchNorm(True, True, 0.9, name="first")(hk.Linear(8, name="a")(x), True)
    x = hk.Linear(8, name="b")(x)
    return hk.Linear(2, name="c")(hk.BatchNorm(True, True, 0.9, name="second")(x, True))


# --- wrap, insert ---------------------------------------------------------------------------------


def test_wrap_gives_the_original_as_a_function():
    _, mox, params = made(mlp)
    twice = mox.wrap("**/linear_1", lambda linear, x: linear(x) - 2 * linear(jnp.sin(x)))
    w, b = (params["mlp/~/linear_1"][name] for name in "wb")

    def hand(x):
        x = jax.nn.relu(hk.Linear(8, name=hk.force_name("mlp/~/linear_0"))(x))
        x = jax.nn.relu((x @ w + b) - 2 * (jnp.sin(x) @ w + b))
        return hk.Linear(3, name=hk.force_name("mlp/~/linear_2"))(x)

    close(eval_mox(twice, params, None, X), hk.transform(hand).apply(params, None, X))
    assert len(twice["**/linear_1"]) == 2
    never = mox.wrap("**/linear_1", lambda linear, x: x * 2)
    close(
        eval_mox(never, params, None, X),
        eval_mox(mox.sub("**/linear_1", lambda x: x * 2), params, None, X),
    )


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_state_is_what_the_last_call_of_the_original_leaves(calls):
    t, mox, (params, state) = made(trained)

    def around(norm, x, is_training):
        for i in range(calls):
            y = norm(x * (i + 1), is_training)
        return y if calls else x

    got, new = eval_mox(mox.wrap("first", around), params, state, None, X)
    h = hk.transform(lambda x: hk.Linear(8, name="a")(x)).apply(params, None, X)
    norm = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9, name="first")(x, True))
    _, want = norm.apply(params, state, None, h * max(calls, 1))
    first = [name for name in want if name.startswith("first")]
    close({name: new[name] for name in first}, {name: want[name] for name in first})


@pytest.mark.slow
def test_before_and_after_in_a_stack():
    """Adapters of Houlsby et al. in each layer, by hand and put there."""
    _, mox, params = made(stack)

    def adapter(x):
        return x + hk.Linear(8, name="up")(jnp.tanh(hk.Linear(2, name="down")(x)))

    changed = mox.insert_after("stack/out", adapter).insert_before(
        "stack/in", lambda x: hk.LayerNorm(-1, True, True)(x)
    )
    new = changed.init(jax.random.key(0), X)
    assert new["stack/out/down"]["w"].shape == (3, 8, 2)
    assert new["stack/in/layer_norm"]["scale"].shape == (3, 8)

    def hand(x):
        def layer(x):
            h = hk.LayerNorm(-1, True, True, name=hk.force_name("in/layer_norm"))(x)
            h = hk.Linear(8, name="out")(jax.nn.relu(hk.Linear(16, name="in")(h)))
            down = hk.Linear(2, name=hk.force_name("out/down"))(h)
            return x + h + hk.Linear(8, name=hk.force_name("out/up"))(jnp.tanh(down))

        return hk.Linear(3, name="head")(hk.layer_stack(3, name="stack")(layer)(x))

    apply = hk.transform(hand).apply
    close(eval_mox(changed, new, None, X), apply(new, None, X))
    grads = (
        jax.grad(lambda p, f=f: (f(p, None, X) ** 2).sum())(new) for f in (changed.apply, apply)
    )
    close(*grads)


def test_before_a_call_with_several_arrays_and_flags():
    def model(x):
        return hk.MultiHeadAttention(2, 4, w_init=hk.initializers.RandomNormal(), model_size=8)(
            x, x + 1, value=x
        )

    _, mox, params = made(model)
    changed = mox.insert_before(hk.MultiHeadAttention, lambda q, k: (q * 2, jnp.sin(k)))

    def hand(x):
        return hk.MultiHeadAttention(2, 4, w_init=hk.initializers.RandomNormal(), model_size=8)(
            x * 2, jnp.sin(x + 1), value=x
        )

    close(eval_mox(changed, params, None, X), hk.transform(hand).apply(params, None, X))


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_taps_at_the_top_and_in_loops():
    _, mox, params = made(stack)
    out, values = eval_mox(
        mox.taps("//module_call[@name='in'] | //custom_jvp_call | //module_call[@name='head']"),
        params,
        None,
        X,
    )
    same(out, eval_mox(mox, params, None, X))
    h, want = X, []
    for i in range(3):
        pre = h @ params["stack/in"]["w"][i] + params["stack/in"]["b"][i]
        want.append(pre)
        h = h + jax.nn.relu(pre) @ params["stack/out"]["w"][i] + params["stack/out"]["b"][i]
    assert set(values) == {"stack/in", "stack/relu", "head"}
    close(values["stack/in"], jnp.stack(want))
    close(values["stack/relu"], jax.nn.relu(jnp.stack(want)))
    same(values["head"], out)

    def penalty(apply_values):
        return lambda p: sum((v**2).sum() for v in apply_values(p))

    def by_hand(p):
        h, found = X, []
        for i in range(3):
            found.append(h @ p["stack/in"]["w"][i] + p["stack/in"]["b"][i])
            h = h + jax.nn.relu(found[-1]) @ p["stack/out"]["w"][i] + p["stack/out"]["b"][i]
        return found

    tapped = mox.taps("stack/in")
    got = jax.jit(jax.grad(penalty(lambda p: [eval_mox(tapped, p, None, X)[1]["stack/in"]])))(
        params
    )
    close(got, jax.grad(penalty(by_hand))(params))


def test_taps_of_modules_in_one_another_and_of_repeated_calls():
    def model(x):
        layer = hk.nets.MLP([8], name="net")
        return layer(layer(x))

    _, mox, params = made(model)
    _, values = eval_mox(mox.taps("**"), params, None, X)
    assert set(values) == {"net", "net/~/linear_0", "net:1", "net/~/linear_0:1"}
    same(values["net"], values["net/~/linear_0"])
    once = eval_mox(mox.truncate(mox["net"][0]), params, None, X)
    same(once, values["net"])


def branching(x):
    layer = hk.Linear(8)
    if hk.running_init():
        return layer(x)
    return hk.cond(x.sum() > 0, layer, lambda x: x, x)


def looping(x):
    layer = hk.Linear(8)
    if hk.running_init():
        return layer(x)
    return hk.while_loop(lambda x: x.sum() < 50, lambda x: jnp.abs(layer(x)) + x, x)


@pytest.mark.parametrize(
    "model, reason",
    [(branching, "<cond.* it may not run"), (looping, "<while.* an unknown number of times")],
)
def test_taps_in_branches_and_while_loops_are_refused_with_a_way_out(model, reason):
    _, mox, params = made(model)
    with pytest.raises(ValueError, match=f"no value can be tapped .* {reason}.*Tap .*patch"):
        mox.taps(hk.Linear)
    x, seen = jnp.abs(X), []
    whole = "//cond" if model is branching else "//while"
    out, values = eval_mox(mox.taps(whole), params, None, x)
    ((_, value),) = values.items()
    same(out, value)

    def watched(h):
        jax.debug.callback(seen.append, h, ordered=True)
        return h

    same(eval_mox(mox.patch(hk.Linear, watched), params, None, x), out)
    jax.effects_barrier()
    w, b = (params["linear"][name] for name in "wb")
    want, h = [x @ w + b], x
    while model is looping and (h := jnp.abs(want[-1]) + h).sum() < 50:
        want.append(h @ w + b)
    close(seen, want)


@pytest.mark.parametrize("kind", ["function", "value"])
def test_patch(kind):
    _, mox, params = made(mlp)
    value = jnp.cos(X)
    patched = mox.patch("**/linear_1", jnp.cos if kind == "function" else value)
    w = params["mlp/~/linear_2"]
    h = jax.nn.relu(
        jnp.cos(eval_mox(mox.taps("**/linear_1"), params, None, X)[1]["mlp/~/linear_1"])
        if kind == "function"
        else value
    )
    close(eval_mox(patched, params, None, X), h @ w["w"] + w["b"])


@pytest.mark.parametrize("kind", ["function", "value"])
def test_patch_in_a_loop(kind):
    """An array is the value of every step; a function sees the value of each one."""
    _, mox, params = made(stack)
    value = jnp.cos(jnp.arange(64.0)).reshape(4, 16)
    patched = mox.patch("stack/in", jnp.cos if kind == "function" else value)
    h, (inner, outer) = X, (params[f"stack/{name}"] for name in ("in", "out"))
    for i in range(3):
        new = jnp.cos(h @ inner["w"][i] + inner["b"][i]) if kind == "function" else value
        h = h + jax.nn.relu(new) @ outer["w"][i] + outer["b"][i]
    head = params["head"]
    close(jax.jit(patched.apply)(params, None, X), h @ head["w"] + head["b"])
    with pytest.raises(
        ValueError, match=r"stack/in.*to be float32\[4,16\], and is float32\[3,4,16\]"
    ):
        mox.patch("stack/in", jnp.stack([value] * 3))


# --- parts ----------------------------------------------------------------------------------------


def test_truncate_gives_features_without_what_comes_after():
    t, mox, (params, state) = made(trained)
    features = mox.truncate("b")
    assert list(features.init(jax.random.key(0), X)[0]) == ["a", "b", "first"]
    got, new = eval_mox(features, params, state, None, X)

    def hand(x):
        x = hk.BatchNorm(True, True, 0.9, name="first")(hk.Linear(8, name="a")(x), True)
        return hk.Linear(8, name="b")(x)

    want, want_state = hk.transform_with_state(hand).apply(params, state, None, X)
    close(got, want)
    assert set(new) == {"first/~/mean_ema", "first/~/var_ema"}
    close(new, {name: want_state[name] for name in new})


def test_extract_gives_a_module_of_its_own():
    t, mox, (params, state) = made(trained)
    norm = mox.extract("first")
    got, new = eval_mox(norm, params, state, None, X, True)
    hand = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9, name="first")(x, True))
    want, want_state = hand.apply(params, state, None, X)
    close(got, want)
    close(new, {name: want_state[name] for name in new})
    own, own_state = norm.init(jax.random.key(0), X, True)
    assert list(own) == ["first"] and set(own_state) == {"first/~/mean_ema", "first/~/var_ema"}

    _, mox, params = made(mlp)
    linear = mox.extract("**/linear_1")
    close(
        to_transformed(linear).apply(params, None, X),
        X @ params["mlp/~/linear_1"]["w"] + params["mlp/~/linear_1"]["b"],
    )
    assert list(linear.init(jax.random.key(0), X)) == ["mlp/~/linear_1"]


def noisy_stacks(x):
    """Two stacks in one another, with random keys and remat."""

    class Block(hk.Module):
        def __call__(self, x):
            x = jnp.tanh(hk.nets.MLP([8, 8], name="mlp")(x))
            return hk.dropout(hk.next_rng_key(), 0.5, x)

    def inner(x):
        return hk.layer_stack(2, name="inner")(lambda x: hk.remat(Block(name="block"))(x))(x)

    return hk.layer_stack(3, name="outer")(inner)(x)


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("layer", [(0, 0), (2, 1)])
def test_extract_a_layer_of_a_stack(layer):
    """A layer of a stack computes the module with that layer's parameters."""
    _, mox, params = made(noisy_stacks)
    linear = mox.extract("**/linear_1", layer=layer)
    (name,) = linear.init(jax.random.key(0), X)
    own = jax.tree.map(lambda x: x[layer], params[name])
    for apply in (linear.apply, jax.jit(linear.apply)):
        close(apply(params, jax.random.key(2), X), X @ own["w"] + own["b"])
    gradient = jax.grad(lambda p: linear.apply(p, None, X).sum())({name: params[name]})[name]["w"]
    assert (gradient != 0).any((-2, -1)).sum() == 1 and (gradient[layer] != 0).all()
    assert linear.query("//module_call/@path") == [name]
    same(
        make_mox(to_transformed(linear))(X, params={name: params[name]}).apply(params, None, X),
        linear.apply(params, None, X),
    )

    # A whole block, whose random keys are those of its layer.
    key = jax.random.PRNGKey(2)
    h = X
    for i in range(3):
        for j in range(2):
            h = mox.extract("**/block", layer=(i, j)).apply(params, key, h)
    close(h, mox.apply(params, key, X))


class Adds(hk.Module):
    def __init__(self, total):
        super().__init__()
        self.total = total

    def __call__(self, y):
        return y + self.total


def test_what_can_not_be_extracted():
    _, mox, _ = made(stack)
    with pytest.raises(
        ValueError, match="stack of 3 layers. Say which one is meant, from 0 on: layer="
    ):
        mox.extract("stack/in")
    for layer in (3, -1, (0, 0), ()):
        with pytest.raises(
            ValueError, match="is in a stack of 3 layers: expected a number from 0 to 2,"
        ):
            mox.extract("stack/in", layer=layer)
    with pytest.raises(ValueError, match="<head: .* is not in a stack: expected None, got 1"):
        mox.extract("head", layer=1)
    twice = hk.transform(lambda x: hk.layer_stack(3)(hk.layer_stack(2)(hk.Linear(8)))(x))
    with pytest.raises(
        ValueError, match="in stacks of 3 and 2 layers, the outermost first: .* each, got 0"
    ):
        make_mox(twice)(X).extract(hk.Linear, layer=0)

    def loop(x):
        return hk.scan(lambda total, y: (total + 1, Adds(total)(y)), 0.0, x)

    _, mox, _ = made(loop)
    with pytest.raises(ValueError, match="what a loop around it computes from step to step"):
        mox.extract("adds", layer=1)

    def closing(x):
        h = jnp.sin(x)

        class Adding(hk.Module):
            def __call__(self, y):
                return y + h

        return Adding()(x)

    _, mox, _ = made(closing)
    with pytest.raises(ValueError, match="computed from the model's arguments"):
        mox.extract("adding")
    _, mox, _ = made(lambda x: Adds(jnp.sin(x))(x))
    with pytest.raises(ValueError, match="computed from the model's arguments"):
        mox.extract("adds")
    _, mox, _ = made(mlp)
    with pytest.raises(ValueError, match="is 3 nodes, and has to be one"):
        mox.extract(hk.Linear)


def test_share():
    _, mox, params = made(mlp)
    tied = mox.share({"mlp/~/linear_1": "mlp/~/linear_0"})
    both = dict(params) | {"mlp/~/linear_1": params["mlp/~/linear_0"]}
    same(eval_mox(tied, params, None, X), eval_mox(mox, both, None, X))
    assert "mlp/~/linear_1" not in tied.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"'b' is .*3.*there it is .*8"):
        mox.share({"mlp/~/linear_2": "mlp/~/linear_0"})
    with pytest.raises(ValueError, match="no parameter of the model is below 'other'"):
        mox.share({"other": "mlp/~/linear_0"})


@pytest.mark.parametrize("where", ["mlp", "**/linear_1"])
def test_rename(where):
    t, mox, params = made(mlp)
    new = mox.rename(where, "new")
    old_path = mox[where][0].path
    path = "/".join([*old_path.split("/")[:-1], "new"])
    renamed = {
        f"{path}{k[len(old_path) :]}" if f"{k}/".startswith(f"{old_path}/") else k: v
        for k, v in params.items()
    }
    same(eval_mox(new, renamed, None, X), t.apply(params, None, X))
    same(new.init(jax.random.key(0), X), renamed)
    assert new[path] and not set(new.query("//module_call/@path")) & {old_path}
    again = make_mox(to_transformed(new))(X)
    assert again.query("//module_call/@path") == new.query("//module_call/@path")


def test_rename_in_a_stack():
    t, mox, params = made(stack)
    new = mox.rename("stack/in", "wide")
    names = {"stack/in": "stack/wide"}
    same(
        eval_mox(new, {names.get(k, k): v for k, v in params.items()}, None, X),
        t.apply(params, None, X),
    )
    assert new["stack/wide"] and mox["stack/in"]
    both = hk.transform(lambda x: hk.Linear(3, name="b")(hk.Linear(3, name="a")(x)))
    with pytest.raises(ValueError, match="there would be two 'b/b'"):
        make_mox(both)(X).rename("a", "b")


# --- lists of paths -------------------------------------------------------------------------------


def test_parameters_of_nodes_also_in_loops():
    _, mox, params = made(stack)
    assert mox.parameters("stack/in") == ["stack/in/b", "stack/in/w"]
    assert mox.parameters("//scan") == ["stack/in/b", "stack/in/w", "stack/out/b", "stack/out/w"]
    assert mox.parameters("//module_call[@name='head']//dot_general") == ["head/w"]


def test_map_and_diff():
    _, mox, _ = made(mlp)
    names = map_mox(lambda node: getattr(node, "path", ""), mox)
    assert [name for name in names if name] == mox.query("//module_call/@path")
    assert diff(mox, mox) == diff(mox, make_mox(hk.transform(mlp))(X)) == ""
    changed = mox.sub("**/linear_1", lambda x: x)
    lines = diff(mox, changed).splitlines()
    assert lines[-1] == "+  <mlp/~/linear_1: function: f32[4,8] -> f32[4,8]>"
    assert [line[0] for line in lines] == ["-"] * (len(lines) - 1) + ["+"]


def test_state_captured_values_and_hidden_outputs_of_a_call():
    _, mox, _ = made(trained)
    own = [
        f"first/~/{x}_ema/{y}" for x in ("mean", "var") for y in ("average", "counter", "hidden")
    ]
    assert sorted(mox.states("first")) == sorted(own) and mox.states("a") == []
    [first], [a] = mox["first"], mox["a"]
    # The two new averages, with their sums before the correction, and the two counters.
    assert len(mox.hidden_outputs(first)) == 6 and mox.hidden_outputs(a) == ()
    params = {v for slot in mox.interface.params.values() for v in slot.atoms}
    assert len(a.captured) == 2 and set(a.captured) < params
    assert not {*first.inputs} & {*first.captured}


def test_implicit_parameters_by_query():
    _, mox, params = made(mlp)
    chosen = mox.parameters("//module_call[@type='Linear' and @output_size > 5]//dot_general")
    assert chosen == ["mlp/~/linear_0/w", "mlp/~/linear_1/w"]
    lora = hki.add_lora(params, 0, rank=2, targets=chosen)
    assert [k for k in params if isinstance(lora[k]["w"], hki.LoRA)] == [
        "mlp/~/linear_0",
        "mlp/~/linear_1",
    ]
    quantized = hki.quantize_params(params, targets=chosen)
    assert [k for k in params if isinstance(quantized[k]["w"], hki.QuantizedMatrix)] == [
        "mlp/~/linear_0",
        "mlp/~/linear_1",
    ]
    with pytest.raises(ValueError, match="'mlp/w'"):
        hki.add_lora(params, 0, rank=2, targets=["mlp/w"])


def test_what_is_trained_and_rules_by_query():
    _, mox, params = made(mlp)
    chosen = mox.parameters("**/linear_1")

    def loss(params):
        return eval_mox(mox, params, None, X).sum()

    grads = hki.value_and_grad(loss, trainable_dense=chosen)(params)[1]
    zero = {f"{k}/{n}" for k, v in grads.items() for n, x in v.items() if isinstance(x, hki.Zeros)}
    assert chosen == ["mlp/~/linear_1/b", "mlp/~/linear_1/w"] and len(zero) == 4
    close(grads["mlp/~/linear_1"], jax.grad(loss)(params)["mlp/~/linear_1"])
    modules = "|".join(re.escape(node.path) for node in mox["**/linear_[01]"])
    rule = hki.quantization.QuantRule(module_path=modules, weight_qtype="int8")
    types = [type(x["w"]) for x in hki.quantize_params(params, rules=[rule]).values()]
    assert [x is hki.QuantizedMatrix for x in types] == [True, True, False]


@pytest.mark.parametrize(
    "taking, sources",
    [
        ({"b": "a", "c": "b"}, {"b": "a", "c": "a"}),
        ({"c": "b", "b": "a"}, {"b": "a", "c": "a"}),
        ({"d": "c", "c": "b", "b": "a"}, {"b": "a", "c": "a", "d": "a"}),
        ({"c": "a", "d": "c"}, {"c": "a", "d": "a"}),
    ],
)
def test_modules_share_along_a_chain(taking, sources):
    t = hk.transform(lambda x: four("abcd", x))
    params = t.init(jax.random.key(0), X)
    shared = make_mox(t)(X).share(taking)
    assert set(shared.init(jax.random.key(0), X)) == set(params) - set(sources)
    full = {name: params[sources.get(name, name)] for name in params}
    close(shared.apply(params, None, X), t.apply(full, None, X))


def four(names, x):
    for name in names:
        x = jnp.sin(hk.Linear(8, name=name)(x))
    return x


@pytest.mark.parametrize(
    "taking, circle",
    [
        ({"a": "a"}, "a, a"),
        ({"a": "b", "b": "a"}, "a, b, a"),
        ({"a": "b", "b": "c", "c": "a"}, "a, b, c, a"),
        ({"d": "a", "a": "b", "b": "a"}, "a, b, a"),
    ],
)
def test_modules_that_would_share_with_themselves(taking, circle):
    mox = make_mox(hk.transform(lambda x: four("abcd", x)))(X)
    with pytest.raises(ValueError, match=rf"share: .* in a circle: {circle}\. .*rename"):
        mox.share(taking)


def test_a_module_can_take_the_parameters_of_one_only():
    t = hk.transform(lambda x: hk.nets.MLP([8], name="m")(hk.nets.MLP([8], name="n")(four("a", x))))
    message = "share: .n/~/linear_0/b. would take those of .m/~/linear_0/b. and"
    with pytest.raises(ValueError, match=message):
        make_mox(t)(X).share({"n": "m", "n/~/linear_0": "a"})


# --- parameters -----------------------------------------------------------------------------------


def latents(x):
    """Learned queries, which a module is given as an argument, and a method that is given its own."""

    class Tied(hk.Module):
        def __call__(self, x):
            w = hk.get_parameter("w", (8, 8), init=hk.initializers.RandomNormal())
            return self.twice(w, x)

        def twice(self, w, x):
            return x @ w @ w

    queries = hk.get_parameter("queries", (3, 8), init=hk.initializers.RandomNormal())
    h = hk.Linear(8, name="query")(queries) @ Tied(name="tied")(x).T
    return jax.lax.scan(lambda c, row: (c, hk.Linear(8, name="last")(row)), 0, h)[1]


def given(x):
    class Outer(hk.Module):
        def __call__(self, x):
            queries = hk.get_parameter("queries", (3, 8), init=hk.initializers.RandomNormal())
            return hk.Linear(8, name="inner")(queries) @ x.T

    return Outer(name="outer")(x)


@pytest.mark.parametrize(
    "model, where, parameters",
    [
        (latents, "query", ["query/b", "query/w"]),
        (latents, "//module_call[@type='Linear']//dot_general", ["query/w", "last/w"]),
        (latents, "tied", ["tied/w"]),
        (latents, "//module_call[@method='twice']//dot_general", ["tied/w"]),
        (given, "outer", ["outer/inner/b", "outer/inner/w", "outer/queries"]),
        (given, "outer/inner", ["outer/inner/b", "outer/inner/w"]),
        (given, "//dot_general", ["outer/inner/w"]),
    ],
)
def test_arguments_are_no_parameters_of_a_module(model, where, parameters):
    _, mox, _ = made(model)
    assert sorted(mox.parameters(where)) == sorted(parameters)
    around = mox.wrap("//dot_general", lambda original, x, y: original(x, y))
    assert sorted(around.parameters(where)) == sorted(parameters)


def test_what_shows_parameters_leaves_out_arguments():
    _, mox, _ = made(given)
    lines = [line.split("  ")[-1] for line in mox.show().split("\n")]
    assert lines[1:3] == ["96 parameters", "72 parameters"]
    assert mox.to_dot().count("queries") == 0
