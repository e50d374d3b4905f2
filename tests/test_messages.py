"""The messages that `docs/errors.md` explains are those that people see, and the ways out work."""

import ast
import builtins
import collections
import dataclasses
import json
import logging
import pathlib
import re
import tempfile
import warnings
from unittest import mock

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from docs import list_messages
from haiku_implicit.core import serialization
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.messages import _SECTIONS, imported
from haiku_implicit.quantized.cpu import build
from tests.pages import DOCS, ROOT
from tests.tiers import few

PARAMS = {"a": {"w": jnp.ones((8, 8))}}
X = jnp.ones((2, 8))
TUNED = hki.add_lora(hki.quantize_params(PARAMS), 0, rank=2)
TRAINED, FROZEN = hki.partition(TUNED)


def product(params):
    return (X @ params["a"]["w"]).sum()


LOSS = hki.use_implicit_args(product)


def finite_outside():
    optimizer = optax.apply_if_finite(hki.freeze_declared(optax.sgd(0.1)), 1)
    optimizer.update(hki.grad(product)(TUNED), optimizer.init(TUNED), TUNED)


def plain_optax():
    optimizer = optax.adam(0.1)
    optimizer.update(hki.grad(product)(TUNED), optimizer.init(TUNED), TUNED)


def other_half():
    grads = jax.grad(lambda trained: LOSS(hki.combine(trained, FROZEN)))(TRAINED)
    optax.adam(0.1).update(grads, optax.adam(0.1).init(FROZEN), TRAINED)


def trained(rank):
    """The arrays that training gets from `hki.freeze`."""
    model = hk.transform(lambda x: hk.Linear(8, name="a", with_bias=False)(x))
    return hki.freeze(model, hki.add_lora(PARAMS, 0, rank=rank))[1]


def cast(params, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), params)


def batch_norm():
    norm = lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=False)  # noqa: E731
    hk.transform_with_state(norm).init(jax.random.key(0), X)


def a_model(params=PARAMS):
    """A model that `hki.freeze` takes, and the arrays that it trains."""
    model = hk.transform(lambda x: hk.Linear(8, name="a", with_bias=False)(x))
    return hki.freeze(model, params)


def step(of_optimizer, of_state, of_grads):
    """A step with a bias, and `trainable_dense=` of the optimizer, its state and the gradients."""
    params = {**LORA, "b": {"b": jnp.ones(8)}}
    loss = lambda p: product(p) + p["b"]["b"].sum()  # noqa: E731
    optimizer, other = (
        hki.freeze_declared(optax.adam(0.1), trainable_dense=dense)
        for dense in (of_optimizer, of_state)
    )
    grads = hki.grad(loss, trainable_dense=of_grads)(params)
    optimizer.update(grads, other.init(params), params)


LORA = hki.add_lora(PARAMS, 0, rank=2)
MESH = AbstractMesh((3,), ("d",))
ATTENTION = hk.without_apply_rng(
    hk.transform(
        lambda x: jnp.einsum("xi,ihw->xhw", x, hk.get_parameter("w", (8, 2, 6), init=jnp.ones))
    )
)
STATIC = hki.quantization.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
MOX = hki.mox.make_mox(
    hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8, False, name="a")(x)))
)(X)


def reading(change=lambda data: data, name="x.safetensors", tree=PARAMS, **options):
    """Writes a file, changes its bytes, and reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / name
        hki.save(path, tree)
        path.write_bytes(change(path.read_bytes()))
        hki.load(path, **options)


def of_unknown_type():
    def forgotten(data):
        patch.start()
        return data

    patch = mock.patch.object(serialization, "node_named", lambda name: None)
    try:
        reading(forgotten, tree=LORA)
    finally:
        patch.stop()


def saving(x):
    with tempfile.TemporaryDirectory() as folder:
        hki.save(pathlib.Path(folder) / "x.safetensors", {"a": x})


@dataclasses.dataclass
class Wrong(ImplicitArray):
    """A type that says another shape than it makes."""

    x: jax.Array

    def compute_shape(self):
        return (5,)

    def compute_dtype(self):
        return self.x.dtype

    def materialize(self):
        return self.x


def wrong_rule(kind):
    """A rule of a type of its own, so that no other test sees it."""

    @dataclasses.dataclass
    class Own(ImplicitArray):
        x: jax.Array

        def materialize(self):
            return self.x

    @hki.primitive_handler("sin")
    def sin(primitive, x: Own, **params):
        return None if kind == "none" else jnp.ones(2)

    return lambda: hki.use_implicit_args(jnp.sin)(Own(jnp.ones(3)))


def logged():
    """Raises the text that the log has without a compiler."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("absl")
    log.addHandler(handler)
    try:
        with mock.patch.object(build, "register", side_effect=build.BuildError("no C++ compiler")):
            build._registered.__wrapped__()
    finally:
        log.removeHandler(handler)
    raise RuntimeError(*lines)


