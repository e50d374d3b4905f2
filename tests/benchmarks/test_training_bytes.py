"""The bytes on the first page are those counted."""

import pytest

from benchmarks import training_bytes
from tests.pages import DOCS


@pytest.mark.slow
def test_the_first_page_shows_what_is_counted():
    page = (DOCS / "index.md").read_text()
    for make in training_bytes.ways().values():
        total = sum(training_bytes.counted(make).values())
        assert page.count(f"{total / 1e6:,.0f} MB") == 1
