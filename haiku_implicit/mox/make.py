"""`make_mox`, `eval_mox` and `to_transformed`: from a Haiku model to its expression, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import haiku as hk
import jax

from haiku_implicit.core.messages import type_error
from haiku_implicit.core.typing import Params, State, Tree
from haiku_implicit.mox.mox import Mox
from haiku_implicit.mox.program.program import (
    ANY_KEY,
    Init,
    checked,
    init_called,
    init_of,
    program_of,
)
from haiku_implicit.params.haiku.frozen import Frozen
from haiku_implicit.params.haiku.transformed import AnyTransformed, check_transformed


def _maker_of_one(transformed: Any) -> Callable[..., Mox]:
    def maker(
        *args: Any, params: Params = None, state: State = None, rng: Any = ANY_KEY, **kwargs: Any
    ) -> Mox:
        init = init_of(transformed, args, kwargs, rng)
        made = program_of(transformed, init, *_entries(init, params, state))
        return Mox(made.body, made.interface, made.init, made.implicit)

    return maker


def _maker_of_several(transformed: Any) -> Callable[..., Tree]:
    has_state = isinstance(transformed, hk.MultiTransformedWithState)
    kind: Any = hk.TransformedWithState if has_state else hk.Transformed
    makers = jax.tree.map(lambda fun: _maker_of_one(kind(transformed.init, fun)), transformed.apply)

    def maker(
        *args: Any, params: Params = None, state: State = None, rng: Any = ANY_KEY, **kwargs: Any
    ) -> Tree:
        init = init_of(transformed, args, kwargs, rng)
        params, state = _entries(init, params, state)
        given = dict(params=params, state=state, rng=rng)
        return jax.tree.map(lambda one: one(*args, **given, **kwargs), makers)

    maker.apply = makers  # type: ignore[attr-defined]
    return maker


def _entries(init: Init, params: Params, state: State) -> tuple[Params, State]:
    """The given parameters and state; shapes from `init` replace missing ones."""
    missing = {"params=": params is None, "state=": state is None and init.face.has_state}
    names = " and ".join(name for name, is_missing in missing.items() if is_missing)
    with init_called(
        "make_mox called the model's init with these arguments for the shapes of what it was not given",
        f"If init takes other ones (is_training=True, say), give {names}",
    ):
        return init.entries(params, state)


@overload
def make_mox(transformed: hk.Transformed | hk.TransformedWithState) -> Callable[..., Mox]: ...


@overload
def make_mox(
    transformed: hk.MultiTransformed | hk.MultiTransformedWithState,
) -> Callable[..., Tree]: ...


def make_mox(transformed: AnyTransformed) -> Callable[..., Any]:
    """Makes the module expression of a transformed Haiku function.

    Functions with custom derivative rules keep them. As in a jitted model, only JAX's transformations
    *within* the model see such a rule with the model's modules.

    Args:
      transformed: the result of `hk.transform`, `hk.transform_with_state`, `hk.multi_transform`,
        `hk.multi_transform_with_state`, `hk.without_apply_rng` or `transform_implicit`.

    Returns:
      A function with the arguments of the Haiku function: arrays or `jax.ShapeDtypeStruct`s; anything
      else (flags, numbers, strings) becomes a part of the expression. It also takes `params=`, `state=`
      and `rng=`; without them their shapes come from `init`, which takes longer than the expression
      itself. `rng=None` makes the expression of the model without a key.

      For a multi-transform, the function returns a tree of expressions, like `apply`. Its attribute
      `apply` is a tree of functions that make one expression each, for functions with different
      arguments.

    Raises:
      TypeError: if `transformed` is not a transformed function.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from haiku_implicit.mox import eval_mox, make_mox
      >>> model = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
      >>> x = jnp.ones((2, 4))
      >>> mox = make_mox(model)(x)
      >>> params = model.init(jax.random.key(0), x)
      >>> bool((eval_mox(mox, params, None, x) == model.apply(params, None, x)).all())
      True

      Functions that share parameters, each with its own arguments:

      >>> def coder():
      ...   encoder, decoder = hk.Linear(2, name="encoder"), hk.Linear(4, name="decoder")
      ...   return lambda x: decoder(encoder(x)), (encoder, decoder)
      >>> coder = hk.multi_transform(coder)
      >>> params = coder.init(jax.random.key(0), x)
      >>> encode, decode = make_mox(coder).apply
      >>> encode(x, params=params).select(hk.Linear)
      [<encoder: Linear: f32[2,4] -> f32[2,2]>]
    """
    if isinstance(transformed, Frozen):
        raise type_error(
            "transformed: a model from hki.freeze has arrays that expressions can't contain; give "
            "make_mox(model.whole), whose expression takes model.params(params)"
        )
    check_transformed("transformed", transformed)
    if isinstance(transformed, hk.MultiTransformed | hk.MultiTransformedWithState):
        return _maker_of_several(transformed)
    return _maker_of_one(transformed)


def eval_mox(mox: Mox, *args: Any, **kwargs: Any) -> Tree:
    """Runs a module expression. The results equal the results of the model's `apply`, bit for bit.

    Compiled, it is the same program, except for loops that only pass a value through modules, which JAX
    would leave out. Called eagerly, each of its equations is a separate program, while a function of
    `jax.numpy` is one program: XLA may round a number between two programs that it fuses within one.

    Args:
      mox: the module expression.
      *args: as for the model's `apply`: parameters, state if the model has one, the random key, and the
        arguments of the Haiku function, with the shapes that the expression was made for.
      **kwargs: as for `apply`.

    Returns:
      The result of `apply`.

    Raises:
      TypeError: if there are too few arguments, or too many.
      ValueError: if an argument is not one that the expression was made for.
    """
    checked("eval_mox(mox, params, ...)", mox)
    return mox.apply(*args, **kwargs)


def to_transformed(mox: Mox) -> hk.Transformed | hk.TransformedWithState:
    """Converts a module expression back to a transformed function.

    Returns:
      `hk.Transformed`, or `hk.TransformedWithState` if the model has state. Its `apply` does the same
      as `eval_mox`.
    """
    checked("to_transformed(mox)", mox)
    return mox.transformed()
