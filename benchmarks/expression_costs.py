"""Times module expressions, against plain tracing of the same model.

The model is the Llama of `examples/models`, unrolled and narrow, since tracing is measured. Each of
its layers has its own modules and parameters. Nothing is computed: arguments are shapes.

JAX caches traces by function: `jax.make_jaxpr` of the same function and shapes takes a
millisecond the second time. Each time here is therefore for a new function object (`make_mox` makes
one itself). The functions of `jax.numpy` that the model calls stay in JAX's caches, as in a process
that has traced the model before; a turn that fills them is not counted. With these caches cleared,
every trace of the model takes some 15 ms longer at any depth, and the ratios are smaller.

Times are processor time, since all of this runs in one thread. They are taken in turns, each of which
starts with a different one, and ratios are taken within a turn. Garbage is collected only between
turns: its time depends on the other contents of the memory. With collection at any time, the ratios at
96 layers were 1.57 for making with `params=`, 2.95 without, and 0.57 for evaluating, over nine turns
with one other expression in memory.

An expression caches its results at first use. So evaluation and the view are timed on unused
expressions, and the first change on an expression in which a glob has looked up a node.
"""

import pathlib
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from benchmarks.machine import about_this_machine
from benchmarks.stages import in_turn, no_garbage_collection
from haiku_implicit.mox import eval_mox, load, make_mox, save

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name

from models import llama  # noqa: E402

WIDTHS = dict(vocab_size=64, dim=16, num_heads=2, num_kv_heads=1, hidden_dim=32)
BATCH, LENGTH = 2, 8

# `{middle}` is the number of the layer in the middle.
QUERIES = (
    "count(//dot_general)",
    '//*[@name="silu"]',
    '//module_call[@name="q_proj"]',
    '//module_call[@path="llama/layer_{middle}/attention"]',
    '//module_call[@type="Linear" and @output_size > 16]//dot_general',
    '//module_call[@type="RMSNorm"]/following-sibling::module_call[1]/@path',
    '//module_call[@type="Linear"]',
)
GLOB = "llama/layer_{middle}/attention/o_proj"

Results = dict[str, Any]


class Model(NamedTuple):
    """A transformed model, the shapes of its parameters and its argument, and the layer to look at."""

    transformed: hk.Transformed
    params: Any
    tokens: jax.ShapeDtypeStruct
    middle: int

    def make(self) -> Any:
        """Makes a new module expression."""
        return make_mox(self.transformed)(self.tokens, params=self.params)


def model_of(depth: int) -> Model:
    """Returns the Llama with a given number of layers."""
    config = llama.LlamaConfig(num_layers=depth, **WIDTHS)
    transformed = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(config)(tokens)))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(transformed.init, jax.random.key(0), tokens)
    return Model(transformed, params, tokens, depth // 2)


def measure(depths: list[int], turns: int, compile_up_to: int) -> Iterator[Results]:
    """Measures models of these depths.

    Args:
      depths: numbers of layers.
      turns: how often each time is taken.
      compile_up_to: the largest number of layers with which programs are compiled.

    Yields:
      The results so far, after each depth.
    """
    about = about_this_machine("jax", "jaxlib", "dm-haiku", "haiku-implicit", "lxml")
    results: Results = dict(
        environment=dict(about, python=platform.python_version()),
        model=dict(WIDTHS, batch=BATCH, length=LENGTH),
        turns=turns,
        cases=[],
    )
    _turn(model_of(1), 0)  # fills JAX's caches
    for depth in depths:
        model = model_of(depth)
        mox = model.make()
        records = [_turn(model, turn) for turn in range(turns)]
        case = dict(
            depth=depth,
            equations=int(mox.query("count(/mox//*[not(self::module_call or self::body)])")),
            ms=_by_name([record["ms"] for record in records]),
            queries=_by_name([record["queries"] for record in records]),
            program=compare_programs(model, mox, depth <= compile_up_to),
        )
        results["cases"].append(case)
        yield results


def _by_name(records: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [round(record[name], 4) for record in records] for name in records[0]}


@no_garbage_collection()
def _turn(model: Model, turn: int) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of each operation, taken once."""
    transformed, params, tokens, middle = model
    evaluated, viewed, changed = (model.make() for _ in range(3))
    functions = dict(
        plain=lambda: jax.make_jaxpr(lambda *args: transformed.apply(*args))(params, tokens),
        init=lambda: jax.eval_shape(
            lambda *args: transformed.init(*args), jax.random.key(0), tokens
        ),
        make=lambda: make_mox(transformed)(tokens),
        make_with_params=model.make,
        evaluate=lambda: jax.make_jaxpr(lambda *args: eval_mox(evaluated, *args))(params, tokens),
        view=lambda: viewed.query("true()"),
    )
    ms = {name: _ms(functions[name]) for name in in_turn(list(functions), turn)}
    made = make_mox(transformed)(tokens)
    with tempfile.TemporaryDirectory() as folder:
        ms["save"] = _ms(lambda: save(f"{folder}/model.json", made))
        ms["load"] = _ms(lambda: load(f"{folder}/model.json"))

    (node,) = changed[GLOB.format(middle=middle)]
    for name in ("first_sub", "further_sub"):
        ms[name] = _ms(lambda: changed.sub(node, another_linear))

    ms["glob"] = _ms(lambda: changed[GLOB.format(middle=middle)])

    found = {
        xpath: _ms(lambda xpath=xpath: viewed.query(xpath.format(middle=middle)))
        for xpath in in_turn(list(QUERIES), turn)
    }
    return dict(ms={name: ms[name] for name in sorted(ms)}, queries={x: found[x] for x in QUERIES})


def another_linear(x: jax.Array) -> jax.Array:
    """The replacement for a layer: a linear layer with its own parameter."""
    return hk.Linear(x.shape[-1], with_bias=False, name="new")(x)


def _ms(fun: Callable[[], Any]) -> float:
    start = time.process_time()
    fun()
    return (time.process_time() - start) * 1e3


def compare_programs(model: Model, mox: Any, compiled: bool) -> Results:
    """Compares the lowered and compiled programs of the model and of its expression.

    Args:
      model: the model.
      mox: its expression.
      compiled: whether to compile them.

    Returns:
      `same_hlo`: whether the texts of the lowered programs are equal, and `lines`, their length; for
      compiled programs also `operations`, their numbers in the model and in the expression, and
      `same_compiled`, whether the compiled programs are equal except for source locations.
    """
    lowered = []
    for apply in (model.transformed.apply, mox.apply):

        def program(*args: Any, apply: Any = apply) -> Any:  # one name for both programs
            return apply(*args)

        lowered.append(jax.jit(program).lower(model.params, model.tokens))
    plain, ours = (x.as_text() for x in lowered)
    found: Results = dict(same_hlo=plain == ours, lines=plain.count("\n"))
    if compiled:
        texts = [re.sub(r", metadata=\{.*?\}", "", x.compile().as_text()) for x in lowered]
        operations = [re.findall(r"^ .* = .*$", text, re.MULTILINE) for text in texts]
        found["operations"] = [len(x) for x in operations]
        found["same_compiled"] = operations[0] == operations[1]
    return found
