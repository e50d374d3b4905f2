"""`save` and `load`: module expressions in files."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import haiku as hk
import jax

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import JsonObject, Tree
from haiku_implicit.files.container import CheckpointError, one_line, parse_json
from haiku_implicit.files.file_types import check_file, kind_of, not_a
from haiku_implicit.files.replacing import write_text
from haiku_implicit.mox.format.reading import Misplaced, Reader, at
from haiku_implicit.mox.format.values import of_type
from haiku_implicit.mox.format.writing import Writer
from haiku_implicit.mox.mox import Mox
from haiku_implicit.mox.program.program import Init, Program, checked

FORMAT, VERSION = "haiku_implicit.mox", 1


def save(path: str | os.PathLike[str], mox: Mox) -> None:
    """Writes a module expression to a file, as JSON.

    The file has the whole program with its tree of modules, the rules of functions with custom
    derivatives, and the model's `init` if it can be written. It does not have the parameters, which are
    arguments. Another version of JAX can read the file if its primitives have the same parameters; if
    not, `load` raises an error that names both versions.

    Args:
      path: the file. An existing file stays unchanged until the new one is complete.
      mox: the module expression.

    Raises:
      ValueError: if the expression has something that a file can't have: callbacks, Pallas kernels,
        `shard_map`, foreign functions, functions with a custom rule for `vmap`, implicit arrays that
        the model makes itself, arrays on meshes. The error names the equation and its module.
        Also if an argument or a result is a container other than a dict, a list, a tuple, a named tuple
        or None; if an argument that became a part of the expression is not a plain value; or if a text
        has half of a surrogate pair, which is not valid Unicode.

    Example:
      >>> import tempfile, haiku as hk, jax, jax.numpy as jnp
      >>> from haiku_implicit.mox import eval_mox, load, make_mox, save
      >>> model = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
      >>> x = jnp.ones((2, 4))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(f"{folder}/mlp.json", make_mox(model)(x))
      ...     mox = load(f"{folder}/mlp.json")
      >>> params = model.init(jax.random.key(0), x)
      >>> bool((eval_mox(mox, params, None, x) == model.apply(params, None, x)).all())
      True
      >>> mox.query('//module_call[@type="Linear"]/@path')
      ['mlp/~/linear_0', 'mlp/~/linear_1']
    """
    checked("save(path, mox)", mox)
    text = json.dumps(_to_json(mox), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    if lone := _WITH_SURROGATE.search(text):
        raise value_error(f"save: {lone[0]!a} has half of a surrogate pair, which no file can have")
    try:
        _from_text(text, {})  # proves that the file can be read
    except (Misplaced, CheckpointError) as e:
        raise value_error(f"save: the expression can't be read back: {e}") from e
    write_text(path, text)


_WITH_SURROGATE = re.compile(r'"[^"]*[\ud800-\udfff][^"]*"')


def load(path: str | os.PathLike[str], *, types: Iterable[type] = ()) -> Mox:
    """Reads a module expression that `save` wrote.

    The expression evaluates to the same bits as the original, has the same derivatives, and gives the
    same nodes for a query. Nothing in a file is run or imported. A module's class is an empty class of
    the same name. A constructor argument that is not a plain value (an initializer) can only be shown.
    A named tuple is a new class with the same name and fields.

    Args:
      path: the file.
      types: classes to use for the same names in the file: named tuples of arguments and results, and
        classes of modules, which `select` then finds. `hk.LSTMState` is known.

    Raises:
      ValueError: if the file is not a valid module expression; the error names the place in the file.
      OSError: if the file can't be read.
    """
    types = [types] if isinstance(types, type) else list(types)
    known = {cls.__name__: cls for cls in (hk.LSTMState, *types)}
    path = os.fspath(path)
    check_file(path, "a module expression")
    if kind_of(path).name not in ("mox", "json", "text"):
        raise not_a("a module expression", path)
    data = pathlib.Path(path).read_bytes()
    try:
        return _from_text(data.decode("utf-8"), known)
    except (Misplaced, CheckpointError, UnicodeDecodeError) as e:
        raise value_error(one_line(f"{path} is not a valid module expression: {e}")) from e


# --- writing --------------------------------------------------------------------------------------


def _to_json(mox: Mox) -> JsonObject:
    writer = Writer()
    model = writer.program(mox)
    writing = Writer()
    try:
        init = writing.program(_init_program(mox)) | writing.tables()
    except Exception as e:  # `init` may run anything, also code that the model does not
        init = {"missing": f"{type(e).__name__}: {e}"}
    return {
        "format": FORMAT,
        "version": VERSION,
        "jax": jax.__version__,
        "implicit": mox.implicit,
        "model": {**writer.tables(), **model},
        "init": init,
    }


def _init_program(mox: Mox) -> Program:
    """The program of the model's `init`, for arguments of the same shapes."""
    init = mox.init
    if init is None:
        raise value_error("the expression had none")
    if not (isinstance(init, Init) and init.is_for(mox.interface)):
        init = Init(init, mox.interface)
    return init.program


# --- reading --------------------------------------------------------------------------------------


def _from_text(text: str, types: Mapping[str, type]) -> Mox:
    read = parse_json("the file", text, parse_constant=_no_constant)
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise Misplaced("format", f"expected {FORMAT!r}")
    if type(read.get("version")) is not int or read["version"] != VERSION:
        raise Misplaced("version", f"it has version {read.get('version')!r}, expected {VERSION}")
    if type(read.get("implicit")) is not bool:
        raise Misplaced("implicit", "it has to be a boolean")
    try:
        with at("model"):
            model = _program(read.get("model"), types)
        with at("init"):
            init = _initializer(read.get("init"), types)
    except Misplaced as e:
        if read.get("jax") == jax.__version__:
            raise
        versions = f"The file is from JAX {read.get('jax')!r}, and this is {jax.__version__}"
        raise Misplaced(e.place, f"{e.reason}. {versions}") from e
    return Mox(model.body, model.interface, init, read["implicit"])


def _program(x: Any, types: Mapping[str, type]) -> Program:
    return Reader(of_type(x, dict, "a program"), types).program(x)


def _initializer(x: Any, types: Mapping[str, type]) -> Callable[..., Any]:
    missing = type(x) is dict and "missing" in x
    why = of_type(x["missing"], str, "missing") if missing else None
    program = None if missing else _program(x, types)

    def init(rng: jax.Array, *args: Any, **kwargs: Any) -> Tree:
        if program is None:
            raise value_error(
                "init: the file of this expression has none, as that of the model could not be saved "
                f"({why}). Parameters have to come from elsewhere"
            )
        return program.apply(rng, *args, **kwargs)

    return init


def _no_constant(name: str) -> Any:
    raise value_error(f"{name} is not JSON")
