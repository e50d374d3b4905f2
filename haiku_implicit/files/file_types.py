"""Recognizes the kind of a file or folder by its beginning, for errors that name its reader."""

import itertools
import os
import stat
import zipfile
from typing import NamedTuple

from haiku_implicit.core.messages import see
from haiku_implicit.core.typing import Json
from haiku_implicit.files import records
from haiku_implicit.files.container import CheckpointError, File, is_container, parse_json
from haiku_implicit.files.unpacking import OPENERS


class Kind(NamedTuple):
    """A kind of file or folder.

    Attributes:
      name: its name, for programs.
      what: its description, for errors.
      way_out: the function that reads it, or other advice.
    """

    name: str
    what: str
    way_out: str


_HEAD = 256
_AGAIN = "If it was not copied completely, copy it again"
_OURS = Kind("saved", "a file that haiku_implicit.save wrote", "haiku_implicit.load reads it")
_SAFETENSORS = Kind(
    "safetensors",
    "a safetensors file",
    "haiku_implicit.load reads it as it is, haiku_implicit.load_hugging_face by the names of its "
    "tensors",
)
_NPZ = Kind("npz", "an .npz file of NumPy", "haiku_implicit.load reads it")
_MOX = Kind("mox", "a module expression", "haiku_implicit.mox.load reads it")
_UNPACK = "Unpack it first"
_RECORDS = Kind("records", "parameters of AlphaFold 3, in records", "haiku_implicit.load reads it")
_ZSTD = Kind(
    "zstd",
    "compressed by zstd",
    "haiku_implicit.load reads the parameters of AlphaFold 3. Unpack other files first",
)
_LZMA = Kind("lzma", "compressed by lzma", _UNPACK)
_PACKED = Kind(
    "packed",
    "compressed by zlib, gzip or bz2",
    "haiku_implicit.load(path, allow_pickle=True) reads a pickle in it, as joblib writes it. Unpack "
    "other files first",
)
_PIECE = Kind(
    "piece",
    "a piece of what zstd compressed",
    "Its first piece is not here: haiku_implicit.load reads the parameters of AlphaFold 3 if all are",
)
_JOINED = Kind(
    "joined",
    "an .npz file whose names are keys joined by ':', as GraphCast and GenCast write it",
    "graphcast.checkpoint.load(file, graphcast.CheckPoint).params (or gencast.CheckPoint) are its "
    "parameters, which haiku_implicit.save writes",
)

# Kinds that the first bytes identify.
_BEGINNINGS = {
    b"GGUF": Kind("gguf", "a GGUF file", "haiku_implicit.load_gguf reads it"),
    b"\x93NUMPY": Kind("npy", "an array of NumPy (.npy)", "numpy.load reads it"),
    b"\x89HDF": Kind("hdf5", "an HDF5 file, as Keras writes it", "Its own library reads it"),
    **{
        b"\x80" + bytes([protocol]): Kind(
            "pickle",
            "a pickle",
            "haiku_implicit.load(path, allow_pickle=True) reads one of NumPy arrays and containers, "
            "and nothing else",
        )
        for protocol in range(2, 6)
    },
    b"version https://git-lfs": Kind(
        "lfs", "a pointer of Git LFS in place of the file", "`git lfs pull` brings the file"
    ),
    b"\x28\xb5\x2f\xfd": _ZSTD,
    b"\x04\x22\x4d\x18": Kind("lz4", "compressed by lz4", _UNPACK),
    b"\xfd7zXZ": _LZMA,
}

_ORBAX = Kind(
    "orbax",
    "a checkpoint of Orbax",
    "haiku_implicit.load reads its dicts, lists and arrays. For a tree of other types, restore it with "
    "Orbax, and give it a target: a tree of the same types, such as jax.eval_shape gives",
)
_STEPS = Kind(
    "steps",
    "a folder of checkpoints of Orbax",
    "Give the folder of one of them, in which there is a file _METADATA",
)
_OF_ORBAX = ("_CHECKPOINT_METADATA", "manifest.ocdbt", "_METADATA")
_FOLDERS = {
    "adapter_config.json": Kind("peft", "a folder of PEFT", "haiku_implicit.load_peft reads it"),
    **dict.fromkeys(
        ("model.safetensors", "model.safetensors.index.json"),
        Kind(
            "hub",
            "a folder in the layout of the Hugging Face hub",
            "haiku_implicit.load_hugging_face reads it",
        ),
    ),
    **dict.fromkeys(_OF_ORBAX, _ORBAX),
}


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """Recognizes the kind of a file or folder. Does not read from pipes and devices.

    Raises:
      OSError: if it does not exist, or can't be read.
    """
    path = os.fspath(path)
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        return _kind_of_folder(path)
    if not stat.S_ISREG(status.st_mode):
        return Kind("stream", "a pipe or a device", "Write what comes from it into a file first")
    if not status.st_size:
        return Kind("empty", "an empty file", _AGAIN)
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    for beginning, kind in _BEGINNINGS.items():
        if head.startswith(beginning):
            return kind
    if head.startswith(b"PK"):
        return _kind_of_zip(path)
    text = _kind_of_text(head) if len(head) > 8 else None
    return text or _kind_of_bytes(path, head, status.st_size)


