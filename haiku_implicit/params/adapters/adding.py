"""Adapters added to weights of a tree of parameters, by type or by name."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.adapter import Adapter, method_named, method_names
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.lora_init import Initializer, LoRAInit
from haiku_implicit.core.array import data_names, frozen_names, is_implicit
from haiku_implicit.core.keys import KeySource, as_key_source
from haiku_implicit.core.messages import see, shown, type_error, value_error, warn_caller
from haiku_implicit.core.predicates import Targets, compiled, no_match
from haiku_implicit.core.typing import Array, DType, Key, SameTree, Tree
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf
from haiku_implicit.params.trees.one_by_one import is_news
from haiku_implicit.params.trees.options import Room, check_matrix
from haiku_implicit.params.trees.selection import describe, editing, is_kernel, stacked_axes

# Options of weights, by patterns of their paths.
Patterns = Mapping[str, Mapping[str, Any]]


def add_lora(
    params: SameTree,
    key: Key | Callable[[], jax.Array],
    *,
    rank: int,
    alpha: float | None = None,
    targets: Targets | None = None,
    init: Initializer | LoRAInit | str | None = None,
    exclude: Targets | None = None,
    missing_ok: bool = False,
    matrix_axes: MatrixAxesOf | None = None,
    rank_stabilized: bool = False,
    dtype: DType | None = None,
) -> SameTree:
    """Adds LoRA to weights of a tree of parameters, including quantized weights.

    The new tree stands for the same values. The random key of each weight comes from `key` and the
    parameter's path, and does not depend on the other targets.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      key: a JAX random key, an integer seed, or a function such as `hk.next_rng_key`, which makes the
        key of each weight.
      rank: the rank of the correction, at most the smaller of a weight's last two axes.
      alpha: the correction is scaled by `alpha / rank`; None for a scale of 1.
      targets: the parameters that get LoRA. None: all floating-point parameters of two axes or more,
        dense or quantized, that have room for the rank (axes along which
        `hk.experimental.layer_stack` stacks do not count), except those named `b`, `bias`, `offset`
        or `scale` (or `gating_b`, `query_bias` and so on), and `pos`, `position_embeddings` or
        another name for a table of positions, which is added. A warning names the weights without
        room that `exclude` does not name. A string or compiled pattern: the parameters whose whole
        `module/name` matches the regular expression. A list: those that one of its names
        `module/name` or expressions selects. A predicate: those for which
        `targets(module_name, name, value)` is true. True: all.
      init: the initialization of the factors. A function draws `a`, as `init(key, shape, dtype)`, and
        `b` is zero; None: uniform in ±1/sqrt(n). 'gaussian': normal. 'orthogonal': neither factor is
        zero, but their product is. 'pissa', 'olora': the factors hold the largest part of the weight,
        which becomes the rest. `EVA(moments)` and `CorDA(moments)`: from the inputs of a
        calibration batch. `LoRAGA(gradients)`: from gradients of the weights.
        `LoftQ(dtype, ...)`: the weight is quantized, and the factors make up for part of the error.
      exclude: the targets to leave out, in the same forms as `targets`. One that matches no parameter
        is an error.
      missing_ok: if no parameter is left to change, return the parameters unchanged, without an
        error.
      matrix_axes: the axes that make a matrix of a weight whose last two axes do not, such as
        attention's `[inputs, heads, width]`: a mapping from `module/name`, or a regular expression
        that matches all of it, to `(inputs, outputs)`, with axes counted from the end, such as
        `{'.*query_w': ([-3], [-2, -1])}`; or the result of `infer_matrix_axes`. Such a weight becomes
        a `MatrixView` of one LoRA. Other weights of more than two axes are stacks of matrices, each
        with its own factors; a warning names those whose factors have more numbers than the weight.
      rank_stabilized: whether to scale the correction by `alpha / sqrt(rank)` (rsLoRA,
        arXiv:2312.03732), by `8 / sqrt(rank)` without an `alpha`, as PEFT does.
      dtype: the dtype of the factors. None: the weight's, but float32 for weights of 16 bits or fewer,
        whose small updates would be rounded away. Products run in the model's dtype in any case.

    Returns:
      The tree with the targets replaced by `LoRA`, and mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (the error lists near misses), a parameter that LoRA
        of this rank does not fit, or a rank that is not a positive integer.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((4, 3)), 'b': jnp.zeros(3)}}
      >>> hki.add_lora(params, jax.random.key(0), rank=2, alpha=4.0)['linear']['w']
      LoRA(float32[4,3], w=float32[4,3], a=float32[4,2], b=float32[2,3], factor=float32[])
      >>> hki.add_lora(params, 0, rank=2, targets='linear/v')
      Traceback (most recent call last):
      ...
      ValueError: targets: 'linear/v' matches none of the 2 parameters (the whole of 'module/name'
      has to match). Nearest: linear/w, linear/b (docs/errors.md#nothing-matches)
    """
    options: Any = dict(targets=targets, exclude=exclude, missing_ok=missing_ok)
    options |= dict(rank=rank, alpha=alpha, init=init, rank_stabilized=rank_stabilized)
    return add_adapter(params, key, LoRA, matrix_axes=matrix_axes, dtype=dtype, **options)


def add_adapter(
    params: SameTree,
    key: Key | Callable[[], jax.Array],
    method: str | type[Adapter],
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    missing_ok: bool = False,
    matrix_axes: MatrixAxesOf | None = None,
    patterns: Patterns | None = None,
    dtype: DType | None = None,
    **options: Any,
) -> SameTree:
    """Adds adapters of a type to weights of a tree of parameters, including quantized weights.

    The new tree stands for the same values. The adapters are trained, and the weights are not.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      key: as for `add_lora`.
      method: a type of adapter: `haiku_implicit.LoRA`, one of `haiku_implicit.adapters`, or your own
        subclass of `haiku_implicit.adapters.Adapter`. Or its name: 'boft', 'c3a', 'dora', 'fourierft',
        'gralora', 'hira', 'ia3', 'locon', 'loha', 'lokr', 'lora', 'low_rank_diagonal', 'miss', 'oft',
        'randlora', 'shira', 'trained_rows', 'vblora', 'vera' (see docs/adapters.md), or the name of
        your own class in lower case.
      targets, exclude, missing_ok, matrix_axes: as for `add_lora`. The default targets are weights with
        room for the rank, if the method has one; a warning names the others.
      patterns: other options for some weights: a mapping from a regular expression that matches the
        whole `module/name` to options, such as `{'.*/mlp/.*': {'rank': 4}}`. The first pattern that
        matches counts.
      dtype: the dtype of the trained arrays, as for `add_lora`.
      **options: the options of the method, such as `rank` and `alpha`; see `create` of the type, for
        example `help(haiku_implicit.adapters.DoRA.create)`.

    Returns:
      The tree with adapters on the targets, and mappings as dicts. With 'vblora' it has one more
      module, the vector bank, which `with_vector_bank` puts into the weights in each step.

    Raises:
      ValueError: for an unknown method or option, a missing option, targets or a pattern that match
        nothing, or a weight that the adapter does not fit.
      TypeError: for a `method` or `patterns` of another type.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((4, 3)), 'b': jnp.zeros(3)}}
      >>> new = hki.add_adapter(params, 0, 'dora', rank=2)
      >>> new['linear']['w']
      DoRA(float32[4,3], w=float32[4,3], a=float32[4,2], b=float32[2,3], magnitude=float32[3], ...)
      >>> hki.add_adapter(params, 0, 'dora', ranks=2)
      Traceback (most recent call last):
      ...
      ValueError: method 'dora': expected the options rank, alpha (optional), got ranks
      (docs/errors.md#arguments-and-types)
    """
    kind, name = _kind_of(method)
    if dtype is not None and not jnp.issubdtype(dtype, np.floating):
        raise type_error(f"dtype: expected a floating dtype or None, got {dtype!r}")
    of_weight = _options_of(kind, name, options, patterns or {})
    key = as_key_source(key)
    _check_key(kind, name, key)
    choice = trees.Choice(targets, exclude, missing_ok, matrix_axes)
    done: dict[str, Adapter] = {}

    def made(parameter: trees.Parameter) -> Array:
        path, value, stacked = parameter.path, parameter.value, parameter.stacked
        check_matrix(path, value, kind.__name__, stacked)
        own_key = key if kind.one_key else parameter.key_from(key)
        with editing(path, value):
            own = kind.options_for(path, len(value.shape) - stacked, of_weight(path))
            new = _in_dtype(_created(kind, value, own_key, own), dtype)
        done[path] = new
        return new

    room = _room(kind, of_weight)
    parameters = trees.parameters_of(params)
    marks = trees.marks_of(parameters, choice, trees.of_weights(made, room))
    if not choice.may_be_empty:
        _check_patterns(patterns or {}, [p.path for p in itertools.compress(parameters, marks)])
    new = trees.map_marked(params, marks, trees.on_matrix(made, matrix_axes))
    _warn(parameters, choice, room, done)
    return kind.with_shared(new, key, **options)


def _check_key(kind: Any, name: str, key: KeySource) -> None:
    """Raises for a function of keys if all weights of a method take their numbers from one key."""
    with_shared: Any = getattr(kind.with_shared, "__func__", None)
    shares = kind.one_key or with_shared is not Adapter.__dict__["with_shared"].__func__
    if callable(key) and shares:
        raise value_error(f"method {name!r}: all weights share one key; give key= a key or a seed")


def _room(kind: Any, of_weight: Callable[[str], dict[str, Any]]) -> Room:
    """The weights with room for adapters of a method, given the options of each weight."""

    def room_of(path: str, shape: tuple[int, ...]) -> int:
        return kind.room(shape[stacked_axes(path) :], **of_weight(path))

    return Room(lambda path: of_weight(path).get("rank", 1), room_of)


def _warn(
    parameters: Sequence[trees.Parameter],
    choice: trees.Choice,
    room: Room,
    done: Mapping[str, Adapter],
) -> None:
    """Warns of weights that may be other matrices, of large adapters, and of weights without one."""
    # A type for kernels of convolutions takes all axes together.
    stacks = [p.path in done and done[p.path].core_ndim == 2 for p in parameters]
    told = {p.path for p in trees.stacks_in(parameters, stacks, choice)}
    rest = [choice.opened(p) for p in parameters if p.path in done.keys() - told]
    # `matrix_axes={}` says that kernels are stacks, too.
    unsaid = choice.matrix_axes is None or len(choice.matrix_axes) > 0
    found = [text for p in rest for text in _if_large(p, done[p.path], of_kernels=unsaid)]
    _warn_of_large(found, " To keep them, give matrix_axes={}." if unsaid else "")
    trees.warn_of_others(parameters, stacks, choice, room, room.of_each)


def _check_patterns(patterns: Iterable[str], paths: Sequence[str]) -> None:
    """Raises if a pattern matches no weight; warns if earlier patterns take all its weights."""
    taken: dict[str, str] = {}
    for pattern in patterns:
        own = [path for path in paths if re.fullmatch(pattern, path)]
        if not own:
            raise no_match("patterns", pattern, paths, kind="weights that get an adapter")
        if all(path in taken for path in own):
            warn_caller(
                f"patterns: {pattern!r} decides for no weight, since {taken[own[0]]!r} before it "
                f"matches {own[0]}, too. The first pattern that matches decides: put {pattern!r} first"
            )
        for path in own:
            taken.setdefault(path, pattern)


def _kind_of(method: Any) -> tuple[Any, str]:
    """The class of a method, and its name in errors.

    Raises:
      ValueError: for an unknown name, or a name that several classes have.
      TypeError: for anything but a name or an adapter class with `create`.
    """
    names = ", ".join(map(repr, method_names()))
    if isinstance(method, str):
        kind = method_named(method)
        if kind is None:
            raise value_error(
                f"method: expected one of {names}, or a subclass of "
                f"haiku_implicit.adapters.Adapter, got {method!r}"
            )
        return kind, method
    is_kind = isinstance(method, type) and issubclass(method, Adapter)
    if not is_kind or not callable(getattr(method, "create", None)):
        raise type_error(
            "method: expected a subclass of haiku_implicit.adapters.Adapter that has a class method "
            f"create(w, key, **options), or its name, one of {names}; got {method!r}"
        )
    return method, method.__name__


def _created(kind: Any, value: Array, key: KeySource, options: Mapping[str, Any]) -> Adapter:
    """A weight with an adapter; raises if `create` of its type makes anything else."""
    new = kind.create(value, key, **options)
    if not isinstance(new, Adapter) or tuple(new.shape) != tuple(value.shape):
        raise type_error(
            f"{kind.__name__}.create: expected a {kind.__name__} of the shape {list(value.shape)}, "
            f"got {describe(new) if hasattr(new, 'shape') else type(new).__name__}"
        )
    return new


def _in_dtype(new: Adapter, dtype: DType | None) -> Adapter:
    """An adapter with its trained arrays in a dtype; by default in their own, of 32 bits or more."""

    def cast(x: Array) -> Array:
        if is_implicit(x) or not jnp.issubdtype(getattr(x, "dtype", object), np.floating):
            return x
        return x.astype(dtype or (x.dtype if x.dtype.itemsize >= 4 else jnp.float32))

    names = [name for name in data_names(type(new)) if name not in frozen_names(type(new))]
    trained = {name: getattr(new, name) for name in names}
    return new._replace(**jax.tree.map(cast, trained, is_leaf=is_implicit))


def _if_large(parameter: trees.Parameter, new: Adapter, *, of_kernels: bool) -> Iterator[str]:
    """The description of an adapter for each matrix of a stack, if few would be enough.

    A weight of more than two axes is a stack of matrices, each with its own adapter. If these matrices
    are small, the adapters are larger than the weight. With `of_kernels`, this also describes each
    adapter for every position of a convolution's kernel.
    """
    size, added = math.prod(new.shape), _numbers(new) - _numbers(new.w)
    count = math.prod(new.shape[parameter.stacked : -2])
    wasteful = added > size or (of_kernels and is_kernel(parameter))
    if new.core_ndim == 2 and count > 1 and wasteful:
        what = f"{count:,} adapters with {added:,} numbers for {size:,}"
        yield f"{parameter.path} ({describe(parameter.value)}: {what})"


def _numbers(tree: Tree) -> int:
    return sum(math.prod(np.shape(x)) for x in jax.tree.leaves(tree))


def _warn_of_large(found: list[str], more: str) -> None:
    if found and is_news("large"):
        warn_caller(
            "weights of more than two axes count as stacks of matrices [..., n, m], with an adapter "
            f"for each matrix: {shown(found)}. The method 'locon' of add_adapter has one for a whole "
            "kernel of a convolution: leave kernels out here by exclude=, and name them there by "
            f"targets=. hki.prepare(model, params, *args) finds one matrix in other weights.{more}"
            f" {see('which-axes-make-a-matrix')}"
        )


def options_of(method: Any) -> dict[str, bool] | None:
    """The options of a method, and whether each is required; None if it takes any option.

    Raises:
      ValueError: for an unknown method.
    """
    kind, _ = _kind_of(method)
    own = list(inspect.signature(kind.create).parameters.values())[2:]  # without `w` and `key`
    if any(p.kind is p.VAR_KEYWORD for p in own):
        return None
    return {p.name: p.default is p.empty for p in own}


def _options_of(
    kind: Any, name: str, options: Mapping[str, Any], patterns: Patterns
) -> Callable[[str], dict[str, Any]]:
    """Returns the options of a weight by its path; raises for unknown or missing options."""
    known = options_of(kind)
    rules = checked_patterns(patterns)
    for given in (options, *({**options, **more} for _, more in rules)):
        wrong = sorted(set(given) - set(known or given))
        missing = [own for own, needed in (known or {}).items() if needed and own not in given]
        if wrong or missing:
            names = (f"{own}{'' if needed else ' (optional)'}" for own, needed in known.items())  # type: ignore[union-attr]
            raise value_error(
                f"method {name!r}: expected the options {', '.join(names) or 'none'}, got "
                f"{', '.join(sorted(given)) or 'none'}"
            )
        kind.check_options(given)

    def of_weight(path: str) -> dict[str, Any]:
        found = (more for pattern, more in rules if pattern.fullmatch(path))
        return {**options, **next(found, {})}

    return of_weight


def checked_patterns(patterns: Patterns) -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """The argument `patterns` with compiled expressions; raises if it has another type."""
    example = "such as {'.*/mlp/.*': {'rank': 4}}"
    if not isinstance(patterns, Mapping):
        raise type_error(
            "patterns: expected a mapping from regular expressions to mappings of options, "
            f"{example}, got {patterns!r}"
        )
    for pattern, own in patterns.items():
        if not isinstance(own, Mapping):
            raise type_error(f"patterns: expected options for {pattern!r}, {example}, got {own!r}")
    return [(compiled("patterns", pattern), more) for pattern, more in patterns.items()]
