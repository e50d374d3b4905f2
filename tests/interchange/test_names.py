"""Where tensors of other libraries' files go."""

import json

import pytest

import haiku_implicit as hki
from haiku_implicit.interchange.names import place_of, places_of


@pytest.mark.parametrize("names", [{"a": "linear/w"}, {"a": "linear/w"}.__getitem__])
def test_a_mapping_and_a_function_say_where(names):
    assert place_of(names, "a", "file") == hki.Place("linear/w")
    with pytest.raises(
        ValueError, match=r"file: b: names has no place for it.*None to leave it out"
    ):
        place_of(names, "b", "file")


def test_what_the_model_does_not_have_is_left_out():
    assert place_of({"a": None}, "a", "file") is None


def test_something_else_is_no_place():
    with pytest.raises(ValueError, match=r"file: a: names gives 3 for it"):
        place_of({"a": 3}, "a", "file")


@pytest.mark.parametrize(
    ("place", "ndim", "axes"),
    [
        (hki.Place("linear/w"), 2, (1, 0)),
        (hki.Place("linear/b"), 1, (0,)),
        (hki.Place("embed/embeddings"), 2, (0, 1)),
        (hki.Place("conv/w", (2, 3, 1, 0)), 4, (2, 3, 1, 0)),
        (hki.Place("linear/w", (0, 1)), 2, (0, 1)),
    ],
)
def test_axes(place, ndim, axes):
    assert place.axes_for(ndim) == axes


def test_axes_have_to_be_those_of_the_tensor():
    with pytest.raises(ValueError, match=r"conv/w: axes: .* got \(0, 0\)"):
        hki.Place("conv/w", (0, 0)).axes_for(2)


def test_patterns():
    names = hki.names_by_pattern(
        {
            r"h\.(\d+)\.attn\.bias": None,
            r"h\.(\d+)\.(ln|attn)\.bias": r"gpt/layer_\1/\2/b",
            r"h\.(\d+)\.attn\.weight": hki.Place(r"gpt/layer_\1/attn/w", (0, 1)),
        }
    )
    assert place_of(names, "h.3.attn.bias", "file") is None  # the first pattern that matches
    assert place_of(names, "h.3.ln.bias", "file") == hki.Place("gpt/layer_3/ln/b")
    assert place_of(names, "h.12.attn.weight", "file") == hki.Place("gpt/layer_12/attn/w", (0, 1))
    with pytest.raises(ValueError, match=r"file: xh\.3\.ln\.bias: names has no place for it"):
        place_of(names, "xh.3.ln.bias", "file")


@pytest.mark.parametrize(("pattern", "place"), [(r"a(", "m/w"), (r"a(.)", r"m/\2")])
def test_patterns_that_are_none(pattern, place):
    with pytest.raises(ValueError, match=r"names: 'a\("):
        hki.names_by_pattern({pattern: place})


def test_names_in_a_file(tmp_path):
    path = tmp_path / "names.json"
    path.write_text(
        r'{"a\\.(\\d)": "m/\\1", "b": null, "c": {"path": "m/w", "shape": [2, 3]}, '
        r'"d(.)": {"path": "m/\\1", "axes": [0, 1], "shape": null}}'
    )
    names = hki.read_names(path)
    assert (names("a.3"), names("b")) == ("m/3", None)
    assert names("c") == hki.Place("m/w", None, (2, 3))
    assert names("dx") == hki.Place("m/x", (0, 1), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"expected an object \{pattern: place\}, got \[1\]"),
        ("{", "not JSON"),
        ('{"a": "m/w", "a": "m/v"}', "the key 'a' occurs twice"),
        ('{"a": 3}', "'a': expected 'module/name', null or an object .* got 3"),
        ('{"a": {"path": "m/w", "order": [1]}}', "'a': expected 'module/name', null or an object"),
        ('{"a": {"path": "m/w", "axes": "0"}}', "'a': axes: expected a list of numbers, got '0'"),
        ('{"a(": "m/w"}', r"names: 'a\('"),
    ],
)
def test_files_that_have_no_names(text, message, tmp_path):
    path = tmp_path / "names.json"
    path.write_text(text)
    with pytest.raises(hki.CheckpointError, match=f"names.json: .*{message}"):
        hki.read_names(path)


def test_a_matrix_that_is_cut_into_heads_says_which_axis_is_first():
    """By the number of elements alone both would fit."""
    place = hki.Place("attention/q", shape=(8, 2, 3))
    with pytest.raises(
        ValueError, match=r"attention/q: a matrix becomes \[8, 2, 3\]: say by axes="
    ):
        place.axes_for(2)
    assert place._replace(axes=(1, 0)).axes_for(2) == (1, 0)
    assert place._replace(path="attention/q/w").axes_for(2) == (1, 0)


def test_several_places(tmp_path):
    file = tmp_path / "names.json"
    file.write_text(
        json.dumps({r"(\w+)": [r"\1/b", {"path": r"head/\1", "axes": [0, 1]}], "..": None})
    )
    places = (hki.Place("a/b"), hki.Place("head/a", (0, 1)))
    assert places_of(hki.read_names(file), "a", "file") == places
    assert places_of({"a": list(places)}, "a", "file") == places
    assert places_of({"a": None}, "a", "file") == ()
    with pytest.raises(ValueError, match="file: a: names gives 2 places for it, expected one"):
        place_of(hki.read_names(file), "a", "file")
    for wrong in ([], [None], ["a/b", 3], {"a/b"}, 3):
        with pytest.raises(ValueError, match="file: a: names gives .* a list of them, or None"):
            places_of({"a": wrong}, "a", "file")
    with pytest.raises(ValueError, match="invalid group reference"):
        hki.names_by_pattern({"a": ["a/b", r"\1/c"]})