@jax.tree_util.register_pytree_node_class
class Flat:
    """A container that keeps its leaves flat, and is not a mapping."""

    def __init__(self, tree):
        self.leaves, self.treedef = jax.tree.flatten(tree)

    def tree_flatten(self):
        return self.leaves, self.treedef

    @classmethod
    def tree_unflatten(cls, treedef, leaves):
        new = object.__new__(cls)
        new.leaves, new.treedef = list(leaves), treedef
        return new


# JAX has the first one up to 0.9, then the second one.
OF_OTHER_ARRAYS, OF_ANOTHER_JAX = sorted(
    ["Dict key mismatch", "pytree structure error: different ... has"],
    reverse=jax.__version_info__ >= (0, 10),
)
OF_FROZEN_ARRAYS, OF_FROZEN_ELSEWHERE = sorted(
    ["Custom node type", "pytree structure error: different types"],
    reverse=jax.__version_info__ >= (0, 10),
)
# By the beginning of a message on the page, or all of it: what leads to it.
MISTAKES = {
    "grad requires real- or complex-valued inputs": lambda: jax.grad(LOSS)(TUNED),
    OF_FROZEN_ARRAYS: plain_optax,
    "cond branch outputs must": finite_outside,
    "... was used as if it were a dense array.": lambda: product(TUNED),
    "... is None": lambda: LOSS(hki.partition(hki.add_lora(PARAMS, 0, rank=2))[0]),
    "... are None": lambda: LOSS(TRAINED),
    "None is not a valid value": lambda: jax.tree.map(
        jnp.array, TRAINED, is_leaf=lambda x: x is None
    ),
    "with_dropout: expected": lambda: hki.value_and_grad(
        lambda p: product(hki.with_dropout(p, 0, 0.5))
    )(TUNED),
    "targets: ... matches none": lambda: hki.add_lora(PARAMS, 0, rank=2, targets="attention"),
    "... stays dense": lambda: hki.quantize_params(
        {**PARAMS, "b": {"w": jnp.ones((9, 8))}}, group_size=8
    ),
    "weights of more than two axes": lambda: hki.add_lora(
        {"a": {"w": jnp.ones((8, 4, 4))}}, 0, rank=4, matrix_axes={}
    ),
    "nothing says which axes of": lambda: hki.add_lora(
        {"a": {"w": jnp.ones((8, 4, 4))}}, 0, rank=2
    ),
    "... was materialized": lambda: hki.use_implicit_args(lambda p: jnp.sin(p["a"]["w"]))(TUNED),
    "codes of ...": lambda: LOSS(cast(TUNED, jnp.float8_e4m3fn)),
    "Indexer must have": lambda: LOSS(
        cast(hki.add_adapter(PARAMS, 0, "trained_rows", ids=[3]), jnp.bfloat16)
    ),
    "unsupported operand type(s) for *: 'float' and 'NoneType'": other_half,
    "add got incompatible shapes": lambda: optax.adam(0.1).update(
        trained(4), optax.adam(0.1).init(trained(2)), trained(4)
    ),
    OF_OTHER_ARRAYS: lambda: optax.adam(0.1).update(
        trained(2), optax.adam(0.1).init(PARAMS), trained(2)
    ),
    "The number of updates": lambda: optax.adamw(0.1).update(
        trained(2), optax.adam(0.1).init(trained(2)), trained(2)
    ),
    "No value for 'average'": batch_norm,
    "a rule for": wrong_rule("two"),
    "rule ...": wrong_rule("none"),
    "... has no '...'. Use": lambda: TUNED["a"]["w"].T,
    "...: a half of ...": lambda: hki.quantize_params(TRAINED),
    "trainable_dense: ... matches": lambda: hki.partition(
        hki.add_lora({**PARAMS, "b": {"b": jnp.ones(8)}}, 0, rank=2), "a/w"
    ),
    "targets: no parameter is": lambda: hki.add_lora(PARAMS, 0, rank=2, targets=["b/w"]),
    "exclude: it leaves out": lambda: hki.add_lora(PARAMS, 0, rank=2, targets=".*", exclude=".*"),
    "targets: all ...": lambda: hki.quantize_params(hki.quantize_params(PARAMS)),
    "this is LoRA already": lambda: hki.add_lora(LORA, 0, rank=2, targets=".*"),
    "this is ..., and only": lambda: hki.quantize_params(
        hki.zero_params(PARAMS, targets=".*"), targets=".*"
    ),
    "... needs a floating-point": lambda: hki.quantize_params(
        {"a": {"b": jnp.ones(8)}}, targets=".*"
    ),
    "weights whose axis -2": lambda: hki.quantize_params(
        {**PARAMS, "conv": {"w": jnp.ones((3, 3, 1, 8))}}
    ),
    "trainable_dense: ... trains": lambda: hki.partition(
        {**LORA, "head": {"w": LORA["a"]["w"], "b": jnp.ones(8)}}, "head/.*"
    ),
    "group_size: expected None": lambda: hki.quantize_params(PARAMS, group_size=3, targets=".*"),
    "targets: none of the ... is a weight": lambda: hki.add_lora(PARAMS, 0, rank=9),
    "targets: none of the ... is a dense": lambda: hki.quantize_params(PARAMS, group_size=3),
    "Unable to retrieve": lambda: hk.without_apply_rng(
        hk.transform(lambda x: hk.Linear(8, False, name="a")(x))
    ).apply({"a": {"w_lora_a": jnp.ones((8, 2))}}, X),
    "LoRA of rank": lambda: hki.add_lora(PARAMS, 0, rank=9, targets=".*"),
    "... no adapter, because": lambda: hki.add_lora(
        {**PARAMS, "b": {"w": jnp.ones((8, 3))}}, 0, rank=4
    ),
    "VBLoRA: the weight has": lambda: hki.use_implicit_args(product)(
        hki.add_adapter(PARAMS, 0, "vblora", rank=1, vector_length=4)
    ),
    "bwd_stochastic_rounding": lambda: jax.grad(
        lambda w: hki.quantization.dot_general(
            X,
            w,
            (((1,), (0,)), ((), ())),
            rule=hki.quantization.QtRule(
                weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform"
            ),
        ).sum()
    )(PARAMS["a"]["w"]),
    "act_static_scale: there are": lambda: hki.value_and_grad(product)(
        hki.quantized_training(PARAMS, [STATIC])
    ),
    "params: ... is missing": lambda: a_model(LORA)[0].apply(PARAMS, None, X),
    "params: ... is a trained array": lambda: hki.add_lora(a_model(LORA)[1], 0, rank=2),
    "model: it is from hki.freeze": lambda: hki.freeze(*a_model(LORA)),
    "trainable_dense: no array": lambda: a_model(PARAMS),
    "... the adapter was made for": lambda: hki.set_adapter(
        {"a": {"w": 2 * PARAMS["a"]["w"]}}, hki.get_adapter(LORA)
    ),
    "... the adapter is for this": lambda: hki.set_adapter({}, hki.get_adapter(LORA)),
    "... the adapter is for shape": lambda: hki.set_adapter(
        {"a": {"w": jnp.ones((8, 1))}}, hki.get_adapter(LORA), check_base=False
    ),
    "digests: ...": lambda: a_model(LORA)[0].check_digests(a_model(TUNED)[0].digests()),
    "requantize: rounding again": lambda: hki.merge_lora(
        {"a": {"w": TUNED["a"]["w"]._replace(b=jnp.full((2, 8), 0.01))}}, requantize=True
    ),
    "state: ..., which the": lambda: step(True, False, True),
    "state: it is for": lambda: hki.freeze_declared(optax.adam(0.1)).update(
        LORA, hki.freeze_declared(optax.adam(0.1)).init(hki.add_lora(PARAMS, 0, rank=1))
    ),
    "updates: the optimizer": lambda: hki.freeze_declared(optax.adam(0.1)).update(
        LORA, optax.adam(0.1).init(PARAMS)
    ),
    "...: the optimizer trains": lambda: step(True, True, False),
    "...: there is a gradient": lambda: step(False, False, True),
    "...: expected a gradient": lambda: hki.freeze_declared(optax.adam(0.1)).update(
        hki.add_lora(PARAMS, 0, rank=1), None, LORA
    ),
    "... it is truncated": lambda: reading(lambda data: data[:-8]),
    "... not a whole": lambda: reading(lambda data: data[:20]),
    "... its bytes have": lambda: reading(lambda data: data[:-1] + b"x"),
    "...: not ..., but": lambda: reading(lambda data: b"GGUF" + data),
    "this program does not": of_unknown_type,
    "...: missing in": lambda: reading(like={**PARAMS, "b": jnp.ones(1)}),
    "...: expected ..., found": lambda: reading(like={"a": {"w": jnp.ones(3)}}),
    "files cannot hold": lambda: saving(object()),
    "... can't be saved": lambda: hki.mox.save(
        "/", hki.mox.make_mox(hk.transform(lambda x, f: f(x)))(X, jnp.sin)
    ),
    "... has no values": lambda: hki.materialize(jax.eval_shape(lambda: TUNED)),
    "... a tracer": lambda: jax.jit(saving)(jnp.ones(2)),
    "...: pip install": lambda: imported("no_such_module", "it needs no_such", "no_such"),
    "products with quantized": logged,
    "....materialize()": lambda: hki.materialize(Wrong(jnp.ones(3))),
    "... this container": lambda: hki.use_implicit_args(lambda x: x)(Flat(TUNED)),
    "auto_in_axes: the tree": lambda: hki.auto_in_axes(
        hk.data_structures.to_immutable_dict(TUNED), 8
    ),
    "auto_in_axes: no array": lambda: hki.auto_in_axes(PARAMS, 5),
    "auto_in_axes: ... is a": lambda: hki.auto_in_axes(
        {"z": hki.Zeros(shape=(8,), dtype=jnp.float32), "x": X.T}, 8
    ),
    "...: no pattern": lambda: hki.shardings(PARAMS, [("b", P())], MESH),
    "... the mesh has": lambda: hki.shardings(PARAMS, [(".*", P("y"))], MESH),
    "... can't be cut": lambda: hki.shardings(PARAMS, [(".*", P("d"))], MESH),
    "... can't be split": lambda: hki.shardings(
        hki.prepare(ATTENTION, ATTENTION.init(jax.random.key(0), X), X),
        [(".*", P(None, None, "d"))],
        MESH,
    ),
    "...: the expression": lambda: MOX.apply(PARAMS, X[:, :2]),
    "state: expected the": lambda: hki.convert_trained(
        hki.quantized_training(PARAMS, [STATIC]), state={}
    ),
    "...: expected ..., got": lambda: hki.LoRA(X, X, X),
}
# Those that compile most.
LONG = [
    "bwd_stochastic_rounding",
    "VBLoRA: the weight has",
    "state: expected the",
    "act_static_scale: there are",
    "... can't be saved",
    "...: the expression",
    "digests: ...",
    "model: it is from hki.freeze",
    "this is LoRA already",
    "targets: all ...",
]
OF_TYPEOF = "Triggering __jax_array__() during abstractification is no longer supported."
# `test_static_scales.py` sees it.
NOT_COUNTED = "state: nothing is counted in the statistics of ..."
OF_JAX_ALONE = "Unable to initialize backend 'tpu'"
# `test_freeze.py` sees these, on JAX from 0.9 on.
OF_REFERENCES = [
    "Received incompatible devices for jitted computation",
    "Too many leaves for PyTreeDef; expected ...",
]


