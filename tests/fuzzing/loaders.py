"""The loaders: valid files of each, how these are changed, and how the results are checked."""

import contextlib
import io
import json
import os
import pathlib
import pickle
import struct
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import haiku as hk
import jax
import jax.numpy as jnp
import joblib
import numpy as np
import optax
import safetensors.numpy
import zstandard

import haiku_implicit as hki
from haiku_implicit.command_line.main import main
from haiku_implicit.core.array import IncompleteError, is_implicit, known_struct
from haiku_implicit.mox import load as load_mox
from haiku_implicit.mox import make_mox
from haiku_implicit.mox import save as save_mox
from tests.adapter_cases import CASES as ADAPTERS
from tests.cases import CASES
from tests.files.trees import OTHERS, Registered
from tests.fuzzing import archives, containers, gguf_files, mutations

DATA = pathlib.Path(__file__).parents[1] / "data"
Files = dict[str, Any]


class Loader(NamedTuple):
    """One way to read files.

    Attributes:
      seeds: makes valid cases.
      path: what is read, in the folder of a case.
      load: reads it.
    """

    seeds: Callable[[], list[Files]]
    path: str
    load: Callable[[str], Any]


# --- changes -------------------------------------------------------------------------------------


def mutated(files: Files, draw: Any) -> Files:
    """A case, changed once."""
    try:
        return mutated_by_format(files, draw)
    except Exception:  # the format's own, of a file that is damaged already
        name = draw.choice([name for name, data in files.items() if isinstance(data, bytes)])
        return files | {name: mutations.of_bytes(files[name], draw)}


def mutated_by_format(files: Files, draw: Any) -> Files:
    """Changes a valid case by its format; for a damaged one anything may be raised."""
    if draw.random() < (0.01 if len(files) == 1 else 0.05):
        return mutations.of_folder(files, draw)
    names = [name for name, data in files.items() if isinstance(data, bytes)]
    if not names:
        return files
    name = draw.choice(names)
    data = files[name]
    if name.endswith(".json"):
        return files | {name: mutations.of_json_file(data, draw)}
    if data[:4] == b"GGUF":
        return files | {name: gguf_files.mutated(data, draw)}
    if data[:2] == b"PK":
        return files | {name: archives.mutated_npz(data, draw)}
    if name.endswith(".bin"):
        return files | {name: mutations.of_bytes(data, draw)}
    if name.endswith(".pickle"):
        return files | {name: archives.mutated_pickle(data, draw)}
    return containers.mutated(files, name, draw)


# --- valid files ---------------------------------------------------------------------------------


