"""Opens, checks and reads checkpoints in their files, part by part, and onto devices.

Each process reads the boxes of arrays that its devices hold.
"""

import functools
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from haiku_implicit.core import progress
from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.predicates import Targets, check_list, no_match, path_of, predicate_of
from haiku_implicit.core.typing import Array, Tree
from haiku_implicit.files import container, dtypes
from haiku_implicit.files import structure as structures
from haiku_implicit.files.checksums import checksum_beside
from haiku_implicit.files.container import CheckpointError, File
from haiku_implicit.files.file_types import open_container
from haiku_implicit.files.matching import check_like
from haiku_implicit.files.parts import Box, Part, assembled, box_of
from haiku_implicit.files.shards import names_of, shards_of
from haiku_implicit.files.structure import Branch, Leaf, Structure


class Checkpoint(Mapping[Any, Any]):
    """A tree in a file, or a part of it, that is read when it is needed.

    `open_checkpoint` makes it. It maps the keys of a dict, the names of an object's fields, or the
    numbers of a list to their values: another `Checkpoint` for a container or an object; for arrays,
    implicit arrays and Python values, the value itself, read from the file and checked.
    """

    def __init__(self, structure: Structure, path: str, source: "Source"):
        self._structure, self._path, self._source = structure, path, source

    @property
    def structs(self) -> Tree:
        """The tree with `jax.ShapeDtypeStruct` instead of arrays; this does not read any array."""
        return structures.build(
            self._structure, structures.struct_of, self._source.path, self._path
        )

    def read(self, only: Targets | None = None, like: Tree = None, shardings: Tree = None) -> Tree:
        """Reads the tree.

        Args:
          only: the parameters to read: a regular expression over `module/name`, a list of names or
            expressions, or a predicate `(module_name, name, value) -> bool`, which sees arrays without
            their values. The result has only these. The tree has to be nested dicts.
          like: a tree to compare with: see `haiku_implicit.load`.
          shardings: the shardings of the arrays: see `haiku_implicit.load`.

        Raises:
          haiku_implicit.CheckpointError: if the file is damaged, or not like `like`; it names the key.
          ValueError: if `only` matches nothing, or the tree is not made of dicts; for `shardings` of
            another tree.
        """
        chosen = self._structure
        if only is not None:
            chosen = _selected(chosen, only, self._source.path)
        if like is not None:
            check_like(chosen, like, self._source.path)
        source, count = self._source, sum(1 for _ in structures.leaves_of(chosen))
        places = {}
        if shardings is not None:
            places = _by_name(chosen, shardings, source.path, self._path)
        with progress.bar("reading", count) as run:
            read = lambda leaf: run(leaf.name, source.read, leaf, places.get(leaf.name))  # noqa: E731
            return structures.build(chosen, read, source.path, self._path)

    def close(self) -> None:
        """Closes the files. Arrays that were read stay valid; NumPy arrays keep their file open."""
        self._source.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _children(self) -> dict[Any, Structure]:
        branch = self._structure
        if isinstance(branch, Leaf) or _is_value(branch):
            return {}
        return dict(zip(branch.keys, branch.children, strict=True))

    def __getitem__(self, key: Any) -> Tree:
        children = self._children()
        if key not in children:
            shown = ", ".join(map(repr, list(children)[:20]))
            raise KeyError(
                f"{self._path or 'the tree'}: has no {key!r}; it has {shown or 'no keys'} "
                f"{see('files')}"
            )
        child, path = children[key], structures.joined(self._path, key)
        if _is_value(child):
            return structures.build(child, self._source.read, self._source.path, path)
        return Checkpoint(child, path, self._source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._children())

    def __len__(self) -> int:
        return len(self._children())

    def __repr__(self) -> str:
        kind = "array" if isinstance(self._structure, Leaf) else self._structure.kind
        keys = ", ".join(map(repr, list(self)[:20])) + (", ..." if len(self) > 20 else "")
        return f"Checkpoint({kind}: {keys})"


def _is_value(structure: Structure) -> bool:
    """Whether a structure is an array, an implicit array or a Python value, not a container."""
    if isinstance(structure, Leaf) or structure.kind in ("none", "value"):
        return True
    return structures.is_implicit_kind(structure.kind)


