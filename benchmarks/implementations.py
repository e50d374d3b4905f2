"""Ways to train LoRA factors on the same transformer, each as one loss of the same arrays.

Every implementation is a function that returns a new `loss(trainable, frozen, tokens)`: a new
function object each time, since JAX caches traces by function. `trainable` and `frozen`
are Haiku parameter trees, which `split` makes from the parameters of `models.LoraLinear`.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax

import haiku_implicit as hki
from benchmarks import models

Loss = Callable[[hk.Params, hk.Params, jax.Array], jax.Array]

FACTORS = ("w_a", "w_b")


def split(params: hk.Params) -> tuple[hk.Params, hk.Params]:
    """Splits parameters into the LoRA factors and all others."""
    return hk.data_structures.partition(lambda module, name, value: name in FACTORS, params)


def dense(sizes: models.Sizes) -> Loss:
    """No LoRA: the gradient is with respect to the weights. This is the cost of Haiku by itself."""
    apply = models.transformed(sizes).apply

    def loss(trainable: hk.Params, frozen: hk.Params, tokens: jax.Array) -> jax.Array:
        return models.cross_entropy(apply(_merge(frozen, trainable), tokens), tokens)

    return loss


def by_hand(sizes: models.Sizes) -> Loss:
    """LoRA written into the Haiku modules: the reference for the others."""
    apply = models.transformed(sizes, by_hand=True).apply

    def loss(trainable: hk.Params, frozen: hk.Params, tokens: jax.Array) -> jax.Array:
        return models.cross_entropy(apply(_merge(frozen, trainable), tokens), tokens)

    return loss


def library(sizes: models.Sizes) -> Loss:
    """This library: the unmodified model, with `LoRA` in its parameters."""
    apply = hki.transform_implicit(models.transformed(sizes)).apply

    def loss(trainable: hk.Params, frozen: hk.Params, tokens: jax.Array) -> jax.Array:
        return models.cross_entropy(apply(with_lora(trainable, frozen, sizes), tokens), tokens)

    return loss


def quax(sizes: models.Sizes) -> Loss:
    """quax on the same unmodified model, with a type and a rule as short as the library's own."""
    from benchmarks import quax_lora

    return _with_quax(sizes, functools.partial(quax_lora.Lora, scale=sizes.alpha / sizes.rank))


def quax_example(sizes: models.Sizes) -> Loss:
    """quax with its example LoRA type, which does not have a scale."""
    from benchmarks import quax_lora

    def adapted(w: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        return quax_lora.shipped(w, a * (sizes.alpha / sizes.rank), b)

    return _with_quax(sizes, adapted)


def _with_quax(sizes: models.Sizes, adapted: Callable[..., Any]) -> Loss:
    import quax

    apply = quax.quaxify(models.transformed(sizes).apply)

    def loss(trainable: hk.Params, frozen: hk.Params, tokens: jax.Array) -> jax.Array:
        return models.cross_entropy(apply(_adapt(trainable, frozen, adapted), tokens), tokens)

    return loss


def available() -> dict[str, Callable[[models.Sizes], Loss]]:
    """Returns the implementations by name; quax only if it is installed."""
    found = dict(dense=dense, by_hand=by_hand, library=library)
    if importlib.util.find_spec("quax") is None:
        return found
    return {**found, "quax": quax, "quax_example": quax_example}


def arguments(name: str, params: hk.Params) -> tuple[hk.Params, hk.Params]:
    """Returns an implementation's `trainable` and `frozen`, from parameters of the model by hand."""
    trainable, frozen = split(params)
    if name != "dense":
        return trainable, frozen
    return hk.data_structures.partition(
        lambda module, name, value: name == "w" and module in trainable, frozen
    )


def with_lora(trainable: hk.Params, frozen: hk.Params, sizes: models.Sizes) -> hk.Params:
    """Returns the parameters of the unmodified model, with `LoRA` for each weight that has factors."""
    return _adapt(trainable, frozen, functools.partial(hki.LoRA, alpha=sizes.alpha))


def _merge(frozen: hk.Params, trainable: hk.Params) -> hk.Params:
    return hk.data_structures.merge(frozen, trainable)


def _adapt(trainable: hk.Params, frozen: hk.Params, adapted: Callable[..., Any]) -> hk.Params:
    """Returns the parameters of the unmodified model, with `adapted(w, a, b)` for each adapted `w`."""
    params = {module: dict(values) for module, values in frozen.items()}
    for module, factors in trainable.items():
        params[module]["w"] = adapted(params[module]["w"], *(factors[name] for name in FACTORS))
    return params
