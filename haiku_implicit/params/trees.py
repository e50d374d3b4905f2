"""Trees of parameters: access to their arrays by name, and replacement of some of them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from haiku_implicit.core import progress
from haiku_implicit.core.array import check_values, is_implicit, known_struct
from haiku_implicit.core.predicates import (
    Predicate,
    Targets,
    check_paths,
    no_match,
    path_of,
    predicate_of,
)
from haiku_implicit.params.matrix_axes import MatrixAxesOf, check_given, open_matrix
from haiku_implicit.params.selection import (
    describe,
    errors_name,
    in_tree,
    is_complex_weight,
    is_dense_matrix,
    is_weight,
    stacked_axes,
)
from haiku_implicit.products.quant_rules import (
    OP_NAMES,
    QuantRule,
    rules_for_module,
    warn_of_unused,
)


class Parameter(NamedTuple):
    """An array of a tree, dense or implicit, with its module and name.

    Attributes:
      module_name, name: the keys of the array in the tree.
      value: the array.
      is_matrix: whether its last two axes are known to be a matrix, and all others batch axes.
    """

    module_name: str
    name: str
    value: Any
    is_matrix: bool = False

    @property
    def path(self) -> str:
        """The path `module/name`."""
        return path_of(self.module_name, self.name)

    @property
    def stacked(self) -> int:
        """The number of leading axes that are known to stack weights."""
        return len(self.value.shape) - 2 if self.is_matrix else stacked_axes(self.module_name)

    def key_from(self, key: jax.Array) -> jax.Array:
        """A random key for this parameter, independent of other parameters."""
        return jax.random.fold_in(key, zlib.crc32(self.path.encode()))


def map_parameters(fun: Callable[[Parameter], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """Replaces each array in a nesting of mappings by `fun(parameter)`.

    Haiku makes only mappings, but other libraries put lists and tuples into them.
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
    if is_implicit(tree) and known_struct(tree) is None:
        raise a_half("/".join(path), tree)
    if not (hasattr(tree, "shape") and hasattr(tree, "dtype")):
        return tree
    parameter = Parameter("/".join(path[:-1]), path[-1], tree)
    try:
        return fun(parameter)
    except (AttributeError, TypeError) as error:
        if isinstance(error, AttributeError) or "ShapeDtypeStruct" in str(error):
            check_values(parameter.path, tree, error)
        raise


def a_half(path: str, value: Any) -> ValueError:
    """The error for a parameter that is only a part of an implicit array."""
    return ValueError(
        f"{path}: a part of {type(value).__name__}, as in one of the halves that partition returns. "
        "Put both together first: haiku_implicit.combine(trained, frozen)"
    )


def parameters_of(tree: Any) -> list[Parameter]:
    """Lists the arrays of a tree, in its order."""
    found: list[Parameter] = []
    map_parameters(found.append, tree)
    return found


def on_matrix(
    make: Callable[[Parameter], Any], given: MatrixAxesOf | None = None
) -> Callable[[Parameter], Any]:
    """`make` for parameters of which some are views of matrices: it gets and returns the matrices.

    Args:
      make: a function of a parameter.
      given: the axes of dense parameters to be treated as such matrices.
    """

    def made(parameter: Parameter) -> Any:
        opened = open_matrix(parameter.path, parameter.value, given)
        known = opened.axes is not None
        return opened.closed(make(parameter._replace(value=opened.matrix, is_matrix=known)))

    return made


def map_matrices(fun: Callable[[Parameter], Any], tree: Any) -> Any:
    """Replaces each parameter of a tree, or the matrix of a view, by `fun(parameter)`."""
    return map_parameters(on_matrix(fun), tree)


def none_of(function: str, kind: str, params: Any) -> ValueError:
    """The error of a function that finds no weights of its type, as in a wrapped function."""
    found = ", ".join(f"{p.path} {describe(p.value)}" for p in parameters_of(params)[:4])
    return ValueError(
        f"{function}: expected parameters with {kind}, and there are none in: {found}. If there were "
        "before the call: within hki.value_and_grad, hki.grad and hki.use_implicit_args they are "
        "ordinary arrays. Use jax.value_and_grad with respect to the first part that hki.partition "
        "returns, and hki.combine both parts in the loss"
    )