def _selected(structure: Structure, only: Targets, file: str) -> Structure:
    """Returns a structure of dicts with only the chosen parameters."""
    predicate = predicate_of("only", only)
    paths: list[str] = []

    def chosen(module: tuple[Any, ...], key: Any, child: Structure) -> Structure | None:
        if isinstance(child, Branch) and child.kind in structures.MAPPINGS:
            return below((*module, key), child)
        names = "/".join(map(str, module)), str(key)
        paths.append(path_of(*names))
        value = structures.build(child, structures.struct_of, file, paths[-1])
        return child if predicate(*names, value) else None

    def below(module: tuple[Any, ...], branch: Branch) -> Branch | None:
        pairs = zip(branch.keys, branch.children, strict=True)
        kept = {key: y for key, x in pairs if (y := chosen(module, key, x)) is not None}
        return branch._replace(keys=tuple(kept), children=tuple(kept.values())) if kept else None

    if isinstance(structure, Leaf) or structure.kind not in structures.MAPPINGS:
        kind = "array" if isinstance(structure, Leaf) else structure.kind
        raise value_error(
            f"only: chooses from nested dicts, and here is a {kind}. Open the file with "
            "haiku_implicit.open_checkpoint, and read the part of it that is such a dict"
        )
    kept = below((), structure)
    check_list("only", only, paths)
    if kept is None:
        raise no_match("only", only, paths)
    return kept


# --- reading -------------------------------------------------------------------------------------


class Readable(Protocol):
    """Arrays that are read by their names in a structure: a `File`, or a file of another program."""

    @property
    def path(self) -> str:
        """The file or folder, for errors."""
        ...

    def bytes_of(self, name: str) -> np.ndarray:
        """Reads the bytes of an array, `[bytes]` uint8."""
        ...

    def close(self) -> None:
        """Closes the file; arrays that were read stay valid."""
        ...


class Source:
    """The files of one checkpoint.

    Args:
      path: the main file.
      files: all files, by their indices in the structure.
      numpy: whether arrays are returned as views of the files.
    """

    def __init__(self, path: str, files: "Sequence[Readable]", numpy: bool):
        self.path, self.files, self.numpy = path, files, numpy

    def read(self, leaf: Leaf, sharding: Sharding | None = None) -> Array:
        """Reads an array and checks its bytes; puts it on the devices of a sharding, if given."""
        if not self.files:
            raise value_error(f"{self.path}: {leaf.name}: the checkpoint has been closed")
        if sharding is not None:
            return _placed(leaf, sharding, lambda: self.read(leaf), self._boxes(leaf))
        if len(leaf.tensors) == 1:
            return self._array(leaf, leaf.tensors[0], leaf.weak_type, self.numpy)
        whole = self._boxes(leaf)(tuple((0, n) for n in leaf.shape))
        if self.numpy:
            return whole
        data = dtypes.bytes_of(whole)
        return dtypes.array_of(data, leaf.dtype, leaf.shape, leaf.weak_type, as_numpy=False)

    def _boxes(self, leaf: Leaf) -> Callable[[Box], np.ndarray]:
        """A function that reads boxes of an array, and checks each of its tensors once."""
        part = functools.cache(lambda part: self._array(leaf, part, False, as_numpy=True))
        return lambda box: assembled(leaf.tensors, box, part)

    def _array(self, leaf: Leaf, part: Part, weak_type: bool, as_numpy: bool) -> Array:
        """Reads and checks one tensor of an array."""
        file = self.files[part.file]
        data = file.bytes_of(part.name)
        written = part.checksum
        checksum = None if written is None else checksum_beside(data, written.kind)
        array, error = None, None
        try:
            array = dtypes.array_of(data, leaf.dtype, part.shape, weak_type, as_numpy)
        except ValueError as e:
            error = e
        if checksum is not None and (found := checksum()) != written:
            raise CheckpointError(
                f"{file.path}: {part.name}: its bytes have the checksum {found}, and had "
                f"{written} when they were written; the file is damaged {see('a-damaged-file')}"
            )
        if error is not None:
            raise CheckpointError(f"{file.path}: {part.name}: {error}")
        return array

    def close(self) -> None:
        """Closes the files, and forgets them."""
        for file in self.files:
            file.close()
        self.files = []


