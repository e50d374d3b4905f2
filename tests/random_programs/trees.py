"""Random implicit arrays in place of dense parameters, nested to a depth of three."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from haiku_implicit import ImplicitArray
from haiku_implicit.adapters import Rotated
from tests.cases import Diagonal, Nought, Outer

ADAPTERS: dict[str, dict[str, Any]] = {
    **{
        method: {"rank": 2}
        for method in (
            "dora",
            "hira",
            "locon",
            "loha",
            "lokr",
            "low_rank_diagonal",
            "miss",
            "randlora",
            "vera",
        )
    },
    "c3a": {"block_size": 2},
    "gralora": {"rank": 2, "blocks": 2},
    "vblora": {"rank": 2, "vector_length": 2, "num_vectors": 4, "top_k": 2},
    "ia3": {},
    "oft": {"block_size": 3},
    "boft": {"block_size": 2},
    "shira": {"entries": 4},
    "fourierft": {"coefficients": 4},
    "trained_rows": {"ids": [0, 2]},
}
# Half of the quantized weights have one of the first three formats. (Others have groups that are too long.)
COMMON = ["int8", "int4", "nf4"]
FORMATS = [
    *(
        "int7",
        "int6",
        "int5",
        "int3",
        "int2",
        "ternary",
        "binary",
        "uint8",
        "uint4",
        "uint3",
        "uint1",
    ),
    *("iq4_nl", "fp4", "fp8_e4m3", "fp8_e5m2"),
]
Values = np.random.Generator


def draw_tree(rng: random.Random, structs: Any) -> Any:
    """Parameters of the shapes of `structs`, some implicit.

    Args:
      rng: what kinds are drawn with; values are drawn from a seed of it.
      structs: dictionaries of modules, of names, with `jax.ShapeDtypeStruct`.
    """
    values = np.random.default_rng(rng.randrange(2**32))
    return {
        module: {name: draw_array(rng, values, struct.shape, 3) for name, struct in names.items()}
        for module, names in structs.items()
    }


def numbers(values: Values, shape: tuple[int, ...]) -> Any:
    return jnp.asarray(values.normal(scale=0.4, size=shape), jnp.float32)


def draw_array(rng: random.Random, values: Values, shape: tuple[int, ...], depth: int) -> Any:
    """An array of a shape: dense, or implicit with implicit ones in it up to `depth`."""
    kinds = [kind for kind, (fits, _) in KINDS.items() if fits(shape)]
    if depth == 0 or not kinds or rng.random() < 0.25:
        return numbers(values, shape)
    _, make = KINDS[rng.choices(kinds, [WEIGHTS.get(kind, 1) for kind in kinds])[0]]
    inner = lambda shape: draw_array(rng, values, tuple(shape), depth - 1)  # noqa: E731
    return make(rng, values, shape, inner)


def _lora(rng, values, shape, inner):
    *lead, n, m = shape
    rank = rng.randint(1, 3)
    a, b = numbers(values, (*lead, n, rank)), numbers(values, (*lead, rank, m))
    return hki.LoRA(inner(shape), a, b, alpha=rng.choice([None, 1.0, 3.0]))


def _quantized(rng, values, shape, inner):
    dtype, axis = rng.choice(rng.choice([COMMON, FORMATS])), rng.choice([-2, -1])
    groups = [g for g in range(1, shape[axis] + 1) if shape[axis] % g == 0]
    group, zero_point = rng.choice([None, *groups]), rng.random() < 0.3
    try:
        return hki.QuantizedMatrix.quantize(numbers(values, shape), dtype, group, axis, zero_point)
    except ValueError:  # the format has other groups, or no zero point
        return numbers(values, shape)


def _trellis(rng, values, shape, inner):
    return hki.TrellisMatrix.encode(numbers(values, shape), rng.choice([2, 3, 4]))


def _rotated(rng, values, shape, inner):
    make = rng.choice([_quantized, _trellis])
    return Rotated.quantize(numbers(values, shape), lambda w, _: make(rng, values, w.shape, inner))


def _fake(rng, values, shape, inner):
    return hki.FakeQuantized(numbers(values, shape), (("dtype", rng.choice(COMMON)),))


def _scaled(rng, values, shape, inner):
    w = _quantized(rng, values, shape, inner)
    return hki.ScaledMatrix(w, numbers(values, shape[:-1])) if isinstance(w, ImplicitArray) else w


def _view(rng, values, shape, inner):
    cut = rng.randint(1, len(shape) - 1)
    inputs, outputs = range(-len(shape), cut - len(shape)), range(cut - len(shape), 0)
    if rng.random() < 0.5:
        inputs, outputs = outputs, inputs
    make = lambda matrix: inner(matrix.shape)  # noqa: E731
    return hki.MatrixView.of(numbers(values, shape), list(inputs), list(outputs), make)


def _repeated(rng, values, shape, inner):
    axis = rng.choice([i for i, n in enumerate(shape) if n % 2 == 0])
    times = rng.choice([t for t in (2, 3) if shape[axis] % t == 0])
    part = [n // times if i == axis else n for i, n in enumerate(shape)]
    return hki.Repeated(inner(part), axis - len(shape), times)


def _concatenated(rng, values, shape, inner):
    axis = rng.choice([i for i, n in enumerate(shape) if n > 1])
    cut = rng.randint(1, shape[axis] - 1)
    part = lambda n: inner([n if i == axis else k for i, k in enumerate(shape)])  # noqa: E731
    return hki.Concatenated((part(cut), part(shape[axis] - cut)), axis - len(shape))


def _adapter(rng, values, shape, inner):
    params, method = {"m": {"w": inner(shape)}}, rng.choice(list(ADAPTERS))
    options = ADAPTERS[method]
    with warnings.catch_warnings():  # of adapters that are larger than such a small weight
        warnings.simplefilter("ignore")
        try:
            params = hki.add_adapter(params, rng.randrange(2**16), method, targets="m/w", **options)
        except ValueError:  # the shape is not one for this method
            return params["m"]["w"]
    return _moved(values, params["m"]["w"])


def _moved(values: Values, x: Any) -> Any:
    """With other numbers in the trained arrays, since a new adapter changes nothing."""
    trained, frozen = hki.partition(x)
    moved = jax.tree.map(lambda a: a + 0.2 * numbers(values, a.shape), trained)
    return hki.combine(moved, frozen)


def _matrix(shape):
    return len(shape) >= 2 and min(shape) > 0


# How often a kind is drawn, where it is not once.
WEIGHTS = {"lora": 3, "quantized": 3, "adapter": 4, "repeated": 2, "concatenated": 2, "view": 2}
KINDS: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "lora": (_matrix, _lora),
    "quantized": (_matrix, _quantized),
    "scaled": (_matrix, _scaled),
    "trellis": (_matrix, _trellis),
    "rotated": (_matrix, _rotated),
    "fake": (_matrix, _fake),
    "adapter": (_matrix, _adapter),
    "view": (lambda shape: len(shape) >= 2, _view),
    "outer": (
        _matrix,
        lambda rng, values, shape, _: Outer(
            numbers(values, shape[:-1]), numbers(values, (*shape[:-2], shape[-1]))
        ),
    ),
    "diagonal": (
        lambda shape: len(shape) == 2 and shape[0] == shape[1],
        lambda rng, values, shape, _: Diagonal(numbers(values, shape[:1])),
    ),
    "repeated": (lambda shape: any(n % 2 == 0 for n in shape), _repeated),
    "concatenated": (lambda shape: any(n > 1 for n in shape), _concatenated),
    "zeros": (lambda shape: True, lambda rng, values, shape, _: hki.Zeros(shape=shape, dtype=jnp.float32)),
    "nought": (lambda shape: True, lambda rng, values, shape, _: Nought(shape=shape)),
    "constant": (
        lambda shape: True,
        lambda rng, values, shape, _: hki.SymbolicConstant(
            rng.choice([1.0, -0.5, 0.25]), shape=shape, dtype=jnp.float32
        ),
    ),
}  # fmt: skip