def replace_marked(
    params: Any,
    marks: Sequence[bool],
    make: Callable[[Parameter], Any],
    given: MatrixAxesOf | None = None,
) -> Any:
    """Replaces each marked parameter of a tree, or the matrix of a view, by `make(parameter)`.

    Args:
      given: as for `on_matrix`.
    """
    return map_marked(params, marks, on_matrix(make, given))


def map_marked(params: Any, marks: Sequence[bool], make: Callable[[Parameter], Any]) -> Any:
    """Replaces each marked parameter of a tree by `make(parameter)`, under a progress bar."""
    left = iter(marks)
    with progress.bar("parameters", sum(marks)) as run:

        def replaced(parameter: Parameter) -> Any:
            return run(parameter.path, make, parameter) if next(left) else parameter.value

        return map_parameters(replaced, params)


class Choice(NamedTuple):
    """The arguments by which a function on trees chooses parameters.

    Attributes:
      targets: the parameters to change; None for the default of the function.
      exclude: the targets to leave out; None for none.
      missing_ok: whether to accept that no target is left, that `exclude` matches nothing, and that no
        parameter has the name of an entry in `matrix_axes`.
      matrix_axes: the axes that make matrices of some parameters.
    """

    targets: Targets | None
    exclude: Targets | None = None
    missing_ok: bool = False
    matrix_axes: MatrixAxesOf | None = None

    def opened(self, parameter: Parameter) -> Parameter:
        """The parameter with a matrix as its value, or the struct of a matrix."""
        value = parameter.value
        if not is_implicit(value):
            value = jax.ShapeDtypeStruct(value.shape, value.dtype)
        opened = open_matrix(parameter.path, value, self.matrix_axes)
        return parameter._replace(value=opened.matrix, is_matrix=opened.axes is not None)

    def predicate(self, default: Predicate | None) -> Predicate:
        """The predicate of `targets`; if it is None, the default, applied to matrices."""
        of_matrix = default and (lambda *of: default(*self.opened(Parameter(*of))[:3]))
        return predicate_of("targets", self.targets, of_matrix)

    def marks(self, parameters: Sequence[Parameter], default: Predicate | None) -> list[bool]:
        """Whether each parameter is chosen.

        Args:
          parameters: the parameters of a tree.
          default: the predicate if `targets` is None; without a default, None is an error.
        """
        if not self.missing_ok:
            paths = [p.path for p in parameters]
            check_given(self.matrix_axes, paths)
            check_paths("targets", self.targets, paths)
            check_paths("exclude", self.exclude, paths)
        chosen = self.predicate(default)
        excluded = predicate_of("exclude", self.exclude, lambda *_: False)
        wanted, out = ([bool(f(*p[:3])) for p in parameters] for f in (chosen, excluded))
        if self.exclude not in (None, False) and not any(out) and not self.missing_ok:
            raise no_match("exclude", self.exclude, [p.path for p in parameters])
        left = [w and not o for w, o in zip(wanted, out, strict=True)]
        if any(wanted) and not any(left) and not self.missing_ok:
            names = ", ".join(p.path for p, w in zip(parameters, wanted, strict=True) if w)
            raise ValueError(
                f"exclude: it leaves out all {sum(wanted)} that targets chooses: {names}"
            )
        return left


def replace_targets(
    params: Any,
    choice: Choice,
    make: Callable[[Parameter], Any],
    takes: Predicate | None = None,
    wanted: str = "",
) -> Any:
    """Replaces each target in a tree by `make(parameter)`; for the other arguments see `marks_of`."""
    marks = marks_of(parameters_of(params), choice, takes, wanted)
    return replace_marked(params, marks, make, choice.matrix_axes)


def marks_of(
    parameters: Sequence[Parameter],
    choice: Choice,
    takes: Predicate | None = None,
    wanted: str = "",
) -> list[bool]:
    """Whether each parameter is a target. At least one has to be, unless `choice` allows none.

    Args:
      parameters: the parameters of a tree.
      choice: the choice of targets among them.
      takes: the predicate if `targets` is None; without a predicate, None is an error.
      wanted: the parameters that this predicate looks for, in words, for errors.
    """
    marks = choice.marks(parameters, takes and in_tree(takes))
    if not any(marks) and not choice.missing_ok:
        paths = [parameter.path for parameter in parameters]
        number = sum(is_complex_weight(*p[:3]) for p in parameters)
        if choice.targets is None and number:
            wanted += f" (complex weights, of which there are {number}, are not supported)"
        if choice.targets is None:
            _check_not_done(parameters)
        raise no_match("targets", choice.targets, paths, wanted=wanted)
    return marks