def _by_name(structure: Structure, shardings: Tree, file: str, path: str) -> dict[str, Any]:
    """The sharding of each array, by its name in the structure.

    Args:
      structure: the structure of the tree that is read.
      shardings: one for all arrays, or a tree of them with this structure or a prefix of it; None in
        it stands for the default device.
      file: the structure's file, for errors.
      path: the structure's path in the whole tree, for errors.

    Raises:
      ValueError: for a tree of another structure.
      TypeError: for a leaf that is neither a sharding nor None.
    """
    names: dict[int, str] = {}
    found: dict[str, Any] = {}

    def struct(leaf: Leaf) -> Any:
        made = structures.struct_of(leaf)
        names[id(made)] = leaf.name
        return made

    def put(sharding: Sharding | None, below: Any) -> None:
        if not _is_place(sharding):
            raise type_error(
                f"shardings: expected a jax.sharding.Sharding or None, got {sharding!r:.80}"
            )
        for x in jax.tree.leaves(below):
            if sharding is not None and id(x) in names:
                found[names[id(x)]] = sharding

    tree = structures.build(structure, struct, file, path)
    try:
        jax.tree.map(put, shardings, tree, is_leaf=_is_place)
    except ValueError as e:
        raise value_error(
            "shardings: expected one sharding, or a tree of them that is like the tree in the file or "
            f"a prefix of it: {' '.join(str(e).split()):.500}"
        ) from e
    return found


def _is_place(x: Any) -> bool:
    return x is None or isinstance(x, jax.sharding.Sharding)


def _placed(
    leaf: Leaf, sharding: Any, whole: Callable[[], Any], read: Callable[[Box], np.ndarray]
) -> Array:
    """Reads an array onto the devices of a sharding.

    Args:
      leaf: the array in the file.
      sharding: the sharding of the result.
      whole: reads all of the array.
      read: reads a box of the array.
    """
    struct = dtypes.struct_of(leaf.dtype, leaf.shape)
    small = leaf.weak_type or dtypes.is_key(struct)
    if small or jax.dtypes.canonicalize_dtype(struct.dtype) != struct.dtype:
        x = whole()
        if isinstance(x, np.ndarray):  # of 64 bits, which JAX would not keep
            return x
        # Unlike `jax.device_put`, this writes only to this process's devices.
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    # Copied, since JAX may use a NumPy array without a copy, and this one is a view of a file.
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: np.array(read(box_of(index or (), leaf.shape)))
    )


# --- opening -------------------------------------------------------------------------------------


def opened(path: str) -> tuple[list[File], Structure]:
    """Opens the files of a checkpoint, and checks that they fit its structure."""
    while True:
        main = open_container(path)
        if container.PART in main.metadata:
            raise CheckpointError(
                f"{path}: a part of the checkpoint {main.metadata[container.PART]}; load that file "
                "instead"
            )
        if container.ENTRY not in main.metadata and container.CHECKSUM not in main.metadata:
            _check_alone(path)
            return [main], plain_structure(main)
        names, structure = _parsed(path, main.metadata)
        try:
            files = [main, *(File(_beside(path, name)) for name in names)]
        except FileNotFoundError as e:
            # Another program may have saved since, and removed the old file's shards. Each repetition
            # takes one more such save, so that the loop ends when they do.
            status = os.stat(path)
            if (status.st_dev, status.st_ino) != main.identity:
                continue
            raise _missing(path, str(e.filename), names, structure) from None
        _check_tables(files, structure)
        return files, structure


def _check_alone(path: str) -> None:
    """Raises if a file is one of several files of a model that another program wrote."""
    files = shards_of(pathlib.Path(path)).files
    if len(files) > 1:
        others = names_of(file for file in files if file != pathlib.Path(path))
        raise CheckpointError(
            f"{path}: one of {len(files)} files of a model; the others are {others}. "
            "haiku_implicit.load_hugging_face reads all of them; a copy elsewhere, under another name, "
            "is read alone"
        )


