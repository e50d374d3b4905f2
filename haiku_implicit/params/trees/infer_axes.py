"""`infer_matrix_axes` and `prepare`: the axes of weights that a model contracts, by an abstract run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haiku as hk
import jax

from haiku_implicit.arrays.matrix_view import MatrixView, unfolded
from haiku_implicit.arrays.uses import Piece, Pieces, Use, Uses, find_uses
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.containers import opened
from haiku_implicit.core.materialization import recording
from haiku_implicit.core.messages import type_error, warn_caller
from haiku_implicit.core.transform import (
    Static,
    is_value,
    tree_flatten_with_implicit,
    tree_map_with_implicit,
    use_implicit_args,
)
from haiku_implicit.core.typing import Array, Params, SameTree
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.matrix_axes import LAST_TWO, MatrixAxes
from haiku_implicit.params.trees.options import named
from haiku_implicit.params.trees.selection import editing, is_matrix

# A model, or its `apply`.
Model = hk.Transformed | hk.TransformedWithState | Callable[..., Any]


def prepare(model: Model, params: SameTree, *args: Any, **kwargs: Any) -> SameTree:
    """Stores each weight as the matrix that a model multiplies, whatever axes the weight has.

    Then `add_lora`, `add_adapter`, `quantize_params`, `input_moments` and the others take an attention
    weight `[inputs, heads, width]` as one matrix `[inputs, heads * width]`, without further arguments.
    The model sees the weight with its own axes. This needs one abstract run of the model, which
    computes nothing.

    Args:
      model, *args, **kwargs: as for `infer_matrix_axes`.
      params: the model's parameters, dense or implicit; or `jax.ShapeDtypeStruct`s of them.

    Returns:
      The tree with a `MatrixView` of a dense matrix for each dense weight of more than two axes that is
      a matrix, or a stack of matrices, in a product, and for each weight that is multiplied transposed;
      other parameters are the same, and mappings are dicts. Functions of `transform_implicit` and
      `freeze` take it; `materialize` gives the original arrays back.

    Raises:
      TypeError: as `infer_matrix_axes` does.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> def project(x):
      ...   w = hk.get_parameter('query_w', [64, 4, 16], init=hk.initializers.RandomNormal())
      ...   return jnp.einsum('ba,ahc->bhc', x, w)
      >>> model = hk.without_apply_rng(hk.transform(project))
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 64)))
      >>> params = hki.prepare(model, params, jnp.ones((1, 64)))
      >>> hki.add_lora(params, 0, rank=2)['~']['query_w'].matrix
      LoRA(float32[64,64], w=float32[64,64], a=float32[64,2], b=float32[2,64], factor=float32[])
    """
    axes = infer_matrix_axes(model, params, *args, **kwargs)
    late = [p for p in trees.parameters_of(params) if _is_late(p, axes.get(p.path))]
    if late:
        warn_caller(
            f"prepare: these weights are implicit already, and do not change: {named(late)}. Call "
            "prepare on the dense parameters, before LoRA and quantization"
        )

    def viewed(parameter: trees.Parameter) -> Array:
        own, value = axes.get(parameter.path), parameter.value
        plain = len(value.shape) - parameter.stacked == 2 and own == LAST_TWO
        if own is None or plain or is_implicit(value):
            return value
        with editing(parameter.path, value):
            return MatrixView(*unfolded(value, *own))

    return trees.map_parameters(viewed, params)


def _is_late(parameter: trees.Parameter, own: MatrixAxes | None) -> bool:
    """Whether a weight is implicit already, as other matrices than those that the model multiplies."""
    value, other = parameter.value, own not in (None, LAST_TWO)
    many = len(value.shape) - parameter.stacked > 2
    return other and many and is_implicit(value) and not isinstance(value, MatrixView)


def infer_matrix_axes(
    model: Model, params: Params, *args: Any, **kwargs: Any
) -> dict[str, MatrixAxes]:
    """Finds which axes of its weights a model contracts, by an abstract run that computes nothing.

    The axes of each weight are followed through reshapes, transposes, casts, slices, loops and stacks
    of layers to its first product (`dot_general`).

    Args:
      model: the result of `hk.transform`, `hk.transform_with_state`, `hk.without_apply_rng` or
        `transform_implicit`; or its `apply`, or any function `apply(params, *args, **kwargs)`, such as
        one of those of a multi-transform.
      params: its parameters, or `jax.ShapeDtypeStruct`s of them.
      *args: its other arguments. Arrays may be `jax.ShapeDtypeStruct`s.
      **kwargs: its keyword arguments, likewise.

    Returns:
      The `MatrixAxes(inputs, outputs)` of each weight, by its path (`module/name`). Two kinds of
      weights are missing: weights without a product (kernels of convolutions, tables that are looked
      up), and weights that are not matrices (all axes are contracted, or batch axes do not come first).

    Raises:
      TypeError: for `params` that are not a mapping, and a `model` of another type.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> def attention(x):
      ...   w = hk.get_parameter('query_w', [64, 4, 16], init=hk.initializers.RandomNormal())
      ...   o = hk.get_parameter('output_w', [4, 16, 64], init=hk.initializers.RandomNormal())
      ...   return jnp.einsum('bhc,hco->bo', jnp.einsum('ba,ahc->bhc', x, w), o)
      >>> t = hk.without_apply_rng(hk.transform(attention))
      >>> params = t.init(jax.random.key(0), jnp.ones((1, 64)))
      >>> axes = hki.infer_matrix_axes(t, params, jnp.ones((1, 64)))
      >>> axes['~/query_w'], axes['~/output_w'].inputs
      (MatrixAxes(inputs=(-3,), outputs=(-2, -1)), (-3, -2))
      >>> hki.add_lora(params, 0, rank=2, matrix_axes=axes)['~']['output_w'].matrix
      LoRA(float32[64,64], w=float32[64,64], a=float32[64,2], b=float32[2,64], factor=float32[])
    """
    uses = uses_of(_apply_of(model), params, args, kwargs)
    found = {}
    for parameter in trees.parameters_of(params):
        own = (axes_of_use(use, parameter.value.shape) for use in uses.get(parameter.path, ()))
        axes = next(filter(None, own), None)
        if axes is not None:
            found[parameter.path] = axes
    return found


def _apply_of(model: Model) -> Callable[..., Any]:
    apply = getattr(model, "apply", model)
    if not callable(apply):
        raise type_error(
            "model: expected the result of hk.transform or the like, or its apply (of a "
            "multi-transform, one of its functions, such as model.apply.encode), got "
            f"{type(model).__name__}"
        )
    return apply


def uses_of(
    apply: Callable[..., Any], params: Params, args: Sequence[Array], kwargs: Mapping[str, Any]
) -> Uses:
    """The products of a model with each of its weights, by path, from one trace of the model.

    Args:
      apply: a function `apply(params, *args, **kwargs)`.
      params, args, kwargs: as for `infer_matrix_axes`.
    """

    def dense(x: Array) -> Array:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_implicit(x) else x

    def path_or_none(parameter: trees.Parameter) -> str:
        return parameter.path if is_matrix(parameter.value) else ""

    plain = tree_map_with_implicit(dense, opened(params))
    paths = jax.tree.leaves(trees.map_parameters(path_or_none, plain))
    leaves, treedef = tree_flatten_with_implicit((args, kwargs))
    is_traced = [is_value(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    kept = tuple(None if traced else (x,) for x, traced in zip(leaves, is_traced, strict=True))
    model = use_implicit_args(apply) if any(map(is_implicit, leaves)) else apply

    def run(params: Params, values: list[Array]) -> list[Array]:
        args, kwargs = Static(treedef, kept).merge(values)
        return [x for x in jax.tree.leaves(model(params, *args, **kwargs)) if is_value(x)]

    with recording():  # an array that becomes dense tells nothing about the model's own weights
        closed = jax.make_jaxpr(run)(plain, list(itertools.compress(leaves, is_traced)))
    own = zip(paths, jax.tree.leaves(plain), strict=True)
    given: list[Pieces] = [
        [Piece.of(path, x.shape)] if isinstance(path, str) and path else () for path, x in own
    ]
    rest = len(closed.jaxpr.invars) - len(given)
    return find_uses(closed.jaxpr, [*given, *[()] * rest])


def axes_of_use(use: Use, shape: Sequence[int]) -> MatrixAxes | None:
    """The matrix axes of a weight in a product; None if the weight is not a matrix there."""
    if not use.contracted or not use.free or use.contracted & use.free:
        return None
    first = min(use.contracted | use.free)
    # Axes of length one are not followed to products: those between the others count as free.
    free = use.free | {i for i in range(first, 0) if shape[i] == 1} - use.contracted
    if len(use.contracted) + len(free) != -first:
        return None
    return MatrixAxes(tuple(sorted(use.contracted)), tuple(sorted(free)))
