"""Every Python snippet of the documents, and every example, runs in a test."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxwrap
from fxwrap.lowering.rules.registry import RULES
from tests.support.documents import ROOT, run_snippets

TESTED_ELSEWHERE = {
    "README.md": "test_documents.py",
    "docs/debugging.md": "test_documents.py",
    "docs/overview.md": "test_documents.py",
    "docs/exported_programs.md": "converters/exported/test_files.py",
    "docs/fused_communication.md": "fused_communication/test_fusion.py",
    "docs/integrations.md": "integrations/test_guide.py",
    "docs/rewriting.md": "rewrite/test_guide.py",
    "docs/rewriting_forms.md": "rewrite/test_forms.py",
    **{f"docs/tutorials/{path.name}": "test_site.py" for path in (ROOT / "docs" / "tutorials").glob("*.md")},
}
"""The test that runs the snippets of a document."""


CHAPTERS = ("artifacts", "distributed", "fx_form", "fx_regions", "index", "inspection")
"""The chapters whose snippets leave the model out; this file runs them."""


class Model(nn.Module):
    """A model of the snippets that leave theirs out: tokens to logits, and a loss with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.embedding(tokens)))
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})


def names() -> dict[str, Any]:
    """The names that the snippets assume."""
    model, tokens = Model(), torch.randint(16, (2, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = {"torch": torch, "fxwrap": fxwrap, "Model": Model, "model": model, "optimizer": optimizer}
    return {**shared, "tokens": tokens, "x": tokens, "inputs": (tokens,)}


@pytest.mark.parametrize("document", CHAPTERS)
def test_the_snippets_of_a_chapter_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assumed = names()
    results = run_snippets(f"docs/{document}.md", **assumed)
    match document:
        case "artifacts":
            torch.testing.assert_close(results["logits"], assumed["model"](assumed["tokens"]))
        case "distributed":
            assert isinstance(results["loss"], torch.Tensor) and results["loss"].isfinite()
        case "fx_regions":
            options = {**results["options"], "on_graph": lambda graph, _info: graph}  # type: ignore[dict-item]
            compiled = torch.compile(assumed["model"], backend="fxwrap", options=options)
            torch.testing.assert_close(compiled(assumed["tokens"]), assumed["model"](assumed["tokens"]))
        case "inspection":
            assert "program @" in capsys.readouterr().out


def test_the_registration_of_the_devices_chapter_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(fxwrap.devices, "register", lambda spec, **rest: registered.append((spec, rest)))
    parts = ("print_npu_kernel", "load_npu_kernel", "npu_allocator", "NpuCopy", "write_copy")
    run_snippets("docs/devices.md", **dict.fromkeys(parts, print))
    ((spec, rest),) = registered
    assert spec.device_type == "npu" and set(rest) == {"printer", "language", "runtime", "lines"}


def test_the_rule_of_the_contributors_guide_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(RULES)
    run_snippets("CONTRIBUTING.md")
    assert set(RULES) - set(before) == {"aten.foo.default"}
    del RULES["aten.foo.default"]


def test_every_document_with_snippets_is_run() -> None:
    documents = [*(ROOT / "docs").rglob("*.md"), *[ROOT / name for name in ("README.md", "CONTRIBUTING.md")]]
    with_snippets = [path.relative_to(ROOT).as_posix() for path in documents if "\n```python\n" in path.read_text()]
    here = {*[f"docs/{name}.md" for name in CHAPTERS], "docs/devices.md", "CONTRIBUTING.md"}
    assert set(with_snippets) == here | set(TESTED_ELSEWHERE)
    for document, where in TESTED_ELSEWHERE.items():
        text = (ROOT / "tests" / where).read_text()
        assert Path(document).name in text or "tutorials" in text, f"{where} does not run {document}"


def test_the_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    assert "program @" in capsys.readouterr().out


def test_every_example_is_run() -> None:
    texts = "\n".join([path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))])
    for path in (ROOT / "examples").glob("*.py"):
        names = (f'"{path.stem}', f'"{path.stem.removeprefix("rewrite_")}', path.name, f"examples.{path.stem}")
        assert any(name in texts for name in names), f"{path.name} never runs"
