"""Measures what a training step costs in several forms, and how far apart their gradients are.

The common part of the scripts that fine-tune whole models: `finetune_graphcast.py` and
`finetune_alphafold3.py`.
"""

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import dense_twin
import haiku_implicit as hki
from bars import tqdm


class Form(NamedTuple):
    """A training step in one form.

    Attributes:
      gradients: the loss and its gradients, as a function of the trained arrays and of `args`.
      trained: the trained arrays.
      args: the other arguments.
      twin: the name of the form whose gradients are right, if there is one.
    """

    gradients: Callable[..., tuple[jax.Array, Any]]
    trained: Any
    args: tuple[Any, ...]
    twin: str | None = None


class Cost(NamedTuple):
    """What it takes to make a program.

    Attributes:
      trace, lower, compile: seconds of the processor, which other programs' work does not change.
      temporaries: bytes of the program's temporary arrays, by XLA's own analysis.
    """

    trace: float
    lower: float
    compile: float
    temporaries: int


def compare(forms: Mapping[str, Form], runs: int, rtol: float | None) -> None:
    """Prints the costs of each form, and how far its gradients are from its twin's.

    Args:
      forms: the forms by name. Costs are relative to the first one, whose gradients have a twin.
      runs: how often each form is measured; the best is printed.
      rtol: the largest error of gradients, relative to the greatest one of an array. None for
        products of 16 bits: then the norm of all errors, which may be twice the first form's.

    Raises:
      AssertionError: if gradients are further off than that, or if arrays became dense.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in forms}
    gradients = {}
    rounds = [(number, name) for number in range(runs) for name in forms]
    for number, name in tqdm(rounds, leave=False, disable=not sys.stderr.isatty()):
        cost, compiled = measure(forms[name])
        costs[name].append(cost)
        if number == 0:
            results = compiled(forms[name].trained, *forms[name].args)
            _, gradients[name] = jax.block_until_ready(results)
    off = {
        name: (norm_of_difference if rtol is None else dense_twin.difference)(
            gradients[name], gradients[form.twin]
        )
        for name, form in forms.items()
        if form.twin is not None
    }
    show({name: best_of(own) for name, own in costs.items()}, off)
    limit = 2 * next(iter(off.values())) if rtol is None else rtol
    if max(off.values()) > limit:
        raise AssertionError(f"gradients are off by {max(off.values()):.1e}, more than {limit:.1e}")


def measure(form: Form) -> tuple[Cost, Any]:
    """Traces, lowers and compiles a step; returns the costs and the program."""
    jax.block_until_ready((form.trained, form.args))
    jax.clear_caches()
    times = [time.process_time()]
    traced = trace(form)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    seconds = [after - before for before, after in itertools.pairwise(times)]
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return Cost(seconds[0], seconds[1], seconds[2], temporaries), compiled


def best_of(costs: Sequence[Cost]) -> Cost:
    return Cost(
        trace=min(cost.trace for cost in costs),
        lower=min(cost.lower for cost in costs),
        compile=min(cost.compile for cost in costs),
        temporaries=costs[0].temporaries,
    )


def trace(form: Form) -> Any:
    """Traces a step, in which no array of more than 64 kB may become dense.

    Raises:
      AssertionError: if one does.
    """
    with hki.materialization("allow"), hki.materialization_report() as report:
        traced = jax.jit(form.gradients).trace(form.trained, *form.args)
    if any(event.nbytes > dense_twin.LIMIT for event, _ in report):
        raise AssertionError(f"arrays became dense:\n{report}")
    return traced


def merging(dense: hk.TransformedWithState, model: Any) -> Callable[..., Any]:
    """Returns an `apply` of the arrays that a frozen model trains, which makes all weights dense first.

    Args:
      dense: the model as it was before `hki.freeze`.
      model: the frozen model.
    """

    def apply(trained: Any, *args: Any) -> Any:
        return dense.apply(hki.materialize(model.params(trained)), *args)

    return apply


def norm_of_difference(got: Any, want: Any) -> float:
    """Returns the norm of all differences, relative to the norm of the right values."""
    of_all = [ravel_pytree(tree)[0] for tree in (got, want)]
    return float(jnp.linalg.norm(of_all[0] - of_all[1]) / jnp.linalg.norm(of_all[1]))


def show(costs: Mapping[str, Cost], off: Mapping[str, float]) -> None:
    """Prints a row for each form: its costs, also as multiples of the first one's, and its error."""
    first = next(iter(costs.values()))
    titles = ("trace s", "lower s", "compile s", "temporary MB")
    print(f"\n{'':22}{''.join(f'{title:>15}' for title in titles)}{'gradients':>11}")
    for name, cost in costs.items():
        factors = [value / one if one else 1.0 for value, one in zip(cost, first, strict=True)]
        values = [f"{x:.2f}" for x in cost[:3]] + [f"{cost.temporaries / 1e6:.1f}"]
        columns = (f"{x:>8} ({f:.2f})" for x, f in zip(values, factors, strict=True))
        error = f"{off[name]:.1e}" if name in off else ""
        print(f"{name:22}{''.join(columns)}{error:>11}")
