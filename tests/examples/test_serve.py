"""The server over HTTP: OpenAI's client, those who go away, send garbage, or add an adapter."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import aiohttp
import gguf
import haiku as hk
import jax
import numpy as np
import pytest

import decoding
import haiku_implicit as hki
import smollm
from models import llama
from serving import trial, web
from serving.compilations import Compilations
from serving.engine import Engine
from serving.programs import Programs, Sizes
from tests.examples import tiny_llama

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
TARGETS = ".*_proj/w"
NAMES = [f"a{i}" for i in range(8)]
SIZES = Sizes(lengths=(16, 64), pieces=(8,), widths=(1, 16))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """The golden's Llama, its projections in 4 bits."""
    with np.load(ROOT / "tests" / "data" / "llama_golden.npz") as golden:
        tensors = tiny_llama.gguf_tensors(golden)
    kinds = {
        name: gguf.GGMLQuantizationType.Q4_1
        for name in tensors
        if re.search("attn_[qkv]|attn_output|ffn_(gate|up|down)", name)
    }
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return tiny_llama.write_gguf(path, tensors, types=kinds)


@pytest.fixture(scope="module")
def checkpoint(model_file):
    return smollm.read_gguf(model_file)


@pytest.fixture(scope="module")
def adapters(checkpoint):
    """Strong ones, so that no two say the same."""
    found = {}
    for seed, name in enumerate([*NAMES, "late"]):
        adapter = trial.random_adapter(checkpoint.params, seed, rank=2, targets=TARGETS)
        weights = {path: w._replace(b=w.b * 20) for path, w in adapter.weights.items()}
        found[name] = dataclasses.replace(adapter, weights=weights)
    return found


@pytest.fixture(scope="module")
def alone(checkpoint, adapters):
    """`alone(model, prompt, count)`: the text without any of the server's code."""
    model = decoding.make_model(checkpoint.config, SIZES.length, "int8")
    decoder, state = decoding.make_decoder(model), decoding.empty_cache(model)

    def run(name, prompt, count):
        params = checkpoint.params
        params = params if name == "base" else hki.set_adapter(params, adapters[name])
        ids = checkpoint.tokenizer.encode(prompt).ids
        return checkpoint.tokenizer.decode(decoder.generate(params, state, ids, count))

    return run


@pytest.fixture(scope="module")
def compiled(checkpoint):
    bank = hki.AdapterBank.of(checkpoint.params, capacity=10, rank=2, targets=TARGETS)
    model = functools.partial(decoding.make_model, checkpoint.config, cache="int8")
    programs = Programs(model, decoding.empty_cache, SIZES)
    Engine(programs, bank, base="base", queue=1).warm_up()
    return programs, bank


def openai_module():
    """The package, which takes more than half a second to import: only once a test asks for it."""
    return importlib.import_module("openai")


@contextlib.asynccontextmanager
async def serving(compiled, checkpoint, adapters, queue=64):
    """A server with eight adapters: its engine, the address, and a client of OpenAI."""
    openai = openai_module()
    engine = Engine(*compiled, base="base", queue=queue)
    for name in NAMES:
        engine.put_adapter(name, adapters[name])
    server = web.Server(engine, checkpoint.tokenizer, frozenset(), most_upload=1 << 20)
    engine.start()
    async with web.listening(server, "127.0.0.1", 0, grace=3600.0) as port:
        url = f"http://127.0.0.1:{port}"
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            yield engine, url, client


async def text_of(client, model, prompt, count, stream):
    options = dict(model=model, prompt=prompt, max_tokens=count, temperature=0, stream=stream)
    if not stream:
        answer = await client.completions.create(**options)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == count
        return answer.choices[0].text
    chunks = [chunk async for chunk in await client.completions.create(**options)]
    assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) > 2
    return "".join(chunk.choices[0].text for chunk in chunks)


