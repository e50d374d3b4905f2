"""GraphCast as its demo notebook makes it, from your own checkout, with data and weights.

The part that `finetune_graphcast.py` needs of https://github.com/google-deepmind/graphcast (which has
become https://github.com/google-deepmind/weathernext). The notebook's cell with the loss and its
gradients runs as it is: nothing of the model or of the demo is repeated here.
"""

import dataclasses
import functools
import json
import logging
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np

import dense_twin
from errors import InputError

FRAME_HOURS = 6
INPUT_FRAMES = 2
# In the two forms that the repository has had: the modules that the demo imports, by their last names.
NOTEBOOKS = {
    "weathernext": "docs/weathernext1_graph/graphcast_demo.ipynb",
    "graphcast": "graphcast_demo.ipynb",
}
_UTILS = ("autoregressive", "casting", "checkpoint", "data_utils", "normalization", "xarray_tree")
MODULES = {
    "weathernext": (
        *(f"weathernext.utils.{name}" for name in _UTILS),
        "weathernext.weathernext1_graph.graphcast",
        "xarray_jax",
    ),
    "graphcast": (*(f"graphcast.{name}" for name in (*_UTILS, "graphcast", "xarray_jax")),),
}

Window = tuple[Any, Any, Any]  # inputs, targets and forcings: an xarray.Dataset each
Params = Mapping[str, Mapping[str, Any]]


class Settings(NamedTuple):
    """What the demo's widgets ask for.

    Attributes:
      weights: a checkpoint file of GraphCast; None for random weights.
      data: a netCDF file of weather; None for waves that move east.
      statistics: a folder with GraphCast's three files of statistics; None for those of the waves.
      target_steps: autoregressive steps of the loss.
      bfloat16: whether the model computes in bfloat16, as in the demo.
      resolution: degrees between points of the waves' grid.
      mesh_size, latent_size, message_steps: the size of a model with random weights.
    """

    weights: str | None
    data: str | None
    statistics: str | None
    target_steps: int
    bfloat16: bool
    resolution: float
    mesh_size: int
    latent_size: int
    message_steps: int


class Demo(NamedTuple):
    """GraphCast's parameters and what the demo's cell defines.

    Attributes:
      names: the names of the cell: `loss_fn`, a function transformed by Haiku, and `grads_fn`, which
        calls `loss_fn.apply` by that name.
      params: the parameters.
      windows: data to learn, and to score in the last one.
    """

    names: dict[str, Any]
    params: Params
    windows: list[Window]

    def gradients(self, model: Any, params: Params, window: Window) -> tuple[jax.Array, Params]:
        """Returns the loss and its gradients, by the demo's own function, of a model in its place."""
        names = self.names
        before, names["loss_fn"] = names["loss_fn"], model
        try:
            configs = names["model_config"], names["task_config"]
            loss, _, _, grads = names["grads_fn"](params, {}, *configs, *window)
        finally:
            names["loss_fn"] = before
        return loss, grads

    def loss(self, model: Any, params: Params, window: Window) -> jax.Array:
        """Returns the loss of a model in the place of `loss_fn`."""
        configs = self.names["model_config"], self.names["task_config"]
        (loss, _), _ = model.apply(params, {}, jax.random.PRNGKey(0), *configs, *window)
        return loss

    def save(self, path: str, params: Params) -> None:
        """Writes a checkpoint file of GraphCast with other parameters."""
        module, names = self.names["graphcast"], self.names
        value = module.CheckPoint(
            params=jax.tree.map(np.asarray, params),
            model_config=names["model_config"],
            task_config=names["task_config"],
            description="GraphCast with merged LoRA",
            license="as that of the weights before",
        )
        with open(path, "wb") as file:
            names["checkpoint"].dump(file, value)


def read(repo: str, settings: Settings) -> Demo:
    """Reads the model of a checkout, and makes or reads data and weights.

    Raises:
      InputError: for a folder or file that is not what it has to be.
    """
    root = pathlib.Path(repo).expanduser()
    form = next((form for form in NOTEBOOKS if (root / form).is_dir()), None)
    if form is None:
        raise InputError(f"--repo: {root} has none of the folders {', '.join(NOTEBOOKS)}")
    names = modules(repo, form)
    if not settings.bfloat16:
        off = functools.partial(names["casting"].Bfloat16Cast, enabled=False)
        names["casting"] = dataclasses.make_dataclass("casting", ["Bfloat16Cast"])(off)
    names |= read_weights(names, settings)
    everything = read_data(names, settings)
    windows = windows_of(names, everything, settings.target_steps)
    names |= read_statistics(names, settings.statistics)
    names |= zip(("train_inputs", "train_targets", "train_forcings"), windows[0], strict=True)
    # The demo is told once for each variable without statistics, in each trace.
    logging.getLogger().setLevel(logging.ERROR)
    exec(compile(cell_of(root / NOTEBOOKS[form]), "the demo's cell", "exec"), names)
    return Demo(names, names["params"], windows)


def modules(repo: str, form: str) -> dict[str, Any]:
    """Imports what the cell needs, by the names that it uses."""
    paths = [*MODULES[form], "xarray"]
    found = dense_twin.modules_of(repo, paths, folder=".")
    short = (path.rpartition(".")[2] for path in paths)
    return dict(zip(short, found, strict=True)) | dict(hk=hk, jax=jax, functools=functools)