def sections(part):
    """The anchors and messages of the sections of a part of the page."""
    page = (DOCS / "errors.md").read_text()
    text = page.partition(f"\n## Messages of {part}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^### (.+)\n\n((?:- `.*`\n)+)", text, re.MULTILINE)
    assert len(found) == text.count("\n### ")
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): re.findall("- `(.*)`", shown)
        for title, shown in found
    }


OURS, OTHERS = sections("this library"), sections("JAX, Haiku and optax")


def messages():
    return [message for of_one in (OURS | OTHERS).values() for message in of_one]


def said(mistake):
    """The text of the error, or of the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            mistake()
        except Exception as error:
            return " ".join(str(error).split())
    return " ".join(str(warning.message) for warning in found)


@pytest.mark.all_slow
@pytest.mark.parametrize("start", few(MISTAKES, *(x for x in MISTAKES if x not in LONG)))
def test_a_message_on_the_page_is_what_people_see(start):
    [message] = [x for x in messages() if x.startswith(start)]
    pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
    found = said(MISTAKES[start])
    assert re.search(pattern, found), (message, found)
    links = [f"(docs/errors.md#{anchor})" for anchor, own in OURS.items() if message in own]
    assert all(map(found.endswith, links)), (links, found)


def test_each_link_leads_to_a_section_and_each_section_has_a_link():
    sources = [path.read_text() for path in (ROOT / "haiku_implicit").rglob("*.py")]
    links = {link for text in sources for link in re.findall(r"""see\(["'](.+?)["']\)""", text)}
    rest = (DOCS / "errors.md").read_text().partition("\n## All other messages\n")[2]
    shared = {x.lower().replace(" ", "-") for x in re.findall("(?m)^### (.+)", rest)}
    assert {*OURS} < links <= {*OURS, *shared} and shared == set(_SECTIONS.values())


def test_errors_of_python_types_end_in_a_link():
    """`value_error` and `type_error` make most of them. Protocols, tries and reports keep their own."""
    kept = {"AttributeError", "KeyError", "EOFError", "AssertionError", "PermissionError"}
    wrong = []
    for path in (ROOT / "haiku_implicit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                name, text = node.func.id, ast.unparse(node)
                is_error = name.endswith("Error") and name in vars(builtins) and name not in kept
                if is_error and not re.search(r"see\(|linked\(|errno|\(text\)", text):
                    wrong.append(f"{path.name}:{node.lineno}: {text}")
    assert not wrong


def parts_of(text):
    """The parts of a message without names and numbers, as the list on the page has them."""
    return {
        part.strip(" .,;:()") for part in text.replace("`", "'").replace("\n", " ").split("...")
    }


def test_the_site_has_every_message():
    page = (DOCS / "errors.md").read_text()
    assert "\n### Files\n" in page and len(list_messages.MARK.findall(page)) == 4
    shown = list_messages.with_messages(page)
    found = [text for texts in list_messages.messages().values() for text in texts]
    assert len(found) > 1000 and all(f"- `{text}`\n" in shown for text in found)
    assert "<!-- messages" not in shown
    assert "- `init: 'orthogonal' needs an even rank, got ...`\n" in shown


def raised_texts(tree):
    """The constant texts in each `raise`, and in all that is assigned to the names in it."""
    assigned = collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            for target in getattr(node, "targets", None) or [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        assigned[name.id].append(node.value)
    todo = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]
    while todo:
        for node in ast.walk(todo.pop()):
            if isinstance(node, ast.Name):
                todo += assigned.pop(node.id, [])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.slow
def test_the_list_has_the_texts_of_every_raise():
    listed, seen = list_messages.messages(), 0
    for name, texts in listed.items():
        path, own = ROOT / "haiku_implicit" / name, "\n".join(texts)
        for text in raised_texts(ast.parse(path.read_text())):
            is_pattern = re.search(r"\\[(\[w]|^F16 BF16", text)
            for part in parts_of(text):
                if list_messages.tells(part) and not is_pattern:
                    assert part in own, (name, part)
                    seen += 1
    assert seen > 900


def wrong_file(name, data):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / name
        path.write_bytes(data)
        (hki.mox.load if path.suffix == ".json" else hki.load)(path)


def wrong_module_expression():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "x.json"
        hki.mox.save(path, MOX)
        path.write_text(json.dumps({**json.loads(path.read_text()), "implicit": 3}))
        hki.mox.load(path)


# Messages put together from variables, tables and functions.
PUT_TOGETHER = {
    "a pointer of Git LFS in place of the file": lambda: wrong_file(
        "x.npz", b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3\n"
    ),
    "a web page in place of the file": lambda: wrong_file("x.npz", b"<!DOCTYPE html><html></html>"),
    "an HDF5 file, as Keras writes it": lambda: wrong_file(
        "x.h5", b"\x89HDF\r\n\x1a\n" + b"0" * 99
    ),
    "bytes that begin with": lambda: wrong_file("x.json", b"{"),
    "it has to be a boolean": wrong_module_expression,
    "only LoRA can be combined": lambda: hki.combine_adapters(
        [hki.get_adapter(hki.add_adapter(PARAMS, 0, "dora", rank=2))], [1.0]
    ),
    "LoRA: expected w [..., n, m], a [..., n, r] and b": MISTAKES["...: expected ..., got"],
    "weights of more than two axes count as": MISTAKES["weights of more than two axes"],
    "groups of ": MISTAKES["... stays dense"],
}


@pytest.mark.slow
def test_the_list_has_messages_that_are_put_together():
    """Without the parts on the page, no words are left of a message but names."""
    listed = [text for texts in list_messages.messages().values() for text in texts]
    parts = {part for text in listed for part in parts_of(text) if len(part) > 3}
    for text, mistake in PUT_TOGETHER.items():
        left = said(mistake).replace("`", "'")
        assert text in left and any(text.split("...")[0].strip() in x for x in listed)
        for part in sorted(parts, key=len, reverse=True):
            left = left.replace(part, "|")
        words = re.findall("[a-z]{3,}", re.sub(r"\S*/\S*|\(chex.*|'[^']*'", "", left))
        assert len(words) < 5, (text, words)


def test_each_message_is_tried():
    tried = *MISTAKES, OF_ANOTHER_JAX, OF_FROZEN_ELSEWHERE
    rest = [x for x in messages() if not x.startswith(tried)]
    assert rest == [NOT_COUNTED, *OF_REFERENCES, OF_TYPEOF, OF_JAX_ALONE]
    assert len(messages()) == len(tried) + len(rest)


def test_the_type_of_an_implicit_array():
    weight = TUNED["a"]["w"]
    message = said(lambda: jax.typeof(weight))
    if jax.__version_info__ < (0, 9):  # These call `__jax_array__`, which has its own message.
        assert message.startswith(OF_TYPEOF) or "was used as if it were a dense array" in message
    else:
        assert message.startswith(OF_TYPEOF)
    assert weight.aval == jax.typeof(PARAMS["a"]["w"])
    turned = hki.use_implicit_args(lambda w: jax.lax.transpose(w, (1, 0)))(weight)
    np.testing.assert_array_equal(hki.materialize(turned), PARAMS["a"]["w"].T)


def test_the_ways_out():
    loss, grads = hki.value_and_grad(product)(TUNED)
    optimizer = hki.freeze_declared(optax.adam(0.1))
    updates, _ = optimizer.update(grads, optimizer.init(TUNED), TUNED)
    stepped = hki.apply_updates(TUNED, updates)
    assert LOSS(stepped) < loss
    grads = jax.grad(lambda trained: LOSS(hki.combine(trained, FROZEN)))(TRAINED)
    assert grads["a"]["w"].b.shape == (2, 8)
    half = hki.use_implicit_args(lambda p: cast(p, jnp.bfloat16))(TUNED)
    assert half["a"]["w"].w.codes.dtype == jnp.int8 and half["a"]["w"].dtype == jnp.bfloat16
    assert LOSS(half) == LOSS(TUNED) == 128


def test_what_has_no_message():
    """As the page says: a dense base is trained, and casts make codes large."""
    params = hki.add_lora(PARAMS, 0, rank=2)
    optimizer = optax.adamw(0.1)
    updates, _ = optimizer.update(jax.grad(LOSS)(params), optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (np.asarray(new["a"]["w"].w) != 1).all()
    large = cast(TUNED, jnp.bfloat16)
    assert large["a"]["w"].w.codes.nbytes == 2 * TUNED["a"]["w"].w.codes.nbytes
    assert LOSS(large) == LOSS(TUNED)
