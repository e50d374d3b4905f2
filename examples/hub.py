"""Loads models from folders in the layout of the Hugging Face hub: BERT, GPT-2, Llama, T5 and ViT.

A folder has a `config.json`, and its weights in `model.safetensors` or in the files that
`model.safetensors.index.json` lists. `hub_families.py` has the table of names of each model.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from errors import InputError
from hub_families import FAMILIES, Family, Settings

Params = dict[str, dict[str, jax.Array]]
INDEX = "model.safetensors.index.json"


class Loaded(NamedTuple):
    """The contents of a folder.

    Attributes:
        config: The sizes of the model, for example a `models.gpt2.Gpt2Config`.
        model: The model; `model.apply(params, ...)` takes no random key.
        params: Its parameters, float32.
    """

    config: Any
    model: hk.Transformed
    params: Params


class Tensor(NamedTuple):
    """A tensor of an open file, which is read on demand."""

    name: str
    path: pathlib.Path
    file: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


class Source(NamedTuple):
    """The source of a parameter: the tensor, and the tensor's axis for each axis of the parameter."""

    tensor: str
    axes: tuple[int, ...]


def fetch(repo: str) -> pathlib.Path:
    """Downloads a repository of the hub; returns the folder, for `load`.

    Args:
        repo: For example ``"openai-community/gpt2"``.

    Raises:
        InputError: If `huggingface_hub` is not installed, or the download fails.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise InputError(
            "downloading needs huggingface_hub: pip install 'haiku-implicit[hub]'"
        ) from error
    try:
        files = ["config.json", "model*.safetensors", INDEX, "tokenizer*"]
        return pathlib.Path(huggingface_hub.snapshot_download(repo, allow_patterns=files))
    except Exception as error:  # networks and the hub raise errors without a narrower common class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{repo}: could not be downloaded ({reason})") from error


def load(folder: str | os.PathLike) -> Loaded:
    """Reads a model and its weights.

    Args:
        folder: For example ``fetch("openai-community/gpt2")``.

    Raises:
        InputError: If a file is missing, damaged or holds something other than the models here.
            The message names the file, and the setting or tensor.
    """
    folder = pathlib.Path(folder)
    with contextlib.ExitStack() as stack:
        with named(folder / "config.json"):
            settings = Settings(read_json(folder / "config.json"))
            family = find_family(settings)
        tensors = open_tensors(folder, family.prefix, stack)
        with named(folder / "config.json"):
            config = read_config(family, settings, tensors)
        model = hk.without_apply_rng(hk.transform(lambda *args: family.model(config)(*args)))
        shapes = jax.eval_shape(model.init, jax.random.key(0), *family.inputs(config))
        sources = find_sources(family, shapes)
        check_tensors(family, shapes, sources, tensors, folder)
        params = {
            module: {name: read(tensors, sources[module, name]) for name in own}
            for module, own in shapes.items()
        }
    return Loaded(config, model, params)


def load_as(config: type, folder: str | os.PathLike) -> Loaded:
    """Reads a model that must have this config, as `load` does.

    Raises:
        InputError: If the folder holds another model, and as `load`.
    """
    loaded = load(folder)
    if not isinstance(loaded.config, config):
        found = type(loaded.config).__name__
        raise InputError(f"{folder}: expected {config.__name__}, got {found}")
    return loaded


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
    """Prefixes the message of an `InputError` with the path."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


# --- The files ------------------------------------------------------------------------------------


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"holds {type(found).__name__}, expected an object")
    return found


def open_tensors(
    folder: pathlib.Path, prefix: str, stack: contextlib.ExitStack
) -> dict[str, Tensor]:
    """Opens the tensors of all files by their short names; the stack closes the files."""
    tensors: dict[str, Tensor] = {}
    for path, listed in weight_files(folder).items():
        with named(path):
            file = stack.enter_context(open_safetensors(path))
            names = set(file.keys())
            for name in sorted(listed - names):
                raise InputError(f"tensor {name!r}, which {INDEX} lists, is missing")
            for name in sorted(names):
                short = short_name(name, prefix)
                if short in tensors:
                    other = tensors[short]
                    raise InputError(f"tensor {name!r} is {other.name!r} of {other.path.name}, too")
                tensors[short] = Tensor(name, path, file)
    return tensors


def short_name(name: str, prefix: str) -> str:
    """Returns the name in the tables: without the prefix, and with the new names of norms.

    >>> short_name("bert.embeddings.LayerNorm.gamma", "bert.")
    'embeddings.LayerNorm.weight'
    """
    head, _, last = name.removeprefix(prefix).rpartition(".")
    last = {"gamma": "weight", "beta": "bias"}.get(last, last)
    return f"{head}.{last}" if head else last


