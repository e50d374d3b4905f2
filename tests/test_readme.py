"""The documents: their examples run, and the files, headings and names that they mention exist."""

import contextlib
import copy
import functools
import io
import os
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from docs import type_tables
from tests.pages import (
    DOCS,
    DOCUMENTS,
    INDICES,
    PAGES,
    PROGRAMS,
    README,
    ROOT,
    SINGLE,
    code_blocks,
    name_of,
)  # fmt: skip


def test_the_three_lines_run():
    code, _ = code_blocks(README)[0]
    assert len(code.splitlines()) == 3
    assert code_blocks(DOCS / "index.md")[0][0] == code
    key, batch = jax.random.key(0), jnp.ones((8, 64))

    def forward(x):
        return hk.nets.MLP([32, 10])(x)

    transformed = hk.transform(forward)
    scope = dict(hk=hk, hki=hki, jax=jax, forward=forward, loss_of=jnp.var)
    scope.update(key=key, batch=batch, params=transformed.init(key, batch))
    exec(compile(code, str(README), "exec"), scope)
    assert scope["grads"]["mlp/~/linear_1"]["w_lora_b"].shape == (8, 10)
    whole = scope["model"].params(scope["params"])
    expected = jnp.var(transformed.apply(hki.materialize(whole), key, batch))
    assert jnp.allclose(scope["loss"], expected, rtol=1e-5)


def test_example_prints_what_the_readme_shows():
    ((code, shown),) = [(code, shown) for code, shown in code_blocks(README) if shown]
    assert printed_by(code, README) == shown
    assert len([line for line in code.splitlines() if line]) <= 15


def printed_by(code, document, scope=None):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(document), "exec"), {} if scope is None else scope)
    return printed.getvalue().replace("PartitionSpec(", "P(")  # JAX before 0.9


@pytest.mark.all_slow
@pytest.mark.slow
@pytest.mark.parametrize("page", SINGLE, ids=name_of)
def test_examples_print_what_the_pages_show(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for files that examples write
    for code, shown in code_blocks(page):
        if shown:
            assert printed_by(code, page) == shown


@pytest.mark.all_slow
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for code, shown in code_blocks(DOCS / name):
        assert printed_by(code, DOCS / name, scope) == shown, code


@pytest.mark.slow
@pytest.mark.all_slow
@pytest.mark.parametrize("notebook", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(notebook, tmp_path):
    """Each cell runs, and prints what the notebook shows, numbers up to what another CPU may change."""
    import nbclient  # here, as it takes long
    import nbformat

    shown = nbformat.read(notebook, as_version=4)
    ran = copy.deepcopy(shown)
    client = nbclient.NotebookClient(ran, timeout=3600, resources={"metadata": {"path": tmp_path}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    for now, before in zip(ran.cells, shown.cells, strict=True):
        (texts, numbers), (want_texts, want_numbers) = map(printed_in, (now, before))
        assert texts == want_texts, now.source
        np.testing.assert_allclose(numbers, want_numbers, rtol=0.1, atol=0.02)
    assert any(numbers for _, numbers in map(printed_in, shown.cells))


def printed_in(cell):
    """What a cell of a notebook prints: the text between numbers, and the numbers."""
    printed = [out.text for out in cell.get("outputs", ()) if out.get("name") == "stdout"]
    number = r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
    words = [re.sub(r"\s+", " ", text) for text in re.split(number, "".join(printed))]
    return words, [float(x.replace(",", "")) for x in re.findall(number, "".join(printed))]


def test_every_public_name_is_on_one_page_of_names():
    modules = {hki.adapters, hki.layers, hki.mox, hki.quantization}
    expected = {
        f"{module.__name__}.{name}"
        for module in (hki, *modules)
        for name in module.__all__
        if getattr(module, name) not in modules
    }
    pages = [*(DOCS / "api").glob("*.md"), *(DOCS / "types").glob("*.md")]
    found = [name for page in pages for name in re.findall(r"(?m)^::: (.+)$", page.read_text())]
    assert sorted(found) == sorted(expected)


@functools.cache
def anchors(document):
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", document.read_text()
    ):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_exist(document):
    text = document.read_text()
    for name in re.findall(r"\bhki\.(\w+)", text):
        assert hasattr(hki, name), f"hki.{name}"
    for path in re.findall(r"`((?:\w+/)+[\w.]+\.\w+)`", text):
        assert (ROOT / path).exists() or (ROOT / "haiku_implicit" / path).exists(), path


def test_every_page_is_in_the_list_of_pages():
    listed = (DOCS / "README.md").read_text()
    for page in [*PAGES, *DOCS.rglob("*.ipynb")]:
        if index := INDICES.get(page.parent.name):
            link = os.path.relpath(page, (DOCS / index).parent)
            assert f"]({link}) |" in (DOCS / index).read_text(), page
        else:
            assert page.name in ("README.md", "index.md") or f"]({name_of(page)}) |" in listed, page


@pytest.mark.all_slow
@pytest.mark.slow
@pytest.mark.parametrize("page", type_tables.pages(), ids=name_of)
def test_tables_of_types_are_what_the_script_writes(page):
    assert type_tables.with_tables(page.read_text()) == page.read_text()


def test_each_type_has_a_table():
    """Each public type, and each that a page has a table of."""
    public = {
        name
        for module in (hki, hki.adapters)
        for name in module.__all__
        if isinstance(getattr(module, name), type)
        and issubclass(getattr(module, name), hki.ImplicitArray)
        and name not in ("ImplicitArray", "Adapter", "Operator")
    }
    assert {*type_tables.ARRAYS} == public | {"Deferred"}
    marked = re.findall(r"<!-- fields (\w+) -->", "".join(p.read_text() for p in PAGES))
    assert sorted(marked) == sorted(type_tables.ARRAYS)


def test_nothing_is_left_to_fill_in():
    for path in DOCUMENTS:
        assert "«FILL" not in path.read_text(), path


def test_no_two_versions_of_a_text_are_left_by_a_merge():
    for path in DOCUMENTS:
        marks = [x for x in path.read_text().splitlines() if re.match(r"<{7} |={7}$|>{7} ", x)]
        assert not marks, path
