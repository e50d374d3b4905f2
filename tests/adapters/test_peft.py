"""Adapters against PEFT's: outputs and gradients from the same numbers."""

import functools
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit import adapters
from tests.tiers import few

FILE = pathlib.Path(__file__).resolve().parents[1] / "data" / "peft.npz"


@functools.cache
def golden():
    """The arrays of each method, by name."""
    methods = {}
    with np.load(FILE) as file:
        for name in file:
            method, _, own = name.partition("/")
            methods.setdefault(method, {})[own] = file[name]
    return methods


def upper(skewed):
    """What `OFT` holds of PEFT's blocks. PEFT rotates by `(1 - q)(1 + q)^-1`."""
    rows, columns = np.triu_indices(skewed.shape[-1], 1)
    return -(skewed - skewed.swapaxes(-1, -2))[..., rows, columns] / 2


def lokr(w, p, g):
    d = p["w2"].T if "w2" in p else (p["w2_b"].T, p["w2_a"].T)
    return adapters.LoKr(w, p["w1"].T, d, jnp.float32(3.0 if "w2_a" in p else 1.5))


# Each makes our type of the weight `[inputs, outputs]`, PEFT's trained arrays and the others.
METHODS = {
    "lora": lambda w, p, g: hki.LoRA(w, p["lora_A"].T, p["lora_B"].T, 3.0),
    "rslora": lambda w, p, g: hki.add_lora(
        {"m": {"w": w}}, 0, rank=2, alpha=3.0, rank_stabilized=True
    )["m"]["w"]._replace(a=p["lora_A"].T, b=p["lora_B"].T),
    "dora": lambda w, p, g: adapters.DoRA(
        w, p["lora_A"].T, p["lora_B"].T, p["lora_magnitude_vector"], jnp.float32(3.0)
    ),
    "loha": lambda w, p, g: adapters.LoHa(
        w, p["w1_b"].T, p["w1_a"].T, p["w2_b"].T, p["w2_a"].T, jnp.float32(3.0)
    ),
    "lokr": lokr,
    "lokr dense": lokr,
    "vera": lambda w, p, g: adapters.VeRA(
        w, g["vera_A"].T, g["vera_B"].T, p["lambda_d"], p["lambda_b"]
    ),
    "vblora": lambda w, p, g: adapters.VBLoRA(
        w, p["logits_A"].swapaxes(0, 1), p["logits_B"].swapaxes(0, 1), p["vector_bank"]
    ),
    "ia3": lambda w, p, g: adapters.IA3(w, p["ia3_l"].reshape(-1)),
    "ia3 inputs": lambda w, p, g: adapters.IA3(w, p["ia3_l"].reshape(-1), -2),
    "oft": lambda w, p, g: adapters.OFT(w, -p["oft_R"]),
    "boft": lambda w, p, g: adapters.BOFT(w, upper(p["boft_R"]), p["boft_s"][:, 0]),
    "fourierft": lambda w, p, g: adapters.FourierFT(
        w, p["spectrum"], g["indices"][1], g["indices"][0], jnp.float32(30.0)
    ),
    "shira": lambda w, p, g: adapters.SHiRA(
        w, p["shira_weight"], *np.asarray(g["shira_indices"][::-1], np.int32)
    ),
    "miss": lambda w, p, g: adapters.MiSS(w, p["miss_block"]),
    "miss with a rest": lambda w, p, g: adapters.MiSS(w, p["miss_block"]),
    "hira": lambda w, p, g: adapters.HiRA(w, p["hira_A"].T, p["hira_B"].T),
    "c3a": lambda w, p, g: adapters.C3A(w, p["c3a_kernel"].swapaxes(0, 1)),
    "gralora": lambda w, p, g: adapters.GraLoRA(
        w, p["gralora_A"], p["gralora_B"], jnp.float32(3.0)
    ),
    "randlora": lambda w, p, g: adapters.RandLoRA(
        w,
        g["randlora_A"][:, 0],
        g["randlora_B"].reshape(12, 9),
        p["lambda"],
        p["gamma"],
        jnp.float32(4.0),
    ),
    "trained rows": lambda w, p, g: adapters.TrainedRows(w, p["delta"], jnp.array([3, 11])),
}


