"""The cost of quantizing each weight, and a choice of formats within a number of bytes."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.matrix_view import tensor_of
from haiku_implicit.core import progress
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import check_function, text_table, type_error, value_error
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.serialization import register_tree_type
from haiku_implicit.core.transform import tree_map_with_implicit
from haiku_implicit.core.typing import Array, Params
from haiku_implicit.params import knapsack
from haiku_implicit.params.edits import quantize_params
from haiku_implicit.params.quantizing.calibrated import (
    Carry,
    options_with_inputs,
    parsed,
    quantize_by,
)
from haiku_implicit.params.quantizing.observing import (
    Model,
    arguments_of,
    check_batches,
    inputs_of,
)
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf
from haiku_implicit.params.trees.options import QuantizeOptions
from haiku_implicit.params.trees.selection import is_matrix

Options = Mapping[str, Mapping[str, Any]]


@register_tree_type
class WeightCost(NamedTuple):
    """The cost of quantizing one weight to one format, with all other weights unchanged.

    Attributes:
      path: `module/name`.
      option: the name of the format.
      error: the relative error of the model's outputs.
      nbytes: the bytes of the weight in this format.
      dense_nbytes: the bytes of the weight before.
      size: its numbers.
    """

    path: str
    option: str
    error: float
    nbytes: int
    dense_nbytes: int
    size: int


class Allocation(dict[str, str]):
    """A format for each weight, from `Sensitivity.allocate`, and how good the choice is.

    It is a dictionary: the name of an option for the path (`module/name`) of each weight that does not
    stay dense. `Sensitivity.quantize` takes it, and any dictionary like it, such as a changed copy.

    Attributes:
      error: the relative error of the outputs, from the errors of single weights.
      bound: an error that no choice within the bytes can be below (a Lagrangian bound). If both are
        equal, the choice is the best one.
      nbytes: the bytes of all parameters.
      bits: the bits per number of the weights that the choice is about.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((64, 64))}}
      >>> apply = hki.use_implicit_args(lambda params, x: x @ params['linear']['w'])
      >>> formats = {'int8': dict(dtype='int8'), 'int4': dict(dtype='int4')}
      >>> found = hki.sensitivity(apply, params, [jnp.ones((1, 64))], formats)
      >>> chosen = found.allocate(4_500)
      >>> dict(chosen), chosen.nbytes, chosen.bits
      ({'linear/w': 'int8'}, 4352, 8.5)
      >>> found.quantize(params, chosen | {'linear/w': 'int4'})['linear']['w'].format
      'int4'
    """

    def __init__(
        self, chosen: Mapping[str, str], *, error: float, bound: float, nbytes: int, bits: float
    ) -> None:
        super().__init__(chosen)
        self.error, self.bound, self.nbytes, self.bits = error, bound, nbytes, bits

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in collections.Counter(self.values()).items())
        return (
            f"Allocation({counts or 'all dense'}: {self.bits:.3f} bits a number; {self.nbytes:,} bytes "
            f"with all other parameters; error {self.error:.3g}, at least {self.bound:.3g})"
        )


@register_tree_type
@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The result of `sensitivity`; `print` shows a table, the weight that costs most first.

    `haiku_implicit.save` and `load` keep it for another program.

    Attributes:
      rows: one for each weight and option, the largest errors first.
      options: the options given to `sensitivity`.
      matrix_axes: the axes of weights that are views of matrices.
      other_nbytes: the bytes of all other parameters.
      method: how weights are rounded, as for `quantize_with_inputs`; None to the nearest.
      inputs: for a method, the statistics of the inputs of the weights that have them.
      dense: the bytes of each other matrix, which stays dense, and the reason, by path.
    """

    rows: tuple[WeightCost, ...]
    options: Options
    matrix_axes: MatrixAxesOf | None = None
    other_nbytes: int = 0
    method: str | None = None
    inputs: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict, repr=False)
    dense: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        cells = [
            (r.path, r.option, f"{r.error:.3e}", f"{r.nbytes:,}", f"{r.dense_nbytes:,}")
            for r in self.rows
        ]
        for path, (nbytes, reason) in self.dense.items():
            cells.append((path, f"stays dense: {reason}", "", f"{nbytes:,}", f"{nbytes:,}"))
        if rest := self.other_nbytes - sum(nbytes for nbytes, _ in self.dense.values()):
            cells.append(("all others", "stay dense", "", f"{rest:,}", f"{rest:,}"))
        return text_table(("path", "option", "error", "bytes", "of dense bytes"), cells, numbers=3)

    def allocate(self, nbytes: int) -> Allocation:
        """Chooses a format for each weight, so that all parameters take at most `nbytes` bytes.

        It has the least sum of squared errors, which are assumed to add up, as those of independent
        errors do. (An integer program; `Allocation` says how near it came to the optimum.)

        Args:
          nbytes: the bytes for the whole tree, which are those that `summary` counts.

        Returns:
          The name of an option for each path; weights that stay dense are left out.

        Raises:
          ValueError: if the smallest formats take more, and for anything but a whole number.
        """
        ways: dict[str, list[tuple[str | None, float, int]]] = {}
        for row in self.rows:
            own = ways.setdefault(row.path, [(None, 0.0, row.dense_nbytes)])
            if not math.isnan(row.error):  # NaN: the outputs with this format are not finite
                own.append((row.option, row.error**2, row.nbytes))
        least = sum(min(size for _, _, size in own) for own in ways.values())
        most = sum(own[0][2] for own in ways.values()) + self.other_nbytes
        if not isinstance(nbytes, int | np.integer) or least + self.other_nbytes > nbytes:
            raise value_error(
                "nbytes: expected the bytes of all parameters, a whole number of at least "
                f"{least + self.other_nbytes:,} ({least:,} for the smallest formats of {len(ways)} "
                f"weights, and {self.other_nbytes:,} for what stays dense, as print(found) shows), got "
                f"{nbytes!r}. With {most:,} all weights stay dense. For less, give a smaller format "
                "among the options, or more targets="
            )
        left = int(nbytes) - self.other_nbytes
        items = [[way[1:] for way in own] for own in ways.values()]
        picks = knapsack.least_cost(items, left)
        taken = {path: own[i] for (path, own), i in zip(ways.items(), picks, strict=True)}
        _, squares, sizes = zip(*taken.values(), strict=True)
        return Allocation(
            {path: option for path, (option, _, _) in taken.items() if option is not None},
            error=math.sqrt(sum(squares)),
            bound=math.sqrt(max(knapsack.lower_bound(items, left), 0)),
            nbytes=sum(sizes) + self.other_nbytes,
            bits=8 * sum(sizes) / sum({row.path: row.size for row in self.rows}.values()),
        )

    def quantize(
        self, params: Params, chosen: Mapping[str, str] | int, *, carry: Carry | None = None
    ) -> Params:
        """Quantizes each weight to its chosen format, by the method of `sensitivity`.

        Args:
          params: the parameters given to `sensitivity`.
          chosen: the bytes for the whole tree, as for `allocate`; or the result of it, or a mapping
            like it.
          carry: as for `quantize_with_inputs`, of the weights that have inputs.

        Raises:
          ValueError: for an option or a parameter that does not exist.
        """
        if not isinstance(chosen, Mapping):
            chosen = self.allocate(chosen)
        for name in dict.fromkeys(chosen.values()):
            if name not in self.options:
                raise value_error(f"chosen: expected options of {[*self.options]}, got {name!r}")
        return self._quantized(params, chosen, carry)

    def _quantized(
        self, params: Params, chosen: Mapping[str, str], carry: Carry | None = None
    ) -> Params:
        """Quantizes weights with their inputs, if these are known, and the others to the nearest."""
        axes = self.matrix_axes or {}  # which also says that other weights are stacks
        for name, own in self.options.items():
            rest = [path for path in chosen if chosen[path] == name and path not in self.inputs]
            if rest:
                params = quantize_params(params, targets=rest, matrix_axes=axes, **own)
        known = {path: self.inputs[path] for path in chosen if path in self.inputs}
        if self.method is None or not known:
            return params
        hows: dict[str, QuantizeOptions] = {
            name: options_with_inputs(own, "int8")  # type: ignore[arg-type]
            for name, own in self.options.items()
        }
        return quantize_by(lambda p: hows[chosen[p.path]], params, known, self.method, carry, axes)


