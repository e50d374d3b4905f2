"""Plots of the results of `summary` and `compare_params`, by matplotlib (the extra `plots`)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from haiku_implicit.core.messages import imported, value_error
from haiku_implicit.files.replacing import checked_target, replaced
from haiku_implicit.params.summary import Comparison, Summary

Path = str | os.PathLike[str]

_MOST = 40  # the most rows that one can read in a picture


def plot_memory(found: Summary, path: Path) -> None:
    """Draws the bytes of each row and of its dense array, the largest first.

    Args:
      found: the result of `summary`, by parameter or by module.
      path: the path of the picture; its suffix is the format, such as `.png` or `.svg`.

    Raises:
      ImportError: without matplotlib.
      ValueError: for a suffix that is not a picture format.
      OSError: if the file can't be written.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki, os, tempfile
      >>> params = hki.quantize_params({'linear': {'w': jnp.ones((64, 32))}})
      >>> path = os.path.join(tempfile.mkdtemp(), 'memory.png')
      >>> hki.plot_memory(hki.summary(params), path)
      >>> os.path.getsize(path) > 1000
      True
    """
    rows = sorted(found.rows, key=lambda row: row.dense_nbytes, reverse=True)
    bars = {
        "dense": [row.dense_nbytes / 1e6 for row in rows],
        "held": [row.nbytes / 1e6 for row in rows],
    }
    total = f"{found.total.nbytes / 1e6:,.1f} of {found.total.dense_nbytes / 1e6:,.1f} MB"
    _draw([row.path for row in rows], bars, "MB", f"memory: {total}", path)


def plot_error(found: Comparison, path: Path) -> None:
    """Draws the relative error of each parameter, the largest first.

    Args:
      found: the result of `compare_params`.
      path: as for `plot_memory`.

    Raises:
      ImportError: without matplotlib.
      ValueError: for a suffix that is not a picture format.
    """
    rows = sorted(
        found.rows, key=lambda row: (math.isnan(row.relative), row.relative), reverse=True
    )
    bars = {"relative error": [row.relative for row in rows]}
    _draw([row.path for row in rows], bars, "relative error", "difference of parameters", path)


def check_picture(path: Path) -> None:
    """Checks, before any work is done, that a picture can be drawn and written to a path.

    Raises:
      ImportError, ValueError, OSError: as `plot_memory` does.
    """
    backends = imported(
        "matplotlib.backend_bases", "plots need matplotlib", "'haiku-implicit[plots]'"
    )
    suffix, known = _suffix(path), backends.FigureCanvasBase.get_supported_filetypes()
    if suffix not in known:
        raise value_error(
            f"{os.fspath(path)}: expected a picture's suffix ({', '.join(sorted(known))}), got "
            f"{suffix!r}"
        )
    checked_target(path)


def _suffix(path: Path) -> str:
    return os.path.splitext(path)[1].lstrip(".")


def _draw(
    names: Sequence[str], bars: dict[str, list[float]], label: str, title: str, path: Path
) -> None:
    check_picture(path)
    import matplotlib.figure

    left_out = len(names) - _MOST
    if left_out > 0:
        names, bars = names[:_MOST], {name: values[:_MOST] for name, values in bars.items()}
        title = f"{title} (without the {left_out} smallest)"
    # Unlike pyplot, this does not share state with the caller's own figures.
    figure = matplotlib.figure.Figure(figsize=(8, 1.2 + 0.25 * len(names)), layout="constrained")
    axes: Any = figure.add_subplot()
    height = 0.8 / len(bars)
    for i, (name, values) in enumerate(bars.items()):
        places = [k + (i - (len(bars) - 1) / 2) * height for k in range(len(names))]
        axes.barh(places, values, height, label=name)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10)
    if len(bars) > 1:
        axes.legend(loc="lower right")
    with replaced(path) as temporary:
        figure.savefig(temporary, dpi=120, format=_suffix(path))
