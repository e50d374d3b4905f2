"""An adapter apart from its base: taken out of a tree of parameters, and put into another one."""

import dataclasses
import difflib
import hashlib
from typing import Any

import jax
import numpy as np

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.core.array import data_names
from haiku_implicit.core.predicates import Targets, predicate_of
from haiku_implicit.core.serialization import register_tree_type
from haiku_implicit.params import trees
from haiku_implicit.params.selection import describe


@register_tree_type
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterParts:
    """What an adapter adds to a model: what `get_adapter` takes out and `set_adapter` puts in.

    A pytree. Adapters of one shape for one base have one structure, whatever their `alpha`s are, so
    that a compiled function takes any of them.

    Attributes:
      weights: by `module/name`, the weight with its adapter; where its base was there is None.
      dense: by `module/name`, parameters that were trained as a whole.
      bases: `(module/name, digest)` of the base of each weight, which `set_adapter` compares; empty for
        an adapter of unknown base.
    """

    weights: dict[str, Any]
    dense: dict[str, Any] = dataclasses.field(default_factory=dict)
    bases: tuple[tuple[str, str], ...] = dataclasses.field(default=(), metadata={"static": True})


def get_adapter(params: Any, *, trainable_dense: Targets | None = None) -> AdapterParts:
    """Takes the adapter out of a tree of parameters.

    Args:
      params: parameters with `LoRA` or types of `haiku_implicit.adapters` in them, in any nesting of
        mappings.
      trainable_dense: which dense parameters were trained, too, and belong to it; None for none.

    Returns:
      What the adapter adds, without the base. It remembers digests of the base's bytes.

    Raises:
      ValueError: where no parameter has an adapter, and none is chosen by `trainable_dense`.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> base = {'linear': {'w': jnp.ones((4, 3)), 'b': jnp.zeros(3)}}
      >>> adapter = hki.get_adapter(hki.add_lora(base, 0, rank=1))
      >>> sorted(adapter.weights), adapter.weights['linear/w'].w
      (['linear/w'], None)
      >>> hki.set_adapter(base, adapter)['linear']['w']
      LoRA(float32[4,3], w=float32[4,3], a=float32[4,1], b=float32[1,3])
      >>> hki.set_adapter({'linear': {'w': jnp.zeros((4, 3))}}, adapter)
      Traceback (most recent call last):
      ...
      ValueError: linear/w: the adapter was made for another base (digest ...
    """
    chosen = predicate_of("trainable_dense", trainable_dense, lambda *_: False)
    weights, dense, bases = {}, {}, []
    for parameter in trees.parameters_of(params):
        path, value = parameter.path, parameter.value
        if has_adapter(value):
            weights[path] = with_base(value, None)
            bases.append((path, digest(base_of(value))))
        elif chosen(*parameter[:3]):
            dense[path] = value
    if not weights and not dense:
        raise ValueError(
            "params: expected weights with adapters, as add_lora makes them; there are none"
        )
    return AdapterParts(weights, dense, tuple(bases))


def set_adapter(params: Any, adapter: AdapterParts | None, *, check_base: bool = True) -> Any:
    """Puts an adapter into a tree of parameters, in the place of the one that is there.

    Args:
      params: parameters, with or without an adapter, in any nesting of mappings.
      adapter: what `get_adapter` or `load` returned; None for the base alone.
      check_base: whether weights have to be those that the adapter was made for. Within `jax.jit`
        they cannot be compared, and are not.

    Returns:
      The tree with the adapter, mappings as dicts.

    Raises:
      ValueError: for a weight that is not in the tree, that has another shape, or that is another one
        than the adapter was made for.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = hki.add_lora({'linear': {'w': jnp.ones((4, 3))}}, 0, rank=1)
      >>> type(hki.set_adapter(params, None)['linear']['w']).__name__
      'ArrayImpl'
    """
    adapter = adapter or AdapterParts({})
    parameters = {p.path: p.value for p in trees.parameters_of(params)}
    digests = dict(adapter.bases)
    for path, new in {**adapter.weights, **adapter.dense}.items():
        if path not in parameters:
            nearest = difflib.get_close_matches(path, parameters, n=5, cutoff=0.0)
            raise ValueError(
                f"{path}: the adapter is for this weight, which is not there. Nearest: "
                f"{', '.join(nearest)}"
            )
        base = base_of(parameters[path])
        if path in digests and check_base and not _is_traced(base):
            _check_digest(path, base, digests[path])
        whole = with_base(new, base) if path in adapter.weights else new
        _check_shapes(path, base, whole)

    def replaced(parameter: trees.Parameter) -> Any:
        path, base = parameter.path, base_of(parameter.value)
        if path in adapter.weights:
            return with_base(adapter.weights[path], base)
        return adapter.dense.get(path, base)

    return trees.map_parameters(replaced, params)


def has_adapter(value: Any) -> bool:
    """Whether a parameter is a weight with an adapter, or a view of one."""
    return isinstance(value.matrix if isinstance(value, MatrixView) else value, LoRA | Adapter)


def base_of(value: Any) -> Any:
    """The weight without its adapters."""
    if isinstance(value, MatrixView) and has_adapter(value):
        base = base_of(value.matrix)
        return value._replace(matrix=base)
    while isinstance(value, LoRA | Adapter):
        value = value.w
    return value


def with_base(value: Any, base: Any) -> Any:
    """The weight with the same adapters on another base."""
    if isinstance(value, MatrixView):
        matrix = base.matrix if isinstance(base, MatrixView) else base
        return value._replace(matrix=with_base(value.matrix, matrix))
    if isinstance(
        base, MatrixView
    ):  # and the adapter is one for its matrix, as PEFT's files have it
        return base._replace(matrix=with_base(value, base.matrix))
    if isinstance(value.w, LoRA | Adapter):
        base = with_base(value.w, base)
    return value._replace(w=base)


def without_base(kind: type[LoRA | Adapter], **fields: Any) -> Any:
    """An adapter of a type without its base: what is in `AdapterParts`.

    Args:
      kind: the type.
      **fields: its other fields; those that are not given are None.
    """
    new = object.__new__(kind)
    new.__dict__.update(dict.fromkeys(data_names(kind)) | fields)
    new.__dict__.update(_shape=None, _dtype=None)
    return new


def digest(value: Any) -> str:
    """16 hexadecimal digits of the types, shapes and bytes of an array, dense or implicit."""
    found = hashlib.blake2b(digest_size=8)
    leaves, treedef = jax.tree_util.tree_flatten(value)
    found.update(str(treedef).encode())
    for leaf in leaves:
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype.name}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _is_traced(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(value))


def _check_digest(path: str, base: Any, wanted: str) -> None:
    found = digest(base)
    if found != wanted:
        raise ValueError(
            f"{path}: the adapter was made for another base (digest {wanted}; this one is "
            f"{describe(base)} with digest {found}), so that it would stand for other numbers. Give it "
            "that base, or check_base=False"
        )


def _check_shapes(path: str, base: Any, whole: Any) -> None:
    try:
        shape = jax.eval_shape(lambda x: x.materialize() if has_adapter(x) else x, whole).shape
    except Exception as e:
        raise ValueError(f"{path}: the adapter does not fit {describe(base)}: {e}") from e
    if tuple(shape) != tuple(base.shape):
        raise ValueError(
            f"{path}: the adapter is for shape {list(shape)}, the base is {describe(base)}"
        )
