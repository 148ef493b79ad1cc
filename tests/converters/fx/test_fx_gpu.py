"""What needs a GPU: emitted graphs launch Triton kernels directly, and are captured in CUDA graphs by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.fx.module import boxed_entry
from tests.converters.fx.fused_graphs import fused, split_in_order
from tests.converters.fx.test_fx_code import operator_calls

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def _inputs(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(size, generator=generator, device=DEVICE) for size in ((64, 96), (96, 128))]


def _emitted() -> GraphModule:
    inputs = _inputs()
    graph = make_fx(fused, tracing_mode="fake")(*inputs)
    compiled = fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(emitter="fx", fallback="error"))
    assert {kernel.language for kernel in compiled.program.kernels} == {"triton"}
    return compiled.graph_module


def _assert_right(outputs: Any, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(tuple(outputs), fused(*inputs), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_triton_kernels_are_launched_directly() -> None:
    module, inputs = _emitted(), _inputs(1)
    boxed = boxed_entry(module)
    traced = fxwrap.fx.enable_direct_launches(make_fx(module, tracing_mode="fake")(*inputs))
    parts = fxwrap.fx.enable_direct_launches(split_in_order(module))
    for run in (module, copy.deepcopy(module), traced, parts, lambda *args: boxed([*args])):
        with operator_calls() as called:
            outputs = run(*inputs)
        assert called == []
        _assert_right(outputs, inputs)


@torch.no_grad()
@pytest.mark.parametrize("form", ["emitted", "traced again", "by operators"])
def test_a_cuda_graph_captures_an_emitted_graph(form: str) -> None:
    module, static = _emitted(), _inputs(2)
    if form != "emitted":
        module = make_fx(module, tracing_mode="fake")(*static)
    if form == "traced again":
        fxwrap.fx.enable_direct_launches(module)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module(*static)  # kernels are loaded outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = module(*static)
    for seed in (3, 4):
        fresh = _inputs(seed)
        for place, item in zip(static, fresh, strict=True):
            place.copy_(item)
        graph.replay()
        _assert_right(outputs, fresh)
