"""The README's example prints what the README says that it prints."""

import contextlib
import io
import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_example_prints_what_the_readme_shows():
    code, shown = re.search(
        r"```python\n(.*?)```\n\nIt prints:\n\n```\n(.*?)```", README.read_text(), re.DOTALL
    ).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), {})
    assert printed.getvalue() == shown
    assert len([line for line in code.splitlines() if line]) <= 15


def test_nothing_is_left_to_fill_in():
    for path in (README, *README.parent.glob("docs/*.md"), *README.parent.glob("*.md")):
        assert "«FILL" not in path.read_text(), path
