"""The program `haiku-implicit`, by its `main`."""

import errno
import io
import json
import os
import re
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.command_line.main import COMMANDS, main


def params_of(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "model/layer_0": {"w": jax.random.normal(keys[0], (32, 8)), "b": jnp.ones(8)},
        "model/layer_1": {"w": jax.random.normal(keys[1], (8, 4))},
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hki.save("model", params_of())
    return tmp_path


def run(capsys, *arguments):
    """The exit code, and the lines of output and of errors."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_inspect(folder, capsys):
    code, out, _ = run(capsys, "inspect", "model")
    assert code == 0 and out == str(hki.summary(params_of())).splitlines()
    code, out, _ = run(capsys, "inspect", "model", "--depth=1", "--json", "--plot=memory.png")
    [row] = json.loads(out[0])
    assert (row["path"], row["nbytes"], row["bits"]) == ("model", 4 * (256 + 8 + 32), 32.0)
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_quantize_add_lora_merge_and_diff(folder, capsys):
    options = ("--dtype=int4", "--group_size=16", "--targets=.*layer_0/w")
    assert run(capsys, "quantize", "model", "small", *options)[0] == 0
    weight = hki.load("small")["model/layer_0"]["w"]
    assert (weight.format, weight.group_size) == ("int4", 16)
    assert run(capsys, "add-lora", "small", "tuned", "--rank=2", "--alpha=4", "--seed=3")[0] == 0
    tuned = hki.load("tuned")
    want = hki.add_lora(hki.load("small"), 3, rank=2, alpha=4.0)
    jax.tree.map(np.testing.assert_array_equal, tuned, want)
    code, out, _ = run(capsys, "merge", "tuned", "merged", "--requantize")
    assert code == 0 and any("layer_0/w" in line for line in out[1:])
    merged = hki.load("merged")
    assert merged["model/layer_0"]["w"].format == "int4"
    code, out, _ = run(capsys, "diff", "model", "merged", "--json", "--plot=error.svg")
    rows = {row["path"]: row for row in json.loads(out[0])["rows"]}
    found = hki.compare_params(params_of(), merged)
    assert code == 0 and rows["model/layer_0/w"]["relative"] == found.rows[0].relative > 0.01
    assert "<svg" in (folder / "error.svg").read_text()


def test_axes_of_attention(folder, capsys):
    hki.save("attention", {"att/q": {"w": jnp.ones((16, 2, 8))}})
    axes = '--matrix_axes={".*/q/w": [[-3], [-2, -1]]}'
    assert run(capsys, "quantize", "attention", "small", "--dtype=int8", axes)[0] == 0
    assert run(capsys, "add-lora", "attention", "tuned", "--rank=2", axes)[0] == 0
    shapes = [hki.load(name)["att/q"]["w"].matrix.shape for name in ("small", "tuned")]
    assert shapes == [(16, 16)] * 2
    code, _, err = run(capsys, "quantize", "attention", "stacks", "--dtype=int8")
    assert (
        code == 0
        and "[16,2,8] as 16 matrices of 2 x 8" in err[0]
        and "give --matrix_axes={}" in err[0]
    )
    assert not run(capsys, "quantize", "attention", "silent", "--dtype=int8", "--matrix_axes={}")[2]
    code, _, err = run(capsys, "quantize", "attention", "new", "--matrix_axes=[1]")
    assert code == 2 and "--matrix_axes: expected a JSON object, got '[1]'" in err[0]
    code, _, err = run(capsys, "quantize", "attention", "new", "--matrix_axes={")
    assert code == 2 and "--matrix_axes: not JSON" in err[0]


def test_warnings_are_lines_and_a_field(folder, capsys):
    hki.save("odd", {"odd": {"w": jnp.ones((24, 8))}, "even": {"w": jnp.ones((32, 8))}})
    code, out, err = run(capsys, "quantize", "odd", "small", "--group_size=32", "--json")
    (line,), fields = err, json.loads(out[0])
    start = (
        "1 weight stays dense, because groups of 32 do not divide axis -2: odd/w (float32[24,8])."
    )
    assert code == 0 and line.startswith(
        f"warning: {start} Quantize with another --group_size= (8, 12, 24 would fit), "
    )
    assert [f"warning: {text}" for text in fields["warnings"]] == err
    assert (fields["target"], fields["nbytes_before"]) == ("small", 4 * 8 * (24 + 32))
    code, out, err = run(capsys, "quantize", "odd", "dense", "--group_size=32", "--exclude=odd/.*")
    assert code == 0 and not err and out[0].startswith("dense: ")


def test_merge_of_the_arrays_that_freeze_trains(folder, capsys):
    model = hk.Transformed(init=lambda *_: None, apply=lambda p: p)
    assert run(capsys, "add-lora", "model", "tuned", "--rank=2", "--targets=.*/w")[0] == 0
    frozen, trained = hki.freeze(model, hki.load("tuned"), trainable_dense=".*/b")
    trained = jax.tree.map(lambda x: x + 0.5, trained)
    hki.save("alone", trained)
    hki.save("run", {"step": 3, "trained": trained, "digests": frozen.digests()})
    want = hki.merge_lora(frozen.params(trained))
    for name in ("alone", "run"):
        assert run(capsys, "merge", "tuned", f"from_{name}", f"--trained={name}")[0] == 0
        jax.tree.map(np.testing.assert_array_equal, hki.load(f"from_{name}"), want)

    assert run(capsys, "add-lora", "model", "other", "--rank=2", "--alpha=8")[0] == 0
    code, _, err = run(capsys, "merge", "other", "new", "--trained=run")
    assert code == 1 and "run: digests: model/layer_0/w/factor has other values" in err[0]
    assert run(capsys, "add-lora", "model", "less", "--rank=1")[0] == 0
    code, _, err = run(capsys, "merge", "less", "new", "--trained=alone")
    assert code == 1 and "alone: params: expected model/layer_0/w_lora_a in the shape" in err[0]
    hki.save("list", [1, 2])
    hki.save("apart", hki.get_adapter(hki.load("tuned")))
    for other, message in {
        "model": "params: model/layer_0/w",
        "list": "expected the arrays that hki.freeze returned, .* got list",
        "apart": "expected the arrays .* got AdapterParts. --adapter=FILE takes an adapter",
    }.items():
        code, _, err = run(capsys, "merge", "tuned", "new", f"--trained={other}")
        assert code == 1 and re.search(f"error: {other}: {message}", err[0])
    assert not (folder / "new").exists()


def test_what_has_no_adapter_is_not_merged(folder, capsys):
    code, _, err = run(capsys, "merge", "model", "merged")
    assert code == 1 and "model: there are no adapters in it" in err[0]
    assert "--trained=FILE" in err[0]
    assert not (folder / "merged").exists()


def test_a_picture_has_the_suffix_of_one(folder, capsys):
    for command in (["inspect", "absent"], ["diff", "absent", "absent"]):  # before anything is read
        code, _, err = run(capsys, *command, "--plot=memory.txt")
        assert code == 1 and "memory.txt: expected a picture's suffix (" in err[0]


def test_an_adapter_apart_from_its_base(folder, capsys):
    tuned = hki.add_lora(params_of(), 0, rank=2)
    tuned["model/layer_0"]["w"] = tuned["model/layer_0"]["w"]._replace(b=jnp.ones((2, 8)))
    hki.save("adapter", hki.get_adapter(tuned))
    code, out, _ = run(capsys, "inspect", "adapter")
    assert code == 0 and any(line.startswith("model/layer_0/w/a") for line in out)
    assert run(capsys, "merge", "model", "merged", "--adapter=adapter")[0] == 0
    want = hki.materialize(tuned)["model/layer_0"]["w"]
    np.testing.assert_allclose(hki.load("merged")["model/layer_0"]["w"], want, rtol=1e-6)
    hki.save("other", params_of(1))
    code, _, err = run(capsys, "merge", "other", "wrong", "--adapter=adapter")
    assert code == 1 and "was made for another base" in err[0] and "--any_base" in err[0]
    assert not (folder / "wrong").exists()
    assert run(capsys, "merge", "other", "wrong", "--adapter=adapter", "--any_base")[0] == 0


def test_a_checkpoint_of_training(folder, capsys):
    opt = optax.adam(1e-3).init(params_of())
    hki.save("training", {"step": 3, "params": params_of(), "opt": opt})
    code, _, err = run(capsys, "quantize", "training", "new")
    assert code == 1 and "'step' is no module. --key=NAME takes a part" in err[0]
    assert run(capsys, "quantize", "training", "new", "--key=params")[0] == 0
    assert sorted(hki.load("new")) == sorted(params_of())
    code, out, _ = run(capsys, "inspect", "training", "--key=params")
    assert code == 0 and out == str(hki.summary(params_of())).splitlines()
    code, _, err = run(capsys, "inspect", "training", "--key=weights")
    assert code == 1 and "there is no 'weights'; there is step, params, opt" in err[0]


def test_halves_of_parameters(folder, capsys):
    """Training saves what is trained apart: factors without their weight, and moments of them."""
    tuned = hki.add_lora(params_of(), 0, rank=2)
    adapter, base = hki.partition(tuned, trainable_dense=False)
    moments = optax.adam(1e-3).init(adapter)
    hki.save("halves", {"step": 3, "adapter": adapter, "base": base, "optimizer": moments})
    code, out, _ = run(capsys, "inspect", "halves", "--json")
    rows = {row["path"]: row for row in json.loads("".join(out))}
    assert code == 0 and "adapter/model/layer_0/w/a" in rows
    assert any(path.startswith("optimizer") for path in rows)
    held = [x.nbytes for x in jax.tree.leaves((adapter, base, moments))]
    assert sum(row["nbytes"] for row in rows.values()) == sum(held)


@pytest.mark.parametrize("method, options", [("ia3", "{}"), ("oft", '{"block_size": 4}')])
def test_methods_without_a_rank(folder, capsys, method, options):
    arguments = (f"--method={method}", f"--options={options}", "--targets=.*layer_0/w")
    code, _, err = run(capsys, "add-lora", "model", "new", *arguments)
    assert code == 0, err
    assert type(hki.load("new")["model/layer_0"]["w"]).__name__.lower() == method


@pytest.mark.slow
def test_what_reads_the_output_may_stop(folder):
    program = "from haiku_implicit.command_line.main import main; raise SystemExit(main())"
    command = f"{sys.executable} -c '{program}' inspect model | head -n 1"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("path") and not found.stderr


# --- names with anything in them, and outputs that end ----------------------------------------------

EVIL = "m\x1b[31m\nfake/row  dense  [1]\r\x9b2J\u202e\u2028\t\x07é"
SHOWN = r"m\x1b[31m\nfake/row  dense  [1]\r\x9b2J\u202e\u2028\t\x07é"


@pytest.fixture
def evil(folder):
    hki.save("evil", {EVIL: {"w": jnp.ones((32, 8)), EVIL: jnp.ones(3)}})
    hki.save("other", {EVIL: {"w": jnp.zeros((32, 8)), "new\n": jnp.ones(3)}})
    return folder


@pytest.mark.parametrize(
    "arguments, lines",
    [
        (["inspect", "evil"], 4),
        (["inspect", "evil", "--depth=1"], 3),
        (["diff", "evil", "other"], 4),
        (["quantize", "evil", "new", "--group_size=7"], 1),
        (["quantize", "evil", "new", "--targets=\x1bno"], 1),
        (["quantize", "evil", "new", "--dtype=\x1b\n"], 1),
        (["quantize", "evil", "new", "--exclude=\x1b\n"], 1),
        (["add-lora", "evil", "new", "--rank=99"], 1),
        (["add-lora", "evil", "new", "--targets=.*", "--rank=2"], None),
        (["inspect", "evil", "--key=\x1b"], 1),
        (["inspect", "\x1b[31m\nno"], 1),
        (["inspect", "evil", "--\x1b\nflag"], 2),
        (["inspect", "evil", "\x1b\nmore"], 2),
        (["quantize", "evil", "\x1b\n.gguf"], 2),
        (["\x1b\n"], 1),
        (["convert", "evil", "new", "--names=\x1b\n"], 1),
        (["merge", "evil", "new", "--adapter=other"], 1),
    ],
    ids=str,
)
def test_no_name_writes_to_the_terminal(evil, capsys, arguments, lines):
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()
    if lines is not None:
        assert (out + err).count("\n") == lines
    if code == 0 and out.startswith("path"):
        assert SHOWN.partition("/")[0] in out


def test_rows_are_of_their_names(evil, capsys):
    _, out, _ = run(capsys, "inspect", "evil")
    assert out[1].startswith(f"{SHOWN}/w  ") and out[2].startswith(f"{SHOWN}/{SHOWN}  ")
    _, out, _ = run(capsys, "inspect", "evil", "--json")
    assert [row["path"] for row in json.loads(out[0])] == [f"{EVIL}/w", f"{EVIL}/{EVIL}"]


def test_an_encoding_without_the_letters(evil, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["inspect", "evil"]) == 0
    assert rb"\x07\xe9/w" in stream.buffer.getvalue()


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["inspect", "model"]])
def test_an_output_that_ends(folder, capsys, monkeypatch, arguments):
    """Its reader has gone (`| head -n 1`), it is closed (`>&-`), or there is no room."""
    out, into = os.pipe()
    os.close(out)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open(into, "w"))  # noqa: SIM115
        assert main(arguments) == 0
        sys.stdout.close()  # which writes nothing more
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(arguments) == 0
    full = io.TextIOWrapper(Full(), encoding="utf-8", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err == "error: [Errno 28] No space left on device\n"


class Full(io.RawIOBase):
    """A file on a full disk."""

    def writable(self):
        return True

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_stream_that_is_closed(folder, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["inspect", "absent"]) == 1
    assert main(["bogus"]) == 2


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([], 2, ""),
        (
            ["bogus"],
            2,
            "unknown command 'bogus'; there are inspect, quantize, add-lora, merge, diff",
        ),
        (["inspect"], 2, "expected PATH, got nothing"),
        (["inspect", "model", "more"], 2, "expected PATH, got model more"),
        (["inspect", "model", "--size=3"], 2, "Unknown command line flag 'size'"),
        (["inspect", "model", "--depth=0"], 2, "flag --depth=0: 0 is not a positive integer"),
        (["inspect", "absent"], 1, "absent: No such file or directory"),
        (["inspct", "model"], 2, "Did you mean inspect?"),
        (["inspect", "-"], 2, "'-': standard input and output are not read"),
        (["inspect", "model", "--depth=two"], 2, "flag --depth=two: expected a number, got 'two'"),
        (
            ["quantize", "model", "new", "--group_size=7"],
            1,
            "by 7 (8 would fit) (--matrix_axes= says",
        ),
        (
            ["quantize", "model", "new.gguf"],
            2,
            "new.gguf: what is written is a file of safetensors",
        ),
        (["quantize", "model", "no/new"], 1, "no/new: the folder "),
        (["quantize", "model", "."], 1, ".: is a folder; give the name of a file"),
        (["merge", "model", "new", "--adapter=model"], 1, "model: there is no adapter in it ("),
        (["diff", "model", "text"], 1, "text: not a safetensors or .npz file, but a text"),
        (["inspect", "text"], 1, "text: "),
        (["quantize", "model", "model"], 2, "model is there already; --overwrite writes over it"),
        (["quantize", "model", "new", "--dtype=int99"], 1, "dtype: expected one of int8"),
        (
            ["add-lora", "model", "new", "--method=lore"],
            1,
            "method: expected one of '",
        ),
        (["quantize", "model", "new", "--targets=nothing"], 1, "--targets: 'nothing' matches none"),
    ],
)
def test_errors(folder, capsys, arguments, code, message):
    (folder / "text").write_text("not a checkpoint")
    before = (folder / "model").read_bytes()
    found, _, err = run(capsys, *arguments)
    assert (
        found == code and message in "".join(err) and not any("Traceback" in line for line in err)
    )
    assert (folder / "model").read_bytes() == before and not (folder / "new").exists()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_lists_every_flag(command, capsys):
    code, out, _ = run(capsys, command.name, "--help")
    assert code == 0 and f"haiku-implicit {command.name}" in "\n".join(out)
    for name in set(command.flags()) - {"h"}:
        assert any(line.strip().startswith(f"--{name}: ") for line in out)


def test_overview(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(any(c.name in line for line in out) for c in COMMANDS)


@pytest.mark.slow
def test_as_a_program(folder):
    command = "from haiku_implicit.command_line.main import main; raise SystemExit(main())"
    found = subprocess.run(
        [sys.executable, "-c", command, "inspect", "model"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == str(hki.summary(params_of())).splitlines()
    assert not found.stderr  # no bars, no colours, on a pipe
