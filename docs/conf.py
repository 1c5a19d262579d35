"""How `make docs` builds the site: Markdown files are its pages, and docstrings give the reference."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import distruntime

# The modules that users import. Each has a page in docs/reference.
PARTS = [name for name in distruntime.__all__ if isinstance(getattr(distruntime, name), ModuleType)]
PUBLIC_MODULES = ["distruntime", *(f"distruntime.{part}" for part in PARTS)]

project = "distruntime"
release = distruntime.__version__
html_show_copyright = False

# The source folder is the repository's root, so a link from README.md to docs/ works here as in a clone.
include_patterns = ["*.md", "docs/**"]
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Headings get the anchors that GitHub gives them.
myst_heading_anchors = 6
html_theme = "furo"
html_title = f"distruntime {release}"
# Web servers show index.html first; this one leads to README.html.
html_extra_path = ["index.html"]

# Docstrings put code between single backticks, as Markdown does.
default_role = "code"
# A quotation mark may be part of code that a reader copies.
smartquotes = False
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "show-inheritance": True,
    "member-order": "groupwise",
    # This class of torch's ReduceOp repeats what ReduceOp has.
    "exclude-members": "RedOpType",
}
# A method that remote tensors refuse would otherwise have the docstring of torch's method.
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
# Fields of a dataclass have entries of their own; a second one would be a duplicate.
napoleon_use_ivar = True

# The pages by what a reader needs. README.md cannot hold the tables, since GitHub would print them.
SECTIONS = {
    "Learn": ["tutorial", "examples"],
    "Do": [
        "porting",
        "ssh",
        "launching",
        "service",
        "sharing_a_worker",
        "notebooks",
        "async",
        "publishing",
        "checkpoints",
        "functions",
        "data",
        "shipping",
        "groups",
        "meshes",
        "pipelines",
        "spmd",
        "layers",
        "primitives",
        "slow",
        "programs",
        "compile",
        "timeline",
        "looking",
        "testing",
        "gpu",
    ],
    "Understand": ["design", "sessions", "streams", "data_channel", "security", "accelerators", "scaling"],
    "Look up": [
        "names",
        "places",
        "limits",
        "environment",
        "protocol",
        "ecosystem",
        "from_other_systems",
        "benchmarks",
        "tables/*",
        "torch_tests",
        "upstream",
        "reference/*",
    ],
}


def contents(caption: str, pages: list[str]) -> str:
    """Return a table of contents that only the site shows."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", ":glob:", *pages, "```", ""])


CONTENTS = "\n".join(
    [
        *(contents(caption, [f"docs/{page}" for page in pages]) for caption, pages in SECTIONS.items()),
        contents("Project", ["CONTRIBUTING", "CHANGELOG", "SECURITY"]),
    ]
)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the tables of contents on the first page."""
    if page == root_doc:
        source[0] += CONTENTS


def write_factory(*event: Any) -> tuple[str | None, str | None]:
    """Write `...` for `<factory>`, a default in a dataclass: Sphinx reads only signatures that are Python."""
    *_, signature, returns = event
    return signature and signature.replace("<factory>", "..."), returns


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of every public name that the reference lacks or that has no docstring; `make docs` then fails."""
    logger = logging.getLogger(__name__)
    found = {name for name, *_ in env.get_domain("py").get_objects()}
    for page in PUBLIC_MODULES:
        module = importlib.import_module(page)
        for name in module.__all__:
            if f"{page}.{name}" not in found:
                logger.warning("%s.%s is public, but no page in docs/reference documents it", page, name)
            if not getattr(module, name).__doc__:
                logger.warning("%s.%s is public, but has no docstring", page, name)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", write_factory)
    app.connect("env-check-consistency", check_reference)
