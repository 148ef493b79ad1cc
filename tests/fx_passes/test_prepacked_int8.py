"""With `freeze`, matmuls of dynamically quantised rows keep their int8 weights in the library's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap import Options
from fxwrap.lines import ExternCall, Launch
from fxwrap.runtime import prepacked_weights
from fxwrap.torch_compat import multiplies_bytes_exactly
from tests.support.frozen_operators import use_python_operators
from tests.support.int8_layers import Int8Layers

PREPACKED = f"{'fxwrap.prepacked_int8_linear' if multiplies_bytes_exactly() else 'aten._int_mm'}.default"


def targets(compiled: fxwrap.Compiled) -> list[str]:
    return [line.target for line in compiled.program.lines() if isinstance(line, ExternCall)]


def compiled_layers(model: nn.Module, x: Tensor, most: int | None = None, **options: Any) -> fxwrap.Compiled:
    dims = None if most is None else ({0: torch.export.Dim("rows", min=0, max=most)},)
    program = torch.export.export(model, (x,), dynamic_shapes=dims)
    return fxwrap.compile_graph(program, options=Options(**options))


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_those_of_the_operator(emitter: str, dtype: torch.dtype) -> None:
    """The kernel that quantises the rows makes them unsigned, and the sums are exact."""
    torch.manual_seed(0)
    model = Int8Layers()
    x = torch.randn(64, 768).to(dtype)
    frozen = compiled_layers(model, x, 500, freeze=True, emitter=emitter)
    other = compiled_layers(model, x, 500, emitter=emitter)
    assert targets(frozen) == [PREPACKED] * 2 and targets(other) == ["aten._int_mm.default"] * 2
    launches = [[line for line in item.program.lines() if isinstance(line, Launch)] for item in (frozen, other)]
    assert len(launches[0]) == len(launches[1]) == 3
    for rows in (64, 1, 0, 300):
        x = torch.randn(rows, 768).to(dtype)
        assert torch.equal(frozen(x), other(x))


def test_weights_that_are_written_are_converted_again() -> None:
    torch.manual_seed(0)
    model, x = Int8Layers(), torch.randn(64, 768)
    frozen = compiled_layers(model, x, freeze=True)
    before = frozen(x)
    model.first.neg_()
    assert not torch.equal(frozen(x), before)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-2, atol=1e-2)


class Others(nn.Module):
    """Rows that no kernel computes, few rows, a sum that another operator reads, and a weight that is no constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (768, 768), dtype=torch.int8))

    def forward(self, rows: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        quantised = x.round().clamp(-128, 127).to(torch.int8)
        sums = torch._int_mm(quantised, self.weight.t())
        products = [torch._int_mm(rows, self.weight.t()), torch._int_mm(quantised[:8], self.weight.t())]
        return [sums + 1, *[item.float() for item in (*products, torch._int_mm(quantised, weight.t()))]]


def test_matmuls_that_stay_calls() -> None:
    model = Others()
    rows = torch.randint(-128, 128, (64, 768), dtype=torch.int8)
    inputs = (rows, 50 * torch.randn(64, 768), torch.randint(-128, 128, (768, 768), dtype=torch.int8))
    compiled = fxwrap.compile_graph(torch.export.export(model, inputs), options=Options(freeze=True))
    assert targets(compiled) == ["aten._int_mm.default"] * 4
    for actual, expected in zip(compiled(*inputs), model(*inputs), strict=True):
        assert torch.equal(actual, expected)


def test_a_machine_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = (
        torch.randint(-128, 128, (20, 64), dtype=torch.int8),
        torch.randint(-128, 128, (32, 64)).to(torch.int8),
    )
    unsigned = (rows.int() + 128).to(torch.uint8)
    expected = torch._int_mm(rows, weight.t()).float()
    operator = torch.ops.fxwrap.prepacked_int8_linear
    assert torch.equal(operator(unsigned, weight, True), expected)
    use_python_operators(monkeypatch)
    monkeypatch.setattr(prepacked_weights, "prepack_int8_weight", lambda _: None)
    assert torch.equal(operator(unsigned, weight.t().contiguous(), False), expected)