def _kind_of_folder(path: str) -> Kind:
    names = sorted(os.listdir(path))
    found = next((kind for name, kind in _FOLDERS.items() if name in names), None)
    within = next((name for name in names if name.endswith((".gguf", ".safetensors"))), None)
    if not found and not within and _has_steps_of_orbax(path, names):
        return _STEPS
    if not found and records.file_in(path):
        return _RECORDS
    helps = f"Give a file in it, such as {within}" if within else "Give a file"
    return found or Kind("folder", "a folder", helps)


def _has_steps_of_orbax(path: str, names: list[str]) -> bool:
    """Whether Orbax's `CheckpointManager` wrote a folder, with one checkpoint per step."""
    steps = itertools.islice((name for name in names if name[-1:].isdecimal()), 20)
    return any(
        os.path.exists(os.path.join(path, step, name)) for step in steps for name in _OF_ORBAX
    )


def _kind_of_zip(path: str) -> Kind:
    try:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
    except Exception:  # zipfile raises many types of errors for bytes that are not an archive
        return Kind("zip", "an .npz or .zip file that is not whole", _AGAIN)
    if any(name.endswith("data.pkl") for name in names):
        return Kind("torch", "a file that torch.save wrote", "Save its tensors as safetensors")
    if not all(name.endswith(".npy") for name in names):
        return Kind("zip", "a zip archive", _UNPACK)
    last = (name.removesuffix(".npy").rpartition(":") for name in names)
    # Names with a number after the colon are TensorFlow's: `dense/kernel:0`.
    return _JOINED if any(colon and not key.isdecimal() for _, colon, key in last) else _NPZ


def _kind_of_text(head: bytes) -> Kind | None:
    try:
        text = head.decode("utf-8").lstrip()
    except UnicodeDecodeError as e:
        if len(head) < _HEAD or e.start < len(head) - 4:  # else the head ends within a character
            return None
        text = head[: e.start].decode("utf-8").lstrip()
    if any(ord(c) < 32 and c not in "\t\n\r\f\x1b" for c in text):
        return None
    if text.startswith('{"format":"haiku_implicit.mox"'):
        return _MOX
    if text.lower().startswith(("<!doctype", "<html")):
        return Kind("html", "a web page in place of the file", "Download the file itself")
    if text.startswith(("{", "[")):
        return Kind("json", "a text file, as JSON is", "Give the file with the arrays")
    return Kind("text", "a text file", "Give the file with the arrays")


def _kind_of_bytes(path: str, head: bytes, size: int) -> Kind:
    if is_container(path):
        ours = b'{"__metadata__":{"haiku_implicit' in head
        return _OURS if ours else _SAFETENSORS
    if records.is_record(path):
        return _RECORDS
    if head.startswith(tuple(OPENERS)):
        return _PACKED
    if head.startswith(b"]\x00\x00"):
        return _LZMA
    if ".zst." in os.path.basename(path):
        return _PIECE
    return Kind("unknown", f"{size:,} bytes that begin with {head[:8]!r}", _AGAIN)


def not_a(expected: str, path: str | os.PathLike[str]) -> Exception:
    """The error for a file or folder of another kind than expected.

    Args:
      expected: the expected kind, as in 'a GGUF file'.
      path: the path of an existing file or folder.

    Returns:
      An `IsADirectoryError` for a folder, a `CheckpointError` otherwise.
    """
    path, kind = os.fspath(path), kind_of(path)
    link = see("another-kind-of-file")
    text = f"{path}: not {expected}, but {kind.what}. {kind.way_out} {link}"
    return IsADirectoryError(text) if os.path.isdir(path) else CheckpointError(text)


def check_file(path: str | os.PathLike[str], expected: str) -> None:
    """Raises unless a path names a file that is not empty.

    Args:
      path: the path.
      expected: the expected kind of file, as in 'a GGUF file'.

    Raises:
      CheckpointError: if it is empty, a pipe or a device.
      OSError: if it does not exist, or is a folder.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        raise not_a(expected, path)


def open_container(path: str) -> File:
    """Opens a safetensors file.

    Raises:
      CheckpointError: if it is of another kind, or damaged.
      OSError: if it can't be read.
    """
    check_file(path, "a safetensors file")
    if not is_container(path):
        raise not_a("a safetensors file", path)
    return File(path)


def read_json(path: str | os.PathLike[str], hint: str = "the file is damaged") -> Json:
    """Reads a JSON file.

    Args:
      path: the file.
      hint: the end of error messages.

    Raises:
      CheckpointError: if it is not JSON, repeats a key, is empty, or is a pipe or a device.
      OSError: if it can't be read.
    """
    path = os.fspath(path)
    check_file(path, "a JSON file")
    with open(path, "rb") as file:
        return parse_json(path, file.read(), hint)
