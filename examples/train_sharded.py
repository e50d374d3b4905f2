"""Trains a Llama or a mixture of experts on many devices, in one process or several, and resumes.

The models (`models/llama.py`, `models/mixture.py`) are plain Haiku and know nothing of devices. Two
flags set the trained parameters and the sharding. By default the devices are eight parts of this CPU:

  python examples/train_sharded.py --mode=qlora --strategy=full --compare
  python examples/train_sharded.py --mode=qlora --strategy=full --processes=2 --checkpoint=run
  python examples/train_sharded.py --model=all --mode=all --strategy=all --compare

With `--checkpoint` each process writes its own part at intervals, and the same command resumes from
the last checkpoint, with the same losses. If a process dies, the others are stopped, and the program
ends with an error: start it again. On several machines, start it on each with `--process_id` and
`--coordinator`.
"""

import functools
import itertools
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
import optax
from absl import app, flags, logging
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import haiku_implicit as hki
import processes
from errors import InputError, main_of
from haiku_implicit.quantization import QtRule
from models import llama, mixture
from printing import table

MODELS = ("llama", "moe")
MODES = ("dense", "lora", "qlora", "quantized")
STRATEGIES = ("data", "tensor", "full", "expert")

_MODEL = flags.DEFINE_enum("model", "llama", [*MODELS, "all"], "What is trained.")
_MODE = flags.DEFINE_enum(
    "mode",
    "lora",
    [*MODES, "all"],
    "All weights, LoRA, LoRA on 4 bits, or all by products of int8.",
)
_STRATEGY = flags.DEFINE_enum(
    "strategy", "data", [*STRATEGIES, "all"], "What is split: see the functions."
)
_DEVICES = flags.DEFINE_integer(
    "devices", 8, "Parts of this CPU in all processes; 0: the devices that are there.", 0
)
_PROCESSES = flags.DEFINE_integer("processes", 1, "How many processes share them.", 1)
_PROCESS = flags.DEFINE_integer("process_id", None, "Which this is; by default it starts them all.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "Host and port of process 0.")
_TIMEOUT = flags.DEFINE_integer("timeout", 30, "Seconds after which a silent process is dead.", 1)
_STEPS = flags.DEFINE_integer("steps", 10, "Training steps in all.", 1)
_BATCH = flags.DEFINE_integer("batch_size", 16, "Sequences in a batch.", 1)
_LENGTH = flags.DEFINE_integer("length", 32, "Tokens in a sequence.", 1)
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the model.", 1)
_WIDTH = flags.DEFINE_integer("width", 128, "Its width.", 16)
_GROUP = flags.DEFINE_integer("group_size", 16, "Weights that share a scale, of 4 bits.", 1)
_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Adam's.", 0.0)
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A folder, for what can be resumed.")
_FORMAT = flags.DEFINE_enum("format", "hki", ["hki", "orbax"], "Who writes it.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 2, "Steps between saves.", 1)
_COMPARE = flags.DEFINE_bool("compare", False, "Train on one device too, and compare the losses.")

VOCABULARY = 64
HEADS = 8


class Job(NamedTuple):
    """The model to train, the mode that sets its trained parameters, and the sharding strategy."""

    model: str
    mode: str
    strategy: str


class Run(NamedTuple):
    """The state that training changes; a step also depends on the frozen weights and its number."""

    step: int
    trained: Any
    optimizer: Any


hki.register_tree_type(Run, name="train_sharded.Run")  # needed to save it in files


def run() -> None:
    """Starts the processes, or runs as one of them."""
    logging.set_verbosity(logging.WARNING)
    if _PROCESSES.value > 1 and _PROCESS.value is None:
        return processes.start(_PROCESSES.value)
    if _DEVICES.value:
        if _DEVICES.value % _PROCESSES.value:
            raise InputError(
                f"--devices={_DEVICES.value} is not a multiple of --processes={_PROCESSES.value}"
            )
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _DEVICES.value // _PROCESSES.value)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if _PROCESSES.value > 1:
        processes.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, _TIMEOUT.value)
    jobs = chosen()
    if _CHECKPOINT.value and len(jobs) > 1:
        raise InputError("--checkpoint is for one job: give --model, --mode and --strategy")
    rows = [report(job) for job in tqdm(jobs, "jobs", disable=len(jobs) == 1)]
    if jax.process_index() == 0:
        table(["model", "mode", "split", "loss", "", "from one device", "KB a device", "of"], rows)


def chosen() -> list[Job]:
    """Returns the jobs that the flags select."""
    flag_values = (_MODEL, MODELS), (_MODE, MODES), (_STRATEGY, STRATEGIES)
    axes = [names if flag.value == "all" else (flag.value,) for flag, names in flag_values]
    jobs = [Job(*values) for values in itertools.product(*axes)]
    found = [job for job in jobs if job.model == "moe" or job.strategy != "expert"]
    if not found:
        raise InputError("--strategy=expert needs --model=moe")
    return found


def resumed(store: Any, begin: Any, folder: str | None) -> Any:
    """Returns the last saved run, which must have the same flags; None if there is nothing."""
    try:
        return store.load(begin)
    except (KeyError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"--checkpoint={folder}: is of a run with other flags, such as --mode ({first})"
        ) from error


def report(job: Job) -> list[str]:
    """Trains, also on one device if the flags say so, and returns a row of the report."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    losses, held, whole = train(job, mesh, _CHECKPOINT.value)
    if not losses:
        return [*job, "trained already", "", "", f"{held / 1e3:.0f}", f"{whole / 1e3:.0f}"]
    difference = "not compared"
    if _COMPARE.value:
        one = jax.make_mesh((1,), ("d",), (AxisType.Auto,), devices=jax.local_devices()[:1])
        alone, *_ = train(job, one, None)
        difference = f"{max(abs(losses[i] - alone[i]) for i in losses):.1e}"
    first, last = min(losses), max(losses)
    return [*job, f"{losses[first]:.4f}", f"-> {losses[last]:.4f}", difference, f"{held / 1e3:.0f}",
            f"{whole / 1e3:.0f}"]  # fmt: skip


# --- the model, and how it is split ---------------------------------------------------------------


def model_of(job: Job) -> Any:
    """Returns a function from tokens `[batch, time]` to logits `[batch, time, vocabulary]`."""
    width = _WIDTH.value
    sizes = dict(
        vocab_size=VOCABULARY,
        dim=width,
        num_layers=_LAYERS.value,
        num_heads=HEADS,
        num_kv_heads=HEADS // 2,
        tied=False,
    )
    if job.model == "llama":
        config = llama.LlamaConfig(**sizes, hidden_dim=2 * width)
        forward = lambda tokens: llama.Llama(config)(tokens)  # noqa: E731
    else:
        experts = mixture.MixtureConfig(**sizes, hidden_dim=width, num_experts=8)
        forward = lambda tokens: mixture.MixtureOfExperts(experts)(tokens)  # noqa: E731
    return hk.without_apply_rng(hk.transform(forward))


def make_params(job: Job, key: jax.Array) -> Any:
    """Returns the parameters in the types of the mode."""
    params = model_of(job).init(key, np.zeros((1, 2), np.int32))
    if job.mode == "quantized":
        int8 = dict(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
        return hki.quantized_training(params, [QtRule(module_path=".*_proj", **int8)])
    if job.mode == "qlora":
        group = _GROUP.value
        params = hki.quantize_params(params, dtype="int4", group_size=group, targets=".*_proj/w")
    if job.mode in ("lora", "qlora"):
        params = hki.add_lora(params, jax.random.fold_in(key, 1), rank=4, targets=".*_proj/w")
    return params


def rules_of(job: Job) -> list[tuple[str, P]]:
    """Returns the sharding of each weight, for any type: the first rule that fits its path counts.

    - data: no sharding; each device has its own part of the batch, as with all but `tensor`.
    - tensor: columns, and rows of the next matrix, so that a sum over devices follows.
    - full: each weight in equal parts, which are gathered for use. (Not the columns of the
      embedding: XLA would split activations in the same way, and gather them instead.)
    - expert: each device has its own experts, and a copy of everything else.
    """
    rest = [(".*", P())]
    experts = ".*mixture/(gate|up|down)_proj/w"
    columns, rows = P(None, "d"), P("d")
    return {
        "data": rest,
        "tensor": [
            (experts.replace("gate|up|down", "gate|up"), P(None, None, "d")),
            (experts, P(None, "d")),
            (".*/(o|down)_proj/w", rows),
            (".*(_proj|lm_head)/w", columns),
            *rest,
        ],
        "full": [
            (experts, P(None, None, "d")),
            (".*/w", columns),
            (".*/embeddings", rows),
            *rest,
        ],
        "expert": [(experts, P("d")), *rest],
    }[job.strategy]


# --- training -------------------------------------------------------------------------------------


def train(job: Job, mesh: Any, folder: str | None) -> tuple[dict[int, float], int, int]:
    """Trains from the start, or from the checkpoint in a folder.

    Returns:
      The loss of each step of this run, and the bytes of weights and of the optimizer's state on one
      device and on all devices.
    """
    rules, key = rules_of(job), jax.random.key(0)
    of_batch = NamedSharding(mesh, P() if job.strategy == "tensor" else P("d"))

    def start(key: jax.Array) -> tuple[Run, Any]:
        everything = job.mode in ("dense", "quantized")
        trained, frozen = hki.partition(make_params(job, key), trainable_dense=everything)
        return Run(0, trained, optax.adam(_RATE.value).init(trained)), frozen

    # Made with their sharding: no device ever has all of it.
    places = hki.shardings(jax.eval_shape(start, key), rules, mesh)
    begin, frozen = jax.jit(start, out_shardings=places)(key)
    begin = begin._replace(step=0)
    store = processes.STORES[_FORMAT.value](folder) if folder else None
    now = (store and resumed(store, begin, folder)) or begin
    apply = hki.transform_implicit(model_of(job)).apply

    def loss_of(trained: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        logits = apply(hki.combine(trained, frozen), tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, out_shardings=(None, *places[0][1:]))
    def step(trained: Any, state: Any, frozen: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(trained, frozen, tokens)
        updates, state = optax.adam(_RATE.value).update(grads, state, trained)
        return loss, optax.apply_updates(trained, updates), state

    losses = {}
    while now.step < _STEPS.value:
        loss, *new = step(now.trained, now.optimizer, frozen, batch(now.step, of_batch))
        losses[now.step] = float(loss)
        if store and jax.process_index() == 0:
            print(f"step {now.step} loss {losses[now.step].hex()}", flush=True)
        now = Run(now.step + 1, *new)
        if store and (now.step % _SAVE_EVERY.value == 0 or now.step == _STEPS.value):
            store.save(now)
    arrays = jax.tree.leaves((now.trained, now.optimizer, frozen))
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    return losses, held, sum(x.nbytes for x in arrays)


def batch(step: int, sharding: Any) -> jax.Array:
    """Returns a step's tokens, `[batch, time + 1]`: each depends on the one before it, and some noise.

    Each process makes all of them, and places its devices' part.
    """
    rng = np.random.default_rng([0, step])
    tokens = rng.integers(VOCABULARY, size=(_BATCH.value, 1))
    for _ in range(_LENGTH.value):
        noise = rng.integers(2, size=(_BATCH.value, 1))
        tokens = np.hstack([tokens, (3 * tokens[:, -1:] + 1 + noise) % VOCABULARY])
    return jax.make_array_from_callback(
        tokens.shape, sharding, lambda i: tokens[i].astype(np.int32)
    )


if __name__ == "__main__":
    app.run(main_of(run))
