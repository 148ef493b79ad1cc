"""Loops over experts in processes without Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap import Options
from fxwrap.lines import ExternCall
from tests.artifact.native_host import drive, read_result, tensor_commands
from tests.fx_passes.expert_layers import SORTING, Experts, inputs_of, routed


class _Routed(nn.Module):
    """A layer of experts after a router."""

    def __init__(self, layer: Experts) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor, scores: Tensor) -> Tensor:
        return routed(self.layer)(tokens, scores)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("weights", "frozen", "operator"),
    [("biased modules", True, "frozen_grouped_mm"), ("modules", False, "grouped_matmul"),
     ("addmm", False, "grouped_matmul")],
)  # fmt: skip
def test_experts_without_python(weights: str, frozen: bool, operator: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if frozen else torch.float32
    model, inputs = _Routed(Experts("where", weights)).to(dtype), inputs_of(10, dtype=dtype)
    options = Options(freeze=frozen, emitter="cpp", devices=(SORTING,))
    compiled = fxwrap.compile_graph(torch.export.export(model, inputs), name="experts", options=options)
    targets = [line.target for line in compiled.program.body.lines if isinstance(line, ExternCall)]
    assert targets.count(f"fxwrap.{operator}.default") == (2 if weights == "addmm" else 3)
    compiled.save(tmp_path / "experts.fxw", target="native")
    start = ["open", tmp_path / "experts.fxw", *tensor_commands(tmp_path, inputs)]
    done = drive(*start, "run", tmp_path / "result", "alive")
    assert done.code == 0 and done.lines == ("alive 0",), (done.lines, done.errors)
    expected = model(*inputs).detach()
    result = read_result(tmp_path / "result.0", expected)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    assert (result.double() - expected.double()).norm() <= tolerance * expected.norm()