def short(name):
    """PEFT's name of a parameter without its module and prefix."""
    name = name.removeprefix("layer.").replace(".default", "").removesuffix(".weight")
    for prefix in (
        "hada_",
        "lokr_",
        "vera_",
        "vblora_",
        "fourierft_",
        "randlora_",
        "trainable_tokens_",
    ):
        name = name.removeprefix(prefix)
    return name


def arrays_of(found, kind):
    return {short(k.removeprefix(kind)): v for k, v in found.items() if k.startswith(kind)}


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1, np.abs(want).max()))


def check(found, trained, run, x):
    """The outputs, and the gradients with respect to PEFT's parameters and the inputs."""
    own = arrays_of(found, "trained/") if trained is None else trained
    assert own

    def loss(own, x):
        out = run(own, x)
        return (out * found["cotangent"]).sum(), out

    is_float = jnp.issubdtype(x.dtype, np.floating)
    compute = jax.jit(jax.grad(loss, argnums=(0, 1) if is_float else (0,), has_aux=True))
    grads, out = compute(own, x)
    close(out, found["out"])
    jax.tree.map(close, grads[0], arrays_of(found, "grad/"))
    if "grad_x" in found:
        close(grads[1], found["grad_x"])


@pytest.mark.parametrize("name", few(METHODS, "dora", "oft", "vblora"))
def test_method(name, never_dense):
    found = golden()[name]
    embedding = name == "trained rows"
    w = jnp.asarray(found["weight"] if embedding else found["weight"].T)
    product = (lambda x, w: w[x]) if embedding else (lambda x, w: x @ w)

    def run(own, x):
        return hki.use_implicit_args(product)(x, METHODS[name](w, own, found))

    check(found, None, run, jnp.asarray(found["x"]))


CONVOLUTIONS = {
    "conv1d": dict(window_strides=(2,), padding=[(1, 1)]),
    "conv2d": dict(window_strides=(1, 1), padding="SAME"),
    "conv3d": dict(window_strides=(1, 2, 1), padding="VALID"),
}


@pytest.mark.parametrize("name", few(CONVOLUTIONS, "conv2d"))
def test_convolution(name, never_dense):
    found = golden()[name]
    spatial = "DHW"[-(found["x"].ndim - 2) :]
    numbers = ("NC" + spatial, spatial + "IO", "NC" + spatial)
    kernel = lambda k: jnp.moveaxis(k, (0, 1), (-1, -2))  # noqa: E731

    def run(own, x):
        b = own["lora_B"].reshape(own["lora_B"].shape[:2]).T
        w = adapters.LoCon(kernel(found["weight"]), kernel(own["lora_A"]), b, jnp.float32(3.0))
        options = dict(CONVOLUTIONS[name], dimension_numbers=numbers)
        return hki.use_implicit_args(lambda x, w: jax.lax.conv_general_dilated(x, w, **options))(
            x, w
        )

    check(found, None, run, jnp.asarray(found["x"]))


@pytest.mark.slow
@pytest.mark.parametrize("factors, size", few([(2, 2), (2, 6), (1, 4)], (2, 2)))
def test_butterfly(factors, size):
    found = golden()[f"butterfly {factors} {size}"]
    blocks = upper(found["blocks"])
    w = adapters.BOFT(jnp.eye(12), blocks, jnp.ones(12))
    close(hki.materialize(w), found["rotation"])


def test_layer_norm():
    found = golden()["layer norm"]
    model = hk.without_apply_rng(
        hk.transform(lambda x: hk.LayerNorm(-1, True, True, name="norm")(x) @ hk.get_parameter(
            "w", (12, 12), init=lambda *_: jnp.eye(12)
        ))
    )  # fmt: skip
    params = model.init(None, found["x"])
    trained = arrays_of(found, "trained/")
    names = {"ln_tuning_layers": "scale", "ln_tuning_layers.bias": "offset"}
    assert set(trained) == set(names)
    params["norm"] = {names[k]: v for k, v in trained.items()}
    mine, frozen = hki.partition(params, hki.LAYER_NORMS)
    assert mine["~"]["w"] is None
    loss = lambda t, x: (model.apply(hki.combine(t, frozen), x) * found["cotangent"]).sum()  # noqa: E731
    grads = jax.grad(loss)(mine, found["x"])
    close(model.apply(params, found["x"]), found["out"])
    for name, own in names.items():
        close(grads["norm"][own], arrays_of(found, "grad/")[name])
