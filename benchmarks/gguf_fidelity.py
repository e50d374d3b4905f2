"""llama.cpp's own quantizer, for `benchmarks.fidelity`.

It is loaded by ctypes from a shared library: the one in PyPI's `xllamacpp`, or a `libggml-base.so`.
"""

import ctypes
import importlib.util
import math
import pathlib
from concurrent import futures
from typing import Any

import gguf
import numpy as np
from absl import app

_BLOCK = 256  # a multiple of all block sizes


class Quantizer:
    """llama.cpp's quantization of weights, on two threads."""

    def __init__(self, path: str | None) -> None:
        """Loads a library; without a path, the one of the installed `xllamacpp`."""
        found = pathlib.Path(path) if path else _installed()
        if found is None or not found.is_file():
            raise app.UsageError("--llama_cpp: no library; pip install xllamacpp, or see --help")
        self._library = ctypes.CDLL(str(found.resolve()))
        self._quantize = self._library.ggml_quantize_chunk
        sizes = [ctypes.c_int64] * 3
        self._quantize.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p
        ]  # fmt: skip
        self._quantize.restype = ctypes.c_size_t
        self._library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        self._library.ggml_version.restype = ctypes.c_char_p
        self.version = self._library.ggml_version().decode()

    def requires_importance(self, kind: str) -> bool:
        """Whether a type can be quantized only if the importance of inputs is known."""
        return self._library.ggml_quantize_requires_imatrix(int(gguf.GGMLQuantizationType[kind]))

    def rounded(
        self, kind: str, weights: dict[Any, np.ndarray], importance: dict[Any, np.ndarray] | None
    ) -> dict[Any, np.ndarray]:
        """Returns rounded weights, by the same keys.

        Args:
          kind: the type's name in GGML.
          weights: float32 matrices `[inputs, outputs]`.
          importance: a positive number for each input of each weight. None: none is known.
        """

        def one(key: Any) -> np.ndarray:
            return self._round(kind, weights[key].T, importance and importance[key]).T

        with futures.ThreadPoolExecutor(2) as threads:
            return dict(zip(weights, threads.map(one, weights), strict=True))

    def _round(self, kind: str, rows: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        """Rounds rows along the inputs, as GGUF files have them.

        A width that is not a multiple of 256 has blocks that continue in the next row: as many rows
        as needed become one. Groups of 16 and 32 still stay within their rows.
        """
        ggml_type = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[ggml_type]
        joined = _BLOCK // math.gcd(rows.shape[1], _BLOCK)
        source = np.ascontiguousarray(rows, np.float32).reshape(-1, joined * rows.shape[1])
        data = np.zeros((len(source), source.shape[1] // elements * size), np.uint8)
        if importance is not None:
            importance = np.tile(np.asarray(importance, np.float32), joined)
        written = self._quantize(
            int(ggml_type), source.ctypes.data, data.ctypes.data, 0, *source.shape,
            None if importance is None else importance.ctypes.data,
        )  # fmt: skip
        assert written == data.nbytes, (kind, written, data.nbytes)
        return gguf.quants.dequantize(data, ggml_type).reshape(rows.shape)


def bits(kind: str) -> float:
    """The bits per weight of a type of GGML."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return 8 * size / elements


def _installed() -> pathlib.Path | None:
    """Returns the library in the package `xllamacpp`, which is not imported."""
    spec = importlib.util.find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((x for own in folders or () for x in pathlib.Path(own).glob("*.so")), None)