def cell_of(notebook: pathlib.Path) -> str:
    """Returns the source of the notebook's cell that defines the loss and its gradients."""
    try:
        cells = json.loads(notebook.read_text())["cells"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--repo: {notebook} is not a notebook: {error}") from error
    sources = ["".join(cell["source"]) for cell in cells]
    found = [source for source in sources if "def grads_fn(" in source]
    if len(found) != 1:
        raise InputError(f"--repo: {len(found)} cells of {notebook} define grads_fn, expected one")
    return found[0]


# --- weights, data and statistics -----------------------------------------------------------------


def read_weights(names: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns parameters (None for random ones) and the model's two configurations."""
    module = names["graphcast"]
    if settings.weights is None:
        config = module.ModelConfig(
            resolution=0,
            mesh_size=settings.mesh_size,
            latent_size=settings.latent_size,
            gnn_msg_steps=settings.message_steps,
            hidden_layers=1,
            radius_query_fraction_edge_length=0.6,
        )
        return dict(params=None, state={}, model_config=config, task_config=module.TASK_13)
    try:
        with open(settings.weights, "rb") as file:
            found = names["checkpoint"].load(file, module.CheckPoint)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"--weights: {settings.weights} is not a checkpoint of GraphCast (.npz): {error}"
        ) from error
    configs = dict(model_config=found.model_config, task_config=found.task_config)
    return dict(params=found.params, state={}, **configs)


def read_data(names: Mapping[str, Any], settings: Settings) -> Any:
    """Returns the data, an `xarray.Dataset`."""
    if settings.data is None:
        return waves(names, names["model_config"].resolution or settings.resolution)
    try:
        found = names["xarray"].load_dataset(settings.data).compute()
    except (OSError, ValueError) as error:
        raise InputError(f"--data: {settings.data} is not a netCDF file: {error}") from error
    needed = INPUT_FRAMES + settings.target_steps
    if found.sizes["time"] < needed:
        raise InputError(
            f"--data: {settings.data} has {found.sizes['time']} frames, --target_steps="
            f"{settings.target_steps} needs {needed}"
        )
    return found


def waves(names: Mapping[str, Any], resolution: float, frames: int = 13) -> Any:
    """Returns weather to practise with: waves that move east, of another phase for each variable."""
    task, xarray = names["task_config"], names["xarray"]
    lat = np.arange(-90, 90 + resolution / 2, resolution, dtype=np.float32)
    lon = np.arange(0, 360, resolution, dtype=np.float32)
    level, time = np.asarray(task.pressure_levels), np.arange(frames)
    rng = np.random.default_rng(0)

    def variable(name: str) -> tuple[tuple[str, ...], np.ndarray]:
        kind = kind_of(names, name)
        phase = rng.uniform(0, 2 * np.pi, len(level))[:, None, None]
        hours = time[:, None, None, None] * (kind != "static")
        angle = 2 * np.deg2rad(lon) - hours * np.pi / 8 + phase
        found = (np.sin(angle) * np.cos(np.deg2rad(lat))[:, None]).astype(np.float32)
        dims = ("batch", "time", "level", "lat", "lon")
        if kind == "static":
            return dims[3:], found[0, 0]
        if kind == "surface":
            return (*dims[:2], *dims[3:]), found[None, :, 0]
        return dims, found[None]

    given = {*task.input_variables, *task.target_variables}
    times = time * np.timedelta64(FRAME_HOURS, "h").astype("timedelta64[ns]")
    dates = np.datetime64("2020-01-01", "ns") + times
    return xarray.Dataset(
        {name: variable(name) for name in sorted(given) if "_progress" not in name},
        coords=dict(
            lat=lat, lon=lon, level=level, time=times, datetime=(("batch", "time"), dates[None])
        ),
    )


def kind_of(names: Mapping[str, Any], name: str) -> str:
    """Returns whether a variable is static, of the surface, or atmospheric."""
    if name in ("geopotential_at_surface", "land_sea_mask"):
        return "static"
    atmospheric = names["graphcast"].TARGET_ATMOSPHERIC_VARS
    return "atmospheric" if name in atmospheric else "surface"


def windows_of(names: Mapping[str, Any], data: Any, target_steps: int) -> list[Window]:
    """Cuts the data into overlapping windows, as the demo extracts its one."""
    frames = INPUT_FRAMES + target_steps
    lead_times = slice(f"{FRAME_HOURS}h", f"{FRAME_HOURS * target_steps}h")
    return [
        names["data_utils"].extract_inputs_targets_forcings(
            data.isel(time=slice(start, start + frames)),
            target_lead_times=lead_times,
            **dataclasses.asdict(names["task_config"]),
        )
        for start in range(data.sizes["time"] - frames + 1)
    ]


def read_statistics(names: Mapping[str, Any], folder: str | None) -> dict[str, Any]:
    """Returns the statistics that normalize the data, by the demo's names."""
    values = dict(diffs_stddev_by_level=0.5, mean_by_level=0.0, stddev_by_level=1.0)
    if folder is None:
        return {name: constant_statistics(names, value) for name, value in values.items()}
    try:
        return {
            name: names["xarray"].load_dataset(pathlib.Path(folder) / f"{name}.nc").compute()
            for name in values
        }
    except (OSError, ValueError) as error:
        raise InputError(f"--statistics: {error}; expected {', '.join(values)} (.nc)") from error


def constant_statistics(names: Mapping[str, Any], value: float) -> Any:
    """Returns the same statistics for all variables of the waves."""
    task = names["task_config"]
    level = np.asarray(task.pressure_levels)
    variables = {}
    for name in sorted({*task.input_variables, *task.target_variables}):
        atmospheric = kind_of(names, name) == "atmospheric"
        shape = level.shape if atmospheric else ()
        dims = ("level",) if atmospheric else ()
        variables[name] = (dims, np.full(shape, value, np.float32))
    return names["xarray"].Dataset(variables, coords=dict(level=level))
