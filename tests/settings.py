"""JAX's settings, under which implicit arrays do what dense ones do."""

import contextlib

import jax

SETTINGS = {
    "jax_enable_x64": True,
    "jax_debug_nans": True,
    "jax_disable_jit": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_check_tracer_leaks": True,
    "jax_transfer_guard": "disallow",
}


@contextlib.contextmanager
def setting(name):
    """One of them, for a while."""
    before = getattr(jax.config, name)
    jax.config.update(name, SETTINGS[name])
    try:
        yield
    finally:
        jax.config.update(name, before)