def _check_not_done(parameters: Sequence[Parameter]) -> None:
    """Raises if all weights are implicit already, as in a second call."""
    done = [p for p in parameters if is_implicit(p.value) and is_weight(*p[:3])]
    if done and not any(is_weight(*p[:3]) for p in parameters if not is_implicit(p.value)):
        first = done[0]
        raise ValueError(
            f"targets: all {len(done)} weights are implicit already; {first.path} is "
            f"{describe(first.value)}. merge_lora and dequantize_params make them dense; targets= "
            "names those of other types that are to be changed"
        )


# --- by rules ------------------------------------------------------------------------------------


def checked_rules(rules: Any) -> list[QuantRule]:
    """The rules as a list; a single rule becomes a list of one."""
    rules = [rules] if isinstance(rules, QuantRule) else list(rules)
    for i, rule in enumerate(rules):
        if not isinstance(rule, QuantRule):
            raise TypeError(f"rules[{i}]: expected a QtRule or a QuantRule, got {rule!r}")
    return rules


def rules_of(rules: Sequence[QuantRule], parameter: Parameter) -> tuple[QuantRule, ...]:
    """The rules that decide for the products of a module; empty if they all leave it dense."""
    own = rules_for_module(rules, parameter.module_name)
    return own if any(rule.weight_qtype is not None for rule in own) else ()


def rule_of(rules: Sequence[QuantRule], parameter: Parameter) -> QuantRule | None:
    """The rule by which a weight is stored, from the rules for its products; None to leave it dense.

    A weight with two axes is for a `dot_general`, and a weight with more than three is the kernel of a
    convolution. A weight with three may be for any operation, and is taken to be for the operation that
    the rules quantize.

    Raises:
      ValueError: if they quantize a weight with three axes differently for different operations.
    """
    own = rules_for_module(rules, parameter.module_name)
    axes = len(parameter.value.shape) - parameter.stacked
    operations = ("dot_general",) if axes < 3 else ("conv_general_dilated",)
    by_op = {
        op: next((rule for rule in own if rule.is_for(op)), None)
        for op in (OP_NAMES if axes == 3 else operations)
    }
    found = {op: rule for op, rule in by_op.items() if rule is not None and rule.weight_qtype}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"rules: they differ for {', '.join(found)}, and a weight of three axes may be for any of "
            "them: say by module_path which rule is for its module"
        )
    return next(iter(found.values()), None)


def replace_by_rules(
    params: Any,
    rules: Sequence[QuantRule],
    choice: Choice,
    make: Callable[[Parameter, Any], Any],
    decide: Callable[[Sequence[QuantRule], Parameter], Any] = rule_of,
) -> Any:
    """Replaces the dense weights that rules quantize by `make(parameter, decided)`.

    A warning names rules that decide for nothing. It points to the caller of the public function that
    has called this one.

    Args:
      decide: a function that selects from the rules for a parameter: `rule_of` one, `rules_of` all.
    """
    parameters = parameters_of(params)
    chosen = choice.marks(parameters, in_tree(is_weight))
    decided, modules = [], []
    for p, is_chosen in zip(map(choice.opened, parameters), chosen, strict=True):
        is_target = is_chosen and is_dense_matrix(p.value)
        if is_target:
            modules.append(p.module_name)
        with errors_name(p.path, p.value):
            decided.append(decide(rules, p) if is_target else None)
    marks = list(map(bool, decided))
    if not any(marks):
        if choice.missing_ok:
            return replace_marked(params, marks, lambda parameter: parameter.value)
        if not modules:
            _check_not_done(parameters)
        number = sum(is_complex_weight(*p[:3]) for p in parameters)
        of_complex = f" ({number} complex weights are not supported)" if number else ""
        patterns = ", ".join(repr(rule.module_path) for rule in rules)
        raise ValueError(
            f"rules: those for {patterns or 'nothing'} quantize none of the {len(modules)} dense "
            f"weights{of_complex}; their modules are: {', '.join(sorted(set(modules)))}"
        )

    left = iter(filter(None, decided))

    def replaced(parameter: Parameter) -> Any:
        with errors_name(parameter.path, parameter.value):
            return make(parameter, next(left))

    new = replace_marked(params, marks, replaced, choice.matrix_axes)
    warn_of_unused(rules, modules)
    return new
