"""An extension of Griffe, which reads the docstrings for the pages of docs/api (see `mkdocs.yml`)."""

import re

import griffe


class Examples(griffe.Extension):
    """Has sections `Example:` shown as code; what Griffe knows as such is `Examples:`."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            text = re.sub(r"(?m)^Example: +(.+)$", r"Examples:\n  \1", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", text)
