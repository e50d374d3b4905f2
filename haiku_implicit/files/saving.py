"""`save`: writes trees to safetensors files, atomically."""

from __future__ import annotations

import os

import jax

from haiku_implicit.core.typing import Tree
from haiku_implicit.files import several_processes
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.structure import check_readable, describe

Path = str | os.PathLike[str]


def save(path: Path, tree: Tree, *, max_shard_bytes: int = 2_000_000_000) -> None:
    """Writes a tree to a safetensors file, from which `load` reads the same tree.

    Other programs find an array of a Haiku model under `module/name`, and the arrays in an implicit
    array under `module/name.field`. Types, static metadata, containers and Python values are in the
    file's metadata, with checksums of everything.

    An existing file is kept until the new one is complete and on disk, even if the program is killed.
    If two programs save to the same path, the file of one of them remains.

    If arrays are on the devices of several processes, each process writes its parts to its own files
    next to `path`, in a folder that all of them see. All processes of the program then have to call
    this with the same tree, and it returns, or fails, in all of them. The first process writes the
    values that each process holds completely, such as numbers and NumPy arrays.

    Args:
      path: the file, in an existing folder.
      tree: JAX or NumPy arrays, random keys, implicit arrays, numbers, texts, bytes, dtypes and None,
        in dicts, lists, tuples, Haiku's immutable dicts, states of optax, and types that
        `register_tree_type` knows: parameters, their halves by `partition`, gradients, Haiku's state,
        optimizer states. NumPy arrays are read back as JAX arrays.
      max_shard_bytes: the most bytes of tensors in a file (a larger tensor has its own). The rest goes
        into further files next to `path`: copy them with it, under their names. The arrays in one
        implicit array may be in several files.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError` that names the key, for a value that a file cannot
        hold or give back; and in processes that could write, if another one could not.
      ValueError: for a `max_shard_bytes` that is not a positive integer, and for a `path` that ends in
        `.gguf`, whose files `save_gguf` writes.
      OSError: if the file can't be written. An existing file is kept.

    Example:
      >>> import os, tempfile, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = hki.quantize_params({'linear': {'w': jnp.ones((8, 4))}}, dtype='int4')
      >>> params = hki.add_lora(params, jax.random.key(0), rank=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'params.safetensors')
      ...   hki.save(path, params)
      ...   same = hki.load(path)
      >>> same['linear']['w']
      LoRA(float32[8,4], w=QuantizedMatrix(...), a=float32[8,2], b=float32[2,4], factor=float32[])
    """
    if type(max_shard_bytes) is not int or max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes: expected a positive integer, got {max_shard_bytes!r}")
    if os.fspath(path).lower().endswith(".gguf"):
        raise ValueError(
            f"{os.fspath(path)}: expected the name of a safetensors file, which is what save writes, "
            "got that of a GGUF file. haiku_implicit.save_gguf writes these; or name it .safetensors"
        )
    structure, arrays = describe(tree)
    for name, x in arrays.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(f"{name}: a ShapeDtypeStruct, which has no values. Give arrays")
    check_readable(structure)
    several_processes.save(path, structure, arrays, max_shard_bytes)
