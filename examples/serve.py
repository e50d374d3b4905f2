"""Serves SmolLM2 and many adapters for it over HTTP, with OpenAI's completions API.

The weights keep the GGUF file's format, the key-value cache is quantized, and requests for different
adapters are decoded together.

    python examples/serve.py --adapters=folder    # each file is a model, in addition to the base
    python examples/serve.py --trial=64           # sends itself requests, prints a table, and ends
"""

import asyncio
import pathlib
import signal
import sys
from typing import Any

import jax
from absl import app, flags
from tqdm import tqdm

import decoding
import haiku_implicit as hki
import smollm
from errors import InputError, main_of
from serving import engine as engines
from serving.programs import Programs, Sizes

_GGUF = flags.DEFINE_string("gguf", None, "GGUF file of a Llama; by default SmolLM2 from PyPI.")
_NAME = flags.DEFINE_string("model_name", "smollm2", "What requests call the base.")
_ADAPTERS = flags.DEFINE_string("adapters", None, "Folder of adapters, NAME.safetensors each.")
_CAPACITY = flags.DEFINE_integer("capacity", 8, "How many adapters there is room for.", 1)
_RANK = flags.DEFINE_integer("rank", 8, "Their largest rank.", 1)
_TARGETS = flags.DEFINE_string("targets", ".*_proj/w", "The weights that they may be for.")
_CACHE = flags.DEFINE_enum("cache", "int8", ["int8", "int4", "f32"], "The format of the cache.")
_LENGTHS = flags.DEFINE_list(
    "cache_length",
    ["64", "256"],
    "How many tokens of prompt and answer a cache has; the last one is the most.",
)
_PIECES = flags.DEFINE_list(
    "pieces", ["8", "32"], "Lengths of the pieces that prompts are read in."
)
_WIDTHS = flags.DEFINE_list(
    "widths", ["1", "8", "32"], "How many requests are decoded together; the last one is the most."
)
_BURST = flags.DEFINE_integer(
    "burst", 8, "Tokens that a call decodes, if fewer requests than that are running.", 1
)
_READERS = flags.DEFINE_integer("readers", 8, "How many prompts a call may read.", 1)
_QUEUE = flags.DEFINE_integer("queue", 256, "How many requests may wait.", 0)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "The address to listen at. There are no passwords."
)
_PORT = flags.DEFINE_integer("port", 8000, "The port to listen at; 0 for any.", 0)
_GRACE = flags.DEFINE_float("grace", 60.0, "Seconds for the last requests after SIGTERM.", 0.0)
_MOST_UPLOAD = flags.DEFINE_integer("most_upload_mb", 256, "Largest file of an adapter.", 1)
_COMPILED = flags.DEFINE_string(
    "compilation_cache", None, "Folder that keeps compiled programs for the next start."
)
_TRIAL = flags.DEFINE_integer(
    "trial", 0, "If positive, as many requests are sent to random adapters, and that is all.", 0
)
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens of an answer in a trial.", 1)


def run() -> None:
    """Loads, compiles, and serves until SIGTERM or the end of the trial."""
    try:
        from serving import trial, web  # aiohttp
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is missing; install it with: pip install 'haiku-implicit[serve]'"
        ) from error
    if _COMPILED.value:
        jax.config.update("jax_compilation_cache_dir", _COMPILED.value)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    checkpoint = smollm.read_gguf(_GGUF.value or smollm.fetch(smollm.MODEL))
    engine = make_engine(checkpoint)
    engine.warm_up(lambda works: tqdm(works, "compiling", leave=False))
    tried = {
        f"adapter-{seed}": trial.random_adapter(
            checkpoint.params, seed, rank=_RANK.value, targets=_TARGETS.value
        )
        for seed in range(_CAPACITY.value if _TRIAL.value else 0)
    }
    for name, adapter in tried.items():
        engine.put_adapter(name, adapter)
    for path in sorted(
        pathlib.Path(_ADAPTERS.value).glob("*.safetensors") if _ADAPTERS.value else []
    ):
        try:
            engine.put_adapter(path.stem, web.read_adapter(path))
        except (ValueError, TypeError, engines.Refused) as error:
            raise InputError(f"{path}: {error}") from error
    end = checkpoint.tokenizer.token_to_id("<|im_end|>")
    stop = frozenset() if end is None or _TRIAL.value else frozenset([end])
    server = web.Server(engine, checkpoint.tokenizer, stop, _MOST_UPLOAD.value << 20)
    engine.start()
    asyncio.run(serve(server, checkpoint, tried))
    if engine.failed:
        sys.exit(f"error: {engine.failed}")


def make_engine(checkpoint: smollm.Checkpoint) -> engines.Engine:
    """Makes the engine from the flags."""
    try:
        lists = (tuple(map(int, flag.value)) for flag in (_LENGTHS, _PIECES, _WIDTHS))
        sizes = Sizes(*lists, _BURST.value, _READERS.value)
    except ValueError as error:
        raise InputError(f"--cache_length, --pieces, --widths: {error}") from error
    bank = hki.AdapterBank.of(
        checkpoint.params, capacity=_CAPACITY.value + 1, rank=_RANK.value, targets=_TARGETS.value
    )

    def model(length: int) -> Any:
        return decoding.make_model(checkpoint.config, length, _CACHE.value)

    programs = Programs(model, decoding.empty_cache, sizes)
    return engines.Engine(programs, bank, base=_NAME.value, queue=_QUEUE.value)


async def serve(server, checkpoint, tried) -> None:
    from serving import trial, web

    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    port = 0 if _TRIAL.value else _PORT.value
    async with web.listening(server, _HOST.value, port, _GRACE.value) as port:
        if _TRIAL.value:
            length = server.engine.programs.sizes.length
            model = decoding.make_model(checkpoint.config, length, _CACHE.value)
            empty = decoding.empty_cache(model)
            gap = trial.gap_without_server(checkpoint, tried, model, empty, length)
            try:
                print(await trial.measure(port, [*tried], _TRIAL.value, _TOKENS.value, gap))
            except trial.TrialError as error:
                raise InputError(f"the trial: {error}") from error
            return
        print(f"ready: http://{_HOST.value}:{port}/v1", flush=True)
        await stop.wait()
        print("stopping", flush=True)


if __name__ == "__main__":
    app.run(main_of(run))
