"""Module expressions as text, as a page and as a graph; and how many operations are counted."""

import functools
import html.parser
import re

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from haiku_implicit.mox import make_mox
from haiku_implicit.mox.show.flops import flops
from tests.haiku_models import MODELS, X
from tests.mox.bodies import BODIES, stacked
from tests.tiers import few

IMAGE = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)


def expression(fun, *args):
    return make_mox(hk.transform_with_state(fun))(*args)


class Block(hk.Module):
    def __call__(self, x):
        x = x + hk.MultiHeadAttention(
            2, 8, model_size=16, w_init=hk.initializers.Constant(1.0), name="attention"
        )(x, x, x)
        x = hk.LayerNorm(-1, True, True, name="norm")(x)
        return x + hk.nets.MLP([32, 16], name="mlp")(x)


@functools.cache
def blocks():
    def f(x):
        x = hk.Linear(16, name="embed")(x)
        for _ in range(3):
            x = Block(name="block")(x)
        for i in range(2):
            x = hk.LayerNorm(-1, True, True, name=f"norm_{i}")(x)
            x = hk.Linear(16, name=f"dense_{i}")(x)
        return hk.Linear(5, name="head")(x)

    return expression(f, TOKENS)


def resnet_block(x):
    options = {"create_scale": True, "create_offset": True, "decay_rate": 0.9}
    return hk.nets.ResNet.BlockV1(8, (2, 2), True, options, bottleneck=False)(x, True, False)


def attention(x):
    return hk.MultiHeadAttention(2, 8, model_size=16, w_init=hk.initializers.Constant(1.0))(x, x, x)


# --- operations ------------------------------------------------------------------------------------

COUNTED = {
    "mlp": (lambda x: hk.nets.MLP([64, 16])(x), TOKENS),
    "resnet block": (resnet_block, IMAGE),
    "attention": (attention, TOKENS),
    "transposed": (lambda x: hk.Conv2DTranspose(6, 3, 2)(x), IMAGE),
    "dilated, in groups": (lambda x: hk.Conv2D(6, 3, rate=2, feature_group_count=3)(x), IMAGE),
    "pool": (lambda x: hk.max_pool(x, (2, 2, 1), (2, 2, 1), "SAME"), IMAGE),
}


@pytest.mark.parametrize("name", few(COUNTED, "mlp", "resnet block"))
def test_operations_are_those_that_xla_counts(name):
    fun, x = COUNTED[name]
    model = hk.transform_with_state(fun)
    params, state = jax.eval_shape(model.init, jax.random.key(0), x)
    run = jax.jit(lambda params, state, x: model.apply(params, state, None, x)[0])
    cost = run.lower(params, state, x).cost_analysis()
    counted = cost["flops"] + (cost.get("transcendentals") or 0)
    assert flops(make_mox(model)(x).body) == pytest.approx(counted, rel=0.01)


def test_operations_in_loops_and_branches():
    one = flops(expression(lambda x: hk.Linear(4)(x), X).body)
    (scan,) = expression(stacked, X).query("//scan")
    assert flops(scan) == 3 * one
    inner, outer = jnp.tanh, lambda h: h @ h.T @ h
    (cond,) = expression(lambda x: jax.lax.cond(x[0, 0] > 0, inner, outer, x), X).query("//cond")
    assert flops(cond) == max(X.size, 2 * 2 * 6 * 6 * 4)


# --- text ------------------------------------------------------------------------------------------


def test_repeated_modules_are_one_line():
    lines = str(blocks()).split("\n")
    assert lines == [
        "model: f32[2,8,16] -> f32[2,8,5]",
        "  embed: Linear  f32[2,8,16] -> f32[2,8,16]  272 parameters",
        "  block … block_2 × 3: Block  f32[2,8,16] -> f32[2,8,16]  2,192 parameters each",
        "    attention: MultiHeadAttention  f32[2,8,16], f32[2,8,16], f32[2,8,16] -> f32[2,8,16]  "
        "1,088 parameters",
        *(
            f"      {name}: Linear  f32[2,8,16] -> f32[2,8,16]  272 parameters"
            for name in ("query", "key", "value", "linear")
        ),
        "    norm: LayerNorm  f32[2,8,16] -> f32[2,8,16]  32 parameters",
        "    mlp: MLP  f32[2,8,16] -> f32[2,8,16]  1,072 parameters",
        "      linear_0: Linear  f32[2,8,16] -> f32[2,8,32]  544 parameters",
        "      linear_1: Linear  f32[2,8,32] -> f32[2,8,16]  528 parameters",
        "  repeated × 2:",
        "    norm_{0..1}: LayerNorm  f32[2,8,16] -> f32[2,8,16]  32 parameters each",
        "    dense_{0..1}: Linear  f32[2,8,16] -> f32[2,8,16]  272 parameters each",
        "  head: Linear  f32[2,8,16] -> f32[2,8,5]  85 parameters",
        lines[-1],
    ]
    assert re.fullmatch(r"7,541 parameters \(30.2 kB\), \d+ equations, [\d.]+ kflop", lines[-1])