def _written(write: Callable[[pathlib.Path], None]) -> Files:
    """The files that a function writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder))
        return {p.name: p.read_bytes() for p in sorted(pathlib.Path(folder).iterdir())}


def _small_tree() -> Any:
    state = hk.data_structures.to_immutable_dict({"count": jnp.int32(3)})
    weights = {"w": CASES["lora of int4"](), "b": np.ones(4, jnp.bfloat16), "on": np.array([True])}
    more = (
        5,
        None,
        [jnp.ones(0), jnp.asarray(2.0)],
        jax.random.key(3),
        state,
        "text",
        1 + 2j,
        b"b",
    )
    step = Registered(3, {"w": np.arange(4.0)})
    return {"mlp/~/linear": weights, "more": more, "step": step, "dtype": np.dtype("int8")}


def _trees() -> list[Any]:
    kinds = [make() for make in (*CASES.values(), *OTHERS.values())]
    w = jnp.ones((12, 8))
    adapters = [case((), w) for case in ADAPTERS.values()]
    params = {"linear": {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}}
    states = [optax.adam(1e-3).init(params), optax.sgd(0.1, momentum=0.9).init(params)]
    lora = hki.get_adapter(hki.add_lora(params, 0, rank=2))
    return [*({"m": {"w": x}} for x in (*kinds, *adapters)), *states, lora]


def _types() -> list[Files]:
    """A file for each type."""
    return [_written(lambda f, t=tree: hki.save(f / "file", t)) for tree in _trees()]


def _saved() -> list[Files]:
    small = _written(lambda f: hki.save(f / "file", _small_tree()))
    plain = {"a/w": np.ones((2, 3), np.float32), "a/b": np.arange(4), "c": np.ones(2, np.int8)}

    def npz(folder: pathlib.Path, write: Any = np.savez) -> None:
        with (folder / "file").open("wb") as file:
            write(file, **plain)

    foreign = _written(lambda f: safetensors.numpy.save_file(plain, f / "file"))
    packed = _written(lambda f: npz(f, np.savez_compressed))
    return [small, small, foreign, _written(npz), packed]


def _parted() -> list[Files]:
    """Checkpoints in several files, and one with an array in parts."""

    def sharded(folder: pathlib.Path) -> None:
        hki.save(folder / "file", _small_tree(), max_shard_bytes=60)

    def in_parts(folder: pathlib.Path) -> None:
        hki.save(folder / "file", {"a": np.arange(12.0).reshape(6, 2), "b": jnp.ones(3)})

    files = _written(in_parts)
    rows, payload = containers.parsed(files["file"])
    meta = json.loads(rows["__metadata__"]["haiku_implicit"])
    [leaf] = [x for x in meta["tree"]["items"] if x["array"] == "a"]
    leaf["parts"] = [
        {"array": f"a[{i}]", "file": 0, "start": [i, 0], "shape": [2, 2], "sums32": "00000000"}
        for i in (0, 2, 4)
    ]
    draw = _Never()
    files = containers._fitting(files, "file", meta, draw)
    return [_written(sharded), files]


class _Never:
    """Draws nothing unusual."""

    def random(self) -> float:
        return 0.5


def _pickles() -> list[Files]:
    tree = {
        "mlp/~/linear": {
            "w": np.arange(6, dtype=np.float32).reshape(2, 3),
            "b": np.ones(3, np.int8),
        },
        "norm": {"scale": np.ones(2, jnp.bfloat16), "big": np.arange(3, dtype=">i4")},
        "more": [(1, None), True, "text", np.float32(2.5), np.asfortranarray(np.ones((2, 2)))],
    }
    state = hk.data_structures.to_immutable_dict({"m": {"w": np.ones(2)}})
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    whole = {**tree, "state": state}
    of_joblib = [
        _written(lambda f, i=i: joblib.dump(whole, f / "file.pickle", protocol=i)) for i in (3, 5)
    ]
    of_joblib += [
        _written(lambda f, how=how: joblib.dump(whole, f / "file.pickle", compress=how))
        for how in ("zlib", "gzip", "bz2")
    ]
    return [*({"file.pickle": pickle.dumps(whole, i)} for i in protocols), *of_joblib]


def _records() -> list[Files]:
    """AlphaFold 3's records, packed or not."""
    found = b""
    for scope, name, x in (
        ("a/b", "w", np.ones((2, 3), np.float32)),
        ("a/b", "b", np.ones(3, jnp.bfloat16)),
        ("__meta__", "__identifier__", np.arange(8, dtype=np.uint8)),
    ):
        texts = [scope.encode(), name.encode(), x.dtype.name.encode()]
        found += struct.pack("<5i", *map(len, texts), x.ndim, x.nbytes) + b"".join(texts)
        found += struct.pack(f"<{x.ndim}i", *x.shape) + x.tobytes()
    return [{"file.bin": found}, {"file.bin": zstandard.ZstdCompressor().compress(found)}]


def _gguf() -> list[Files]:
    kinds = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", "MXFP4")

    def write(folder: pathlib.Path, names: tuple[str, ...]) -> None:
        writer = gguf.GGUFWriter(folder / "file.gguf", arch="test")
        writer.add_uint32("test.block_count", 2)
        writer.add_array("tokenizer.tokens", ["a", "b", "c"])
        writer.add_array("tokenizer.scores", [0.5, 1.5])
        writer.add_bool("test.on", True)
        for name in names:
            kind = gguf.GGMLQuantizationType[name]
            width = 256 if kind.name == "TQ2_0" else 64
            data = gguf.quantize(np.ones((2, width), np.float32), kind)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        writer.add_tensor("bias", np.arange(5, dtype=np.float32))
        writer.add_tensor("half", np.ones((2, 3), np.float16))
        writer.add_tensor("whole", np.ones(3, np.int32))
        for part in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{part}_to_file")()
        writer.close()

    small = [_written(lambda f, k=kind: write(f, (k,))) for kind in kinds]
    return [*small, _written(lambda f: write(f, kinds))]


