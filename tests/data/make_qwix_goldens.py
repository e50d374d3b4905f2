"""Makes qwix.npz: arrays that Qwix quantized, for tests/interchange/test_qwix.py.

For each case the file has the fields of the `QArray` under `CASE/NAME` (codes of four bits as bytes), and
under `CASE` the values that Qwix itself makes of them.

To make it anew, in an environment of its own::

    python -m venv qwix_env && qwix_env/bin/pip install qwix==0.1.8
    qwix_env/bin/python tests/data/make_qwix_goldens.py
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import qwix

TARGET = pathlib.Path(__file__).with_name("qwix.npz")
ROWS = dict(channelwise_axes=(0,), tiled_axes={1: 16})
COLUMNS = dict(channelwise_axes=(1,), tiled_axes={0: 16})
TILES = dict(channelwise_axes=(1,), tiled_axes={0: 32})
CASES = {
    "int8": ("int8", dict(channelwise_axes=(1,))),
    "int8 zero point": ("int8", COLUMNS | dict(calibration_method="minmax")),
    "int7": ("int7", COLUMNS),
    "int4 zero point": ("int4", ROWS | dict(calibration_method="minmax")),
    "int3": ("int3", ROWS),
    "nf4": ("nf4", COLUMNS),
    "fp8": ("float8_e5m2", {}),
    "mxfp8": ("mxfp8", TILES),
    "mxfp4": ("mxfp4", TILES),
    "nvfp4": ("nvfp4", COLUMNS),
}


def main():
    w = jax.random.normal(jax.random.key(0), (64, 32))
    found = {}
    for case, (qtype, options) in CASES.items():
        q = qwix.quantize(w, qtype, **options)
        found[case] = np.asarray(qwix.dequantize(q))
        bits = 4 if q.qvalue.dtype.name in ("int4", "uint4", "float4_e2m1fn") else 8
        same = jnp.uint4 if bits == 4 else jnp.uint8
        for name in ("qvalue", "zero_point"):
            if getattr(q, name) is not None:
                raw = jax.lax.bitcast_convert_type(getattr(q, name), same)
                found[f"{case}/{name}"] = np.asarray(raw.astype(jnp.uint8))
        found[f"{case}/scale"] = np.asarray(q.scale)
        found[f"{case}/names"] = np.asarray([q.qvalue.dtype.name, str(q.qtype)])
    np.savez_compressed(TARGET, **found)


if __name__ == "__main__":
    main()