def test_depth():
    assert blocks().show() == str(blocks())
    top = blocks().show(depth=1).split("\n")
    assert [line.split(":")[0].strip() for line in top[1:-2]] == [
        *("embed", "block … block_2 × 3", "repeated × 2", "norm_{0..1}", "dense_{0..1}", "head")
    ]
    assert top[-2] == "(to depth 1 of 3)"
    assert blocks().show(depth=0).split("\n")[0] == top[0]
    for depth in (-1, "2"):
        with pytest.raises(ValueError, match="^depth: expected a number of levels"):
            blocks().show(depth=depth)


def test_repr_is_one_line():
    assert "\n" not in repr(blocks())
    assert repr(blocks()).startswith("<Mox: f32[2,8,16] -> f32[2,8,5]: 7,541 parameters")


def test_a_shared_module_and_other_methods():
    class Tied(hk.Module):
        def encode(self, x):
            return x @ hk.get_parameter("w", (4, 4), init=jnp.ones)

    def f(x):
        tied = Tied()
        for _ in range(3):
            x = tied.encode(x)
        return x

    lines = str(expression(f, X)).split("\n")
    assert lines[1] == "  tied × 3: Tied.encode  f32[6,4] -> f32[6,4]  16 parameters each"
    assert lines[2].startswith("16 parameters (64 B), 3 equations")


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_loops_and_branches_are_lines(model):
    mox = expression(model, jnp.ones((2, 4)))
    count = sum(v.aval.size for slot in mox.interface.params.values() for v in slot.atoms)
    (line,) = [x for x in str(mox).split("\n") if x.strip().startswith("inner")]
    assert line.endswith(f"  {count} parameters")
    if model.__name__ in ("scanned", "stacked"):
        assert "  scan × 3:" in str(mox)


def test_a_long_model_is_cut_to_some_depth():
    n = 25

    def f(x):
        for i in range(n):
            x = hk.nets.MLP([5 + i, 4], name=f"net_{chr(97 + i)}")(x)
        return x

    mox = expression(f, X)
    assert len(str(mox).split("\n")) == 1 + n + 2 and "(to depth 1 of 2)" in str(mox)
    assert len(mox.show().split("\n")) == 1 + n + 2 * n + 1


# --- the page --------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Reads a page, whose tags have to be balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def test_the_page_has_every_module_and_parameter():
    text = blocks().to_html()
    page = Page(text)
    modules = blocks().select(hk.Module)
    assert len(page.all("details")) == len(modules)
    paths = [row["data-p"] for row in page.all("div") if "data-p" in row]
    assert sorted(paths) == sorted("/".join(path) for path in blocks().interface.params)
    assert any(x.startswith("7,541 parameters (30.2 kB), ") for x in page.texts)
    assert {"MultiHeadAttention", "2,192", "f32[2,8,16] -> f32[2,8,5]"} <= set(page.texts)


def test_the_page_needs_no_network():
    text = blocks().to_html()
    assert "http:" not in text and "https:" not in text and "url(" not in text
    assert "default-src 'none'" in text
    assert all("src" not in attrs and "href" not in attrs for _, attrs in Page(text).tags)


def test_names_do_not_become_html():
    bad = "<script>alert(1)</script>\"'&"

    class Harmful(hk.Module):
        def __call__(self, x):
            self.module_name = f"{bad}\0"  # what Haiku would refuse
            return x * hk.get_parameter(bad, (), init=jnp.ones)

    Harmful.__name__ = bad
    mox = expression(lambda x: Harmful(name="harmful")(x), X)
    for text in (mox.to_html(), mox.to_html(values={f"{bad}\0/{bad}": 1})):
        assert Page(text).all("script") == [{}]
        assert "alert(1)" in text and "<script>alert" not in text and "\0" not in text
    frame = Page(mox._repr_html_())
    assert [tag for tag, _ in frame.tags] == ["iframe"]
    assert frame.tags[0][1]["srcdoc"].replace("\r", "") == mox.to_html()


