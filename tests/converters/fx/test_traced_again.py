"""Emitted graphs that torch traces again: Dynamo, torch.export, make_fx, also after torch.compiler.reset()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import ArgumentError
from tests.converters.fx.fused_graphs import LANGUAGES, fused

TRACERS: dict[str, Callable[[GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]] = {
    "eager": lambda module, inputs: torch.compile(module, backend="eager", fullgraph=True),
    "aot_eager": lambda module, inputs: torch.compile(module, backend="aot_eager", fullgraph=True),
    "caller": lambda module, inputs: torch.compile(lambda *a: module(*a), backend="aot_eager", fullgraph=True),
    "strict export": lambda module, inputs: torch.export.export(module, tuple(inputs), strict=True).module(),
    "export": lambda module, inputs: torch.export.export(module, tuple(inputs), strict=False).module(),
    "interpreter": lambda module, inputs: torch.fx.Interpreter(module).run,
    "make_fx": lambda module, inputs: make_fx(module)(*inputs),
}


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(5, 6), torch.randn(6, 7)]


@pytest.mark.parametrize("form", ["in_place", "functional"])
@pytest.mark.parametrize("language", LANGUAGES)
@torch.no_grad()
def test_emitted_graphs_are_traced_again(language: str, form: str) -> None:
    """Dynamo rejected torch's operators for Triton kernels, and they failed after torch.compiler.reset()."""
    inputs = _inputs()
    options = LANGUAGES[language].replace(fx_form=form)
    module = fxwrap.compile_graph(make_fx(fused, tracing_mode="fake")(*inputs), inputs, options=options).graph_module
    for trace in TRACERS.values():
        torch.compiler.reset()
        traced = trace(module, inputs)
        for _ in range(2):
            torch.testing.assert_close(tuple(traced(*inputs)), fused(*inputs))
            inputs = _inputs()


def test_export_names_its_argument() -> None:
    """It was an AttributeError."""
    module = fxwrap.compile_graph(make_fx(fused, tracing_mode="fake")(*_inputs()), _inputs()).graph_module
    with pytest.raises(ArgumentError, match=r"fxwrap\.fx\.export takes Compiled as 'compiled', not ProgramModule"):
        fxwrap.fx.export(module)  # type: ignore[arg-type]
