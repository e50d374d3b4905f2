"""Adapters with random numbers, what the papers say that each stands for, and uses of their weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from haiku_implicit import adapters
from haiku_implicit.adapters import operators, rotated, sums
from haiku_implicit.adapters.places import Sparse
from tests.random_arrays import numpy_normal

N, M, R = 12, 8, 2


def normal(shape, seed=0):
    return jax.device_put(numpy_normal(shape, seed, 0.5))


def diagonal(lead, w):
    return sums.Sum(w, operators.Diagonal(normal((*lead, M), 1), num_rows=N))


def sparse(lead, w):
    row, column = ([0, 1, 5, 5, 11], [0, 7, 2, 2, 3])  # one place is there twice
    row, column = (jnp.broadcast_to(jnp.array(x), (*lead, 5)) for x in (row, column))
    return sums.Sum(w, Sparse(normal((*lead, 5), 1), row, column, (N, M)))


def loha(lead, w, rank=R):
    shapes = [(N, rank), (rank, M)] * 2
    parts = [normal((*lead, *shape), i) for i, shape in enumerate(shapes, 1)]
    return adapters.LoHa(w, *parts, alpha=jnp.full(lead, 3.0))


def places(lead, count):
    """Rows and columns, other ones for each matrix."""
    index = np.random.default_rng(5).permuted(np.tile(np.arange(N * M), (*lead, 1)), axis=-1)
    return jnp.asarray(index[..., :count] // M), jnp.asarray(index[..., :count] % M)


def fourier(lead, w):
    return adapters.FourierFT(w, normal((*lead, 6), 1), *places(lead, 6), jnp.full(lead, 30.0))


def randlora(lead, w, small, large, rank=3):
    shapes = [(rank, small), (large, 3 * rank), (rank, 3), (3, M)]
    parts = [normal((*lead, *shape), i) for i, shape in enumerate(shapes, 1)]
    return adapters.RandLoRA(w, *parts, jnp.full(lead, 3.0))


# Each makes an adapter of leading axes and a base.
CASES = {
    "dora": lambda lead, w: adapters.DoRA(
        w,
        normal((*lead, N, R), 1),
        normal((*lead, R, M), 2),
        1 + normal((*lead, M), 3),
        jnp.full(lead, 3.0),
    ),
    "loha": loha,
    "loha through its rank": functools.partial(loha, rank=1),
    "lokr": lambda lead, w: adapters.LoKr(
        w, normal((*lead, 3, 2), 1), normal((*lead, 4, 4), 2), jnp.full(lead, 3.0)
    ),
    "lokr of low rank": lambda lead, w: adapters.LoKr(
        w, normal((*lead, 3, 2), 1), (normal((*lead, 4, 2), 2), normal((*lead, 2, 4), 3))
    ),
    "vera": lambda lead, w: adapters.VeRA(
        w,
        normal((*lead, N, R), 1),
        normal((*lead, R, M), 2),
        normal((*lead, R), 3),
        normal((*lead, M), 4),
    ),
    "ia3": lambda lead, w: adapters.IA3(w, 1 + normal((*lead, M), 1)),
    "ia3 of inputs": lambda lead, w: adapters.IA3(w, 1 + normal((*lead, N), 1), -2),
    "oft": lambda lead, w: adapters.OFT(w, normal((*lead, 3, 6), 1)),
    "diagonal": diagonal,
    "sparse": sparse,
    "vera of a larger pair": lambda lead, w: adapters.VeRA(
        w,
        normal((*lead, N + 3, R), 1),
        normal((*lead, R, M + 5), 2),
        normal((*lead, R), 3),
        normal((*lead, M), 4),
    ),
    "boft": lambda lead, w: adapters.BOFT(
        w, normal((*lead, 2, 6, 1), 1), 1 + normal((*lead, M), 2)
    ),
    "boft of halves": lambda lead, w: adapters.BOFT(
        w, normal((*lead, 2, 2, 15), 1), 1 + normal((*lead, M), 2)
    ),
    "vblora": lambda lead, w: adapters.VBLoRA(
        w,
        normal((*lead, N // 4, R, 5), 1),
        normal((*lead, R, M // 4, 5), 2),
        normal((*lead, 5, 4), 3),
    ),
    "fourierft": fourier,
    "shira": lambda lead, w: adapters.SHiRA(w, normal((*lead, 7), 1), *places(lead, 7)),
    "low rank and diagonal": lambda lead, w: adapters.LowRankDiagonal(
        w,
        normal((*lead, N, R), 1),
        normal((*lead, R, M), 2),
        normal((*lead, M), 3),
        jnp.full(lead, 3.0),
    ),
    "trained rows": lambda lead, w: adapters.TrainedRows(
        w, normal((*lead, 2, M), 1), jnp.broadcast_to(jnp.array([3, 11]), (*lead, 2))
    ),
    "locon": lambda lead, w: adapters.LoCon(
        w, normal((*lead, N, R), 1), normal((*lead, R, M), 2), jnp.full(lead, 3.0)
    ),
    "miss": lambda lead, w: adapters.MiSS(w, normal((*lead, 3, M), 1)),
    "miss with a rest": lambda lead, w: adapters.MiSS(w, normal((*lead, 5, M), 1)),
    "hira": lambda lead, w: adapters.HiRA(w, normal((*lead, N, R), 1), normal((*lead, R, M), 2)),
    "c3a": lambda lead, w: adapters.C3A(w, normal((*lead, N // 4, M // 4, 4), 1)),
    "gralora": lambda lead, w: adapters.GraLoRA(
        w,
        normal((*lead, 2, N // 2, 4), 1),
        normal((*lead, 2, 4, M // 2), 2),
        jnp.full(lead, 3.0),
    ),
    "randlora": lambda lead, w: randlora(lead, w, M, N),
    "randlora of a larger pair": lambda lead, w: randlora(lead, w, M + 3, N + 5),
    "butterfly": lambda lead, w: rotated.Rotated(
        w, operators.BlockDiagonal(normal((*lead, 6, 2, 2), 1), stride=3)
    ),
}


def cayley(upper, size):
    q = np.zeros((size, size))
    q[np.triu_indices(size, 1)] = upper
    q -= q.T
    block = (np.eye(size) + q) @ np.linalg.inv(np.eye(size) - q)
    np.testing.assert_allclose(block @ block.T, np.eye(size), atol=1e-12)
    return block


def mixed(w, logits):
    """Rows of VB-LoRA: the mean of the vectors with the two largest logits."""
    rows = []
    for one in logits:
        first = np.argsort(-one)[: w.top_k]
        weights = np.exp(one[first]) / np.exp(one[first]).sum()
        rows.append(weights @ np.asarray(w.bank, np.float64)[first])
    return np.stack(rows)


def definition(w):
    """The dense matrix by what the papers say, with NumPy, for one matrix."""
    base = np.array(hki.materialize(w.w), np.float64)
    f = lambda x: np.asarray(x, np.float64)  # noqa: E731
    match w:
        case adapters.DoRA():
            v = base + f(w.alpha) / R * f(w.a) @ f(w.b)
            return v * f(w.magnitude) / np.linalg.norm(v, axis=0)
        case adapters.LoHa():
            scale = f(w.alpha) / w.a1.shape[-1]
            return base + scale * (f(w.a1) @ f(w.b1)) * (f(w.a2) @ f(w.b2))
        case adapters.LoKr():
            d = f(w.d[0]) @ f(w.d[1]) if isinstance(w.d, tuple) else f(w.d)
            return base + (1 if w.scale is None else f(w.scale)) * np.kron(f(w.c), d)
        case adapters.VeRA():
            return base + (f(w.a)[:N] * f(w.d)) @ (f(w.b)[:, :M] * f(w.e))
        case adapters.MiSS():
            return base + f(w.block)[np.arange(N) % w.block.shape[0]]
        case adapters.HiRA():
            return base * (1 + f(w.a) @ f(w.b))
        case adapters.C3A():
            (p, q, size), kernel = w.kernel.shape, f(w.kernel)
            turned = (np.arange(size)[:, None] - np.arange(size)) % size
            return base + np.block([[kernel[i, j][turned] for j in range(q)] for i in range(p)]) / N
        case adapters.GraLoRA():
            a, b = f(w.a).reshape(2, N // 2, 2, 2), f(w.b).reshape(2, 2, 2, M // 2)
            blocks = [[a[i, :, j] @ b[j, i] for j in range(2)] for i in range(2)]
            return base + f(w.alpha) / 4 * np.block(blocks)
        case adapters.RandLoRA():
            rank, count = w.rows.shape
            a, b = f(w.a)[:, :M], f(w.b)[:N].reshape(-1, 1, count * rank)[..., : count * rank]
            pairs = [(r, k) for r in range(rank) for k in range(count)]
            scaled = [f(w.rows)[r, k] * a[r] * f(w.columns)[k] for r, k in pairs]
            return base + f(w.alpha) / rank * b[:, 0] @ np.stack(scaled)
        case adapters.BOFT():
            count, size = w.upper.shape[-2], N // w.upper.shape[-2]
            rotation = np.eye(N)
            for i, upper in enumerate(f(w.upper)):
                # Block `d` of the factor `i` has the halves `d` and `d + 2^i` of a stretch.
                factor, half = np.zeros((N, N)), size // 2
                for block in range(count):
                    stretch, d = divmod(block, 2**i)
                    units = [(stretch * 2 + e) * 2**i + d for e in range(2)]
                    own = [u * half + j for u in units for j in range(half)]
                    factor[np.ix_(own, own)] = cayley(upper[block], size)
                rotation = factor @ rotation
            np.testing.assert_allclose(rotation @ rotation.T, np.eye(N), atol=1e-12)
            return rotation @ base * f(w.scale)
        case adapters.VBLoRA():
            a = np.concatenate([mixed(w, of).T for of in f(w.of_a)], 0)
            b = np.concatenate([mixed(w, of) for of in f(w.of_b).swapaxes(0, 1)], 1)
            return base + a @ b
        case adapters.FourierFT():
            spectrum = np.zeros((N, M))
            spectrum[np.asarray(w.row), np.asarray(w.column)] = f(w.values)
            return base + f(w.scale) * np.fft.ifft2(spectrum).real
        case adapters.SHiRA():
            base[np.asarray(w.row), np.asarray(w.column)] += f(w.values)
            return base
        case adapters.LowRankDiagonal():
            low = f(w.alpha) / R * f(w.a) @ f(w.b)
            return base + low + np.eye(N, M) * f(w.values)
        case adapters.TrainedRows():
            base[np.asarray(w.ids)] = f(w.rows)
            return base
        case adapters.LoCon():
            return base + f(w.alpha) / R * f(w.a) @ f(w.b)
        case adapters.IA3():
            return base * (f(w.factor) if w.axis == -1 else f(w.factor)[:, None])
        case adapters.OFT():
            blocks = [cayley(upper, 4) for upper in f(w.upper)]
            return np.block([[blocks[i] * (i == j) for j in range(3)] for i in range(3)]) @ base
        case rotated.Rotated():
            r = np.zeros((N, N))
            for block in range(6):  # the indices of a block are `stride` apart
                i, k = divmod(block, 3)
                own = [(i * 2 + j) * 3 + k for j in range(2)]
                r[np.ix_(own, own)] = f(w.rotation.blocks[block])
            return r @ base
        case sums.Sum(delta=operators.Diagonal()):
            return base + np.eye(N, M) * f(w.delta.values)
        case sums.Sum():
            delta = np.zeros((N, M))
            np.add.at(
                delta, (np.asarray(w.delta.row), np.asarray(w.delta.column)), f(w.delta.values)
            )
            return base + delta


# --- by options, on each kind of weight ----------------------------------------------------------

METHODS = {
    "lora": dict(rank=2, alpha=4.0),
    "dora": dict(rank=2, alpha=4.0),
    "loha": dict(rank=2),
    "lokr": dict(rank=2),
    "vera": dict(rank=2),
    "vblora": dict(rank=2, num_vectors=6, vector_length=4),
    "ia3": dict(),
    "oft": dict(block_size=4),
    "boft": dict(block_size=4, factors=2),
    "fourierft": dict(coefficients=6),
    "shira": dict(entries=7),
    "low_rank_diagonal": dict(rank=2),
    "trained_rows": dict(ids=[1, 3]),
    "locon": dict(rank=2),
    "miss": dict(rank=2),
    "hira": dict(rank=2),
    "c3a": dict(block_size=4),
    "gralora": dict(rank=4, blocks=2),
    "randlora": dict(rank=3),
}
BASES = {
    "dense": None,
    "int8": dict(dtype="int8"),
    "int4 groups": dict(dtype="int4", group_size=4),
    "nf4": dict(dtype="nf4"),
}


X = normal((5, 16), 8)
SIZES = jnp.array([2, 0, 3], jnp.int32)
# The shape of a weight, which of its axes make a matrix, and what a model does with it.
USES = {
    "matrix": ((16, 8), None, lambda w: X @ w),
    "attention": ((16, 2, 4), ([-3], [-2, -1]), lambda w: jnp.einsum("ba,ahc->bhc", X, w)),
    "out of attention": (
        (4, 4, 8),
        ([-3, -2], [-1]),
        lambda w: jnp.einsum("bhc,hcm->bm", X.reshape(5, 4, 4), w),
    ),
    "embedding": ((16, 8), None, lambda w: w[jnp.array([[1, 0], [3, 15]])]),
    "tied": ((16, 8), None, lambda w: w[jnp.array([1, 0, 3])] @ w.T),
    "layers": (
        (3, 16, 16),
        None,
        lambda w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), X, w)[0],
    ),
    "experts": ((3, 16, 8), None, lambda w: jnp.einsum("ebn,enm->ebm", jnp.stack([X] * 3), w)),
    "routed experts": ((3, 16, 8), None, lambda w: jax.lax.ragged_dot(X, w, SIZES)),
}


def adapted(method, use, base):
    """A weight with an adapter of random numbers, in a tree."""
    shape, axes, _ = USES[use]
    params = {"layer": {"w": normal(shape)}}
    given = {"layer/w": axes} if axes else None
    if BASES[base]:
        params = hki.quantize_params(params, matrix_axes=given, **BASES[base])
        given = None
    options = dict(METHODS[method])
    if method == "locon" and not axes:
        options["kernel_ndim"] = 2  # no window
    params = hki.add_adapter(params, 0, method, targets="layer/w", matrix_axes=given, **options)
    trained, frozen = hki.partition(params, trainable_dense=False)
    leaves, treedef = jax.tree.flatten(trained)
    moved = [x + 0.3 * normal(x.shape, i) for i, x in enumerate(leaves)]
    return treedef.unflatten(moved), frozen
