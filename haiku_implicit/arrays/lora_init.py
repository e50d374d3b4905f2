"""Initializations of LoRA: from the weight, from its inputs, or with its quantization."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from haiku_implicit.arrays import drawing
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized.matrix import QuantizedMatrix

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


class Parts(NamedTuple):
    """The fields of a LoRA: `w + scale * a @ b` is the weight that it is put on."""

    w: Array
    a: jax.Array
    b: jax.Array


class LoRAInit(abc.ABC):
    """An initialization of LoRA: the factors, and the weight to be added to their product."""

    def of_weight(self, path: str) -> "LoRAInit":
        """The initialization of the weight with a path, `module/name`."""
        return self

    @abc.abstractmethod
    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        """The fields of a LoRA for a weight `[..., n, m]`.

        Args:
          w: the weight, dense or implicit.
          rank: the rank of the correction.
          scale: the correction is `scale * a @ b`.
          key: a random key.
        """


@dataclasses.dataclass(frozen=True)
class Drawn(LoRAInit):
    """LoRA whose `a` is drawn and whose `b` is zero.

    Attributes:
      draw: called as `draw(key, shape, dtype)` with the shape of `a`, `[..., n, r]`.
    """

    draw: Initializer

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        *lead, n, m = w.shape
        a = self.draw(key, (*lead, n, rank), w.dtype)
        return Parts(w, a, drawing.zeros((*lead, rank, m), w.dtype))


def gaussian(key: jax.Array, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    """Draws from a normal distribution of standard deviation `1 / rank`, as PEFT's 'gaussian' does."""
    return drawing.drawn(lambda *args: jax.random.normal(*args) / shape[-1], key, shape, dtype)


