"""Applies techniques of a JAX tutorial to implicit arrays: axes, static arguments, keys, callbacks.

They are from "JAX Advanced Techniques" by Robert Dyro and Spencer Richards. Each is compared with
the same computation on dense arrays, or with a loop. The other techniques are in jax_control_flow.py,
remote_functions.py and torch_loss.py.

    python examples/jax_techniques.py
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import scipy.spatial
from absl import app, flags

import haiku_implicit as hki
from printing import heading, table

_BATCH = flags.DEFINE_integer("batch", 32, "Number of examples.", 2)
_SIZE = flags.DEFINE_integer("size", 256, "Rows and columns of the matrices, a multiple of 32.", 32)
_POINTS = flags.DEFINE_integer("points", 2000, "Points in the KD-tree.", 50)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    axes_of_a_problem()
    methods_with_flags()
    keys_for_a_batch()
    nearest_points()


# --- 1. vmap, with the axes found ------------------------------------------------------------------


def axes_of_a_problem() -> None:
    """Solves ridge regression by gradient descent, for a batch of targets and one quantized matrix."""
    n, batch = _SIZE.value, _BATCH.value
    keys = jax.random.split(jax.random.key(0), 3)
    matrix = jax.random.normal(keys[0], (2 * n, n)) / n**0.5
    problem = {
        "matrix": hki.QuantizedMatrix.quantize(matrix, "int8", group_size=32),
        "targets": jax.random.normal(keys[1], (batch, 2 * n)),
        "prior": hki.Zeros(shape=(n,)),  # shared by all examples
        "options": {"penalty": jnp.float32(0.1), "method": "gradient", "steps": 100},
        "start": hki.Zeros(shape=(batch, n)),  # one for each example
    }

    def solve(problem: dict[str, Any]) -> jax.Array:
        """Minimizes `|matrix x - target|² + penalty |x - prior|²` over `x` `[n]`."""
        options = problem["options"]
        assert options["method"] == "gradient"

        def step(_: Any, x: jax.Array) -> jax.Array:
            residual = problem["matrix"] @ x - problem["targets"]
            slope = residual @ problem["matrix"] + options["penalty"] * (x - problem["prior"])
            return x - 0.2 * slope

        return jax.lax.fori_loop(0, options["steps"], step, problem["start"])

    @jax.jit
    def solve_all(arrays: dict[str, Any]) -> jax.Array:
        def run(arrays: dict[str, Any]) -> jax.Array:
            whole = {**arrays, "options": {**problem["options"], **arrays["options"]}}
            # Inside the wrapped function all leaves are arrays, even the zeros, with their own axes.
            return jax.vmap(solve, (hki.auto_in_axes(whole, batch),))(whole)

        return hki.use_implicit_args(run)(arrays)

    heading("1. vmap over a problem: the axes are found by their length")
    shared = {k: v for k, v in problem.items() if k != "start"}
    rows = [
        [jax.tree_util.keystr(path, simple=True, separator="/"), kind(x), axis]
        for (path, x), axis in zip(
            jax.tree_util.tree_flatten_with_path(shared, is_leaf=is_implicit)[0],
            jax.tree.leaves(hki.auto_in_axes(shared, batch), is_leaf=lambda x: x is None),
            strict=True,
        )
    ]
    table(["leaf", "is", "in_axes"], rows)

    arrays = {**problem, "options": {"penalty": problem["options"]["penalty"]}}
    with hki.materialization_report() as report:
        solutions = solve_all(arrays)
    dense = np.asarray(hki.materialize(problem["matrix"]))
    penalty = np.float32(0.1) * np.eye(n, dtype=np.float32)
    want = np.linalg.solve(dense.T @ dense + penalty, dense.T @ np.asarray(problem["targets"]).T).T
    error = abs(solutions - want).max() / abs(want).max()
    print(
        f"{batch} solutions of {n} numbers; relative error against numpy.linalg.solve: {error:.1e}"
    )
    for event, count in report:
        print(f"made dense: {event.type_name} {list(event.shape)}, {count} x: {event.reason}")
    assert solutions.shape == (batch, n) and error < 2e-2

    try:
        hki.auto_in_axes(problem, batch)
    except ValueError as e:
        print(f"around the wrapped function, the batch of zeros is refused:\n  {str(e)[:97]} ...")
    else:
        raise AssertionError("a batch of zeros has no leaves that vmap could slice")


# --- 2. jit, with the static leaves found ----------------------------------------------------------


class Layer:
    """A layer whose flags and strings are static arguments of its compiled program."""

    def __init__(self, weight: Any, activation: str):
        self.weight, self.activation = weight, activation

    def plain(self, x: jax.Array, *, options: dict[str, Any]) -> jax.Array:
        """Maps `[batch, n]` to `[batch, n]`."""
        y = hki.use_implicit_args(jnp.dot)(x, self.weight)
        y = getattr(jax.nn, self.activation)(y)
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True) if options["normalize"] else y

    __call__ = hki.auto_jit(plain)


def methods_with_flags() -> None:
    """Calls a method with a nested flag, of an object with a string and LoRA on 4-bit weights."""
    n = _SIZE.value
    x = jax.random.normal(jax.random.key(0), (_BATCH.value, n))
    layer = Layer(lora_on_int4(jax.random.key(1), n), "relu")
    heading("2. jit of a method: flags and strings are static, implicit arrays are traced")
    rows = []

    def call(label: str, normalize: bool) -> None:
        before = Layer.__call__.cache_info().misses
        out = layer(x, options={"normalize": normalize})
        want = layer.plain(x, options={"normalize": normalize})
        np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-4)
        compiled = Layer.__call__.cache_info().misses - before
        rows.append([label, compiled, f"{abs(out - want).max():.0e}"])

    call("first call", True)
    call("same flag", True)
    call("other flag", False)
    layer.weight = lora_on_int4(jax.random.key(2), n)
    call("other weights", False)
    layer.activation = "gelu"
    call("other activation", False)
    layer.activation = "relu"
    call("back", False)
    table(["", "compiled", "difference from the plain method"], rows)
    assert [row[1] for row in rows] == [1, 0, 1, 0, 1, 0]
    try:
        layer(x, options={"normalize": True, "names": {"a", "b"}})
    except TypeError as e:
        print(f"a set is refused: {e}"[:100], "...")
    else:
        raise AssertionError("a set is neither traced nor static")


def lora_on_int4(key: jax.Array, n: int) -> hki.LoRA:
    """Returns LoRA of rank 4, `[n, n]`, on a 4-bit weight."""
    keys = jax.random.split(key, 3)
    w = jax.random.normal(keys[0], (n, n)) / n**0.5
    factors = jax.random.normal(keys[1], (n, 4)) / n**0.5, jax.random.normal(keys[2], (4, n)) / 2
    return hki.LoRA(hki.QuantizedMatrix.quantize(w, "int4", group_size=32), *factors)


# --- 3. keys for a batch ----------------------------------------------------------------------------


def keys_for_a_batch() -> None:
    """Runs dropout with each example's own key and LoRA, in an unmodified model."""
    n, batch = _SIZE.value, _BATCH.value

    def forward(x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(hk.Linear(n)(x))
        return hk.Linear(4)(hk.dropout(hk.next_rng_key(), 0.5, hidden))

    model = hki.transform_implicit(hk.transform(forward))
    params = model.init(jax.random.key(0), jnp.ones(n))

    # The tutorial's way: one key more than needed, the first of which is the new global key.
    new_keys = jax.random.split(jax.random.key(1), batch + 1)
    _, keys = new_keys[0], new_keys[1:]
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(2), (n,)), (batch, n))

    def with_factors(key: jax.Array) -> Any:
        """Returns the parameters with an example's own factors."""
        adapted = hki.add_lora(params, key, rank=2, targets="linear/w")
        weight = adapted["linear"]["w"]
        b = jax.random.normal(key, weight.b.shape) / n**0.5
        return {**adapted, "linear": {**adapted["linear"], "w": weight._replace(b=b)}}

    adapted = [with_factors(key) for key in keys]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *adapted)
    args = (stacked, keys, x)
    axes = hki.auto_in_axes(args, batch)
    run = jax.jit(jax.vmap(model.apply, axes))
    out = run(*args)
    want = jnp.stack([model.apply(p, k, row) for p, k, row in zip(adapted, keys, x, strict=True)])
    shared = jax.vmap(model.apply, (None, 0, 0))(adapted[0], keys, x)
    one_key = jax.vmap(model.apply, (None, None, 0))(adapted[0], keys[0], x)

    heading("3. keys for a batch: dropout in a Haiku model, LoRA for each example")
    spread = lambda y: f"{y.std(axis=0).mean():.4f}"  # noqa: E731
    table(
        ["one input, for all examples", "spread of the outputs"],
        [
            ["one key, one LoRA", spread(one_key)],
            ["a key for each, one LoRA", spread(shared)],
            ["a key and a LoRA for each", spread(out)],
        ],
    )
    print(f"difference from a loop over the examples: {abs(out - want).max():.1e}")
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert one_key.std(axis=0).max() < 1e-5 < shared.std(axis=0).mean()


