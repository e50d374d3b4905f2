"""`freeze`: a model whose parameters are only its trained arrays, for a training loop as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.matrix_view import tensor_of
from haiku_implicit.core import compat
from haiku_implicit.core.array import check_no_half, is_implicit
from haiku_implicit.core.messages import see, type_error, value_error, warn_caller
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.transform import (
    is_value,
    materialize,
    tree_leaves_with_implicit,
    tree_map_with_implicit,
)
from haiku_implicit.core.typing import Array, Params, Tree, TreeDef
from haiku_implicit.params.haiku.transformed import (
    AnyTransformed,
    check_transformed,
    marked_implicit,
    takes_implicit,
    transform_implicit,
)
from haiku_implicit.params.trees.digests import as_rows, digest, options, split_rows, text_of
from haiku_implicit.params.trees.trees import check_whole_tree, parameters_of
from haiku_implicit.training.gradients import is_empty, slots_of, trained, treedef_of

Keys = tuple[str, ...]


class _Options(TypedDict, total=False):
    """The options of `freeze`, whose overloads differ in the kind of the model."""

    trainable_dense: Targets
    by_reference: bool


@overload
def freeze(
    model: hk.Transformed, params: Params, **options: Unpack[_Options]
) -> tuple[FrozenTransformed, hk.MutableParams]: ...


@overload
def freeze(
    model: hk.TransformedWithState, params: Params, **options: Unpack[_Options]
) -> tuple[FrozenTransformedWithState, hk.MutableParams]: ...


@overload
def freeze(
    model: hk.MultiTransformed, params: Params, **options: Unpack[_Options]
) -> tuple[FrozenMultiTransformed, hk.MutableParams]: ...


@overload
def freeze(
    model: hk.MultiTransformedWithState, params: Params, **options: Unpack[_Options]
) -> tuple[FrozenMultiTransformedWithState, hk.MutableParams]: ...


def freeze(
    model: AnyTransformed,
    params: Params,
    *,
    trainable_dense: Targets = False,
    by_reference: bool = True,
) -> tuple[Any, Params]:
    """Hides the frozen arrays in a model, so that its parameters are only the trained arrays.

    The new parameters are ordinary arrays of floats in Haiku's nesting, `{module: {name: array}}`. So
    any training loop for Haiku takes them as it is: `jax.grad`, each optax optimizer,
    `optax.apply_updates`, Orbax, a `TrainState`. The optimizer has state for the trained arrays alone,
    and nothing can change the frozen ones. A field of an implicit array has the name that a `getter`
    would give it, such as `w_lora_a` for the factor `a` of a LoRA on `w`. The model has copies of all
    arrays, so delete your own to free their memory.

    Args:
      model: the result of `hk.transform`, `hk.transform_with_state`, `hk.multi_transform`,
        `hk.multi_transform_with_state`, `hk.without_apply_rng` or `transform_implicit`. If the
        parameters have implicit arrays, it is wrapped by `transform_implicit`. (Apply
        `hk.without_apply_rng` before `freeze`: its result has no `params` and `whole`.)
      params: all its parameters, dense or implicit.
      trainable_dense: which dense arrays are trained too, as in `partition`. By default none is: the
        types of implicit arrays declare which of their fields are trained. `'head/.*'` also trains a
        head, and `hki.BIASES` all biases.
      by_reference: whether the frozen arrays become arguments of each compiled program that uses the
        model, as JAX's references do (`jax.new_ref`). Otherwise they are constants in each program, and
        `jax.export` needs that. They are constants before JAX 0.9, within `shard_map` and `pmap`, and
        if there are several devices and the parameters are not on chosen ones.

    Returns:
      `(model, params)`: a model of the same kind, and the trained arrays. Its `apply` takes these
      instead of all parameters, and its results are dense, unless an argument is implicit, such as a
      cache. Its `init` returns new copies of the trained arrays as they are now, also after the first
      ones were donated, whatever its key is, with the state that the model's own `init` makes with that
      key. (For other factors, give `add_lora` another key.)
      `model.params(params)` gives all parameters back, for saving, merging and serving, and
      `model.whole` is the model that takes them. A file of the trained arrays alone does not name their
      base: save `model.digests()` beside them, and `model.check_digests(...)` raises if the frozen
      arrays are others when training continues.

    Raises:
      TypeError: for anything but a transformed function and a tree of parameters.
      ValueError: if no array is trained, or `trainable_dense` matches nothing; from `apply`, for other
        parameters than the trained arrays.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, optax, haiku_implicit as hki
      >>> model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 1])(x)))
      >>> x = jnp.ones((4, 3))
      >>> params = hki.add_lora(model.init(jax.random.key(0), x), jax.random.key(1), rank=1)
      >>> model, params = hki.freeze(model, params)
      >>> jax.tree.map(jnp.shape, params)['mlp/~/linear_0']
      {'w_lora_a': (3, 1), 'w_lora_b': (1, 8)}
      >>> grads = jax.jit(jax.grad(lambda params: model.apply(params, x).var()))(params)
      >>> params = optax.apply_updates(params, grads)
      >>> model.params(params)['mlp/~/linear_0']['w']
      LoRA(float32[3,8], w=float32[3,8], a=float32[3,1], b=float32[1,8], factor=float32[])
    """
    check_transformed("model", model)
    given: Any = model
    if isinstance(given, Frozen) and isinstance(params, Mapping):
        given.check(params)
        if trainable_dense is False:
            raise ValueError(
                "model: it is from hki.freeze already, and params are the arrays that it trains. Use "
                "both as they are. trainable_dense= chooses some of these arrays; to freeze anew, give "
                "model.whole and model.params(params)"
                f" {see('a-frozen-model')}"
            )
    if not takes_implicit(model) and _has_implicit(params):
        model = transform_implicit(model)
    halves = _split(params, trainable_dense, by_reference)
    kind = next(new for kind, new in _KINDS.items() if isinstance(model, kind))
    new = kind(
        init=_with_start(model, halves),
        apply=jax.tree.map(functools.partial(_with_frozen, halves), model.apply),
    )
    new.whole, new._halves = model, halves
    return marked_implicit(new), halves.start()


class Frozen:
    """What the result of `freeze` has beyond `init` and `apply`.

    Attributes:
      whole: the model that takes all parameters.
    """

    whole: AnyTransformed
    _halves: _Halves

    def _replace(self, **fields: Any) -> Any:
        new = super()._replace(**fields)  # type: ignore[misc]
        new.whole, new._halves = self.whole, self._halves
        return new

    def check(self, params: Params) -> None:
        """Raises for other parameters than the trained arrays, as if they were frozen once more."""
        try:
            self._halves.check(dict(_flat(params)))
        except ValueError as error:
            raise value_error(
                "model: it is from hki.freeze already. Freeze model.whole, which takes all parameters, "
                f"or the trained arrays of this model once more ({error})"
            ) from None

    def shapes(self) -> tuple[Params, Sequence[bool]]:
        """The structs of all parameters, and whether the array in each of their slots is trained."""
        return self._halves.shapes(), self._halves.flags

    def params(self, params: Params) -> hk.MutableParams:
        """Returns all parameters, with the trained arrays from `params`.

        Each call copies the frozen arrays, unless it is within a jitted function.

        Raises:
          ValueError: for parameters other than those that `freeze` returned.
        """
        return self._halves.whole(params)

    def digests(self) -> np.ndarray:
        """Returns digests of the frozen arrays, to be saved beside the trained ones.

        The arrays go through the memory of the host, so call it once, before the loop.

        Returns:
          A row `uint32[4]` for each array of all parameters: two numbers for its parameter's types,
          options and shapes, and two for the bytes of the array if it is frozen. Then rows with the
          text of all types, options, shapes and single numbers, for messages.

        Example:
          >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
          >>> model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8)(x)))
          >>> base = model.init(jax.random.key(0), jnp.ones((4, 3)))
          >>> first, _ = hki.freeze(model, hki.add_lora(base, 0, rank=1, alpha=8.0))
          >>> again, _ = hki.freeze(model, hki.add_lora(base, 0, rank=1, alpha=16.0))
          >>> first.check_digests(first.digests())
          >>> again.check_digests(first.digests())
          Traceback (most recent call last):
          ...
          ValueError: digests: linear/w/factor has other values than in the model of the digests...
        """
        own, texts = self._digests()
        return np.concatenate([np.stack([row for *_, row in own]), as_rows(texts)])

    def check_digests(self, digests: Array) -> None:
        """Raises unless this model's frozen arrays are those of the model that `digests` are from.

        Args:
          digests: the result of `digests`, as a file returns it.

        Raises:
          ValueError: for another base, or for an adapter or quantized weights with other options. It
            names the first parameter that differs.
        """
        saved = np.asarray(digests)
        if saved.ndim != 2 or saved.shape[1] != 4:
            raise type_error(
                f"digests: expected the result of model.digests(), got {type(digests).__name__}"
            )
        (own, texts), (saved, expected) = self._digests(), split_rows(saved)
        for (parameter, array, row), other in zip(own, saved, strict=False):
            if not np.array_equal(row, other):
                if np.array_equal(row[:2], other[:2]):
                    found = f"{array} has other values"
                else:
                    found = f"{parameter} has another type, another shape or other options"
                how = _difference(parameter, texts, expected)
                raise ValueError(
                    f"digests: {found} than in the model of the digests{how}. Give hki.freeze the "
                    "same base, quantization, adapter, alpha= and trainable_dense=; or leave out this "
                    "check, if the model is another one on purpose"
                    f" {see('another-base')}"
                )
        if len(saved) != len(own):
            raise ValueError(
                f"digests: they are from a model with {len(saved)} arrays; this one has {len(own)}"
                f" {see('another-base')}"
            )

    def _digests(self) -> tuple[list[tuple[str, str, np.ndarray]], dict[str, str]]:
        """The paths of the parameter and the array, and the digests, of each array; texts of them."""
        inner: Any = self.whole  # a model that was frozen before
        found, texts = self._halves.digests()
        if not isinstance(inner, Frozen):
            return found, texts
        before, others = inner._digests()
        return [*before, *found], others | texts


class FrozenTransformed(Frozen, hk.Transformed):
    """An `hk.Transformed` that holds frozen parameters; see `freeze`."""

    whole: hk.Transformed


class FrozenTransformedWithState(Frozen, hk.TransformedWithState):
    """An `hk.TransformedWithState` that holds frozen parameters; see `freeze`."""

    whole: hk.TransformedWithState


class FrozenMultiTransformed(Frozen, hk.MultiTransformed):
    """An `hk.MultiTransformed` that holds frozen parameters; see `freeze`."""

    whole: hk.MultiTransformed


class FrozenMultiTransformedWithState(Frozen, hk.MultiTransformedWithState):
    """An `hk.MultiTransformedWithState` that holds frozen parameters; see `freeze`."""

    whole: hk.MultiTransformedWithState


def _difference(path: str, own: dict[str, str], expected: dict[str, str]) -> str:
    """The first type, option, shape or number of a parameter that differs; empty if none is known."""
    for key in {**expected, **own}:
        if (key == path or key.startswith((f"{path}/", f"{path}:"))) and expected:
            wanted, got = (texts.get(key, "nothing") for texts in (expected, own))
            if wanted != got:
                return f" ({key}: expected {wanted}, got {got})"
    return ""


_KINDS: dict[type, Any] = {
    hk.Transformed: FrozenTransformed,
    hk.TransformedWithState: FrozenTransformedWithState,
    hk.MultiTransformed: FrozenMultiTransformed,
    hk.MultiTransformedWithState: FrozenMultiTransformedWithState,
}


def _with_frozen(halves: _Halves, apply: Callable[..., Any]) -> Callable[..., Any]:
    """An `apply` of the trained arrays, whose results are dense.

    A model may return a part of a weight. A loop that knows no implicit arrays would take the leaves of
    it for results. A loop that has an implicit cache among the arguments gets the new one as it is.
    """

    @functools.wraps(apply)
    def wrapped(params: Params, *args: Any, **kwargs: Any) -> Any:
        results = apply(halves.whole(params), *args, **kwargs)
        if _has_implicit((args, kwargs)) or not _has_implicit(results):
            return results
        return materialize(results)

    return wrapped


def _has_implicit(tree: Tree) -> bool:
    return any(map(is_implicit, tree_leaves_with_implicit(tree)))


def _with_start(model: AnyTransformed, halves: _Halves) -> Callable[..., Any]:
    """An `init` that returns the trained arrays as they were when the model was frozen."""
    has_state = isinstance(model, hk.TransformedWithState | hk.MultiTransformedWithState)

    @functools.wraps(model.init)
    def init(*args: Any, **kwargs: Any) -> Any:
        if not has_state:
            return halves.start()
        return halves.start(), model.init(*args, **kwargs)[1]

    return init


# --- the two halves ------------------------------------------------------------------------------


class _Halves(NamedTuple):
    """Parameters in two halves: which arrays are trained, and the values of the others.

    Attributes:
      treedef: the structure of all parameters, with a leaf for each slot.
      flags: whether the array in each slot is trained.
      names: the keys of each trained array in the tree of trained arrays.
      frozen: the values of the other slots.
      initial: the trained arrays as they were at first.
    """

    treedef: TreeDef
    flags: tuple[bool, ...]
    names: tuple[Keys, ...]
    frozen: _Held
    initial: tuple[jax.Array, ...]

    def start(self) -> Params:
        """The trained arrays as they were at first."""
        tree: dict[str, Any] = {}
        for keys, value in zip(self.names, map(jnp.copy, self.initial), strict=True):
            functools.reduce(lambda t, key: t.setdefault(key, {}), keys[:-1], tree)[keys[-1]] = (
                value
            )
        return tree

    def whole(self, params: Params) -> Params:
        """All parameters."""
        given = dict(_flat(params))
        self.check(given)
        own, frozen = (given[keys] for keys in self.names), iter(self.frozen.read())
        values = [next(own if flag else frozen) for flag in self.flags]
        return self.treedef.unflatten(values)

    def digests(self) -> tuple[list[tuple[str, str, np.ndarray]], dict[str, str]]:
        """The paths of the parameter and the array, and the digests, of each array; texts of them."""
        shapes, frozen, found = self.shapes(), self.frozen.each(), []
        structures = {p.path: digest(p.value) for p in parameters_of(shapes)}
        texts = {k: x for p in parameters_of(shapes) for k, x in options(p.path, p.value).items()}
        for slot, is_trained in zip(slots_of(shapes), self.flags, strict=True):
            path = "/".join(slot.path[: len(slot.path) - len(slot.fields)])
            value = slot.value if is_trained else next(frozen)
            content = digest(value)
            if not is_empty(value):
                texts[slot.name] = text_of(value) + (", trained" if is_trained else "")
            of_parameter = structures.get(path, digest(None))  # (None is no parameter)
            row = np.frombuffer(bytes.fromhex(of_parameter + content), np.uint32)
            found.append((path, slot.name, row))
        return found, texts

    def shapes(self) -> Params:
        """The structs of all parameters."""
        return jax.eval_shape(self.whole, self.start())

    def check(self, given: Mapping[Keys, Array]) -> None:
        """Raises for parameters other than the trained arrays."""
        missing = [keys for keys in self.names if keys not in given]
        others = list(given.keys() - set(self.names))
        if missing or others:
            wrong = "missing" if missing else "not trained"
            first = f"{_path((missing or others)[0])} is {wrong}"
            raise ValueError(
                f"params: {first}. A model from hki.freeze takes the trained arrays that hki.freeze "
                "returned. model.params(params) gives all parameters, and model.whole takes all"
                f" {see('a-frozen-model')}"
            )
        for keys, x in zip(self.names, self.initial, strict=True):
            if np.shape(given[keys]) != x.shape:
                raise value_error(
                    f"params: expected {_path(keys)} in the shape {list(x.shape)}, got "
                    f"{list(np.shape(given[keys]))}; is it an adapter of another rank?"
                )


def _split(params: Params, trainable_dense: Targets, by_reference: bool) -> _Halves:
    """Splits parameters into the trained arrays and all others."""
    if not isinstance(params, Mapping):
        raise type_error(
            "params: expected a mapping of parameters as Haiku's init returns it, got "
            f"{type(params).__name__}"
        )
    for parameter in parameters_of(params):
        check_no_half(parameter.path, parameter.value)
    params = tree_map_with_implicit(tensor_of, params)  # the axes of `prepare` have done their work
    slots = slots_of(params)
    for slot in slots:
        if isinstance(slot.value, jax.ShapeDtypeStruct):
            raise type_error(
                f"params: expected arrays, got the struct {slot.value} for {slot.name}. For shapes: "
                "jax.eval_shape(lambda params: hki.freeze(model, params)[1], params)"
            )
    flags = trained(slots, trainable_dense)
    if not any(flags):
        check_whole_tree(parameters_of(params))
        raise ValueError(
            "trainable_dense: no array is trained. No implicit array in the parameters has trained "
            "fields (hki.add_lora and hki.add_adapter add some), and trainable_dense= names no array"
            f" {see('nothing-is-trained')}"
        )
    others, own = (
        [s for s, f in zip(slots, flags, strict=True) if f is is_own] for is_own in (False, True)
    )
    frozen = [slot.value for slot in others]
    by_reference = by_reference and compat.new_ref is not None and _is_placed(frozen)
    return _Halves(
        treedef=treedef_of(params),
        flags=tuple(flags),
        names=_unique([slot.keys for slot in own]),
        frozen=_Held(frozen, by_reference),
        initial=tuple(jnp.copy(slot.value) for slot in own),
    )


def _is_placed(values: Sequence[Any]) -> bool:
    """Whether arrays stay on their devices; JAX moves others to the devices of a program."""
    loose = [x for x in values if _can_be_referenced(x) and not getattr(x, "committed", False)]
    if not loose or jax.device_count() == 1:
        return True
    warn_caller(
        f"freeze: {len(loose)} frozen arrays are on no chosen device, and there are "
        f"{jax.device_count()}. So each compiled program contains these arrays as constants. To accept "
        "that (pmap needs it): by_reference=False. Otherwise place the parameters first. For a mesh: "
        "jax.device_put(params, NamedSharding(mesh, PartitionSpec())) or hki.place; for one device: "
        "jax.device_put(params, jax.devices()[0])"
    )
    return False


def _unique(names: Sequence[Keys]) -> tuple[Keys, ...]:
    """The names, of which each that occurs before gets an underscore."""
    found: dict[Keys, None] = {}
    for *module, name in names:
        while (*module, name) in found:
            name += "_"
        found[(*module, name)] = None
    return tuple(found)


def _flat(tree: Mapping[str, Any], keys: Keys = ()) -> Iterator[tuple[Keys, Array]]:
    """The arrays of nested mappings, by their keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*keys, str(key)))
        else:
            yield (*keys, str(key)), value


