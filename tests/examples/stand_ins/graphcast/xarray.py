"""Named arrays with named axes, as much of xarray as GraphCast's stand-in needs."""

import jax
import numpy as np


class Dataset:
    """Variables by name, each `(dims, array)`, and the coordinates of axes.

    It is a pytree of its variables; coordinates other than latitudes and longitudes are not kept.
    """

    def __init__(self, data_vars, coords=None):
        self.data_vars = dict(data_vars)
        self.coords = dict(coords or {})

    @property
    def sizes(self):
        pairs = [zip(dims, np.shape(x), strict=True) for dims, x in self.data_vars.values()]
        return {dim: size for own in pairs for dim, size in own}

    def isel(self, time):
        def part(dims, x):
            return x[(slice(None),) * dims.index("time") + (time,)] if "time" in dims else x

        return Dataset({n: (d, part(d, x)) for n, (d, x) in self.data_vars.items()}, self.coords)

    def select(self, names):
        return Dataset({name: self.data_vars[name] for name in names}, self.coords)


def load_dataset(path):
    """There is no netCDF here: no file is one."""
    raise ValueError(f"{path} has no format that is known")


def _flatten(dataset):
    names = sorted(dataset.data_vars)
    dims = tuple(dataset.data_vars[name][0] for name in names)
    grid = tuple(tuple(map(float, dataset.coords[axis])) for axis in ("lat", "lon"))
    return [dataset.data_vars[name][1] for name in names], (tuple(names), dims, grid)


def _unflatten(aux, arrays):
    names, dims, grid = aux
    variables = dict(zip(names, zip(dims, arrays, strict=True), strict=True))
    return Dataset(variables, dict(zip(("lat", "lon"), grid, strict=True)))


jax.tree_util.register_pytree_node(Dataset, _flatten, _unflatten)
