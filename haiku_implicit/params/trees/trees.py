"""Trees of parameters: access to their arrays by name, and replacement of some of them."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from haiku_implicit.arrays.adapter import Adapter, kinds
from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.core import progress
from haiku_implicit.core.array import check_no_half, check_values, is_implicit
from haiku_implicit.core.messages import see, shown, type_error, value_error, warn_caller
from haiku_implicit.core.predicates import Predicate, Targets, check_list, no_match, predicate_of
from haiku_implicit.core.typing import Array, Params, Tree
from haiku_implicit.params.trees import selection
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf, check_given, open_matrix
from haiku_implicit.params.trees.one_by_one import is_news, is_one_of_many
from haiku_implicit.params.trees.options import QuantizeOptions, Room, named
from haiku_implicit.params.trees.selection import Parameter, is_unsaid_stack
from haiku_implicit.quantized.products.rules import (
    OP_NAMES,
    QuantRule,
    rules_for_module,
    warn_of_unused,
)

Parameters = Sequence[Parameter]
Make = Callable[[Parameter], Array]  # the new value of a parameter


def map_parameters(fun: Make, tree: Tree, path: tuple[str, ...] = ()) -> Params:
    """Replaces each array in a nesting of mappings by `fun(parameter)`.

    Haiku makes only mappings, but other libraries put lists and tuples into them.
    """
    if isinstance(tree, Mapping):
        return {k: map_parameters(fun, v, (*path, str(k))) for k, v in tree.items()}
    if not path:
        raise type_error(
            "params: expected a mapping of parameters as Haiku's init returns it (for a model with "
            f"state: its first result), got {type(tree).__name__}"
        )
    if isinstance(tree, list | tuple):
        items = [map_parameters(fun, v, (*path, str(i))) for i, v in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    check_no_half("/".join(path), tree)
    if not (hasattr(tree, "shape") and hasattr(tree, "dtype")):
        return tree
    parameter = Parameter("/".join(path[:-1]), path[-1], tree)
    try:
        return fun(parameter)
    except (AttributeError, TypeError) as error:
        if isinstance(error, AttributeError) or "ShapeDtypeStruct" in str(error):
            check_values(parameter.path, tree, error)
        raise


def parameters_of(tree: Tree) -> list[Parameter]:
    """Lists the arrays of a tree, in its order."""
    found: list[Parameter] = []
    map_parameters(found.append, tree)
    return found


def values_of(tree: Tree) -> dict[str, Any]:
    """The arrays of a tree by their paths, `module/name`."""
    return {p.path: p.value for p in parameters_of(tree)}


def on_matrix(make: Make, given: MatrixAxesOf | None = None) -> Make:
    """`make` for parameters of which some are views of matrices: it gets and returns the matrices.

    Args:
      make: a function of a parameter.
      given: the axes of dense parameters to be treated as such matrices.
    """

    def made(parameter: Parameter) -> Array:
        opened = open_matrix(parameter.path, parameter.value, given)
        known = opened.axes is not None
        return opened.closed(make(parameter._replace(value=opened.matrix, is_matrix=known)))

    return made


def map_matrices(fun: Make, tree: Tree) -> Params:
    """Replaces each parameter of a tree, or the matrix of a view, by `fun(parameter)`."""
    return map_parameters(on_matrix(fun), tree)


def none_of(function: str, kind: str, params: Params) -> ValueError:
    """The error of a function that finds no weights of its type, as in a wrapped function."""
    found = ", ".join(f"{p.path} {selection.describe(p.value)}" for p in parameters_of(params)[:4])
    return ValueError(
        f"{function}: expected parameters with {kind}, and there are none in: {found}. If there were "
        "before the call: within hki.value_and_grad, hki.grad and hki.use_implicit_args they are "
        "ordinary arrays. Use jax.value_and_grad with respect to the first half that hki.partition "
        "returns, and hki.combine both halves in the loss"
        f" {see('ordinary-arrays-inside')}"
    )


def check_whole_tree(parameters: Sequence[Parameter]) -> None:
    """Raises for the trained arrays of a model from `hki.freeze`, which has the others itself."""
    paths, names = {p.path for p in parameters}, "|".join(kind.__name__.lower() for kind in kinds())
    for path in paths:
        found = re.fullmatch(rf"(.+?)_({names})_[a-z0-9_]+", path)
        if found and found[1] not in paths:
            raise ValueError(
                f"params: {path} is a trained array of a model from hki.freeze, and {found[1]} is not "
                "here. model.params(params) gives all parameters"
                f" {see('a-frozen-model')}"
            )


def map_marked(params: Params, marks: Sequence[bool], make: Make) -> Params:
    """Replaces each marked parameter of a tree by `make(parameter)`, under a progress bar."""
    left = iter(marks)
    with progress.bar("parameters", sum(marks)) as run:

        def replaced(parameter: Parameter) -> Array:
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

    @property
    def may_be_empty(self) -> bool:
        """Whether to accept that no parameter of a tree is chosen."""
        return self.missing_ok or is_one_of_many()

    def opened(self, parameter: Parameter) -> Parameter:
        """The parameter with a matrix as its value, or the struct of a matrix."""
        value = parameter.value
        if not is_implicit(value):
            value = jax.ShapeDtypeStruct(value.shape, value.dtype)
        opened = open_matrix(parameter.path, value, self.matrix_axes)
        return parameter._replace(value=opened.matrix, is_matrix=opened.axes is not None)

    def why_not(self, path: str, value: Array) -> str:
        """The reason for which a matrix is no target of an edit of weights."""
        module_name, _, name = path.rpartition("/")
        unlike = selection.why_no_weight(name, value) if self.targets is None else ""
        of_tree = self._replace(missing_ok=True, matrix_axes=None)
        if unlike or of_tree.marks([Parameter(module_name, name, value)], selection.is_weight)[0]:
            return unlike or "no option fits it"
        return "targets= or exclude= leaves it out"

    def chosen(self, parameters: Parameters, default: Predicate) -> list[Parameter]:
        """The chosen ones of some parameters, opened; `default` is of weights without stacked axes."""
        marks = self.marks(parameters, selection.in_tree(default))
        return [self.opened(p) for p in itertools.compress(parameters, marks)]

    def marks(self, parameters: Parameters, default: Predicate | None) -> list[bool]:
        """Whether each parameter is chosen.

        Args:
          parameters: the parameters of a tree.
          default: the predicate if `targets` is None; without a default, None is an error.
        """
        if not self.may_be_empty:
            paths = [p.path for p in parameters]
            check_given(self.matrix_axes, paths)
            check_list("targets", self.targets, paths)
            check_list("exclude", self.exclude, paths)
        of_matrix = default and (lambda *of: default(*self.opened(Parameter(*of))[:3]))
        chosen = predicate_of("targets", self.targets, of_matrix)
        excluded = predicate_of("exclude", self.exclude, lambda *_: False)
        wanted, out = ([bool(f(*p[:3])) for p in parameters] for f in (chosen, excluded))
        if self.exclude not in (None, False) and not any(out) and not self.may_be_empty:
            raise no_match("exclude", self.exclude, [p.path for p in parameters])
        left = [w and not o for w, o in zip(wanted, out, strict=True)]
        if any(wanted) and not any(left) and not self.may_be_empty:
            names = ", ".join(p.path for p, w in zip(parameters, wanted, strict=True) if w)
            raise ValueError(
                f"exclude: it leaves out all {sum(wanted)} that targets chooses: {names}"
                f" {see('nothing-matches')}"
            )
        return left


class Edit(NamedTuple):
    """A change of parameters.

    Attributes:
      make: a function of a chosen parameter, or of the matrix of a view, that returns its new value.
      takes: the default targets; None if `targets` has to choose.
      nothing: the error if no parameter is chosen, by the parameters of a tree and the choice.
      fits: whether a chosen parameter is changed; None for all of them.
      warn: warns of correct but unexpected results, by the parameters of a tree, whether each is
        changed, and the choice.
    """

    make: Make
    takes: Predicate | None = None
    nothing: Callable[[Parameters, Choice], ValueError] | None = None
    fits: Callable[[Parameter], bool] | None = None
    warn: Callable[[Parameters, Sequence[bool], Choice], None] | None = None


# The default targets of an edit of weights: those that suit it, and that fit its options.
Weights = Room | QuantizeOptions


def of_weights(make: Make, default: Weights) -> Edit:
    """An edit of weights, which warns of the weights that do not fit the options."""

    def takes(*of: Any) -> bool:
        return default.suits(*of) and default.fits(*of)

    def nothing(parameters: Parameters, choice: Choice) -> ValueError:
        suited = choice._replace(missing_ok=True).chosen(parameters, default.suits)
        page = default.page if suited else "nothing-matches"
        return nothing_chosen(parameters, choice, default.wanted(suited), page)

    warn = functools.partial(warn_of_others, default=default, of_each=default.of_each)
    return Edit(make, takes, nothing, warn=warn)


def replace_targets(params: Params, choice: Choice, edit: Edit) -> Params:
    """Replaces each target in a tree. At least one has to be there, unless `choice` allows none."""
    parameters = parameters_of(params)
    marks = marks_of(parameters, choice, edit)
    new = map_marked(params, marks, on_matrix(edit.make, choice.matrix_axes))
    if edit.warn is not None:
        edit.warn(parameters, marks, choice)
    return new


def marks_of(parameters: Parameters, choice: Choice, edit: Edit) -> list[bool]:
    """Whether each parameter is a target. At least one has to be, unless `choice` allows none."""
    marks = choice.marks(parameters, edit.takes and selection.in_tree(edit.takes))
    if edit.fits is not None:
        pairs = zip(parameters, marks, strict=True)
        marks = [marked and edit.fits(choice.opened(p)) for p, marked in pairs]
    if not any(marks) and not choice.may_be_empty:
        raise (edit.nothing or nothing_chosen)(parameters, choice)
    return marks


def nothing_chosen(
    parameters: Parameters, choice: Choice, wanted: str = "", page: str = "nothing-matches"
) -> ValueError:
    """The error for targets that choose nothing; raises if all weights are implicit already.

    Args:
      wanted: the default targets, in words.
      page: the section of docs/errors.md. If it is another one, there are weights, which do not fit.
    """
    check_whole_tree(parameters)
    number = sum(selection.is_complex_weight(*p[:3]) for p in parameters)
    if choice.targets is None:
        wanted += _already_done(parameters, may_be_all=page != "nothing-matches")
        if number:
            wanted += f" (complex weights, of which there are {number}, are not supported)"
    paths = [p.path for p in parameters]
    return no_match("targets", choice.targets, paths, wanted=wanted, page=page)


def warn_of_others(
    parameters: Parameters,
    marks: Sequence[bool],
    choice: Choice,
    default: Weights | None = None,
    of_each: str | None = None,
) -> None:
    """Warns once of weights that are changed or left out in another way than people may expect.

    These are the changed weights that may not be the stacks of matrices that they are taken for, and
    those that `targets=None` leaves out, unless `exclude` names them: complex weights, and weights that
    do not fit the options of the default.

    Args:
      parameters: those of a tree.
      marks: whether each is changed.
      choice: the arguments that chose them.
      default: the default targets.
      of_each: the new thing that each matrix of a stack has; None to accept all stacks.
    """
    sentences = _told_of_stacks(parameters, marks, choice, of_each) if of_each else []
    if choice.targets is None:
        lenient = choice._replace(missing_ok=True)
        if default is not None:
            left = lenient.chosen(parameters, lambda *p: default.suits(*p) and not default.fits(*p))
            if left and is_news(type(default).__name__):
                sentences.append(default.told(left, prepared=is_prepared(parameters)))
        of_complex = lenient.chosen(parameters, selection.is_complex_weight)
        if of_complex and is_news("complex"):
            names = named(of_complex)
            sentences.append(f"complex weights are not supported, and stay as they are: {names}")
    if isinstance(default, QuantizeOptions):
        marked = itertools.compress(parameters, marks)
        sentences += default.told_of_changed(list(map(choice.opened, marked)))
    if sentences:
        warn_caller(". ".join(sentences))


def _told_of_stacks(
    parameters: Parameters, marks: Sequence[bool], choice: Choice, of_each: str
) -> list[str]:
    """The warning about weights that are taken as stacks of matrices, though nothing says so."""
    found = stacks_in(parameters, marks, choice)
    if not found or not is_news("stacks"):
        return []
    what = "1 weight" if len(found) == 1 else f"{len(found)} weights"
    names = shown([_as_matrices(p) for p in found], most=3)
    way_out = "begin with params = hki.prepare(model, params, *args), or give matrix_axes="
    if is_one_of_many():  # out of a model that makes or reads them
        way_out = "say which by matrix_axes=, such as {'.*/query_w': ([-3], [-2, -1])}"
    return [
        f"nothing says which axes of {what} make a matrix, so that each counts as a stack of matrices, "
        f"with {of_each} for each matrix: {names}. If the model multiplies more axes as one matrix, "
        f"{way_out}. If they are stacks or kernels of convolutions, give matrix_axes={{}}"
        f" {see('which-axes-make-a-matrix')}"
    ]


def stacks_in(parameters: Parameters, marks: Sequence[bool], choice: Choice) -> list[Parameter]:
    """The marked weights that are taken as stacks of matrices, though nothing says so.

    `matrix_axes` of any value says so for all of them, and a `MatrixView` in the tree, too: `prepare`
    makes one of each weight that has more than two axes and is a matrix. A parameter `[..., m]` in the
    module of a weight `[..., n, m]` has the same stacked axes, as a bias for each matrix.
    """
    if choice.matrix_axes is not None or is_prepared(parameters):
        return []
    shapes = {(p.module_name, tuple(p.value.shape)) for p in parameters}

    def has_biases(p: Parameter) -> bool:
        *lead, _, m = p.value.shape
        return (p.module_name, (*lead, m)) in shapes

    marked = itertools.compress(parameters, marks)
    return [p for p in marked if is_unsaid_stack(p) and not has_biases(p)]


def is_prepared(parameters: Parameters) -> bool:
    """Whether `prepare` has seen some parameters, or the axes of one were given."""
    return any(isinstance(p.value, MatrixView) for p in parameters)


def _as_matrices(p: Parameter) -> str:
    *lead, n, m = p.value.shape[p.stacked :]
    return f"{p.path} ({selection.describe(p.value)} as {math.prod(lead):,} matrices of {n} x {m})"


def _already_done(parameters: Parameters, *, may_be_all: bool = False) -> str:
    """Says if some weights are implicit already; raises if all are, as in a second call.

    Args:
      parameters: those of a tree.
      may_be_all: whether to say nothing if all are, because implicit weights are targets, too.
    """
    weights = [p for p in parameters if selection.is_weight(*p[:3])]
    matrices = {p.path: open_matrix(p.path, p.value).matrix for p in weights}
    done = {path: matrix for path, matrix in matrices.items() if is_implicit(matrix)}
    if not done or (may_be_all and len(done) == len(weights)):
        return ""
    path, kind = next((path, selection.describe(matrix)) for path, matrix in done.items())
    if len(done) == len(weights):
        raise ValueError(
            f"targets: all {len(done)} weights are implicit already; {path} is {kind}. "
            "To change them all the same, name them by targets=. hki.materialize makes them dense, "
            "and hki.merge_adapters merges adapters alone"
            f" {see('implicit-already')}"
        )
    return f" (already implicit: {len(done)}, such as {path}, {kind})"


# --- by rules ------------------------------------------------------------------------------------


def checked_rules(rules: Any) -> list[QuantRule]:
    """The rules as a list; a single rule becomes a list of one."""
    rules = [rules] if isinstance(rules, QuantRule) else list(rules)
    for i, rule in enumerate(rules):
        if not isinstance(rule, QuantRule):
            raise type_error(f"rules[{i}]: expected a QtRule or a QuantRule, got {rule!r}")
    return rules


def rules_of(rules: Sequence[QuantRule], parameter: Parameter) -> tuple[QuantRule, ...]:
    """The rules that decide for the products of a module; empty if they all leave it dense."""
    own = rules_for_module(rules, parameter.module_name)
    return own if any(rule.weight_qtype is not None for rule in own) else ()


def rule_of(rules: Sequence[QuantRule], parameter: Parameter) -> QuantRule | None:
    """The rule by which a weight is quantized, from the rules for its products; None to leave it dense.

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
        raise value_error(
            f"rules: they differ for {', '.join(found)}, and a weight of three axes may be for any of "
            "them: say by module_path which rule is for its module"
        )
    return next(iter(found.values()), None)