def sensitivity(
    apply: Callable[..., Any],
    params: Params,
    batches: Iterable[Any],
    options: Options,
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    matrix_axes: MatrixAxesOf | None = None,
    method: str | None = None,
    inputs: Mapping[str, jax.Array] | None = None,
) -> Sensitivity:
    """Measures how much the model's outputs change when one weight is quantized.

    It runs the model once for each weight, format and batch, from one compiled program. A few hundred
    tokens are enough to choose formats.

    Args:
      apply: `apply(params, *batch)`, the model, which need not be wrapped; its outputs are compared.
        For a language model, take the square roots of the probabilities as outputs.
      params: dense parameters.
      batches: tuples of the arguments of `apply` after the parameters, of the same shapes. Anything
        else than a tuple or a list is the only argument.
      options: arguments of `quantize_params` by names that you choose, such as
        `{'int8': dict(dtype='int8'), 'int4': dict(dtype='int4', group_size=32)}`.
      targets, exclude, matrix_axes: the weights to quantize, as for `quantize_params`.
      method: 'gptq', 'awq' or another method of `quantize_with_inputs`, which then rounds each weight
        that has inputs. None: all weights are rounded to the nearest.
      inputs: for a method, what `input_moments` (or `input_maxima`) says of more batches than these.
        None: these batches'.

    Returns:
      The errors, the largest first, with the methods `allocate` and `quantize` that use them.

    Raises:
      ValueError: without batches or options, for inputs without a method or of other weights, and as
        `quantize_params` does for weights that do not fit.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 32])(x)))
      >>> x = jax.random.normal(jax.random.key(0), (8, 64))
      >>> params = model.init(jax.random.key(1), x)
      >>> formats = {'int8': dict(dtype='int8'), 'int4': dict(dtype='int4', group_size=32)}
      >>> found = hki.sensitivity(model.apply, params, [x], formats)
      >>> small = found.quantize(params, 6_000)
      >>> hki.summary(small).total.nbytes <= 6_000
      True
    """
    check_function("apply", apply)
    check_batches("batches", batches)
    _check_options(options)
    given, options = [arguments_of(batch) for batch in batches], _for_files(options)
    if not given or not options:
        raise value_error(f"expected batches and options, got {len(given)} and {len(options)}")
    if inputs is not None and method is None:
        raise value_error("inputs: expected a method that rounds by them, such as 'gptq', got None")
    choice = trees.Choice(targets, exclude, matrix_axes=matrix_axes)
    chosen: dict[str, list[str]] = {}
    for name, own in options.items():
        # After the first one, there is no warning of stacks.
        known = choice._replace(matrix_axes=matrix_axes or {}) if chosen else choice
        chosen[name] = _chosen(params, known, own)
    every = {path for own in chosen.values() for path in own}
    if method is not None and inputs is None:
        model = Model(apply, params, matrix_axes)
        inputs = inputs_of(parsed(method)[0].needed, model, given, every)
    elif inputs is not None and not every.intersection(inputs):
        raise value_error(
            f"inputs: expected those of weights such as {min(every, default='none')!r}, got {[*inputs]}"
        )
    plan = Sensitivity((), options, matrix_axes, 0, method, inputs or {})
    quantized: dict[tuple[str, str], Any] = {}
    for name, paths in chosen.items():
        stored = _dense_values(plan._quantized(params, dict.fromkeys(paths, name)))
        quantized |= {(path, name): stored[path] for path in paths}
    dense = _dense_values(params)
    tensors = tree_map_with_implicit(tensor_of, params)
    errors = _errors(apply, tensors, given, quantized)
    rows = [
        WeightCost(*key, error, quantized[key].nbytes, dense[key[0]].nbytes, dense[key[0]].size)
        for key, error in errors.items()
    ]
    rows.sort(key=lambda row: row.error, reverse=True)
    others = {path: x for path, x in dense.items() if path not in every}
    nbytes = sum(x.nbytes for x in others.values())
    left = {path: (x.nbytes, choice.why_not(path, x)) for path, x in others.items() if is_matrix(x)}
    return dataclasses.replace(plan, rows=tuple(rows), other_nbytes=nbytes, dense=left)


