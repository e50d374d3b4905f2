"""What the site needs beside the pages as they stand: hooks of MkDocs and Griffe (see `mkdocs.yml`).

The list of pages is made of the tables in docs/README.md, so that there is one. Pages link to files
outside of docs/, as they should in the repository; the site takes these files in under `repository/`.
Griffe reads the docstrings for the pages of docs/api.
"""

import json
import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File, InclusionLevel

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROW = re.compile(r"(?m)^\| \[(.+?)\]\(([^)]+)\) \|")
LINK = re.compile(r"(\]\()((?!\w+:)[^)#\s]+)(#[^)\s]*)?(\))")


class Examples(griffe.Extension):
    """Has sections `Example:` shown as code; what Griffe knows as such is `Examples:`."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            text = re.sub(r"(?m)^Example: +(.+)$", r"Examples:\n  \1", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", text)


def on_config(config):
    """The navigation: a part for each heading of docs/README.md, a page for each row of its table."""
    nav, pages = ["README.md"], None
    for line in (ROOT / "docs/README.md").read_text().splitlines():
        if heading := re.match(r"## (.+)", line):
            pages = []
            nav.append({heading[1]: pages})
        elif row := ROW.match(line):
            pages.append({plain(row[1]): with_pages(row[2])})
    config.nav = nav
    return config


def with_pages(index):
    """A page; with those of its own folder after it, where its tables list them."""
    text = (ROOT / "docs" / index).read_text() if index.endswith(".md") else ""
    folders = ("docs/types/", "docs/hooks/")
    listed = [(row[1], resolved("docs/" + index, row[2])) for row in ROW.finditer(text)]
    own = [{plain(title): site_path(path)} for title, path in listed if path.startswith(folders)]
    return [site_path("docs/" + index), *own] if own else site_path("docs/" + index)


def plain(title):
    return title.replace("`", "")


def on_files(files, config):
    """Adds notebooks, the files outside of docs/ that pages link to, and those that these link to."""
    for file in [f for f in files if f.src_uri.endswith(".ipynb")]:
        page = site_path("docs/" + file.src_uri)
        files.append(File.generated(config, page, content=notebook(ROOT / "docs" / file.src_uri)))
    found, todo = set(), sorted((ROOT / "docs").rglob("*.md"))
    while todo:
        path = todo.pop()
        source = path.relative_to(ROOT).as_posix()
        if path.suffix != ".md":
            continue
        for target in targets(source, path.read_text()):
            if not target.startswith("docs/") and target not in found:
                found.add(target)
                todo.append(ROOT / target)
    for target in sorted(found):
        added = File.generated(config, site_path(target), content=as_page(ROOT / target))
        added.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(added)
    return files


def on_page_markdown(markdown, page, config, files):
    """Has links lead to where the site has the files."""
    here = repository_path(page.file.src_uri)

    def moved(match):
        target = site_path(resolved(here, match[2]))
        relative = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return match[1] + relative + (match[3] or "") + match[4]

    return LINK.sub(moved, markdown)


def targets(source, text):
    """The files and folders that a document of the repository links to."""
    return [resolved(source, match[2]) for match in LINK.finditer(text)]


def resolved(source, link):
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def site_path(path):
    """Where the site has a file or folder of the repository."""
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def repository_path(src_uri):
    """Where the repository has a page of the site."""
    if not src_uri.startswith("repository/"):
        return f"docs/{src_uri}"
    path = src_uri.removeprefix("repository/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def notebook(path):
    """A notebook as Markdown: its cells, and what they printed and drew."""
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


def as_page(path):
    """A file as Markdown: a document as it is, a source as a block of code, a folder as a list."""
    if path.suffix == ".md":
        return path.read_text()
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(f.name for f in path.iterdir() if f.is_file())
        return title + "".join(f"- `{name}`\n" for name in names)
    language = path.suffix[1:] if path.suffix in (".py", ".json", ".txt", ".cc") else ""
    return f"{title}````{language}\n{path.read_text()}````\n"
