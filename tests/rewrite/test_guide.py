"""The snippets of docs/rewriting.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fxwrap import pass_spec

GUIDE = (Path(__file__).parents[2] / "docs" / "rewriting.md").read_text()


def test_the_snippets_run(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(pass_spec, "_REGISTRY", {})
    names: dict[str, Any] = {"__name__": "guide"}
    snippets = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 6
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"<docs/rewriting.md, snippet {number}>", "exec"), names)
