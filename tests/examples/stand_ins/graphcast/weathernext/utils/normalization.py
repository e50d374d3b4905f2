"""A predictor of normalized differences."""

import xarray


def _map(function, dataset, statistics):
    """Applies a function of an array and its statistic to the variables that have one."""

    def changed(name, dims, x):
        if name not in statistics.data_vars:
            return dims, x
        own_dims, own = statistics.data_vars[name]
        shape = [len(own) if dim in own_dims else 1 for dim in dims]
        return dims, function(x, own.reshape(shape).astype(x.dtype))

    new = {name: changed(name, *pair) for name, pair in dataset.data_vars.items()}
    return xarray.Dataset(new, dataset.coords)


class InputsAndResiduals:
    def __init__(self, predictor, diffs_stddev_by_level, mean_by_level, stddev_by_level):
        self.predictor = predictor
        self.mean, self.stddev = mean_by_level, stddev_by_level
        self.diffs_stddev = diffs_stddev_by_level

    def normalized(self, dataset):
        centred = _map(lambda x, mean: x - mean, dataset, self.mean)
        return _map(lambda x, stddev: x / stddev, centred, self.stddev)

    def loss_and_predictions(self, inputs, targets, forcings):
        last = {name: inputs.data_vars[name][1][:, -1:] for name in targets.data_vars}
        pairs = targets.data_vars.items()
        moved = {name: (dims, x - last[name]) for name, (dims, x) in pairs}
        residuals = xarray.Dataset(moved, targets.coords)
        loss, predicted = self.predictor.loss_and_predictions(
            self.normalized(inputs),
            _map(lambda x, stddev: x / stddev, residuals, self.diffs_stddev),
            self.normalized(forcings),
        )
        found = _map(lambda x, stddev: x * stddev, predicted, self.diffs_stddev).data_vars.items()
        next_values = {name: (dims, x + last[name]) for name, (dims, x) in found}
        return loss, xarray.Dataset(next_values, targets.coords)
