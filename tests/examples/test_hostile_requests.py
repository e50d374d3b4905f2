"""Requests that nobody means well with: each is answered, and never by 500."""

import asyncio
import gzip
import itertools
import json
import zlib

import aiohttp
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

import haiku_implicit as hki
from serving import questions, web
from serving.engine import Engine
from serving.programs import Sizes
from tests.examples import plain_server

MOST_UPLOAD = 3 << 20
PATHS = {"completions": "/v1/completions", "chats": "/v1/chat/completions"}
GOOD = {
    "completions": dict(model="base", prompt="ab", max_tokens=2),
    "chats": dict(model="base", messages=[{"role": "user", "content": "hi"}], max_tokens=2),
}


@pytest.fixture
def answers(monkeypatch):
    """From requests (method, path, data, headers): the status and JSON of each; nothing is logged."""
    logged = []
    monkeypatch.setattr(logging, "exception", lambda *args: logged.append(args))

    async def run(requests):
        sizes = Sizes(lengths=(400,), pieces=(100,), widths=(2,))
        engine = Engine(plain_server.Counting(sizes), None, base="base", queue=4)
        server = web.Server(engine, plain_server.byte_tokenizer(), frozenset(), MOST_UPLOAD)
        engine.start()
        found = []
        async with web.listening(server, "127.0.0.1", 0, grace=3600.0) as port:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                for method, path, data, headers in requests:
                    async with session.request(method, path, data=data, headers=headers) as got:
                        text = await got.text()
                    found.append((got.status, json.loads(text) if text[0] == "{" else text))
        return found

    def of(*requests):
        found = asyncio.run(run(requests))
        assert logged == []
        return found

    return of