async def goes_away(url):
    """Reads the beginning of a stream, and closes the connection."""
    body = dict(model="base", prompt="go", max_tokens=48, temperature=0, stream=True)
    async with aiohttp.ClientSession(url) as session:
        async with session.post("/v1/completions", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: {")


async def sends_garbage(url):
    """What is not HTTP, and what is not JSON."""
    host, port = url.removeprefix("http://").split(":")
    for garbage in (b"\x00\xff\x80 garbage\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        await writer.drain()
        if garbage.endswith(b"\r\n\r\n"):
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()
    async with aiohttp.ClientSession(url) as session:
        for data in (b"{", b"\xff" * 1000, b"[[[[", b'{"model": 3}'):
            async with session.post("/v1/completions", data=data) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"


async def uploads(url, client, path, want):
    async with aiohttp.ClientSession(url) as session:
        async with session.put("/v1/adapters/late", data=path.read_bytes()) as response:
            assert (response.status, await response.json()) == (
                200,
                {"id": "late", "object": "model"},
            )
    return [await text_of(client, "late", "later", 6, stream=False)]


def test_each_answer_is_that_of_its_adapter_alone(compiled, checkpoint, adapters, alone, tmp_path):
    """64 at once, while some go away, send garbage, or add an adapter; and nothing is compiled."""
    rng = np.random.default_rng(0)
    letters = list("abcdefghij")
    asked = [  # of few lengths, because `alone` compiles for each
        (name, "".join(rng.choice(letters, (5, 12)[i % 2])), (6, 20)[i // 4], i % 3 == 0)
        for i in range(8)
        for name in NAMES
    ]
    want = [alone(*one[:3]) for one in asked]
    assert len(set(want)) > 55  # the adapters matter
    want_late = alone("late", "later", 6)
    path = tmp_path / "late.safetensors"
    hki.save(path, adapters["late"])

    async def run():
        async with serving(compiled, checkpoint, adapters) as (engine, url, client):
            with Compilations() as compilations:
                got, *_, late = await asyncio.gather(
                    asyncio.gather(*(text_of(client, *one) for one in asked)),
                    goes_away(url),
                    sends_garbage(url),
                    uploads(url, client, path, want_late),
                )
            models = [model.id async for model in client.models.list()]
            while engine.running or engine.waiting:
                await asyncio.sleep(0.01)
            async with aiohttp.ClientSession(url) as session:
                metrics = await (await session.get("/metrics")).text()
                health = await (await session.get("/health")).json()
            return got, late, compilations.count, models, metrics, health

    got, late, compiled_count, models, metrics, health = asyncio.run(run())
    assert got == want
    assert late == [want_late]
    assert compiled_count == 0
    assert models == ["base", *NAMES, "late"] and health == {"status": "ok"}
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    # Whoever went away is cancelled, or was answered just before.
    ended = [int(v) for name, v in values.items() if name.startswith("serve_requests_total")]
    assert sum(ended) == 66 and int(values['serve_requests_total{reason="length"}']) >= 65
    assert (values["serve_slots_in_use"], values["serve_queue"]) == ("0", "0")
    assert values['serve_responses_total{status="400"}'] == "4"
    assert int(values["serve_tokens_total"]) >= sum(one[2] for one in asked) + 6
    assert float(values["serve_request_seconds_sum"]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_goes_away_gives_the_slot_back(compiled, checkpoint, adapters, stream, monkeypatch):
    turn = Engine.turn

    def slow_turn(engine):
        while engine.counters.tokens >= 3 and not all(
            r.cancelled for r in [*engine._running.values()]
        ):
            time.sleep(0.001)
        turn(engine)

    monkeypatch.setattr(Engine, "turn", slow_turn)
    body = dict(model="base", prompt="go", max_tokens=48, temperature=0, stream=stream)

    async def run():
        async with serving(compiled, checkpoint, adapters) as (engine, url, _):
            async with aiohttp.ClientSession(url) as session:
                asking = asyncio.create_task(session.post("/v1/completions", json=body))
                while engine.counters.tokens < 3:
                    await asyncio.sleep(0.01)
                if stream:
                    (await asking).close()
                else:
                    asking.cancel()
            while engine.running:
                await asyncio.sleep(0.01)
            return engine.counters

    counters = asyncio.run(run())
    # The token after the prompt, and those of one call.
    assert counters.finished == {"cancelled": 1} and counters.tokens == 1 + SIZES.burst


def test_the_trial_asks_the_model_itself(checkpoint, adapters):
    model = decoding.make_model(checkpoint.config, SIZES.length, "f32")
    empty = decoding.empty_cache(model)
    gap = trial.gap_without_server(checkpoint, adapters, model, empty, SIZES.length)
    tokens = np.asarray([[*checkpoint.tokenizer.encode("abcd").ids, 5, 6]])
    dense = hki.materialize(hki.set_adapter(checkpoint.params, adapters["a1"]))
    plain = hk.without_apply_rng(hk.transform(lambda x: llama.Llama(checkpoint.config)(x)))
    logits = np.asarray(jax.jit(plain.apply)(dense, tokens))[0, -1]
    apart, rounding = gap("a1", "abcd", [5, 6], (3, 9))
    np.testing.assert_allclose(apart, abs(logits[3] - logits[9]), rtol=1e-4)
    assert apart > 100 * rounding > 0


def test_errors(compiled, checkpoint, adapters, tmp_path):
    path = tmp_path / "file.safetensors"

    def file_of(tree):
        hki.save(path, tree)
        return path.read_bytes()

    late = file_of(adapters["late"])
    nan = jax.tree.map(lambda x: x * np.nan, adapters["late"])
    other = jax.tree.map(lambda x: x * 2 if x.dtype == np.float32 else x, checkpoint.params)
    foreign = trial.random_adapter(other, 0, rank=1, targets=TARGETS)
    large = trial.random_adapter(checkpoint.params, 0, rank=3, targets=TARGETS)
    uploads = [
        ("bad name", late, 400, "the name 'bad name': expected up to 64"),
        ("a0", late, 409, "the model 'a0' exists"),
        ("x", b"garbage", 400, "the adapter 'x': "),
        ("x", late[:-100], 400, "the adapter 'x': "),
        ("x", file_of(checkpoint.params), 400, "the file holds a dict, expected what hki.save"),
        ("x", file_of(nan), 400, "numbers that are not finite"),
        ("x", file_of(foreign), 400, "this parameter was another one"),
        ("x", file_of(large), 400, "the adapter has rank 3, the bank has room for 2"),
        ("x", file_of(dataclasses.replace(adapters["late"], bases=())), 400, "for which base"),
        ("x", bytes(1 << 21), 413, "more than 1048576 bytes"),
    ]
    bodies = [
        (dict(prompt="a" * 64), 400, "the prompt has 64 tokens, expected 1 to 63"),
        (dict(prompt="abc", max_tokens=62), 400, "max_tokens is 62, expected 1 to 61"),
        (dict(prompt=[64]), 400, "'prompt': expected tokens from 0 to 63, got 64"),
        (dict(model="zz"), 404, "the model 'zz' does not exist; there are base, a0"),
        (dict(prompt="a" * (1 << 20)), 413, "the body has more than 1048576 bytes"),
        (dict(logprobs=1), 400, "'logprobs' is not supported"),
    ]

    async def run():
        async with serving(compiled, checkpoint, adapters, queue=2) as (engine, url, client):
            found = []
            async with aiohttp.ClientSession(url) as session:

                async def check(method, path, status, message, **options):
                    async with session.request(method, path, **options) as response:
                        text = (await response.json())["error"]["message"]
                    found.append((response.status, status, message in text, text))

                for fields, status, message in bodies:
                    body = dict(model="base", prompt="ab") | fields
                    await check("POST", "/v1/completions", status, message, json=body)
                for name, data, status, message in uploads:
                    await check("PUT", f"/v1/adapters/{name}", status, message, data=data)
                await check("GET", "/v1/none", 404, "GET /v1/none: Not Found")
                await check("GET", "/v1/completions", 405, "Method Not Allowed")
                await check("DELETE", "/v1/adapters/zz", 404, "'zz' does not exist")
                chat = dict(model="base", messages=[dict(role="user", content="hi")])
                await check("POST", "/v1/chat/completions", 400, "no template", json=chat)
                async with session.delete("/v1/adapters/a3") as response:
                    assert (await response.json())["deleted"]
                async with session.put("/v1/adapters/a3", data=late) as response:
                    assert response.status == 200
            refused, turn = threading.Event(), engine.turn
            engine.turn = lambda: (refused.wait(), turn())

            async def ask():
                try:
                    return await client.completions.create(
                        model="base", prompt="ab", max_tokens=60, temperature=0
                    )
                except openai_module().RateLimitError as e:
                    refused.set()
                    return e

            return found, await asyncio.gather(*(ask() for _ in range(40)))

    found, full = asyncio.run(run())
    for status, wanted, matches, text in found:
        assert status == wanted and matches, (status, wanted, text)
    refused = [x for x in full if isinstance(x, openai_module().RateLimitError)]
    answered = [x for x in full if not isinstance(x, Exception)]
    assert len(refused) + len(answered) == 40 and refused and answered
    assert refused[0].response.headers["Retry-After"] == "1"
    assert refused[0].body["code"] == "queue_full"


def test_sigterm_finishes_what_runs(model_file, adapters, alone, tmp_path):
    """The program itself: adapters from a folder, SIGTERM in the middle of a stream."""
    for name in NAMES[:2]:
        hki.save(tmp_path / f"{name}.safetensors", adapters[name])
    command = [
        sys.executable,
        "examples/serve.py",
        f"--gguf={model_file}",
        f"--adapters={tmp_path}",
    ]
    command += ["--port=0", "--rank=2", "--widths=2", "--pieces=16", "--cache_length=64"]
    command += ["--grace=3600"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready: "), process.communicate()
        url = ready.split()[1]
        client = openai_module().OpenAI(base_url=url, api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["smollm2", "a0", "a1"]
        options = dict(model="a1", prompt="abcd", max_tokens=60, temperature=0)
        chunks = iter(client.completions.create(**options, stream=True))
        text = next(chunks).choices[0].text
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        text += "".join(chunk.choices[0].text for chunk in chunks)
        assert text == alone("a1", "abcd", 60)
        assert process.wait() == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_new_requests_are_refused_while_it_stops(compiled, checkpoint, adapters):
    async def run():
        async with serving(compiled, checkpoint, adapters) as (engine, url, client):
            long = dict(model="base", prompt="ab", max_tokens=60, temperature=0)
            chunks = await client.completions.create(**long, stream=True)
            first = await anext(chunks)
            stopping = asyncio.create_task(asyncio.to_thread(engine.stop, 3600.0))
            while engine.accepts:
                await asyncio.sleep(0)
            with pytest.raises(openai_module().InternalServerError, match="is stopping") as refused:
                await client.completions.create(**long)
            async with aiohttp.ClientSession(url) as session:
                async with session.get("/health") as response:
                    health = response.status, await response.json()
            rest = [chunk async for chunk in chunks]
            await stopping
            return first, rest, refused.value.status_code, health

    first, rest, status, (health, told) = asyncio.run(run())
    assert status == health == 503 and told["error"]["code"] == "stopping"
    assert rest[-1].choices[0].finish_reason == "length"
    assert len(json.dumps([x.model_dump() for x in rest])) > 100 and first.choices[0].text
