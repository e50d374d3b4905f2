"""Adapters put on weights of a tree of parameters, by the name of a method."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from haiku_implicit import adapters
from haiku_implicit.core.predicates import Targets
from haiku_implicit.params import trees
from haiku_implicit.params.matrix_axes import MatrixAxesOf
from haiku_implicit.params.options import LoRAOptions, check_matrix
from haiku_implicit.params.selection import errors_name

METHODS: dict[str, Any] = {
    "dora": adapters.DoRA,
    "ia3": adapters.IA3,
    "loha": adapters.LoHa,
    "lokr": adapters.LoKr,
    "oft": adapters.OFT,
    "vera": adapters.VeRA,
}


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
      method: 'lora', 'dora', 'ia3', 'loha', 'lokr', 'oft' or 'vera'.
      targets, exclude, missing_ok, matrix_axes: as for `add_lora`.
      patterns: other options for some weights: a mapping from a regular expression that the whole of
        `module/name` matches to options, such as `{'.*/mlp/.*': {'rank': 4}}`; the first one counts.
      **options: of the method, such as `rank` and `alpha`; see `create` of the type, for example
        `help(haiku_implicit.adapters.DoRA.create)`.

    Returns:
      The tree with adapters in place of the targets, mappings as dicts.

    Raises:
      ValueError: for an unknown method or option, a missing option, targets that match nothing, a
        weight that the adapter does not fit.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((4, 3)), 'b': jnp.zeros(3)}}
      >>> new = hki.add_adapter(params, 0, 'dora', rank=2)
      >>> new['linear']['w']
      DoRA(float32[4,3], w=float32[4,3], a=float32[4,2], b=float32[2,3], magnitude=float32[3])
      >>> hki.add_adapter(params, 0, 'dora', ranks=2)
      Traceback (most recent call last):
      ...
      ValueError: method 'dora': expected the options rank, alpha (optional), got ranks
    """
    of_weight = _options_of(method, options, patterns or {})
    key = jax.random.key(key) if isinstance(key, int) else key
    choice = trees.Choice(targets, exclude, missing_ok, matrix_axes)

    def make(parameter: trees.Parameter) -> Any:
        own, own_key = of_weight(parameter.path), parameter.key_from(key)
        if method == "lora":
            return LoRAOptions(**own).put_on(parameter.path, parameter.value, own_key)
        check_matrix(parameter.path, parameter.value, method)
        with errors_name(parameter.path, parameter.value):
            return METHODS[method].create(parameter.value, own_key, **own)

    room = LoRAOptions(options.get("rank", 1))
    return trees.replace_targets(params, choice, make, room.takes, room.wanted)


def _options_of(
    method: str, options: Mapping[str, Any], patterns: Mapping[str, Mapping[str, Any]]
) -> Callable[[str], dict[str, Any]]:
    """The options for the weight of a path; raises for those that the method does not have."""
    if method not in METHODS and method != "lora":
        raise ValueError(f"method: expected 'lora' or one of {sorted(METHODS)}, got {method!r}")
    create: Any = LoRAOptions if method == "lora" else METHODS[method].create
    own = [p for p in inspect.signature(create).parameters.values() if p.name not in ("w", "key")]
    known = {p.name: p.default is p.empty for p in own}
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
