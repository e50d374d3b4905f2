"""Embeddings, a stack of blocks, and heads with losses.

Weights of attention are parameters of three axes, read by a getter that insists on float32 and gives
the model's dtype. Blocks are a stack of layers with remat; attention runs over slices of its rows; keys
of dropout are split; the structure's frames come from a loop, in which gradients are stopped.
"""

import contextlib

import haiku as hk
import jax
import jax.numpy as jnp


@contextlib.contextmanager
def half_context():
    def getter(next_getter, value, context):
        if context.original_dtype == jnp.bfloat16:
            assert value.dtype == jnp.float32
            value = value.astype(jnp.bfloat16)
        return next_getter(value)

    def creator(next_creator, shape, dtype, init, context):
        return next_creator(shape, jnp.float32 if dtype == jnp.bfloat16 else dtype, init)

    with hk.custom_creator(creator), hk.custom_getter(getter):
        yield


class Linear(hk.Module):
    def __init__(self, num_output, name, initializer="linear"):
        super().__init__(name=name)
        self.num_output, self.initializer = num_output, initializer

    def __call__(self, x):
        shape = (x.shape[-1], self.num_output)
        init = hk.initializers.VarianceScaling() if self.initializer != "zeros" else jnp.zeros
        w = hk.get_parameter("weights", shape, x.dtype, init)
        return jnp.einsum("...a,ab->...b", x, w) + hk.get_parameter(
            "bias", shape[1:], x.dtype, jnp.zeros
        )


def norm(x, name):
    layer = hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)
    return layer(x.astype(jnp.float32)).astype(x.dtype)