def _check_options(options: Any) -> None:
    """Raises for anything but arguments of `quantize_params` by name, without the choice of weights."""
    own = options.values() if isinstance(options, Mapping) else ()
    if not isinstance(options, Mapping) or not all(isinstance(x, Mapping) for x in own):
        raise type_error(
            "options: expected arguments of quantize_params by names that you choose, such as "
            f"{{'int4': dict(dtype='int4', group_size=32)}}, got {options!r}"
        )
    for name, own in options.items():
        if taken := [x for x in ("targets", "exclude", "matrix_axes", "missing_ok") if x in own]:
            raise type_error(
                f"options: {name!r} has {taken[0]}=, which chooses weights for all options alike; give "
                "it to sensitivity"
            )


def _for_files(options: Options) -> Options:
    """The options with dtypes in place of classes such as `jnp.bfloat16`, which files can't hold."""
    return {
        name: {x: np.dtype(y) if callable(y) else y for x, y in own.items()}
        for name, own in options.items()
    }


def _chosen(params: Params, choice: trees.Choice, options: Mapping[str, Any]) -> list[str]:
    """The paths of the weights that `quantize_params` quantizes with some options."""
    structs = jax.eval_shape(lambda: params)
    new = trees.values_of(quantize_params(structs, **choice._asdict(), **options))
    return [path for path, x in trees.values_of(structs).items() if new[path] is not x]


