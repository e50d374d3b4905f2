"""The settings of a model, as attributes of nested dicts."""


class Config(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def model_config(name):
    multiplication = {"fuse_projection_weights": True}
    heads = {
        name: Config(weight=weight)
        for name, weight in dict(
            distogram=0.3, masked_msa=2.0, structure_module=1.0, none=0.0
        ).items()
    }
    return Config(
        model=Config(
            embeddings_and_evoformer=Config(
                evoformer=Config(
                    triangle_multiplication_outgoing=Config(multiplication),
                    triangle_multiplication_incoming=Config(multiplication),
                ),
                evoformer_num_block=48,
                extra_msa_stack_num_block=2,
                msa_channel=32,
                pair_channel=16,
            ),
            global_config=Config(bfloat16=True, use_remat=False, subbatch_size=4),
            heads=Config(heads),
        )
    )
