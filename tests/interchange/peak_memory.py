"""Prints what reading a checkpoint takes in memory: `python peak_memory.py KIND FOLDER`.

It writes a checkpoint of equal weights, reads it in a process that has done so with a small one before,
and prints as JSON the bytes of the parameters, of one weight in float32, and the most memory of the
process (anonymous: without the pages of mapped files) above what it had before.
"""

import json
import pathlib
import sys
import threading

import gguf
import jax
import numpy as np

import haiku_implicit as hki

COUNT, N = 24, 1024
NAMES = hki.names_by_pattern({r"(\d+)\.weight": r"model/layer_\1/w"})


def anonymous():
    """The bytes of the process that are not pages of files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def write_gguf(path, count, kind):
    writer = gguf.GGUFWriter(path, arch="test")
    w = gguf.quantize(np.ones((N, N), np.float32), kind)
    for i in range(count):
        writer.add_tensor(f"{i}.weight", w, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(path, count, tensors, config):
    path.mkdir()
    hki.save(
        path / "model.safetensors",
        {f"{i}.{k}": x for i in range(count) for k, x in tensors.items()},
    )
    (path / "config.json").write_text(json.dumps(config))
    return path


def gptq():
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"}
    tensors = {
        "qweight": np.zeros((N // 8, N), np.int32),
        "qzeros": np.full((N // 128, N // 8), 3, np.int32),
        "scales": np.ones((N // 128, N), np.float16),
    }
    return tensors, {"quantization_config": config}


def nf4():
    state = {"blocksize": 64, "shape": [N, N], "dtype": "float32"}
    tensors = {
        "weight": np.zeros((N * N // 2, 1), np.uint8),
        "weight.absmax": np.ones(N * N // 64, np.float32),
        "weight.quant_map": np.asarray(hki.quantization.formats.NF4_TABLE, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return tensors, {"quantization_config": {"quant_method": "bitsandbytes"}}


def dense():
    return {"weight": np.ones((N, N), np.float32)}, {}


# Dense, bitsandbytes' and GPTQ's in safetensors, and a type of GGUF.
FOLDERS = {"F32": dense, "nf4": nf4, "gptq": gptq}
KINDS = (*FOLDERS, "Q4_1")


def main():
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    load = hki.load_hugging_face if kind in FOLDERS else hki.load_gguf
    for count in (2, COUNT):
        path = folder / f"{count}"
        if kind in FOLDERS:
            write_folder(path, count, *FOLDERS[kind]())
        else:
            write_gguf(path, count, gguf.GGMLQuantizationType[kind])
        if count != COUNT:
            load(path, NAMES)  # what JAX compiles stays
    before = anonymous()
    most, done = [before], threading.Event()

    def watch():
        while not done.wait(0.0005):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = load(path, NAMES)
    done.set()
    watcher.join()
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    json.dump({"held": held, "one": N * N * 4, "peak": most[0] - before}, sys.stdout)


if __name__ == "__main__":
    main()
