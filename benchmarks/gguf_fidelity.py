"""Measures the accuracy of llama.cpp's formats on the weights of `benchmarks.fidelity`, for comparison.

    python3 -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36   # compiles for minutes
    python -m benchmarks.gguf_fidelity --library=llama/lib/python3.11/site-packages/llama_cpp/lib

Run the second command from the root of the repository, with the requirements of `benchmarks.fidelity`.
It loads llama.cpp's own quantizer by ctypes, so it uses no Python of that environment. Then
`python -m benchmarks.fidelity --report_only` writes the table and the plot.
"""

import ctypes
import pathlib
from collections.abc import Sequence
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

from benchmarks import fidelity, fidelity_report, result_files

LIBRARY = flags.DEFINE_string(
    "library", None, "The folder of llama.cpp's shared libraries, in llama-cpp-python's package."
)

_BLOCK = 256  # a multiple of all block sizes


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    quantizer = Quantizer(pathlib.Path(LIBRARY.value or ""))
    encoder = fidelity.Encoder()
    results: dict[str, Any] = dict(commit=quantizer.commit, cases={})
    for kind in (progress := tqdm(fidelity_report.BESIDE_GGUF)):
        for flat in (True, False):
            progress.set_description(kind)
            if not flat and quantizer.requires_importance(kind):
                continue
            bits, new = quantizer.rounded(encoder.params, kind, flat)
            record = dict(bits=bits, **encoder.error(new), **encoder.score(new))
            results["cases"][kind if flat else f"{kind}, no importance"] = record
            result_files.write(results, fidelity_report.GGUF_RESULTS)


class Quantizer:
    """llama.cpp's quantization, called in its own library."""

    def __init__(self, folder: pathlib.Path) -> None:
        path = folder.resolve() / "libggml-base.so"
        if not path.exists():
            raise app.UsageError(f"--library: {path} is not there; see the start of {__file__}")
        self._library = ctypes.CDLL(str(path))
        self._quantize = self._library.ggml_quantize_chunk
        sizes = [ctypes.c_int64] * 3
        self._quantize.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p
        ]  # fmt: skip
        self._quantize.restype = ctypes.c_size_t
        self._library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        self._library.ggml_commit.restype = ctypes.c_char_p
        self.commit = self._library.ggml_commit().decode()

    def requires_importance(self, kind: str) -> bool:
        return self._library.ggml_quantize_requires_imatrix(int(gguf.GGMLQuantizationType[kind]))

    def rounded(self, params: Any, kind: str, flat: bool) -> tuple[float, Any]:
        """Returns the bits per weight, and the parameters with rounded linear weights.

        Args:
          params: parameters of the encoder.
          kind: the type's name in GGML.
          flat: whether to declare all weights equally important, or to pass no importance.
        """
        new = {module: dict(own) for module, own in params.items()}
        for module, name in fidelity.linear_weights(params):
            # Rows are along the inputs, as in GGUF files. A width of 384 is not a multiple of
            # 256, so blocks continue in the next row. Groups of 16 and 32 still stay within rows.
            rows = np.asarray(params[module][name], np.float32).T
            new[module][name] = jnp.asarray(self._round(rows, kind, flat).T)
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        return 8 * size / elements, new

    def _round(self, rows: np.ndarray, kind: str, flat: bool) -> np.ndarray:
        ggml_type = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[ggml_type]
        source = np.ascontiguousarray(rows).reshape(-1, _BLOCK)
        data = np.zeros((len(source), _BLOCK // elements * size), np.uint8)
        importance = np.ones(_BLOCK, np.float32)
        written = self._quantize(
            int(ggml_type), source.ctypes.data, data.ctypes.data, 0, *source.shape,
            importance.ctypes.data if flat else None,
        )  # fmt: skip
        assert written == data.nbytes, (kind, written, data.nbytes)
        return gguf.quants.dequantize(data, ggml_type).reshape(rows.shape)


if __name__ == "__main__":
    app.run(main)
