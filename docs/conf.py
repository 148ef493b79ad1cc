"""The documentation site: `make docs` builds it from docs/*.md, docs/tutorials and the docstrings of fxwrap."""

import importlib
import inspect
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "fxwrap"
author = "The fxwrap authors"
project_copyright = "The fxwrap authors, BSD-3-Clause"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = "fxwrap"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 3
# Links of chapters to source files are for readers of the repository: here they download the file.
myst_url_schemes = ("http", "https", "mailto")

default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_custom_sections = [("Fields", "params_style")]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# Annotations name types of torch, of private aliases and of type variables, which have no page here.
nitpick_ignore_regex = [("py:.*", ".*")]
highlight_language = "text"
pygments_style = "friendly"
suppress_warnings = ["misc.highlighting_failure"]
linkcheck_ignore = [r"https://127\.0\.0\.1.*"]


class FxwrapNames(Directive):
    """The documentation of a module's public names, or of some of them, from their docstrings."""

    required_arguments = 1
    optional_arguments = 100

    def run(self):
        """Returns the nodes of one autodoc directive for each function and class."""
        module, names = importlib.import_module(self.arguments[0]), self.arguments[1:]
        lines = ["```{eval-rst}"]
        for name in names or public_names(module):
            item = getattr(module, name)
            elsewhere = "   :no-index:" if name in importlib.import_module("fxwrap").__all__ else ""
            members = "   :members:" if inspect.isclass(item) and not describes_itself(item) else ""
            options = [option for option in (members, elsewhere if module.__name__ != "fxwrap" else "") if option]
            lines += [f".. {autodoc_directive(item)}:: {module.__name__}.{name}", *options, ""]
        container = nodes.container()
        self.state.nested_parse(StringList([*lines, "```"], source=self.arguments[0]), self.content_offset, container)
        return container.children


def public_names(module):
    """Returns the functions and classes that a module exports, in its order."""
    names = getattr(module, "__all__", None)
    if names is None:
        own = [name for name, item in vars(module).items() if getattr(item, "__module__", "") == module.__name__]
        names = [name for name in own if not name.startswith("_")]
    items = {name: getattr(module, name) for name in names}
    return [name for name, item in items.items() if inspect.isclass(item) or inspect.isfunction(item)]


def describes_itself(item):
    """Whether the docstring of a class says all: lines, errors and events are data with the same methods each."""
    return item.__module__.startswith(("fxwrap.lines.", "fxwrap.errors", "fxwrap.events"))


def autodoc_directive(item):
    """Returns the directive that documents a function or class."""
    if inspect.isclass(item):
        return "autoexception" if issubclass(item, BaseException) else "autoclass"
    return "autofunction"


def escape_docstring(app, what, name, item, options, lines):
    """Escapes stars and underscores outside of code, and makes the example of a line with blocks literal text."""
    text = "\n".join(lines)
    example = re.search(r"^Example:\n((?:    .*\n?)+)", text, re.MULTILINE)
    if example is not None:
        text = f"{text[: example.start()]}Example::\n\n{example[1]}{text[example.end() :]}"
    parts = text.split("`")
    parts[::2] = [re.sub(r"(\*|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    parts[2::2] = [re.sub(r"^(?=\w)", r"\\ ", part) for part in parts[2::2]]
    text = "`".join(parts)
    lines[:] = (text.replace(":", COLON) if what in ("property", "attribute") else text).split("\n")


COLON = "\0"
"""Stands for a colon of a property, before which napoleon would see a type."""


def restore_colons(app, what, name, item, options, lines):
    """Restores the colons of a property's docstring."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "reference/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "benchmarks/README.md": "reference/measurements.md",
    "benchmarks/dashboard.md": "reference/dashboard.md",
}
"""The pages that show files outside of this folder, by file."""


def resolve_links(app, docname, source):
    """Reads a page that shows another file, and makes links between such files links between their pages."""
    page = f"{docname}.md"
    file = next((name for name, shown in PAGES.items() if shown == page and name != "README.md"), f"docs/{page}")
    text = (ROOT / file).read_text()

    def resolved(match):
        path, anchor = match[1], match[2] or ""
        target = (ROOT / file).parent.joinpath(path).resolve()
        if "://" in path or not target.exists():
            return match[0]
        relative = target.relative_to(ROOT).as_posix()
        shown = ROOT / "docs" / PAGES[relative] if relative in PAGES else target
        return f"]({os.path.relpath(shown, (ROOT / 'docs' / page).parent)}{anchor})"

    source[0] = re.sub(r"\]\(([^)#\s]+)(#[^)]*)?\)", resolved, text)


def setup(app):
    """Adds the directive and the changes of texts."""
    app.add_directive("fxwrap-names", FxwrapNames)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
    app.connect("autodoc-process-docstring", restore_colons, priority=900)
    app.connect("source-read", resolve_links)