def post(body, kind="completions", **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return "POST", PATHS[kind], data, headers


def message(answer):
    status, body = answer
    assert set(body) == {"error"} and body["error"]["type"] == "invalid_request_error", answer
    return status, body["error"]["message"]


HOSTILE = [
    None, True, False, 0, 1, -1, 2**31, -(2**63), 2**64, 10**400, 0.5, -0.5, 1e-38, 5e-324, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "a", "base", "\x00\x1b[31m\n", "\ud800", "a\udfffb",
    "é" * 2000, [], [[]], ["a"], ["\ud800"], [""], ["a"] * 5, [1, 2], [-1], [258], [2**70], [True], [1.5],
    [None], {}, {"a": 1}, {"\ud800": 1}, {"include_usage": 1}, {"include_usage": True},
    [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": None}], [{"role": []}],
    [{"role": "user", "content": "x", "\udc00": 1}], [{"role": "user", "content": ["x"]}],
]  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_any_value_of_any_field(kind, answers):
    fields = questions.OF_CHATS if kind == "chats" else questions.OF_COMPLETIONS
    asked = [
        {**GOOD[kind], name: value}
        for name, value in itertools.product([*fields, "top_k", "\ud800"], HOSTILE)
    ]
    statuses = set()
    for body, (status, answer) in zip(asked, answers(*(post(x, kind) for x in asked)), strict=True):
        assert status in (200, 400, 404), (body, status, answer)
        if status != 200:
            text = answer["error"]["message"]
            assert "\n" not in text and len(text) < 400, text
            answer = json.dumps(answer)
        elif "\ud800" in repr(body) or "\\ud800" in json.dumps(body):
            pytest.fail(f"taken: {body}")
        statuses.add(status)
    assert statuses == {200, 400, 404}


@pytest.mark.parametrize("field", ["prompt", "model", "stop", "user"])
def test_half_of_a_surrogate_pair(field, answers):
    good = GOOD["completions"]
    asked = [
        post({**good, field: "a\ud800"}),
        post({**good, field: "a\udfffb"}),
        # As bytes that are not UTF-8, which Python's `json` takes.
        post(json.dumps({**good, field: "HERE"}).encode().replace(b"HERE", b"\xed\xa0\x80")),
    ]
    for answer, half in zip(answers(*asked), ("D800", "DFFF", "D800"), strict=True):
        want = f"'{field}': U+{half} is half of a surrogate pair, which is no character"
        assert message(answer) == (400, want)
        assert answer[1]["error"]["param"] == field
    assert answers(post({**good, "user": "\U0001f600"}))[0][0] == 200  # a whole pair


OK = json.dumps(GOOD["completions"]).encode()
ZIPPED = gzip.compress(OK)


def test_compressed_bodies(answers):
    good = [("gzip", ZIPPED), ("GZip", ZIPPED), ("deflate", zlib.compress(OK)), ("identity", OK)]
    good.append(("gzip", gzip.compress(OK + b" " * ((1 << 20) - len(OK)))))  # as much as is taken
    found = answers(*(post(data, **{"Content-Encoding": name}) for name, data in good))
    assert [status for status, _ in found] == [200] * len(good)
    assert {answer["choices"][0]["text"] for _, answer in found} == {"cd"}
    bad = [
        ("gzip", b"garbage", 400, "the body cannot be read: Error -3 while decompressing data"),
        ("deflate", b"garbage", 400, "the body cannot be read: Error -3 while decompressing data"),
        ("gzip", ZIPPED[:-9], 400, "the body ends before its gzip data do"),
        ("gzip", b"", 400, "the body ends before its gzip data do"),
        ("gzip", ZIPPED[:-1] + b"\x01", 400, "the body cannot be read: Error -3"),
        ("gzip", ZIPPED + b"more", 400, "the body has more bytes after its gzip data"),
        ("gzip", gzip.compress(b" " * (1 << 24)), 413, "the body has more than 1048576 bytes"),
        ("gzip", gzip.compress(b"\xff{"), 400, "the body is not JSON"),
        ("br", OK, 400, "Content-Encoding: expected one of identity, gzip, deflate, got 'br'"),
        ("gzip, gzip", OK, 400, "got 'gzip, gzip'"),
        ("identity", b" " * (1 << 21), 413, "the body has more than 1048576 bytes"),
    ]
    found = answers(*(post(data, **{"Content-Encoding": name}) for name, data, *_ in bad))
    for answer, (*_, status, text) in zip(found, bad, strict=True):
        assert message(answer)[0] == status and text in message(answer)[1]


def test_an_upload_is_decompressed_and_bounded(answers):
    put = lambda data: ("PUT", "/v1/adapters/x", data, {"Content-Encoding": "gzip"})  # noqa: E731
    found = answers(
        put(b"garbage"),
        put(gzip.compress(bytes(MOST_UPLOAD))),
        put(gzip.compress(bytes(MOST_UPLOAD + 1))),
    )
    assert message(found[0])[1].startswith("the body cannot be read")
    assert message(found[1])[1].startswith("the adapter 'x': ")  # read whole, and no adapter
    assert message(found[2]) == (413, f"the body has more than {MOST_UPLOAD} bytes")


def test_other_encodings_and_names(answers):
    found = answers(
        post(OK, **{"Content-Type": "application/json; charset=none"}),
        post(OK.decode().encode("utf-16")),
        ("DELETE", "/v1/adapters/%ED%A0%80%FF%00%0A", None, {}),
        ("PUT", "/v1/adapters/%ED%A0%80%FF%00%0A", b"", {}),
        ("PUT", "/v1/adapters/" + "a" * 65, b"", {}),
    )
    assert [status for status, _ in found] == [200, 200, 404, 400, 400]
    assert all("\n" not in message(answer)[1] for answer in found[2:])


def test_an_adapter_without_weights(answers, tmp_path):
    """It would be the base under another name."""
    params = {"layer": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}}
    whole = hki.get_adapter(hki.add_lora(params, 0, rank=1), trainable_dense=True)
    empty = hki.AdapterParts({}, {}, whole.bases)
    dense = hki.AdapterParts({}, whole.dense, whole.bases)
    for adapter in (empty, dense, hki.AdapterParts({})):
        hki.save(tmp_path / "x", adapter)
        [answer] = answers(("PUT", "/v1/adapters/x", (tmp_path / "x").read_bytes(), {}))
        assert message(answer) == (
            400,
            "the adapter 'x': it has no weights with LoRA, and would be the base alone",
        )
    assert np.asarray(whole.dense["layer/b"]).tolist() == [1, 1, 1]
