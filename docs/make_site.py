"""Builds the site: `python docs/make_site.py` (the extra `docs`), into `.build/site/html`.

The pages are those of docs/ as they stand. Zensical takes no hooks, so this script stages them in
`.build/site/pages`: the navigation is made of the tables in docs/README.md, notebooks become pages,
files outside of docs/ that pages link to are taken in under `repository/`, and the page of errors gets
all messages of the library. `--serve` shows the site.
"""

import json
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys

import list_messages

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAGE = ROOT / ".build/site"
ROW = re.compile(r"(?m)^\| \[(.+?)\]\(([^)]+)\) \|")
LINK = re.compile(r"(\]\()((?!\w+:)[^)#\s]+)(#[^)\s]*)?(\))")


def main() -> None:
    shutil.rmtree(STAGE, ignore_errors=True)
    pages = documents() | outside(documents())
    for path in pages:
        # The search is for the pages of docs/: the changelog alone has almost all words.
        no_search = "" if path.startswith("docs/") else "---\nsearch: {exclude: true}\n---\n\n"
        write(site_path(path), no_search + relinked(path, as_page(ROOT / path)))
    # The landing page has the width for its three lines and its doors, of which one is the next page.
    landing = STAGE / "pages/index.md"
    landing.write_text("---\nhide: [navigation, toc, footer]\n---\n\n" + landing.read_text())
    shutil.copytree(ROOT / "docs/images", STAGE / "pages/images")
    shutil.copy(ROOT / "docs/site.css", STAGE / "pages")
    settings = {"docs_dir": "pages", "site_dir": "html", "nav": navigation()}
    config = STAGE / "mkdocs.yml"
    # JSON is YAML.
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in settings.items()]
    config.write_text((ROOT / "mkdocs.yml").read_text() + "".join(lines))
    command = ["serve"] if "--serve" in sys.argv else ["build", "--strict"]
    program = [sys.executable, "-m", "zensical", *command, "--config-file", str(config)]
    sys.exit(subprocess.run(program, cwd=ROOT).returncode)


def documents() -> set[str]:
    """The pages and notebooks of docs/, as paths in the repository."""
    found = [path for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind)]
    return {path.relative_to(ROOT).as_posix() for path in found}


def outside(sources: set[str]) -> set[str]:
    """The files and folders outside of docs/ that pages link to, and those that these link to."""
    found: set[str] = set()
    todo = list(sources)
    while todo:
        source = todo.pop()
        if source.endswith(".md"):
            new = {x for x in targets(source) if not x.startswith("docs/")} - found
            found |= new
            todo.extend(new)
    return found


def targets(source: str) -> list[str]:
    """The files and folders of the repository that a document links to."""
    return [resolved(source, match[2]) for match in LINK.finditer((ROOT / source).read_text())]


def navigation() -> list:
    """The landing page; then a part per heading of docs/README.md, with a page per row of its table."""
    nav: list = [{"haiku_implicit": "index.md"}]
    for line in (ROOT / "docs/README.md").read_text().splitlines():
        if heading := re.match(r"## (.+)", line):
            pages: list = []
            nav.append({heading[1]: pages})
        elif row := ROW.match(line):
            pages.append({plain(row[1]): with_pages(row[2])})
    return [*nav, {"All pages": site_path("docs/README.md")}]


def with_pages(index: str) -> str | list:
    """A page; with those of its own folder after it, if its tables list them."""
    text = (ROOT / "docs" / index).read_text() if index.endswith(".md") else ""
    folders = ("docs/types/", "docs/hooks/")
    listed = [(row[1], resolved("docs/" + index, row[2])) for row in ROW.finditer(text)]
    own = [{plain(title): site_path(path)} for title, path in listed if path.startswith(folders)]
    return [site_path("docs/" + index), *own] if own else site_path("docs/" + index)


def plain(title: str) -> str:
    return title.replace("`", "")


def relinked(source: str, text: str) -> str:
    """Has links lead to the places of the files on the site."""
    here = posixpath.dirname(site_path(source)) or "."

    def moved(match: re.Match) -> str:
        target = posixpath.relpath(site_path(resolved(source, match[2])), here)
        return match[1] + target + (match[3] or "") + match[4]

    return LINK.sub(moved, text) if source.endswith((".md", ".ipynb")) else text


def resolved(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def site_path(path: str) -> str:
    """The place on the site of a file or folder of the repository."""
    if path == "docs/README.md":  # The landing page, docs/index.md, is that of the folder.
        return "pages.md"
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def write(path: str, text: str) -> None:
    target = STAGE / "pages" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def notebook(path: pathlib.Path) -> str:
    """A notebook as Markdown: its cells, their printed output and their pictures."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = {**output.get("data", {}), "text": output.get("text", "")}
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![What the cell draws](data:image/png;base64,{picture})")
            elif data["text"]:
                parts.append(f"```\n{''.join(data['text'])}```")
    return "\n\n".join(parts) + "\n"


def as_page(path: pathlib.Path) -> str:
    """A file as Markdown: a document as it is, a source as a block of code, a folder as a list."""
    if path.suffix == ".md":
        return list_messages.with_messages(path.read_text())
    if path.suffix == ".ipynb":
        return notebook(path)
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(f.name for f in path.iterdir() if f.is_file())
        return title + "".join(f"- `{name}`\n" for name in names)
    language = path.suffix[1:] if path.suffix in (".py", ".json", ".txt", ".cc") else ""
    return f"{title}````{language}\n{path.read_text()}````\n"


if __name__ == "__main__":
    main()
