"""Programs for a GPU, which need not be there."""

import contextlib

import jax


def lowered_for_cuda(trace):
    """The text of the program that a function traces, for a GPU.

    From JAX 0.12 on the GPU's kind has to be named; from 0.12.0.1 on also while it is traced.
    """
    context = contextlib.nullcontext()
    if hasattr(jax.sharding, "AbstractDevice"):
        device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        context = jax.sharding.use_abstract_mesh(mesh)
    with context:
        return trace().lower(lowering_platforms=("cuda",)).as_text()