# --- 4. pure_callback -------------------------------------------------------------------------------


class JAXKDTree:
    """SciPy's KD-tree for use in JAX: under `jit`, `vmap` and `grad` (of distances).

    Args:
      data: `[points, dim]`.
      n_return: the number of neighbors that `query_ball_point` returns, padded with -1.
    """

    def __init__(self, data: jax.Array, n_return: int = 10):
        self.tree, self.data, self.n_return = scipy.spatial.KDTree(data), data, n_return

    def query(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the nearest point to each of `x` `[..., dim]`: distances (which are differentiable)
        and indices, `[...]`."""
        struct = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32)
        indices = jax.pure_callback(
            lambda x: self.tree.query(x)[1].astype(np.int32),
            struct,
            jax.lax.stop_gradient(x),
            vmap_method="broadcast_all",  # SciPy takes any number of points in one call
        )
        return jnp.linalg.norm(x - self.data[indices], axis=-1), indices

    def query_ball_point(self, x: jax.Array, radius: jax.Array) -> jax.Array:
        """Returns points `[..., n_return]` in a radius `[...]` of `x` `[..., dim]`, nearest first."""
        struct = jax.ShapeDtypeStruct((*x.shape[:-1], self.n_return), jnp.int32)
        return jax.pure_callback(
            self._balls, struct, *jax.lax.stop_gradient((x, radius)), vmap_method="broadcast_all"
        )

    def _balls(self, x: Any, radius: Any) -> np.ndarray:
        x, data = np.asarray(x), np.asarray(self.data)
        radius = np.broadcast_to(radius, x.shape[:-1])
        out = np.full((*x.shape[:-1], self.n_return), -1, np.int32)
        for place in np.ndindex(x.shape[:-1]):
            found = np.array(self.tree.query_ball_point(x[place], radius[place]), int)
            nearest = np.argsort(np.linalg.norm(x[place] - data[found], axis=-1), kind="stable")
            found = found[nearest][: self.n_return]
            out[place][: len(found)] = found
        return out


def nearest_points() -> None:
    """Looks up embeddings by an implicit matrix in a KD-tree, and differentiates the distances."""
    n, batch, dim, n_return = 32, _BATCH.value, 3, 5
    points = jax.random.normal(jax.random.key(0), (_POINTS.value, dim))
    tree = JAXKDTree(points, n_return)
    x = jax.random.normal(jax.random.key(1), (batch, n))
    keys = jax.random.split(jax.random.key(2), 3)
    weight = hki.LoRA(
        hki.QuantizedMatrix.quantize(jax.random.normal(keys[0], (n, dim)) / n**0.5, "int8"),
        jax.random.normal(keys[1], (n, 1)) / n**0.5,
        jax.random.normal(keys[2], (1, dim)),
    )

    embed = hki.use_implicit_args(jnp.dot)

    @jax.jit
    def look_up(w: Any, x: jax.Array, radius: jax.Array) -> Any:
        return jax.vmap(
            lambda x: (*tree.query(embed(x, w)), tree.query_ball_point(embed(x, w), radius))
        )(x)

    radius = 0.25
    distances, indices, balls = look_up(weight, x, jnp.float32(radius))
    embedded = np.asarray(x @ hki.materialize(weight))
    pairs = np.linalg.norm(embedded[:, None] - np.asarray(points), axis=-1)
    order = np.argsort(pairs, axis=-1)[:, :n_return]
    inside = np.take_along_axis(pairs, order, axis=-1) <= radius

    @jax.jit
    @hki.value_and_grad
    def loss(w: Any) -> jax.Array:
        return jax.vmap(lambda x: tree.query(embed(x, w))[0])(x).sum()

    value, grads = loss(weight)
    direction = embedded - np.asarray(points)[order[:, 0]]
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    of_weight = np.asarray(x).T @ direction

    heading("4. pure_callback: SciPy's KD-tree under jit, vmap and grad")
    first = int(np.argmax((balls >= 0).sum(-1)))
    table(
        ["query", "answer", "agrees with all distances"],
        [
            [
                "nearest of each",
                f"{shown(indices)} ...",
                f"{(indices == order[:, 0]).sum()} of {batch}",
            ],
            [
                "distance of each",
                f"{shown(distances)} ...",
                f"{abs(distances - pairs.min(-1)).max():.0e}",
            ],
            [
                f"within {radius}",
                f"{balls[first]} (-1: no more)",
                f"{(balls == np.where(inside, order, -1)).all(-1).sum()} of {batch}",
            ],
        ],
    )
    print(
        f"sum of distances {value:.4f}; norm of its gradient with respect to LoRA's b: "
        f"{jnp.linalg.norm(grads.b):.4f}"
    )
    np.testing.assert_array_equal(indices, order[:, 0])
    np.testing.assert_array_equal(balls, np.where(inside, order, -1))
    np.testing.assert_allclose(distances, pairs.min(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads.b, weight.a.T @ of_weight, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(grads.a, of_weight @ weight.b.T, rtol=1e-3, atol=1e-4)


# --- output ---------------------------------------------------------------------------------------


def is_implicit(x: Any) -> bool:
    return isinstance(x, hki.ImplicitArray)


def kind(x: Any) -> str:
    """Returns `QuantizedMatrix [4, 2]`, for example, or the type of a value that is not an array."""
    name = type(x).__name__ if is_implicit(x) else "array"
    return f"{name} {list(x.shape)}" if hasattr(x, "shape") else type(x).__name__


def shown(x: jax.Array) -> str:
    return " ".join(f"{y:.4g}" for y in np.asarray(x)[:4])


if __name__ == "__main__":
    app.run(main)