class Orthogonal(LoRAInit):
    """LoRA with factors in orthogonal halves of the rank: neither is zero, but their product is.

    It is PEFT's 'orthogonal' (https://datta0.github.io/posts/rethink-lora-init). The rank is even.
    """

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        if rank % 2:
            raise value_error(f"init: 'orthogonal' needs an even rank, got {rank}")
        *lead, n, m = w.shape
        keys = jax.random.split(key, 3)
        q, _ = jnp.linalg.qr(jax.random.normal(keys[0], (*lead, rank, rank)))
        a = jax.random.normal(keys[1], (*lead, n, rank // 2)) @ q[..., ::2, :] / 10
        b = jax.random.normal(keys[2], (*lead, m, rank // 2)) @ q[..., 1::2, :] / 10
        return Parts(w, a.astype(w.dtype), jnp.swapaxes(b, -1, -2).astype(w.dtype))


class PiSSA(LoRAInit):
    """LoRA whose factors hold the largest singular values; the weight holds the rest.

    After Meng et al. 2024, arXiv:2404.02948.
    """

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        w = _dense("pissa", w)
        return _with_rest(w, *truncated(w, rank, scale), scale)


class OLoRA(LoRAInit):
    """LoRA with the first columns and rows of a QR decomposition (arXiv:2406.01775).

    As in the paper, it decomposes the weight `[outputs, inputs]`: `b` is orthonormal.
    """

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        w = _dense("olora", w)
        q, r = jnp.linalg.qr(jnp.swapaxes(w, -1, -2).astype(jnp.float32))
        a, b = (jnp.swapaxes(x, -1, -2) for x in (r[..., :rank, :], q[..., :rank]))
        return _with_rest(w, a, b, scale)


@dataclasses.dataclass(frozen=True)
class FromData(LoRAInit):
    """An initialization from an array of each weight, which a calibration batch gives.

    Attributes:
      path: the path of the weight, which `add_lora` and `add_adapter` give.
    """

    path: str = dataclasses.field(default="", kw_only=True)

    def of_weight(self, path: str) -> Self:
        return dataclasses.replace(self, path=path)

    def _found(self, name: str, data: Mapping[str, Any], shape: tuple[int, ...]) -> jax.Array:
        """The weight's own array, float32; raises if it is missing or of another shape.

        Args:
          name: the name of the data, for errors.
          data: arrays by the paths of weights, `module/name`, or in the nesting of the parameters.
          shape: the expected shape.
        """
        own, kind = _by_path(data, self.path), type(self).__name__
        if own is None:
            raise value_error(f"init: {kind} has no {name} of {self.path}, only of {[*data]}")
        if own.shape != shape:
            raise value_error(
                f"init: expected {name} {[*shape]} of {self.path}, got {list(own.shape)}"
            )
        return jnp.asarray(own, jnp.float32)


def _by_path(tree: Any, path: str) -> Any:
    """The entry of nested mappings whose keys, joined by '/', are a path; None if there is none."""
    if not isinstance(tree, Mapping):
        return None
    if path in tree:
        return tree[path]
    keys = [key for key in tree if path.startswith(f"{key}/")]
    found = (_by_path(tree[key], path[len(key) + 1 :]) for key in keys)
    return next((x for x in found if x is not None), None)


@dataclasses.dataclass(frozen=True)
class EVA(FromData):
    """LoRA whose `a` holds the directions in which the inputs vary most, and whose `b` is zero.

    After Paischer et al. 2024, arXiv:2410.07170, with one rank for all weights. To vary the rank by
    weight, as the authors do, use `patterns=` of `add_adapter`.

    Attributes:
      moments: the second moments of the inputs, `[..., n, n]`, by the paths of the weights, as
        `input_moments` returns them.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> init = hki.EVA({'linear/w': jnp.diag(jnp.array([1.0, 9.0]))})
      >>> params = hki.add_lora({'linear': {'w': jnp.ones((2, 3))}}, 0, rank=1, init=init)
      >>> print(abs(params['linear']['w'].a).T)
      [[0. 1.]]
    """

    moments: Mapping[str, Any]

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        *lead, n, m = w.shape
        moments = self._found("moments", self.moments, (*lead, n, n))
        _, vectors = jnp.linalg.eigh(moments)  # the largest come last
        a = vectors[..., ::-1][..., :rank].astype(w.dtype)
        return Parts(w, a, drawing.zeros((*lead, rank, m), w.dtype))


@dataclasses.dataclass(frozen=True)
class CorDA(FromData):
    """LoRA with the components of the weight that matter most for its inputs.

    After Yang et al. 2024, arXiv:2406.05223. `c` is the second moment of the inputs, divided by the
    mean of its diagonal, plus `damping` times the identity. With the singular value decomposition
    `c @ w = u s v`, the weight is `(c⁻¹ u) s v`. LoRA gets `rank` components, and the weight holds the
    rest.

    Attributes:
      moments: the second moments of the inputs, as for `EVA`.
      preserve: whether LoRA gets the components of the least singular values, so that training changes
        little on these inputs (the paper's knowledge-preserved mode). By default it gets the largest.
      damping: the share of the identity in `c`; the default is PEFT's.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> init = hki.CorDA({'linear/w': jnp.diag(jnp.array([1.0, 9.0]))})
      >>> params = hki.add_lora({'linear': {'w': jnp.eye(2)}}, 0, rank=1, init=init)
      >>> print(params['linear']['w'].w.round(3))
      [[1. 0.]
       [0. 0.]]
    """

    moments: Mapping[str, Any]
    preserve: bool = False
    damping: float = 0.01

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        _check_scale(scale)
        w = _dense("CorDA", w)
        *lead, n, _ = w.shape
        c = self._found("moments", self.moments, (*lead, n, n))
        c /= jnp.trace(c, axis1=-2, axis2=-1)[..., None, None] / n
        c += self.damping * jnp.eye(n)
        u, s, v = jnp.linalg.svd(
            jnp.matmul(c, w.astype(jnp.float32), precision="highest"), full_matrices=False
        )
        own = slice(-rank, None) if self.preserve else slice(rank)
        root = jnp.sqrt(s[..., own] / scale)
        a = jnp.linalg.solve(c, u[..., own]) * root[..., None, :]
        return _with_rest(w, a, root[..., None] * v[..., own, :], scale)


@dataclasses.dataclass(frozen=True)
class LoRAGA(FromData):
    """LoRA whose first step of gradient descent is nearest to a step of the whole weight.

    After Wang et al. 2024, arXiv:2407.05000: `a` has the first `rank` left singular vectors of the
    gradient, `b` the next `rank` right ones, both times `m^(1/4) / gamma^(1/2)`, and the weight is what
    remains. The first step then changes the product along the gradient's `2 * rank` largest components.

    Attributes:
      gradients: the gradients of the weights in the nesting of the parameters, as `jax.grad` returns
        them.
      gamma: a smaller one makes larger factors; the default is the paper's.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.eye(4)}}
      >>> grads = jax.grad(lambda p: (jnp.diag(jnp.arange(4.0)) * p['linear']['w']).sum())(params)
      >>> lora = hki.add_lora(params, 0, rank=1, init=hki.LoRAGA(grads))['linear']['w']
      >>> print(abs(lora.a).T.round(3), abs(lora.b).round(3))
      [[0.    0.    0.    0.354]] [[0.    0.    0.354 0.   ]]
    """

    gradients: Mapping[str, Any]
    gamma: float = 16.0

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        w = _dense("LoRAGA", w)
        if 2 * rank > min(w.shape[-2:]):
            raise value_error(
                f"init: LoRAGA needs twice the rank, {2 * rank}, of singular values; a weight "
                f"{list(w.shape)} has {min(w.shape[-2:])}"
            )
        u, _, v = jnp.linalg.svd(
            self._found("gradient", self.gradients, w.shape), full_matrices=False
        )
        size = w.shape[-1] ** 0.25 / self.gamma**0.5
        return _with_rest(w, size * u[..., :rank], size * v[..., rank : 2 * rank, :], scale)


@dataclasses.dataclass(frozen=True)
class LoftQ(LoRAInit):
    """LoRA on a quantized weight, whose factors make up for the error (arXiv:2310.08659).

    Quantizing and decomposing take turns: `q = quantize(w - ab)`, `ab ≈ w - q`. For each matrix the
    turn with the least error is kept, since with few bits the error may also grow.

    Attributes:
      dtype, group_size, zero_point: as for `QuantizedMatrix.quantize`.
      iterations: the number of turns.

    Example:
      >>> import jax, haiku_implicit as hki
      >>> w = jax.random.normal(jax.random.key(0), (64, 32))
      >>> new = hki.add_lora({'linear': {'w': w}}, 0, rank=8, init=hki.LoftQ('int2', iterations=5))
      >>> new['linear']['w'].w.format
      'int2'
    """

    dtype: str = "nf4"
    group_size: int | None = None
    zero_point: bool = False
    iterations: int = 1

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise value_error(f"iterations: expected 1 or more, got {self.iterations}")

    def parts(self, w: Array, rank: int, scale: float, key: jax.Array) -> Parts:
        rest = w = _dense("LoftQ", w)
        best, least = None, jnp.full(w.shape[:-2], jnp.inf)
        for _ in range(self.iterations):
            q = QuantizedMatrix.quantize(
                rest, self.dtype, group_size=self.group_size, zero_point=self.zero_point
            )
            lost = w - q.materialize()
            a, b = (x.astype(w.dtype) for x in truncated(lost, rank, scale))
            correction = (scale * (a @ b)).astype(w.dtype)
            rest, found = w - correction, Parts(q, a, b)
            error = jnp.square((lost - correction).astype(jnp.float32)).sum((-2, -1))
            best = found if best is None else _choose(error < least, found, best)
            least = jnp.minimum(error, least)
        assert best is not None  # there is at least one turn
        return best


BY_NAME: dict[str, LoRAInit] = {
    "gaussian": Drawn(gaussian),
    "olora": OLoRA(),
    "orthogonal": Orthogonal(),
    "pissa": PiSSA(),
}


def init_of(init: LoRAInit | Initializer | str | None) -> LoRAInit:
    """The initialization for an argument `init=`; None draws `a` uniformly.

    Raises:
      ValueError: for an unknown name.
    """
    if isinstance(init, str):
        if init not in BY_NAME:
            raise value_error(
                f"init: expected a function or one of {sorted(BY_NAME)}, got {init!r}"
            )
        return BY_NAME[init]
    return init if isinstance(init, LoRAInit) else Drawn(init or drawing.uniform)


def truncated(w: jax.Array, rank: int, scale: float) -> tuple[jax.Array, jax.Array]:
    """`a` and `b`, float32, so that `scale * a @ b` has the largest singular values of `w`."""
    _check_scale(scale)
    u, s, v = jnp.linalg.svd(w.astype(jnp.float32), full_matrices=False)
    root = jnp.sqrt(s[..., :rank] / scale)
    return u[..., :rank] * root[..., None, :], root[..., None] * v[..., :rank, :]


def _check_scale(scale: float) -> None:
    if scale <= 0:
        raise value_error(
            f"alpha: expected a positive number for this init, got a scale of {scale}"
        )


def _choose(condition: jax.Array, new: Array, old: Array) -> Array:
    """Selects each matrix from `new` if its condition is true and from `old` otherwise."""

    def of_leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(condition, range(condition.ndim, x.ndim)), x, y)

    return jax.tree.map(of_leaf, new, old)


def _with_rest(w: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> Parts:
    """The factors, and the weight minus their product, which absorbs their rounding errors."""
    a, b = a.astype(w.dtype), b.astype(w.dtype)
    correction = scale * jnp.matmul(
        a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return Parts((w.astype(jnp.float32) - correction).astype(w.dtype), a, b)


def _dense(name: str, w: Array) -> jax.Array:
    if is_implicit(w):
        raise value_error(
            f"init: {name} decomposes a dense weight, and this one is {w!r}; put LoRA on the dense "
            "weight, and quantize what is left of it with quantize_params"
        )
    return jnp.asarray(w)
