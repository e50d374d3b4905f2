"""A training step with the habits of AlphaGenome's."""

import haiku as hk
import jax
import jmp
import optax

from alphagenome_research.model import model


def get_forward_fn(output_metadata, jmp_policy="params=float32,compute=bfloat16,output=bfloat16"):
    """The loss of a batch; no gradient reaches the trunk."""
    policy = jmp.get_policy(jmp_policy)

    @hk.transform_with_state
    def forward(batch):
        with hk.mixed_precision.push_policy(model.AlphaGenome, policy):
            return model.AlphaGenome(output_metadata, freeze_trunk_embeddings=True).loss(batch)

    return forward


def get_train_step(predict_fn, optimizer):
    @jax.jit
    def step(params, state, opt_state, batch):
        def loss_of(params):
            (loss, scalars, _), new = predict_fn(params, state, None, batch)
            return loss, (new, scalars)

        (loss, (new, scalars)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new, opt_state, scalars | {"loss": loss}

    return step
