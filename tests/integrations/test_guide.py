"""The snippets of docs/integrations.md."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import NO_ACCELERATE
from tests.support.documents import ROOT

_SNIPPET = re.compile(r"^(<!-- needs accelerate -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def snippets() -> list[tuple[bool, str]]:
    """Returns the snippets of the chapter, whose models get one layer, and whether each needs accelerate."""
    text = (ROOT / "docs" / "integrations.md").read_text()
    assert "num_hidden_layers=2" in text
    text = text.replace("num_hidden_layers=2", "num_hidden_layers=1")
    return [(bool(match[1]), match[2]) for match in _SNIPPET.finditer(text)]


@pytest.mark.long  # other tests of this folder run each interface alone
def test_generate_and_subgraphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    counts = []
    for needs_accelerate, text in snippets():
        if not needs_accelerate:
            exec(compile(text, "<docs/integrations.md>", "exec"), names)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert torch.equal(names["static_tokens"], names["eager_tokens"])
    assert torch.equal(names["dynamic_tokens"], names["eager_tokens"])
    assert counts[0] > 0, "the static cache was not compiled"
    assert 0 < counts[1] - counts[0] <= 3, "a length of the dynamic cache was compiled by itself"
    torch.testing.assert_close(names["result"], names["block"](names["x"]))


@pytest.mark.long  # `tests/training` trains a transformer
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason=NO_ACCELERATE)
def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = [text for needs_accelerate, text in snippets() if needs_accelerate]
    setup = snippets()[0][1].partition("model = ")[0]
    losses = []
    for compiled in (True, False):
        names: dict[str, Any] = {}
        torch.manual_seed(0)
        exec(setup, names)
        exec(text if compiled else text.replace('model.compile(backend="fxwrap")', ""), names)
        losses.append(names["trained"].training_loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