def by_rules(
    rules: Sequence[QuantRule],
    make: Callable[[Parameter, Any], Any],
    decide: Callable[[Sequence[QuantRule], Parameter], Any] = rule_of,
    *,
    in_adapters: bool = False,
) -> Edit:
    """An edit of the dense weights that rules quantize.

    Warnings name complex weights, and rules that decide for nothing.

    Args:
      rules: the rules.
      make: called as `make(parameter, decided)`.
      decide: a function that selects from the rules for a parameter: `rule_of` one, `rules_of` all.
      in_adapters: whether the `w` of an adapter is such a weight, too.
    """

    def is_dense(value: Array) -> bool:
        if in_adapters and isinstance(value, Adapter):
            return is_dense(value.w)
        return selection.is_dense_matrix(value)

    def fits(parameter: Parameter) -> bool:
        with selection.editing(parameter.path, parameter.value):
            return is_dense(parameter.value) and bool(decide(rules, parameter))

    def made(parameter: Parameter) -> Array:
        value = parameter.value
        if isinstance(value, Adapter):
            return value._replace(w=made(parameter._replace(value=value.w)))
        with selection.editing(parameter.path, value):
            return make(parameter, decide(rules, parameter))

    def weights(parameters: Parameters, choice: Choice) -> list[Parameter]:
        return [p for p in choice.chosen(parameters, selection.is_weight) if is_dense(p.value)]

    def nothing(parameters: Parameters, choice: Choice) -> ValueError:
        return _no_weights(rules, parameters, weights(parameters, choice))

    def warn(parameters: Parameters, marks: Sequence[bool], choice: Choice) -> None:
        # Rules for each product (`rules_of`) take the axes from the products.
        of_each = "scales" if decide is rule_of else None
        warn_of_others(parameters, marks, choice, of_each=of_each)
        found = weights(parameters, choice)
        if any(map(fits, found)) and not is_one_of_many():
            warn_of_unused(rules, [p.module_name for p in found])

    return Edit(made, selection.is_weight, nothing, fits, warn)


def _no_weights(
    rules: Sequence[QuantRule], parameters: Parameters, weights: Parameters
) -> ValueError:
    """The error for rules that quantize no weight; raises if all weights are implicit already."""
    if not weights:
        _already_done(parameters)
    number = sum(selection.is_complex_weight(*p[:3]) for p in parameters)
    of_complex = f" ({number} complex weights are not supported)" if number else ""
    patterns = ", ".join(repr(rule.module_path) for rule in rules)
    modules = sorted({p.module_name for p in weights})
    return value_error(
        f"rules: those for {patterns or 'nothing'} quantize none of the {len(weights)} dense "
        f"weights{of_complex}; their modules are: {', '.join(modules)}"
    )
