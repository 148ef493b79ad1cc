"""Random graphs with symbolic sizes, compiled once for all sizes that they allow, have eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings

import fxwrap
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.compile import emit
from fxwrap.converters.emitted_program import kernel_texts
from fxwrap.runtime.kernels import prepare_kernels
from fxwrap.wrapper_ir import Program
from tests.lowering.planned_programs import close, plan
from tests.support.long_form import LONG, sample_size
from tests.support.strategies.dynamic_graphs import DynamicGraph, dynamic_graphs

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
EMITTERS = tuple([emitter for emitter in COMPARED_EMITTERS if emitter != "cpp"])
BUILT = 6
"""Every so many programs are emitted as C++ too, which takes a compiler each."""


def test_random_graphs_with_symbolic_sizes_match_eager() -> None:
    """All are drawn before any is run, so that their kernels are compiled together."""
    drawn: list[tuple[DynamicGraph, Program]] = []

    @given(dynamic_graphs())
    @settings(max_examples=sample_size(24), phases=[Phase.generate], database=None, suppress_health_check=QUIET)
    def draw(graph: DynamicGraph) -> None:
        drawn.append((graph, fxwrap.lower(graph.module)))

    draw()
    prepare_kernels(tuple({str(text): text for _, program in drawn for text in kernel_texts(program)}.values()))
    text = "\n".join([str(program) for _, program in drawn])
    assert "symbol.size" in text and "kernel.launch" in text
    assert not LONG or "symbol.bind" in text or "symbol.item" in text  # the few graphs of the short form may lack them
    for number, (graph, program) in enumerate(drawn):
        for emitter in COMPARED_EMITTERS if number % BUILT == 0 else EMITTERS:
            compare(graph, emit(program, emitter), emitter, program)


@given(dynamic_graphs())
@settings(max_examples=sample_size(12), suppress_health_check=QUIET)
def test_planned_kernels_over_symbolic_sizes_match_eager(graph: DynamicGraph) -> None:
    planned = plan(graph.module, None)
    compare(graph, lambda *inputs: planned.run(inputs), "the plan", planned.program)


def compare(graph: DynamicGraph, run: Callable[..., Any], name: str, program: Program) -> None:
    """Compares with eager on inputs of several sizes, and on some of which nothing is chosen; written inputs too."""
    for inputs in graph.inputs():
        held, written = [item.clone() for item in inputs], [item.clone() for item in inputs]
        with torch.no_grad():
            wanted = graph.module(*held)
        for one, other in zip((*run(*written), *written), (*wanted, *held), strict=True):
            sizes = [list(item.shape) for item in inputs]
            assert close(one, other), f"{name} on {sizes}: {one}, not {other}\n{graph}\n{program}"
