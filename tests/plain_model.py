"""A model as users have it, which knows nothing of this library; and its use by a program of that kind.

`python -m tests.plain_model FILE ...` runs the model with the plain parameters in each file, and prints how
far its outputs are from those in the file, relative to the largest one.
"""

import sys

import haiku as hk
import jax
import numpy as np


def forward(x, is_training):
    """A model with state, random numbers and parameters that are not matrices. `[batch, 16]` to `[batch, 8]`."""
    x = hk.Linear(32, name="first")(x)
    x = hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training)
    x = jax.nn.gelu(x)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
    return hk.Linear(8, name="second")(x)


def inputs(number):
    """A batch of inputs and targets."""
    random = np.random.default_rng(number)
    x = random.standard_normal((8, 16), np.float32)
    return x, np.tanh(x[:, :8] * 2)


def tree_of(arrays, prefix):
    """`{module: {name: array}}` of the arrays whose names begin with a prefix."""
    tree = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            module, last = name.removeprefix(prefix).rsplit("/", 1)
            tree.setdefault(module, {})[last] = array
    return tree


def main(paths):
    from safetensors.numpy import load_file

    model = hk.transform_with_state(forward)
    for path in paths:
        arrays = load_file(path)
        params, state = (tree_of(arrays, f"{part}/") for part in ("params", "state"))
        out, _ = model.apply(params, state, None, inputs(100)[0], False)
        print(float(np.abs(out - arrays["out"]).max() / np.abs(arrays["out"]).max()))
    assert not any(name.startswith("haiku_implicit") for name in sys.modules)


if __name__ == "__main__":
    main(sys.argv[1:])
