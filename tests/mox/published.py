"""Models that others have published, as packages for Python, and what they are called with.

pip puts the packages of ``published.txt`` into ``~/.cache/haiku_implicit`` (or below
``$XDG_CACHE_HOME``) the first time, and not into the environment: they are 38 MB, and ask for
dependencies that these models do not use.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import smollm
from tests.haiku_models import RNG

REQUIREMENTS = pathlib.Path(__file__).with_name("published.txt")
LENGTH = 6  # amino acids


class Published(NamedTuple):
    """A transformed function, its parameters, and its arguments."""

    transformed: hk.Transformed
    params: Any
    args: tuple

    @property
    def arguments(self):
        """The arguments of ``apply``."""
        return (self.params, RNG, *self.args)


# --- Getting the packages -------------------------------------------------------------------------


@functools.cache
def packages():
    """The folder of the packages, which is on the path afterwards."""
    pinned = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    cache = smollm.default_cache_dir()
    folder = cache / f"published-{sys.implementation.cache_tag}-{pinned}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".published-") as scratch:
            fresh = pathlib.Path(scratch) / "packages"
            install(fresh)
            try:
                os.rename(fresh, folder)  # whole or not at all
            except OSError:
                if not folder.is_dir():  # or another process was faster
                    raise
    sys.path.append(str(folder))
    return folder


def install(folder):
    """Has pip put the packages into a folder, without dependencies; it checks their digests."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--requirement", str(REQUIREMENTS), "--target", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"pip could not install {REQUIREMENTS.name}:\n{result.stderr}")


def without_init(name):
    """Lets one import the modules of a package without what its `__init__` imports."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(packages() / name.replace(".", "/"))]
    sys.modules.setdefault(name, importlib.util.module_from_spec(spec))


# --- AlphaFold ------------------------------------------------------------------------------------


def alphafold_config():
    """AlphaFold's first model with fewer blocks, and without dropout."""
    packages()
    from alphafold.model import config

    c = config.model_config("model_1_ptm").model
    c.global_config.deterministic = True
    c.embeddings_and_evoformer.evoformer_num_block = 2
    c.embeddings_and_evoformer.extra_msa_stack_num_block = 2
    return c


def cosines(*shape):
    return jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def evoformer():
    """Two blocks of the Evoformer, in AlphaFold's own stack of layers."""
    c = alphafold_config()
    from alphafold.model import layer_stack, modules, prng

    def fun(activations, masks):
        block = modules.EvoformerIteration(
            c.embeddings_and_evoformer.evoformer, c.global_config, is_extra_msa=False
        )

        def layer(carried):
            activations, key = carried
            key, own = key.split()
            return block(activations, masks, is_training=False, safe_key=own), key

        carried = activations, prng.SafeKey(hk.next_rng_key())
        return layer_stack.layer_stack(2)(layer)(carried)[0]

    sequences = 5
    activations = {"msa": cosines(sequences, LENGTH, 256), "pair": cosines(LENGTH, LENGTH, 128)}
    masks = {"msa": jnp.ones((sequences, LENGTH)), "pair": jnp.ones((LENGTH, LENGTH))}
    return with_weights(hk.transform(fun), activations, masks)


def alphafold():
    """The whole of AlphaFold: templates, both stacks, the structure module and the heads."""
    c = alphafold_config()
    from alphafold.model import modules

    def fun(batch):
        return modules.AlphaFold(c)(dict(batch), is_training=False)

    n, sequences, extra, templates = LENGTH, 4, 3, 2
    ids = jnp.arange(n) % 20
    batch = {
        "aatype": ids,
        "seq_length": jnp.asarray(n),
        "seq_mask": jnp.ones(n),
        "residue_index": jnp.arange(n),
        "target_feat": jax.nn.one_hot(ids, 22),
        "msa_feat": cosines(sequences, n, 49),
        "msa_mask": jnp.ones((sequences, n)),
        "extra_msa": jnp.arange(extra * n).reshape(extra, n) % 23,
        "extra_has_deletion": jnp.zeros((extra, n)),
        "extra_deletion_value": jnp.zeros((extra, n)),
        "extra_msa_mask": jnp.ones((extra, n)),
        "template_aatype": jnp.arange(templates * n).reshape(templates, n) % 20,
        "template_all_atom_positions": 5 * cosines(templates, n, 37, 3),
        "template_all_atom_masks": jnp.ones((templates, n, 37)),
        "template_mask": jnp.ones(templates),
        "template_pseudo_beta": 5 * cosines(templates, n, 3),
        "template_pseudo_beta_mask": jnp.ones((templates, n)),
        "atom14_atom_exists": jnp.ones((n, 14)),
        "atom37_atom_exists": jnp.ones((n, 37)),
        "residx_atom37_to_atom14": jnp.tile(jnp.arange(37) % 14, (n, 1)),
        "residx_atom14_to_atom37": jnp.tile(jnp.arange(14), (n, 1)),
    }
    return with_weights(hk.transform(fun), jax.tree.map(lambda x: x[None], batch))


def with_weights(transformed, *args):
    """With random weights; those that AlphaFold sets to zero at first would hide what comes before."""
    numbers = np.random.default_rng(0)

    def weights(path, shape):
        drawn = numbers.normal(scale=0.1, size=shape.shape).astype(shape.dtype)
        return jnp.asarray(drawn + (path[-1].key == "scale"))

    shapes = jax.eval_shape(transformed.init, RNG, *args)
    return Published(transformed, jax.tree_util.tree_map_with_path(weights, shapes), args)


# --- ProteinMPNN ----------------------------------------------------------------------------------


def mpnn(method):
    """ProteinMPNN with its real weights, of 48 edges and noise of 0.2 Å: `score` or `sample`."""
    # These import Biopython, pandas and more, and set XLA_FLAGS.
    without_init("colabdesign")
    without_init("colabdesign.mpnn")
    import joblib
    from colabdesign.mpnn import modules

    checkpoint = joblib.load(packages() / "colabdesign/mpnn/weights/v_48_020.pkl")
    sizes = dict(num_letters=21, node_features=128, edge_features=128, hidden_dim=128)
    sizes |= dict(augment_eps=0.0, dropout=0.0, k_neighbors=checkpoint["num_edges"])

    # JAX has not had the name that colabdesign uses since 0.6.
    @mock.patch.object(jax, "tree_map", jax.tree.map, create=True)
    def fun(inputs):
        return getattr(modules.ProteinMPNN(**sizes), method)(dict(inputs))

    n = 4 * LENGTH
    inputs = {
        "X": jnp.cumsum(2 * cosines(n, 4, 3), 0),
        "mask": jnp.ones(n),
        "residue_idx": jnp.arange(n),
        "chain_idx": jnp.zeros(n, int),
        "decoding_order": jnp.arange(n)[::-1],
    }
    if method == "score":
        inputs["S"] = jax.nn.one_hot(jnp.arange(n) % 21, 21)
    else:
        inputs["temperature"] = jnp.float32(0.1)
    params = jax.tree.map(jnp.asarray, checkpoint["model_state_dict"])
    return Published(hk.transform(fun), params, (inputs,))


MODELS = {
    "evoformer": evoformer,
    "alphafold": alphafold,
    "mpnn_score": functools.partial(mpnn, "score"),
    "mpnn_sample": functools.partial(mpnn, "sample"),
}
