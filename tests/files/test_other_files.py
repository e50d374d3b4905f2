"""Parameters in files of other programs: `.npz`, and pickles, of which nothing is run."""

import collections
import io
import os
import pickle

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import haiku_implicit as hki
from tests.files.trees import assert_same


@pytest.fixture
def path(tmp_path):
    return tmp_path / "params"


def params():
    return {
        "mlp/~/linear": {
            "w": np.arange(6, dtype=np.float32).reshape(2, 3),
            "b": np.ones(3, np.int8),
        },
        "norm": {"scale": np.ones(2, ml_dtypes.bfloat16), "on": np.array(True)},
    }


def as_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.parametrize("between", ["/", "//"])
def test_npz(between, path):
    tree = params()
    tree["norm"].pop("scale")  # NumPy's files do not have bfloat16
    arrays = {f"{m}{between}{n}": x for m, names in tree.items() for n, x in names.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)
    assert_same(hki.load(path), as_jax(tree))
    assert_same(
        hki.load(path, only=".*/w"), {"mlp/~/linear": {"w": as_jax(tree)["mlp/~/linear"]["w"]}}
    )
    with pytest.raises(hki.CheckpointError, match="norm/scale: missing in the file|expected"):
        hki.load(path, like=params())


def test_npz_with_objects_or_damage(path):
    with path.open("wb") as file:
        np.savez(file, **{"a/w": np.array([{}]), "a/b": np.ones(3)})
    with pytest.raises(hki.CheckpointError, match=r"params: a/w: it holds Python objects"):
        hki.load(path)
    whole = path.read_bytes()
    for length in (3, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(hki.CheckpointError, match="params: "):
            hki.load(path)


@pytest.mark.parametrize("text", ["license", b"license"])
def test_npz_with_texts(text, path):
    with path.open("wb") as file:
        np.savez(file, **{"a/w": np.ones(3), "license": np.array(text)})
    with pytest.raises(
        hki.CheckpointError, match="license: an array .* not numbers. numpy.load reads"
    ):
        hki.load(path)


def test_npz_with_names_of_tensorflow(path):
    with path.open("wb") as file:
        np.savez(file, **{"dense/kernel:0": np.ones(3, np.float32)})
    assert_same(hki.load(path), {"dense": {"kernel:0": jnp.ones(3)}})


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_parameters(protocol, path):
    tree = params()
    tree["norm"] |= {"big": np.arange(3, dtype=">i4"), "scalar": np.float32(2.5)}
    tree["norm"]["fortran"] = np.asfortranarray(np.arange(6).reshape(2, 3).astype(np.int16))
    tree["norm"]["more"] = [(1, None), collections.OrderedDict(a=True), "text"]
    immutable = hk.data_structures.to_immutable_dict({"m": {"w": np.ones(2)}})
    path.write_bytes(pickle.dumps({**tree, "state": immutable}, protocol))
    found = hki.load(path, allow_pickle=True, numpy=True)
    assert_same(found.pop("state"), {"m": {"w": np.ones(2)}})
    wanted = jax.tree.map(
        lambda x: x.astype(x.dtype.newbyteorder("=")) if hasattr(x, "shape") else x, tree
    )
    assert_same(found, wanted)
    assert_same(
        hki.load(path, allow_pickle=True, only="mlp.*"),
        as_jax({"mlp/~/linear": tree["mlp/~/linear"]}),
    )


def test_a_pickle_has_to_be_allowed(path):
    path.write_bytes(pickle.dumps(params()))
    with pytest.raises(
        hki.CheckpointError,
        match=r"params: not a safetensors or .npz file, but a pickle.*allow_pickle=True",
    ):
        hki.load(path)


class Calls:
    """A pickle that calls a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


MARK = []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (Calls(os.system, ("echo",)), "it has posix.system"),
        (Calls(MARK.append, (1,)), "it has builtins.getattr"),
        (Calls(eval, ("MARK.append(1)",)), "it has builtins.eval"),
        (Calls(np.load, ("x",)), r"it has numpy\.load"),
        (Calls(np.ndarray, ((2,), "O", b"0" * 16)), r"it calls numpy\.ndarray"),
        (Calls(np.dtype, ("O",)), "it has an array of 'O'"),
        (np.array([{}]), "it has an array of 'O8'"),
        (np.array(["a"]), "it has an array of 'U1'"),
        (np.zeros(1, [("a", "f4")]), "it has an array of 'V4'"),
        (hki.Zeros(shape=(1,), dtype=jnp.float32), "it has haiku_implicit.arrays"),
        (jnp.ones(1), "it has jax"),
        (np.dtype("f4"), "it has a function or a type as a value"),
        (os.system, "it has posix.system"),
    ],
)  # fmt: skip
def test_nothing_else_is_unpickled(what, message, path):
    path.write_bytes(pickle.dumps({"m": {"w": what}}))
    with pytest.raises(hki.CheckpointError, match=message) as raised:
        hki.load(path, allow_pickle=True)
    assert str(path) in str(raised.value) and not MARK


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cnumpy._core.multiarray\n_reconstruct\n}S'x'\nI1\nsb.", "it changes numpy"),
        (b"\x80\x04cnumpy\nndarray\nN}S'__doc__'\nI1\ns\x86b.", "it changes numpy.ndarray"),
        (b"cnumpy\ndtype\n(S'f4'\ntR(I3\nS'<'\n(S'f4'\n(I2\ntttb.", "not a whole pickle|records"),
        (b"cbuiltins\nexec\n(S'MARK.append(1)'\ntR.", "it has builtins.exec"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.", "it has numpy.dtype.__class__"),
        (b"not a pickle", "not a whole pickle"),
        (b"", "but an empty file"),
    ],
)  # fmt: skip
def test_pickles_that_were_made_by_hand(text, message, path):
    path.write_bytes(text)
    with pytest.raises(hki.CheckpointError, match=message):
        hki.load(path, allow_pickle=True)
    assert not MARK


def test_bytes_that_do_not_fit(path):
    buffer = io.BytesIO()
    pickle.dump(np.arange(3, dtype=np.float32), buffer, 2)
    data = buffer.getvalue()
    for cut in range(len(data)):
        path.write_bytes(data[:cut] + data[cut + 1 :])
        try:
            hki.load(path, allow_pickle=True)
        except hki.CheckpointError as e:
            assert "params: " in str(e)
