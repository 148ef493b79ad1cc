"""The snippets of docs/rewriting.md run, one after the other."""

from __future__ import annotations

from fxwrap.options import empty_pass_registry
from tests.support.documents import run_snippets


def test_the_snippets_run() -> None:
    with empty_pass_registry():
        names = run_snippets("docs/rewriting.md")
    assert {"gelu_of_linear", "as_tanh", "replacement", "rename", "too_short"} <= set(names)