def weight_files(folder: pathlib.Path) -> dict[pathlib.Path, set[str]]:
    """Returns the files with weights, and the tensors that the index requires in each."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.exists():
        return {whole: set()}
    if not index.exists():
        pickled = "; pickled weights (.bin) are not read, save the model as safetensors"
        hint = pickled if any(folder.glob("*.bin")) else ""
        raise InputError(f"{folder}: neither {whole.name} nor {INDEX} is there{hint}")
    files: dict[pathlib.Path, set[str]] = {}
    with named(index):
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise InputError("'weight_map' is missing")
        for name, file in listed.items():
            if not isinstance(file, str) or pathlib.PurePath(file).name != file:
                raise InputError(f"'weight_map' names {file!r}, expected a file beside it")
            files.setdefault(folder / file, set()).add(name)
    return files


def open_safetensors(path: pathlib.Path) -> Any:
    """Opens the file, mapped into memory."""
    try:
        return safetensors.safe_open(path, framework="numpy")
    except OSError as error:
        raise InputError(error.strerror or "No such file or directory") from error
    except safetensors.SafetensorError as error:
        raise InputError(f"truncated or damaged safetensors file ({error})") from error


# --- The model ------------------------------------------------------------------------------------


def find_family(settings: Settings) -> Family:
    """Returns the kind of model; refuses classes and settings that are not computed here."""
    kind = settings["model_type"]
    if kind not in FAMILIES:
        raise InputError(f"'model_type' is {kind!r}, expected one of {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[kind]
    for architecture in settings.get("architectures") or ():
        if architecture not in family.architectures:
            expected = " or ".join(family.architectures)
            raise InputError(f"'architectures' has {architecture!r}, expected {expected}")
    settings.expect({"quantization_config": None, **family.expected})
    return family


def read_config(family: Family, settings: Settings, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the config of the model."""
    try:
        return family.config(settings, tensors.keys())
    except ValueError as error:
        raise InputError(str(error)) from error


def find_sources(
    family: Family, shapes: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str], Source]:
    """Returns the source of each parameter of the model, by the table of names."""
    sources = {}
    for theirs, ours, kind in family.rows:
        for i in itertools.count() if "{i}" in ours else (0,):
            module = ours.format(i=i)
            if module not in shapes:
                break
            for suffix, (name, axes) in kind.items():
                if name in shapes[module]:
                    sources[module, name] = Source(f"{theirs.format(i=i)}.{suffix}", axes)
    return sources


def check_tensors(
    family: Family,
    shapes: Mapping[str, Mapping[str, Any]],
    sources: Mapping[tuple[str, str], Source],
    tensors: Mapping[str, Tensor],
    folder: pathlib.Path,
) -> None:
    """Checks that every parameter has its tensor, of the right shape, and that there are no others."""
    for (module, name), (wanted, axes) in sources.items():
        if wanted not in tensors:
            raise InputError(f"{folder}: tensor {wanted!r} ({module}/{name}) is missing")
        tensor, shape = tensors[wanted], shapes[module][name].shape
        shape = tuple(shape[axes.index(i)] for i in range(len(axes)))
        if tensor.shape != shape:
            raise InputError(
                f"{tensor.path}: tensor {tensor.name!r} has shape {tensor.shape}, "
                f"expected {shape} by config.json"
            )
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise InputError(
                f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype}, "
                "expected F32, F16 or BF16"
            )
    for short in sorted(tensors.keys() - {source.tensor for source in sources.values()}):
        check_unused(family, short, tensors)


def check_unused(family: Family, short: str, tensors: Mapping[str, Tensor]) -> None:
    """Checks that an unread tensor is a buffer, or a copy of a tensor that is read."""
    tensor, original = tensors[short], tensors.get(family.copies.get(short, ""))
    if original is not None:
        if not np.array_equal(tensor.read(), original.read()):
            raise InputError(
                f"{tensor.path}: tensor {tensor.name!r} differs from {original.name!r}, "
                "with which config.json shares it (tie_word_embeddings)"
            )
    elif not re.fullmatch(family.unused, short):
        raise InputError(
            f"{tensor.path}: tensor {tensor.name!r} is not of the model in config.json"
        )


def read(tensors: Mapping[str, Tensor], source: Source) -> jax.Array:
    """Reads the parameter in float32, its axes in Haiku's order."""
    tensor = tensors[source.tensor]
    try:
        return jnp.asarray(tensor.read().transpose(source.axes), jnp.float32)
    # bfloat16 needs a newer version of safetensors than the other dtypes.
    except (TypeError, safetensors.SafetensorError) as error:
        raise InputError(f"{tensor.path}: tensor {tensor.name!r}: {error}") from error
