"""Which weights of a model get an adapter, by model: the files `presets/*.json`."""

import json
import pathlib
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).resolve().parent / "presets"


class Preset(NamedTuple):
    """Regular expressions of whole names `module/name`, for one model.

    Attributes:
      model: the model, and whose names these are.
      adapters: the weights that each method of `hki.add_adapter` is for, by its name.
      quantized: the weights that may be quantized below an adapter; all others stay floats.
      trained_whole: the dense arrays that are trained beside adapters; "" for none.
      matrix_axes: the axes of weights that are matrices in another form, `(inputs, outputs)`.
    """

    model: str
    adapters: dict[str, str]
    quantized: str
    trained_whole: str
    matrix_axes: dict[str, list[list[int]]]


def read(name: str) -> Preset:
    """Reads the preset of a model.

    Raises:
      ValueError: for a name without a file; the error lists the names.
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json")))
        raise ValueError(f"name: expected one of {names}, got {name!r}")
    return Preset(**json.loads(path.read_text(encoding="utf-8")))