def _config(**quantization: Any) -> bytes:
    config = {"model_type": "test"}
    return json.dumps(
        config | {"quantization_config": quantization} if quantization else config
    ).encode()


def _hugging_face() -> list[Files]:
    dense = {"up.weight": np.ones((3, 4), np.float32), "up.bias": np.ones(3, np.float16)}
    dense |= {"table": np.ones((5, 4), jnp.bfloat16), "ids": np.arange(4)}
    index = {"up.weight": "a.safetensors", "up.bias": "b.safetensors"}

    def file(tensors: Any) -> bytes:
        return _written(lambda f: hki.save(f / "x", tensors))["x"]

    found = [
        {"model.safetensors": file(dense), "config.json": _config()},
        {
            "a.safetensors": file({"up.weight": dense["up.weight"]}),
            "b.safetensors": file({"up.bias": dense["up.bias"]}),
            "model.safetensors.index.json": json.dumps({"weight_map": index}).encode(),
        },
    ]
    with np.load(DATA / "bitsandbytes.npz") as goldens:
        for case in ("nf4", "nf4 double", "fp4 double", "int8"):
            own = {
                k.removeprefix(f"{case}/"): goldens[k] for k in goldens if k.startswith(f"{case}/")
            }
            tensors = {f"up.{k}": x for k, x in own.items()}
            config = _config(quant_method="bitsandbytes", load_in_4bit=True)
            found.append({"model.safetensors": file(tensors), "config.json": config})
    for method, bits in (("gptq", 4), ("gptq", 3), ("awq", 4)):
        rows = (64, 4) if method == "awq" else (64 * bits // 32, 32)
        tensors = {
            "up.qweight": np.full(rows, 0x1234567, np.int32),
            "up.qzeros": np.full((2, 32 * bits // 32), 0x1111111, np.int32),
            "up.scales": np.ones((2, 32), np.float16),
            "up.g_idx": (np.arange(64) // 32).astype(np.int32),
        }
        if method == "awq":
            del tensors["up.g_idx"]
        config = _config(quant_method=method, bits=bits, group_size=32)
        found.append({"model.safetensors": file(tensors), "config.json": config})
    affine = {"up.weight": np.full((3, 8), 0x1234567, np.uint32)}
    affine |= dict.fromkeys(("up.scales", "up.biases"), np.ones((3, 2), np.float16))
    config = json.dumps({"quantization": {"group_size": 32, "bits": 4}}).encode()
    return [*found, {"model.safetensors": file(affine), "config.json": config}]


def _peft() -> list[Files]:
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "bias": "none",
        "rank_pattern": {"b.*": 2},
    }
    config |= {"alpha_pattern": {"layers.0": 1}, "use_rslora": False}
    found = []
    for kinds in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
        for magnitude in (False, True):
            tensors = {}
            for i in range(2):
                prefix = f"base_model.model.layers.{i}.q_proj"
                tensors[f"{prefix}.{kinds[0]}"] = np.ones((2, 5), np.float32)
                tensors[f"{prefix}.{kinds[1]}"] = np.ones((4, 2), np.float32)
                if magnitude:
                    tensors[f"{prefix}.lora_magnitude_vector"] = np.ones(4, np.float32)
            data = _written(lambda f, t=tensors: hki.save(f / "x", t))["x"]
            name = "adapter_model.safetensors"
            found.append({name: data, "adapter_config.json": json.dumps(config).encode()})
    return found


def _mox() -> list[Files]:
    def linear(x: Any) -> Any:
        x = jax.nn.relu(hk.Linear(3)(x))
        return hk.Linear(2)(x) + jax.lax.stop_gradient(x.sum())

    def loop(x: Any) -> Any:
        x, _ = jax.lax.scan(lambda c, row: (jnp.tanh(c + row), None), x[0], x)
        count = hk.get_state("count", (), init=jnp.zeros)
        hk.set_state("count", count + 1)
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), {"a": [x.astype("int8")]}

    def save(folder: pathlib.Path, fun: Any) -> None:
        model = hk.transform_with_state(fun) if fun is loop else hk.transform(fun)
        save_mox(folder / "file.json", make_mox(model)(jnp.ones((2, 4))))

    return [_written(lambda f, x=fun: save(f, x)) for fun in (linear, loop)]


def _names() -> list[Files]:
    names = {
        r"h\.(\d+)\.attn\.weight": r"gpt/layer_\1/attention/w",
        "b": None,
        "c": {"path": "gpt/c", "axes": [1, 0], "shape": [4, 2, 2]},
    }
    return [{"file.json": json.dumps(names).encode()}]


# --- reading -------------------------------------------------------------------------------------


def _load(path: str) -> Any:
    tree = hki.load(path)
    hki.load(path, numpy=True)
    with open(path, "rb") as file:
        container = file.read(9)[8:] == b"{"
    if container:
        with hki.open_checkpoint(path) as checkpoint:
            repr(checkpoint.structs)
    return tree


def _name(tensor: str) -> str:
    """Where any tensor goes."""
    return "m/" + tensor.replace("/", "_").replace("weight", "w")


def _dense_or_not(load: Callable[..., Any]) -> Callable[[str], Any]:
    """Reads quantized tensors as they are, and if that is not possible, dense values."""

    def read(path: str) -> Any:
        try:
            return load(path, _name)
        except ValueError as e:
            if "`dequantize` makes it dense" not in str(e):
                raise
            return load(path, _name, dequantize=lambda *_: True)

    return read


def _inspect(path: str) -> Any:
    """The command prints the error in one line, and exits with 1."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["inspect", path])
    if code:
        assert code == 1, f"exit code {code}"
        raise hki.CheckpointError(err.getvalue().strip())


LOADERS = {
    "load": Loader(_saved, "file", _load),
    "load_types": Loader(_types, "file", _load),
    "load_parts": Loader(_parted, "file", _load),
    "load_pickle": Loader(_pickles, "file.pickle", lambda path: hki.load(path, allow_pickle=True)),
    "load_records": Loader(_records, "file.bin", _load),
    "load_gguf": Loader(_gguf, "file.gguf", lambda path: hki.load_gguf(path, _name)),
    "load_hugging_face": Loader(_hugging_face, "", _dense_or_not(hki.load_hugging_face)),
    "load_peft": Loader(_peft, "", lambda path: hki.load_peft(path, _name)),
    "mox": Loader(_mox, "file.json", load_mox),
    "read_names": Loader(_names, "file.json", hki.read_names),
    "inspect": Loader(_saved, "file", _inspect),
}


# --- what was read -------------------------------------------------------------------------------

_SMALL = 1 << 16


def check(tree: Any, thorough: bool) -> None:
    """Raises if an array of a tree has not the shape or dtype that it states."""
    for x in jax.tree.leaves(tree, is_leaf=is_implicit):
        if not is_implicit(x) or known_struct(x) is None:  # an adapter without its base
            continue
        # Any half of what `partition` gives can be in a file, which then says so where it is used.
        with hki.materialization("allow"), contextlib.suppress(IncompleteError):
            dense = jax.eval_shape(hki.materialize, x)
            assert (dense.shape, dense.dtype) == (x.shape, x.dtype), (dense, x.shape, x.dtype)
            if thorough and np.prod(x.shape, dtype=float) < _SMALL:
                np.asarray(hki.materialize(x))


def write(files: Files, folder: str) -> None:
    """Puts a case into an empty folder."""
    for name, data in files.items():
        path = os.path.join(folder, name)
        if isinstance(data, bytes):
            with open(path, "wb") as file:
                file.write(data)
        elif data.kind == "link":
            os.symlink(name if data.target == "itself" else data.target, path)
        elif data.kind == "pipe":
            os.mkfifo(path)
        else:
            os.mkdir(path)
