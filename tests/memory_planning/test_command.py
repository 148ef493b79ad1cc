"""The command `plan`: its table, JSON that is read back, and a drawing."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from fxwrap.cli.command import main
from fxwrap.memory_planning import plan_from_json

_MODEL = """
import torch

def f(x, w):
    for _ in range(4):
        x = torch.softmax(x @ w, -1).cumsum(0) + x
    return x.sum() * torch.ones(4096)

f.example_inputs = (torch.randn(64, 64), torch.randn(64, 64))
"""


def test_a_plan_is_printed_saved_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "planned_model.py").write_text(_MODEL)
    json, svg = tmp_path / "plan.json", tmp_path / "plan.svg"
    target = f"{tmp_path}/planned_model.py:f"
    assert main(["plan", target, "--json", str(json), "--svg", str(svg), "--algorithm", "greedy_by_size"]) == 0
    table = capsys.readouterr().out
    plan = plan_from_json(json.read_text())
    (pool, *_) = plan.body.pools
    share = plan.body.peak / plan.body.lower_bound
    assert f"^body: peak {plan.body.peak:,} bytes, {share:.3f} times the lower bound {plan.body.lower_bound:,}" in table
    assert f"{pool.name} on cpu: {pool.size:,} bytes" in table
    drawn = [item for item in ElementTree.fromstring(svg.read_text()).iter() if item.tag.endswith("title")]
    assert len(drawn) == sum(len(item.allocations) for item in plan.body.pools)


def test_an_output_file_requires_one_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _MODEL.replace("torch.randn(64, 64), torch", "torch.randn(64, 64, requires_grad=True), torch")
    (tmp_path / "trained_model.py").write_text(text)
    code = main(["plan", f"{tmp_path}/trained_model.py:f", "--training", "--svg", str(tmp_path / "plan.svg")])
    assert code == 2 and "there are 2 graphs; select one with --graph" in capsys.readouterr().err
