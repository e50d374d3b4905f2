"""Models with a linear layer `inner` in the body of a loop or call, and the XPath that finds it."""

import haiku as hk
import jax
import jax.numpy as jnp


def scanned(x):
    layer = hk.Linear(4, name="inner")
    return hk.scan(lambda c, _: (layer(c), None), x, None, length=3)[0]


def stacked(x):
    return hk.experimental.layer_stack(3)(lambda h: hk.Linear(4, name="inner")(h))(x)


def branches(x):
    layer = hk.Linear(4, name="inner")
    return layer(x) if hk.running_init() else hk.cond(x.sum() > 0, layer, lambda h: h, x)


def looped(x):
    layer = hk.Linear(4, name="inner")
    if hk.running_init():
        return layer(x)
    return hk.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layer(s[1])), (0, x))[1]


def checkpointed(x):
    return hk.remat(lambda h: hk.Linear(4, name="inner")(h))(x)


def with_rule(x):
    @jax.custom_vjp
    def f(w):
        return jnp.tanh(w) ** 3

    f.defvjp(lambda w: (f(w), w), lambda w, g: (g,))
    return f(hk.Linear(4, name="inner")(x))


BODIES = {
    scanned: "//scan/body//module_call",
    stacked: "//scan/body//module_call",
    branches: "//cond/body[starts-with(@name, 'branches')]/module_call",
    looped: "//while/body[@name='body_jaxpr']/module_call",
    checkpointed: "//*[@name='inner' and ancestor::body]",
    with_rule: "//custom_vjp_call/body/tanh/preceding::module_call",
}