def _beside(path: str, name: str) -> str:
    """The path of a further file: next to the main file, or next to the target of its link."""
    found = os.path.join(os.path.dirname(path), name)
    real = os.path.join(os.path.dirname(os.path.realpath(path)), name)
    return found if os.path.exists(found) else real


def _missing(path: str, shard: str, names: list[str], structure: Structure) -> CheckpointError:
    index = names.index(os.path.basename(shard)) + 1
    leaves = structures.leaves_of(structure)
    keys = [part.name for leaf in leaves for part in leaf.tensors if part.file == index]
    return CheckpointError(
        f"{path}: the file {os.path.basename(shard)} is missing, which has {', '.join(keys[:1])} and "
        f"{len(keys[1:])} more. Copy all files of the checkpoint into one folder, under their names"
    )


def _parsed(path: str, metadata: Mapping[str, str]) -> tuple[list[str], Structure]:
    """Parses the names of further files and the structure from the metadata of the main file."""
    where = f"{path}: {container.METADATA}"
    text, crc = metadata.get(container.ENTRY), metadata.get(container.CHECKSUM)
    if text is None or crc is None:
        gone = container.ENTRY if text is None else container.CHECKSUM
        raise CheckpointError(f"{where}: has no {gone!r}; the file is damaged")
    if f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}" != crc:
        raise CheckpointError(
            f"{where}: {container.ENTRY!r} does not have the checksum {crc!r:.80}; the file is damaged"
        )
    data = container.parse_json(f"{where}: {container.ENTRY}", text)
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int or version not in container.VERSIONS:
        raise CheckpointError(
            f"{where}: version {version!r:.80} of the format; this haiku_implicit reads versions "
            f"up to {container.VERSIONS[-1]}. Update it, or save the tree with this one"
        )
    names = data.get("files")
    plain = isinstance(names, list) and all(
        isinstance(name, str) and os.path.basename(name) == name and name.strip(".")
        for name in names
    )
    if not plain:
        raise CheckpointError(f"{where}: files: expected names, found {names!r:.80}")
    try:
        return names, structures.from_json(data.get("tree", False))
    except RecursionError:
        raise CheckpointError(f"{where}: the tree is nested too deeply") from None
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from None


def _check_tables(files: list[File], structure: Structure) -> None:
    """Raises unless the files have exactly the tensors of the structure, each once."""
    main = files[0].path
    expected: dict[str, tuple[int, tuple[str, tuple[int, ...]]]] = {}
    for leaf in structures.leaves_of(structure):
        for name, file, _, shape, _ in leaf.tensors:
            if name in expected:
                raise CheckpointError(f"{main}: {name}: is in the tree twice; the file is damaged")
            if not 0 <= file < len(files):
                raise CheckpointError(f"{main}: {name}: is in a file number {file}; there is none")
            expected[name] = file, dtypes.stored_of(leaf.dtype, shape)
    for index, found in enumerate(files):
        for name in found.tensors:
            if name not in expected or expected[name][0] != index:
                raise CheckpointError(
                    f"{found.path}: {name}: is in the file, but not in the tree that was saved"
                )
    for name, (index, wanted) in expected.items():
        path, tensor = files[index].path, files[index].tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{path}: {name}: is in the tree that was saved, but not in the file"
            )
        if tensor[:2] != wanted:
            raise CheckpointError(
                f"{path}: {name}: expected {wanted[0]}{list(wanted[1])}, the header says "
                f"{tensor[0]}{list(tensor[1])}; the file is damaged"
            )


def plain_structure(file: File) -> Structure:
    """The structure of another program's file: `{module: {name: array}}`, split at the last `/`."""
    modules: dict[str, dict[str, Leaf]] = {}
    for name, tensor in file.tensors.items():
        if tensor.dtype not in dtypes.FOREIGN:
            raise CheckpointError(f"{file.path}: {name}: there is no dtype {tensor.dtype} here")
        module, _, own = name.rpartition("/")
        dtype = dtypes.FOREIGN[tensor.dtype]
        modules.setdefault(module, {})[own] = Leaf(name, dtype, tensor.shape)
    branches = [Branch("dict", tuple(x), tuple(x.values())) for x in modules.values()]
    return Branch("dict", tuple(modules), tuple(branches))
