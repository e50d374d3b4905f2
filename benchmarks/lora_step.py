"""Times LoRA's training step on SmolLM2, and measures its peak memory, beside PEFT with torch.

    taskset -c 1 python -m benchmarks.lora_step
    taskset -c 1 python -m benchmarks.lora_step --peft=environment/bin/python --turns=5

The step is that of `examples/finetune_smollm.py`: 2 sequences of 128 tokens, Adam, rank 8 on all
projections, whose own flags apply (`--compute=int8`). Each side is a process of its own that waits for
its turn. Times are of the processor, the sum over all threads: the machine may be busy. Memory is the
most that a process had from its start on, compilation included.

To compare with equal instructions, set HAIKU_IMPLICIT_NATIVE_TARGET=x86-64-v3,
XLA_FLAGS=--xla_cpu_max_isa=AVX2 and ATEN_CPU_CAPABILITY=avx2.
"""

import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax
import optax
from absl import app, flags

import haiku_implicit as hki

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name

import finetune_smollm  # noqa: E402
import smollm  # noqa: E402

_TURNS = flags.DEFINE_integer("turns", 5, "How often each step is timed.", 1)
_PEFT = flags.DEFINE_string("peft", None, "A Python with torch, transformers and peft.")
_ALONE = flags.DEFINE_bool("alone", False, "Take the steps that standard input asks for.")


def main(argv: Sequence[str]) -> None:
    if _ALONE.value:
        return answer(make_step())
    command = [sys.executable, "-m", "benchmarks.lora_step", "--alone", *sys.argv[1:]]
    commands = {"this library": command}
    if _PEFT.value:
        commands["PEFT"] = [_PEFT.value, "-m", "benchmarks.lora_step_peft"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    running = {name: subprocess.Popen(command, **pipes) for name, command in commands.items()}
    found = {name: [asked(process)] for name, process in running.items()}  # the first one warms up
    for _ in range(_TURNS.value):
        for name, process in running.items():
            found[name].append(asked(process))
    for name, process in running.items():
        process.stdin.close()
        process.wait()
        times = [x["seconds"] for x in found[name][1:]]
        print(
            f"{name:12}  {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}), "
            f"peak {found[name][-1]['peak']:.2f} GiB, loss {found[name][-1]['loss']:.3f}"
        )


def asked(process: subprocess.Popen) -> dict[str, float]:
    """Asks a process for a step, and returns what it says of it."""
    print(file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def answer(step: Callable[[], float]) -> None:
    """Takes a step for each line of standard input, and prints its cost."""
    for _ in sys.stdin:
        start = time.process_time()
        loss = step()
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(dict(seconds=seconds, peak=peak, loss=loss)), flush=True)


def make_step() -> Callable[[], float]:
    """Returns a function that takes a step, always on the same batch, and returns the loss."""
    checkpoint = smollm.read_gguf(smollm.fetch(smollm.MODEL))
    text = smollm.read_text(smollm.fetch(smollm.SHAKESPEARE))[:100_000]
    batch = finetune_smollm.windows(finetune_smollm.tokenize(checkpoint.tokenizer, text).train, [0])
    adapter, base = hki.partition(finetune_smollm.load_params(checkpoint), trainable_dense=False)
    optimizer = optax.adam(1e-3)
    state = [adapter, optimizer.init(adapter)]
    update = finetune_smollm.make_update(finetune_smollm.make_model(checkpoint.config), optimizer)
    program = finetune_smollm.compiled(update, *state, base, batch)
    del adapter

    def step() -> float:
        loss, *state[:] = jax.block_until_ready(program(*state, base, batch))
        return float(loss)

    return step


if __name__ == "__main__":
    app.run(main)
