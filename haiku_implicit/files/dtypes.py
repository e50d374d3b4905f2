"""Converts arrays of each dtype to the bytes that safetensors stores, and back.

Dtypes that safetensors lacks are stored as others: numbers of 8 bits or fewer as one byte each, complex
numbers as pairs, random keys as their integers, and gradients of integers (JAX's float0), which have
zero bits, as tensors without bytes.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.typing import Array, DType

# The names that safetensors gives to dtypes. Every version of it has them all.
_NATIVE = {
    **dict(bool="BOOL", bfloat16="BF16", float8_e4m3fn="F8_E4M3", float8_e5m2="F8_E5M2"),
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
_PAIRS = dict(complex64="F32", complex128="F64")
_BYTES = (
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_NONE = "float0"
_KEYS = "key:"
_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")

STORED = {**_NATIVE, **_PAIRS, **dict.fromkeys([*_BYTES, _NONE], "U8")}
_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or getattr(np, f"{name}_", None) or name)
    for name in STORED
    if name != _NONE
} | {_NONE: jax.dtypes.float0}

# The dtypes of numbers.
NUMBERS = frozenset(STORED) - {_NONE}

# The dtypes in other programs' files, with our names for them.
FOREIGN = {stored: name for name, stored in _NATIVE.items()} | dict(
    C64="complex64",
    F8_E8M0="float8_e8m0fnu",
    F8_E4M3FNUZ="float8_e4m3fnuz",
    F8_E5M2FNUZ="float8_e5m2fnuz",
)


def is_array(x: Any) -> bool:
    """Whether a leaf of a tree is stored as a tensor (or is the `ShapeDtypeStruct` of such a leaf)."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) or _is_none(x):
        return True
    # Masked arrays and arrays of records are more than their numbers.
    return type(x) in (np.ndarray, np.memmap)


def is_key(x: Any) -> bool:
    """Whether an array has random keys."""
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def _is_none(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0


def name_of(x: Any) -> str:
    """The name of an array's dtype in files; `key:threefry2x32` for random keys.

    Raises:
      TypeError: for a dtype that files cannot hold.
    """
    if is_key(x):
        impls = [impl for impl in _IMPLS if _key_struct(impl).dtype == x.dtype]
        if not impls:
            raise type_error(
                f"files have no {x.dtype}; of random keys they have {', '.join(_IMPLS)}"
            )
        return f"{_KEYS}{impls[0]}"
    name = name_of_dtype(x.dtype)
    if name not in STORED:
        raise type_error(
            f"files have no dtype {name}; they have {', '.join(STORED)}, and random keys"
        )
    return name


def name_of_dtype(dtype: DType) -> str:
    """The name of a dtype of numbers, which `STORED` has if files can hold it."""
    return _NONE if dtype == jax.dtypes.float0 else np.dtype(dtype).name


@functools.cache
def _key_struct(impl: str) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl))


def struct_of(name: str, shape: tuple[int, ...], weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """The `jax.ShapeDtypeStruct` of an array with a dtype of this name.

    Raises:
      KeyError: for an unknown name.
    """
    if name.startswith(_KEYS):
        return jax.ShapeDtypeStruct(
            shape, {f"{_KEYS}{i}": _key_struct(i) for i in _IMPLS}[name].dtype
        )
    return jax.ShapeDtypeStruct(shape, _DTYPES[name], weak_type=weak_type)


def stored_of(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of the tensor that stores an array.

    Raises:
      KeyError: for an unknown name.
    """
    if name.startswith(_KEYS):
        data = jax.eval_shape(jax.random.key_data, struct_of(name, shape))
        return STORED[data.dtype.name], data.shape
    last = {**dict.fromkeys(_PAIRS, (2,)), _NONE: (0,)}.get(name, ())
    return STORED[name], (*shape, *last)


def bytes_of(x: Any) -> np.ndarray:
    """The bytes that store an array, `[bytes]` uint8, little-endian."""
    if isinstance(x, jax.Array):
        if is_key(x):
            x = jax.random.key_data(x)
        if len(x.devices()) == 1:
            x = x.addressable_data(0)  # else JAX keeps the copy on the host as long as x exists
    elif _is_none(x):
        return np.zeros(0, np.uint8)
    host = np.ascontiguousarray(x).reshape(-1)
    if host.dtype.byteorder == ">" or (host.dtype.byteorder == "=" and sys.byteorder == "big"):
        host = host.byteswap()
    return host.view(np.uint8)


def array_of(
    data: np.ndarray, name: str, shape: tuple[int, ...], weak_type: bool, as_numpy: bool
) -> Array:
    """Makes an array from the bytes that store it.

    Args:
      data: `[bytes]` uint8. It is copied into a JAX array.
      name: the name of the dtype.
      shape: the array's shape.
      weak_type: whether the array is weakly typed in JAX, like a Python number.
      as_numpy: whether to return a NumPy array that is a view of the bytes. Random keys are always JAX
        arrays.

    Returns:
      A JAX array on the default device; but a copy in NumPy for dtypes of 64 bits without JAX's 64-bit
      mode, since JAX would drop bits.

    Raises:
      ValueError: for bytes of booleans that are neither 0 nor 1.
    """
    if name.startswith(_KEYS):
        raw = data.view("<u4").reshape(stored_of(name, shape)[1])
        return jax.random.wrap_key_data(jnp.array(raw), impl=name.removeprefix(_KEYS))
    dtype = _DTYPES[name]
    if name == _NONE:
        return np.zeros(shape, dtype)
    if name == "bool" and (data > 1).any():
        raise value_error("bytes of booleans that are neither 0 nor 1")
    if sys.byteorder == "big":
        data = data.view(dtype).byteswap().view(np.uint8)
    host = data.view(dtype).reshape(shape)
    if as_numpy:
        return host
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return host.copy()
    if weak_type:  # an array of Python numbers stays weakly typed under `.at[...].set`
        zero = jnp.full(shape, dtype.type(0).item())
        if zero.dtype == dtype:
            return zero.at[...].set(host)
    return _copied(host)


def _copied(host: np.ndarray) -> jax.Array:
    """A JAX array of a view of a file, whose memory it does not use."""
    # Finished before the next one, as JAX copies after it returns.
    x = jax.block_until_ready(compat.on_device(host))
    device, *others = x.devices()
    on_cpu = not others and device.platform == "cpu"
    if on_cpu and x.unsafe_buffer_pointer() == host.ctypes.data:  # begins at a multiple of 64 bytes
        x = jax.block_until_ready(compat.on_device(host.copy()))
    return x