def _dense_values(params: Params) -> dict[str, Any]:
    """The arrays of a tree by their paths, with views of dense matrices as tensors."""
    return trees.values_of(tree_map_with_implicit(tensor_of, params))


def _errors(
    apply: Callable[..., Any],
    params: Params,
    batches: Sequence[tuple[Any, ...]],
    quantized: Mapping[tuple[str, str], Any],
) -> dict[tuple[str, str], float]:
    """The relative error of the outputs with one weight quantized, by its path and the option."""

    @jax.jit
    def outputs(params: Params, batch: Any) -> list[Array]:
        return [y.astype(jnp.float32) for y in jax.tree.leaves(apply(params, *batch))]

    @jax.jit
    def change(after: Sequence[Array], before: Sequence[Array]) -> Array:
        return _squares(jax.tree.map(jnp.subtract, after, before))

    def change_by(path: str, w: Any, before: Sequence[Array], batch: Any) -> float:
        new = materialize_array(w)
        one = trees.map_parameters(lambda p: new if p.path == path else p.value, params)
        # From the same program, as another one may round otherwise, in bfloat16 as much as int8.
        return float(change(outputs(one, batch), before))

    changes, size = dict.fromkeys(quantized, 0.0), 0.0
    with progress.bar("weights", len(batches) * len(quantized)) as run:
        for batch in batches:  # the outer loop, so that the outputs of one batch are held
            before = outputs(params, batch)
            size += float(_squares(before))
            for (path, name), w in quantized.items():
                changes[path, name] += run(path, change_by, path, w, before, batch)
    return {key: math.sqrt(x / size) if size else math.inf for key, x in changes.items()}


def _squares(arrays: Iterable[Array]) -> Array:
    return sum((jnp.square(x).sum() for x in arrays), jnp.float32(0))
