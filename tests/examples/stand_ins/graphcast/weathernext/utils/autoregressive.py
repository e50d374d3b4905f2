"""A predictor of several steps, each of which sees the predictions of those before."""

import haiku as hk
import jax
import jax.numpy as jnp
import xarray


class Predictor:
    def __init__(self, predictor, gradient_checkpointing=False):
        self.predictor, self.gradient_checkpointing = predictor, gradient_checkpointing

    def loss(self, inputs, targets, forcings):
        static = [name for name, (dims, _) in inputs.data_vars.items() if "time" not in dims]
        constant = inputs.select(static)
        moving = inputs.select([name for name in inputs.data_vars if name not in static])

        def one_step(moving, frame):
            target, forcing = frame
            both = {**moving.data_vars, **constant.data_vars}
            whole = xarray.Dataset(both, moving.coords)
            loss, predictions = self.predictor.loss_and_predictions(whole, target, forcing)
            new = {**predictions.data_vars, **forcing.data_vars}
            joined = {
                name: (dims, jnp.concatenate([x[:, 1:], new[name][1]], axis=1))
                for name, (dims, x) in moving.data_vars.items()
            }
            return xarray.Dataset(joined, moving.coords), loss

        if self.gradient_checkpointing and targets.sizes["time"] > 1:
            one_step = hk.remat(one_step)
        # Each step's frame keeps an axis of time, of size one.
        frames = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], (targets, forcings))
        _, losses = hk.scan(one_step, moving, frames)
        return losses.mean(0), {"all": losses.mean(0)}