def _path(keys: Sequence[str]) -> str:
    return "/".join(keys)


class _Held:
    """Arrays that a function reads and that are none of its arguments.

    JAX writes such arrays into a compiled program as constants. References become arguments of the
    program, which stays small, and all programs share the arrays.
    """

    def __init__(self, values: Sequence[Any], by_reference: bool):
        # One reference for each array, in however many slots it is.
        arrays = {id(x): x for x in values if by_reference and _can_be_referenced(x)}
        refs = {key: compat.new_ref(x) for key, x in arrays.items()}
        self._refs = list(refs.values())
        self._values = [refs.get(id(x), x) for x in values]

    def __reduce__(self) -> tuple[Any, ...]:
        # A reference that was pickled can't be read with JAX 0.12.0.1.
        return type(self), (self.read(), bool(self._refs))

    def read(self) -> list[Array]:
        # JAX can't give references to a program for one of several devices.
        constants = jax.ensure_compile_time_eval if compat.in_manual_region() else nullcontext
        with constants():
            arrays = {id(ref): ref[...] for ref in self._refs}
        return [arrays.get(id(x), x) for x in self._values]

    def each(self) -> Iterator[Array]:
        """The arrays, of which only one is copied at a time."""
        refs = set(map(id, self._refs))
        for x in self._values:
            yield x[...] if id(x) in refs else x


def _can_be_referenced(x: Any) -> bool:
    """Whether a value is a concrete array. A reference would forget that a type is weak."""
    concrete = isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)
    return concrete and is_value(x) and not getattr(x, "weak_type", False)
