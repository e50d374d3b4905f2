"""Trees of parameters: their arrays by name, and new ones in place of some of them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from haiku_implicit.core.predicates import Predicate, Targets, no_match, path_of, predicate_of
from haiku_implicit.params import progress
from haiku_implicit.params.selection import errors_name, in_tree, is_dense_matrix, is_weight
from haiku_implicit.products.quant_rules import QuantRule, rules_for_module, warn_of_unused


class Parameter(NamedTuple):
    """An array of a tree, dense or implicit, and where it is."""

    module_name: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """`module/name`."""
        return path_of(self.module_name, self.name)

    def key_from(self, key: jax.Array) -> jax.Array:
        """A random key of its own, which does not depend on other parameters."""
        return jax.random.fold_in(key, zlib.crc32(self.path.encode()))


def map_parameters(fun: Callable[[Parameter], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """A nesting of mappings with `fun(parameter)` in place of each array in it.

    Haiku makes only mappings; other libraries put lists and tuples into them.
    """
    if isinstance(tree, Mapping):
        return {k: map_parameters(fun, v, (*path, str(k))) for k, v in tree.items()}
    if not path:
        raise TypeError(
            "params: expected a mapping of parameters as Haiku's init returns it, got "
            f"{type(tree).__name__}"
        )
    if isinstance(tree, list | tuple):
        items = [map_parameters(fun, v, (*path, str(i))) for i, v in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if not (hasattr(tree, "shape") and hasattr(tree, "dtype")):
        return tree
    return fun(Parameter("/".join(path[:-1]), path[-1], tree))


def parameters_of(tree: Any) -> list[Parameter]:
    """The arrays of a tree, in its order."""
    found: list[Parameter] = []
    map_parameters(found.append, tree)
    return found


def replace_marked(params: Any, marks: Sequence[bool], make: Callable[[Parameter], Any]) -> Any:
    """A tree with `make(parameter)` in place of those that are marked, under a progress bar."""
    left = iter(marks)
    with progress.bar("parameters", sum(marks)) as run:

        def replaced(parameter: Parameter) -> Any:
            return run(parameter.path, make, parameter) if next(left) else parameter.value

        return map_parameters(replaced, params)


def replace_targets(
    params: Any,
    targets: Targets | None,
    make: Callable[[Parameter], Any],
    takes: Predicate | None = None,
    default: str = "",
) -> Any:
    """A tree with `make(parameter)` in place of each target, of which there has to be one.

    Args:
      params: the tree.
      targets: which parameters.
      make: makes the replacement.
      takes: the predicate if `targets` is None; without one, None is an error.
      default: what this predicate looks for, for errors.
    """
    chosen = predicate_of("targets", targets, takes and in_tree(takes))
    parameters = parameters_of(params)
    marks = [bool(chosen(*parameter)) for parameter in parameters]
    if not any(marks):
        paths = [parameter.path for parameter in parameters]
        raise no_match("targets", targets, paths, default=default)
    return replace_marked(params, marks, make)


# --- by rules ------------------------------------------------------------------------------------


def checked_rules(rules: Any) -> list[QuantRule]:
    """The rules as a list; a single rule makes a list of one."""
    rules = [rules] if isinstance(rules, QuantRule) else list(rules)
    for i, rule in enumerate(rules):
        if not isinstance(rule, QuantRule):
            raise TypeError(f"rules[{i}]: expected a QtRule or a QuantRule, got {rule!r}")
    return rules


def rules_of(rules: Sequence[QuantRule], module_name: str) -> tuple[QuantRule, ...]:
    """The rules that decide for a module; empty if they all leave it alone."""
    own = rules_for_module(rules, module_name)
    return own if any(rule.weight_qtype is not None for rule in own) else ()


def deciding_rule(rules: Sequence[QuantRule]) -> QuantRule:
    """Of the rules for a module, the first one that quantizes its weights."""
    return next(rule for rule in rules if rule.weight_qtype is not None)


def replace_by_rules(
    params: Any,
    rules: Sequence[QuantRule],
    targets: Targets | None,
    make: Callable[[Parameter, tuple[QuantRule, ...]], Any],
) -> Any:
    """A tree with `make(parameter, rules)` in place of the dense weights that rules quantize.

    A warning names rules that decide for nothing. It points to the caller of the public function
    that has called this one.
    """
    chosen = predicate_of("targets", targets, in_tree(is_weight))
    marks, modules = [], []
    for p in parameters_of(params):
        is_target = is_dense_matrix(p.value) and bool(chosen(*p))
        if is_target:
            modules.append(p.module_name)
        marks.append(is_target and bool(rules_of(rules, p.module_name)))
    if not any(marks):
        patterns = ", ".join(repr(rule.module_path) for rule in rules)
        raise ValueError(
            f"rules: those for {patterns or 'nothing'} quantize none of the {len(modules)} dense "
            f"weights; their modules are: {', '.join(sorted(set(modules)))}"
        )

    def replaced(parameter: Parameter) -> Any:
        with errors_name(parameter.path, parameter.value):
            return make(parameter, rules_of(rules, parameter.module_name))

    new = replace_marked(params, marks, replaced)
    warn_of_unused(rules, modules, stacklevel=3)
    return new