def test_numbers_by_path_are_shown():
    values = {"block/mlp/~/linear_0": 0.125, "block_1/mlp/~/linear_1/w": 4, "head": float("nan")}
    text = blocks().to_html(values=values)
    page = Page(text)
    # The layer, the network and the block around it; of the parameter, its layer, too.
    assert page.texts.count("0.125") == 3 and page.texts.count("4") == 4
    assert page.texts.count("nan") == 1
    assert {"values 0.125 ", " 4"} <= set(page.texts)  # the legend
    shares = [x["style"] for x in page.all("b") if "style" in x]
    assert shares == ["--v:0.000"] * 3 + ["--v:1.000"] * 4 + ["--v:0.000"]


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"block/mpl": 1.0},
            "^values: the model has no module and no parameter 'block/mpl'.*block/mlp",
        ),
        ({"head": "large"}, "^values: expected a number for 'head', got 'large'"),
        ({"head": jnp.ones(3)}, "^values: expected a number for 'head'"),
    ],
)
def test_what_is_wrong_with_values_is_said(values, message):
    with pytest.raises(ValueError, match=message):
        blocks().to_html(values=values)


def test_the_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "model.html"
    path.write_text("old")
    text = blocks().to_html(path)
    assert path.read_text(encoding="utf-8") == text

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="full"):
        blocks().to_html(str(path))
    assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


# --- the graph -------------------------------------------------------------------------------------

QUOTED = r'"(?:[^"\\]|\\.)*"'
LINES = [
    r"digraph model \{",
    rf"(?:node|graph) \[(?:\w+={QUOTED}(?:, )?)+\];",
    rf"n\d+ \[label={QUOTED}(?:, shape={QUOTED})?\];",
    r"subgraph cluster_n\d+ \{",
    rf"label={QUOTED};",
    r"n\d+ -> n\d+;",
    r"\}",
]


def check_graph(text):
    """That a graph is in the part of Graphviz's language that is used, and joins what there is."""
    lines = [line.strip() for line in text.rstrip("\n").split("\n")]
    for line in lines:
        assert any(re.fullmatch(pattern, line) for pattern in LINES), line
    assert sum(line.endswith("{") for line in lines) == lines.count("}")
    made = re.findall(r"^ *(n\d+) \[", text, re.MULTILINE)
    joined = re.findall(r"(n\d+) -> (n\d+);", text)
    assert len(made) == len(set(made)) and {x for pair in joined for x in pair} <= set(made)
    return joined


def labels(text):
    return dict(re.findall(r'(n\d+) \[label="(.*?)"', text))


@pytest.mark.parametrize("name", few(MODELS, "mlp", "nested_modules"))
def test_any_model_is_a_graph(name):
    mox = expression(MODELS[name], X)
    for depth in (None, 1):
        joined = check_graph(mox.to_dot(depth=depth))
    assert joined


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_values_go_through_loops_and_branches(model):
    text = expression(model, jnp.ones((2, 4))).to_dot()
    joined, names = check_graph(text), labels(text)
    reached = {n for n, label in names.items() if label == "x"}
    for _ in joined:
        reached |= {end for start, end in joined if start in reached}
    assert {"dot_general\\nw", "result"} <= {names[n] for n in reached}


def test_a_graph_with_a_relu():
    text = expression(lambda x: hk.nets.MLP([8, 3])(x), X).to_dot()
    check_graph(text)
    assert {"custom_jvp_call relu", "dot_general\\nw"} <= set(
        labels(text).values()
    ) or "jit relu" in text
    assert text.count("subgraph") == 3


def test_names_in_a_graph_are_quoted():
    class Odd(hk.Module):
        def __call__(self, x):
            self.module_name = 'a"]; b -> c \\ \n <i>'
            return x + 1

    check_graph(expression(lambda x: Odd()(x), X).to_dot())


@pytest.mark.parametrize("depth", [0, -1, "1"])
def test_a_depth_that_is_none(depth):
    with pytest.raises(ValueError, match="^depth: expected a number of levels, 1 or more"):
        blocks().to_dot(depth=depth)