def by_slices(function, x, size):
    """Runs a function on slices of the first axis, in a loop that writes them."""
    if hk.running_init() or len(x) % size or len(x) == size:
        return function(x)
    shape = jax.eval_shape(function, x[:size])
    out = jnp.zeros((len(x), *shape.shape[1:]), shape.dtype)

    def body(i, out):
        part = jax.lax.dynamic_slice_in_dim(x, i * size, size)
        return jax.lax.dynamic_update_slice_in_dim(out, function(part), i * size, 0)

    return jax.lax.fori_loop(0, len(x) // size, body, out)


class Attention(hk.Module):
    def __init__(self, heads, subbatch, name):
        super().__init__(name=name)
        self.heads, self.subbatch = heads, subbatch

    def __call__(self, x, mask, bias=None):
        channels = x.shape[-1]
        shape, init = (
            (channels, self.heads, channels // self.heads),
            hk.initializers.VarianceScaling(),
        )
        get = lambda name, shape: hk.get_parameter(name, shape, x.dtype, init)  # noqa: E731
        q_w, k_w, v_w, g_w = (get(f"{n}_w", shape) for n in ("query", "key", "value", "gating"))
        g_b = hk.get_parameter("gating_b", shape[1:], x.dtype, jnp.ones)
        o_w = get("output_w", (self.heads, channels // self.heads, channels))
        o_b = hk.get_parameter("output_b", (channels,), x.dtype, jnp.zeros)

        def rows(x):
            q, k, v = (jnp.einsum("bqa,ahc->bqhc", x, w) for w in (q_w, k_w, v_w))
            logits = jnp.einsum("bqhc,bkhc->bhqk", q * q.shape[-1] ** -0.5, k)
            logits = logits + (1e9 * (mask - 1)).astype(x.dtype) + (0 if bias is None else bias)
            found = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(logits), v)
            gate = jax.nn.sigmoid(jnp.einsum("bqa,ahc->bqhc", x, g_w) + g_b)
            return jnp.einsum("bqhc,hco->bqo", found * gate, o_w) + o_b

        return by_slices(rows, x, self.subbatch)


def multiplication(config, act, equation, name):
    assert not config.fuse_projection_weights
    with hk.name_scope(name):
        act = norm(act, "layer_norm_input")
        left, right, gate = (
            Linear(act.shape[-1], f"{n}_projection")(act) for n in ("left", "right", "gating")
        )
        out = norm(jnp.einsum(equation, left, right), "center_layer_norm")
        return Linear(act.shape[-1], "output_projection", "zeros")(out) * jax.nn.sigmoid(gate)


class Evoformer(hk.Module):
    def __init__(self, config, global_config, name):
        super().__init__(name=name)
        self.config, self.subbatch = config, global_config.subbatch_size

    def __call__(self, act, mask, is_training):
        msa, pair, key = act
        key, used = jax.random.split(key)
        bias = jnp.moveaxis(Linear(4, "feat_2d")(norm(pair, "feat_2d_norm")), -1, 0)
        row = Attention(4, self.subbatch, "msa_row_attention")(norm(msa, "query_norm"), mask, bias)
        if is_training:
            row = row * jax.random.bernoulli(used, 0.85, row[:1].shape) / 0.85
        msa = msa + row.astype(msa.dtype)
        left, right = jnp.split(Linear(8, "outer")(norm(msa, "outer_norm")), 2, -1)
        outer = jnp.einsum("sic,sjd->ijcd", left, right).reshape(*pair.shape[:2], -1)
        pair = pair + Linear(pair.shape[-1], "outer_output", "zeros")(outer)
        for direction, equation in (("outgoing", "ikc,jkc->ijc"), ("incoming", "kjc,kic->ijc")):
            name = f"triangle_multiplication_{direction}"
            pair = pair + multiplication(self.config[name], pair, equation, name)
        pair = pair + Attention(4, self.subbatch, "triangle_attention")(
            norm(pair, "pair_norm"), mask
        )
        hidden = jax.nn.relu(Linear(4 * msa.shape[-1], "transition1")(norm(msa, "transition_norm")))
        return msa + Linear(msa.shape[-1], "transition2", "zeros")(hidden), pair, key


class EmbeddingsAndEvoformer(hk.Module):
    def __init__(self, config, global_config, name="evoformer"):
        super().__init__(name=name)
        self.config, self.global_config = config, global_config

    def __call__(self, batch, is_training):
        c, gc = self.config, self.global_config
        dtype = jnp.bfloat16 if gc.bfloat16 else jnp.float32
        with half_context():
            target = batch["target_feat"].astype(dtype)
            msa = Linear(c.msa_channel, "preprocess_1d")(target)[None]
            msa = msa + Linear(c.msa_channel, "preprocess_msa")(batch["msa_feat"].astype(dtype))
            left, right = (Linear(c.pair_channel, f"{n}_single")(target) for n in ("left", "right"))
            places = batch["prev_pos"][:, 1].astype(dtype)
            near = jnp.exp(-jnp.square(places[:, None] - places[None]).sum(-1, keepdims=True) / 99)
            pair = left[:, None] + right[None] + Linear(c.pair_channel, "prev_pos_linear")(near)
            msa = msa.at[0].add(norm(batch["prev_msa_first_row"].astype(dtype), "prev_msa_norm"))
            pair = pair + norm(batch["prev_pair"].astype(dtype), "prev_pair_norm")
            extra = jax.nn.one_hot(batch["extra_msa"], 23, dtype=dtype)
            act = Linear(c.msa_channel, "extra_msa_activations")(extra), pair, hk.next_rng_key()
            act = self.stack(
                "extra_msa_stack", c.extra_msa_stack_num_block, act, batch, is_training
            )
            act = msa, act[1], act[2]
            msa, pair, _ = self.stack(
                "evoformer_iteration", c.evoformer_num_block, act, batch, is_training
            )
            single = Linear(2 * c.msa_channel, "single_activations")(msa[0])
        out = dict(single=single, pair=pair, msa=msa, msa_first_row=msa[0])
        return {name: x.astype(jnp.float32) for name, x in out.items()}

    def stack(self, name, count, act, batch, is_training):
        block = Evoformer(self.config.evoformer, self.global_config, name)
        run = lambda act: block(act, batch["seq_mask"], is_training)  # noqa: E731
        if self.global_config.use_remat:
            run = hk.remat(run)
        return hk.experimental.layer_stack(count, name=f"{name}_stack")(run)(act)


def pseudo_beta_fn(aatype, positions, mask):
    return positions[:, 3], mask[:, 3]


class Head(hk.Module):
    """Gives values of the representations, and a loss of the values."""

    def __init__(self, config, global_config, name):
        super().__init__(name=name)


class MaskedMsaHead(Head):
    def __call__(self, found, batch, is_training):
        return {"logits": Linear(23, "logits", "zeros")(found["msa"])}

    def loss(self, value, batch):
        labels = jax.nn.one_hot(batch["true_msa"], 23)
        errors = -(jax.nn.log_softmax(value["logits"]) * labels).sum(-1) * batch["bert_mask"]
        return errors.sum() / (1e-8 + batch["bert_mask"].sum())


class DistogramHead(Head):
    def __call__(self, found, batch, is_training):
        half = Linear(16, "half_logits", "zeros")(found["pair"])
        return {"logits": half + half.swapaxes(0, 1)}

    def loss(self, value, batch):
        beta, mask = batch["pseudo_beta"], batch["pseudo_beta_mask"]
        squares = jnp.square(beta[:, None] - beta[None]).sum(-1)
        labels = jax.nn.one_hot((squares[..., None] > jnp.linspace(2, 20, 15) ** 2).sum(-1), 16)
        errors = -(jax.nn.log_softmax(value["logits"]) * labels).sum(-1) * mask[:, None] * mask
        return errors.sum() / (1e-8 + (mask[:, None] * mask).sum())


class StructureModule(Head):
    def __call__(self, found, batch, is_training):
        act = norm(found["single"], "single_layer_norm")
        places = jnp.zeros((len(act), 3))
        for i in range(3):
            near = jnp.exp(-jnp.square(places[:, None] - places[None]).sum(-1))
            act = act + Linear(act.shape[-1], f"update_{i}", "zeros")(near @ act / len(act))
            places = jax.lax.stop_gradient(places) + Linear(3, f"affine_{i}", "zeros")(act)
        weight = hk.get_parameter("trainable_point_weights", (3,), init=jnp.ones)
        places = places * jax.nn.softplus(weight)
        return {"final_atom_positions": jnp.tile(places[:, None], (1, 37, 1)), "traj": places}

    def loss(self, value, batch):
        wanted = batch["backbone_affine_tensor"][:, 4:]
        off = [x[:, None] - x[None] for x in (value["traj"], wanted)]
        lengths = [jnp.sqrt(jnp.square(x).sum(-1) + 1e-4) for x in off]
        return jnp.minimum(jnp.abs(lengths[0] - lengths[1]), 10).mean() / 10


HEADS = dict(masked_msa=MaskedMsaHead, distogram=DistogramHead, structure_module=StructureModule)


class AlphaFoldIteration(hk.Module):
    def __init__(self, config, global_config, name="alphafold_iteration"):
        super().__init__(name=name)
        self.config, self.global_config = config, global_config

    def __call__(self, ensembled_batch, non_ensembled_batch, is_training, compute_loss=False):
        assert len(ensembled_batch["seq_length"]) == 1
        batch = {name: x[0] for name, x in ensembled_batch.items()} | non_ensembled_batch
        evoformer = EmbeddingsAndEvoformer(self.config.embeddings_and_evoformer, self.global_config)
        found, total = evoformer(batch, is_training), 0.0
        out = {"representations": found}
        for name, config in sorted(self.config.heads.items()):
            if config.weight:
                own = name if name == "structure_module" else f"{name}_head"
                head = HEADS[name](config, self.global_config, own)
                out[name] = head(found, batch, is_training)
                if compute_loss:
                    total += config.weight * head.loss(out[name], batch)
        return (out, total) if compute_loss else out
