"""Recorded results have one line for each case, and are the JSON they were."""

import doctest
import json
import pathlib

import pytest

from benchmarks import result_files

FOLDER = pathlib.Path(result_files.__file__).parent / "results"
FILES = sorted(FOLDER.glob("*.json"))


def test_the_example():
    assert (
        doctest.testmod(result_files).failed == 0 and doctest.testmod(result_files).attempted == 1
    )


@pytest.mark.parametrize(
    "value",
    [{}, [], 1.5, {"a": {}}, [[], {}], {"a, b": [{"c": [{"d": None}]}, 1, "\n{"]}, {"x": (1, 2)}],
)
def test_what_is_written_is_the_same_json(value, tmp_path):
    path = tmp_path / "folder" / "results.json"
    result_files.write(value, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(value))
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_recorded_results_have_one_line_for_each_case(path):
    assert path.read_text() == result_files.to_text(json.loads(path.read_text())) + "\n"


def test_there_are_recorded_results():
    assert len(FILES) >= 6
