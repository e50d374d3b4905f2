"""Adapters put on weights of a tree of parameters, by the name of a method."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from haiku_implicit import adapters
from haiku_implicit.core.predicates import Targets
from haiku_implicit.params import trees, vector_bank
from haiku_implicit.params.matrix_axes import MatrixAxesOf
from haiku_implicit.params.options import LoRAOptions, check_matrix
from haiku_implicit.params.remarks import LargeAdapters
from haiku_implicit.params.selection import errors_name

METHODS: dict[str, Any] = {
    "boft": adapters.BOFT,
    "dora": adapters.DoRA,
    "fourierft": adapters.FourierFT,
    "ia3": adapters.IA3,
    "locon": adapters.LoCon,
    "loha": adapters.LoHa,
    "lokr": adapters.LoKr,
    "low_rank_diagonal": adapters.LowRankDiagonal,
    "oft": adapters.OFT,
    "shira": adapters.SHiRA,
    "trained_rows": adapters.TrainedRows,
    "vblora": adapters.VBLoRA,
    "vera": adapters.VeRA,
}
# Options of `create` that do not come from the user.
_INNER = ("w", "key", "shared")


def add_adapter(
    params: Any,
    key: Any,
    method: str,
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    missing_ok: bool = False,
    matrix_axes: MatrixAxesOf | None = None,
    patterns: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """Puts adapters of a kind on weights of a tree of parameters, quantized ones included.

    The tree stands for the same numbers as before; what is added is trained, and the weights are not.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      key: a JAX random key, or an integer seed; each weight draws with a key of its own.
      method: 'lora', 'boft', 'dora', 'fourierft', 'ia3', 'locon', 'loha', 'lokr', 'low_rank_diagonal',
        'oft', 'shira', 'trained_rows', 'vblora' or 'vera'; see docs/adapters.md.
      targets, exclude, missing_ok, matrix_axes: as for `add_lora`.
      patterns: other options for some weights: a mapping from a regular expression that the whole of
        `module/name` matches to options, such as `{'.*/mlp/.*': {'rank': 4}}`; the first one counts.
      **options: of the method, such as `rank` and `alpha`; see `create` of the type, for example
        `help(haiku_implicit.adapters.DoRA.create)`.

    Returns:
      The tree with adapters in place of the targets, mappings as dicts. With 'vblora' it has a module
      more, the vector bank, which `with_vector_bank` puts into the weights in each step.

    Raises:
      ValueError: for an unknown method or option, a missing option, targets that match nothing, a
        weight that the adapter does not fit.

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
    """
    of_weight = _options_of(method, options, patterns or {})
    key = jax.random.key(key) if isinstance(key, int) else key
    choice = trees.Choice(targets, exclude, missing_ok, matrix_axes)

    large = LargeAdapters()

    def make(parameter: trees.Parameter) -> Any:
        return large.see(parameter, made(parameter))

    def made(parameter: trees.Parameter) -> Any:
        path, value = parameter.path, parameter.value
        own, own_key = of_weight(path), parameter.key_from(key)
        if method == "lora":
            return LoRAOptions(**own).put_on(path, value, own_key, parameter.stacked)
        check_matrix(path, value, method, parameter.stacked)
        with errors_name(path, value):
            return METHODS[method].create(value, own_key, **inner(parameter, own), **own)

    room = LoRAOptions(options.get("rank", 1))
    targets_are = choice, room.takes, room.wanted
    inner = _inner_options(method, params, targets_are, key)
    new = trees.replace_targets(params, choice, make, room.takes, room.wanted)
    large.warn()
    return vector_bank.added(new, key, options) if method == "vblora" else new


def _inner_options(
    method: str, params: Any, targets_are: Any, key: jax.Array
) -> Callable[[trees.Parameter, dict[str, Any]], dict[str, Any]]:
    """What `create` is given beside the options: what weights share, where a kernel begins."""
    if method == "locon":
        return lambda p, own: {
            "kernel_ndim": own.pop("kernel_ndim", len(p.value.shape) - p.stacked)
        }
    if method != "vera":
        return lambda p, own: {}
    parameters = trees.parameters_of(params)
    choice, takes, wanted = targets_are
    marks = trees.marks_of(parameters, choice, takes, wanted)
    shapes = [
        choice.opened(p).value.shape for p, marked in zip(parameters, marks, strict=True) if marked
    ]
    # (Others than matrices are an error, which names the parameter.)
    shared = [shape for shape in shapes if len(shape) == 2]
    n, m = (max((shape[i] for shape in shared), default=0) for i in (0, 1))

    @functools.cache
    def factors(rank: int, dtype: Any) -> Any:
        return adapters.VeRA.draw(key, (n, m), rank, dtype)

    def inner(parameter: trees.Parameter, own: dict[str, Any]) -> dict[str, Any]:
        """One pair of factors for all matrices; stacked ones have a pair each."""
        value = parameter.value
        plain = len(value.shape) == 2
        return dict(shared=factors(own["rank"], value.dtype)) if plain else {}

    return inner


def options_of(method: str) -> dict[str, bool]:
    """The options of a method, and whether each has to be given.

    Raises:
      ValueError: for an unknown method.
    """
    if method not in METHODS and method != "lora":
        raise ValueError(f"method: expected 'lora' or one of {sorted(METHODS)}, got {method!r}")
    create: Any = LoRAOptions if method == "lora" else METHODS[method].create
    own = [p for p in inspect.signature(create).parameters.values() if p.name not in _INNER]
    return {p.name: p.default is p.empty for p in own}


def _options_of(
    method: str, options: Mapping[str, Any], patterns: Mapping[str, Mapping[str, Any]]
) -> Callable[[str], dict[str, Any]]:
    """The options for the weight of a path; raises for those that the method does not have."""
    known = options_of(method)
    for given in (options, *({**options, **more} for more in patterns.values())):
        wrong = sorted(set(given) - set(known))
        missing = [name for name, needed in known.items() if needed and name not in given]
        if wrong or missing:
            names = (f"{name}{'' if needed else ' (optional)'}" for name, needed in known.items())
            raise ValueError(
                f"method {method!r}: expected the options {', '.join(names)}, got "
                f"{', '.join(sorted(given)) or 'none'}"
            )

    def of_weight(path: str) -> dict[str, Any]:
        found = (more for pattern, more in patterns.items() if re.fullmatch(pattern, path))
        return {**options, **next(found, {})}

    return of_weight
