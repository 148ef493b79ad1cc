"""The models' graphs with kernels as regions: inlined regions compute what eager does, and equal layers share them."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

import fxwrap
from fxwrap import Options
from fxwrap.debugging import copy_inputs
from fxwrap.lines import Launch
from fxwrap.loop_ir import Store
from fxwrap.regions import parse_region
from fxwrap.wrapper_ir import Program
from tests.support.capture import CapturedGraph, capture_graphs
from tests.support.long_form import long_only
from tests.support.models import MODELS, SHALLOW

pytestmark = pytest.mark.usefixtures("exact_convolutions")

SUBGRAPH = Options(kernels="subgraph", compile_cache=False, fallback="error")
TOLERANCE = 1e-5


def lowered(captured: CapturedGraph, options: Options = SUBGRAPH) -> Program:
    return fxwrap.lower(captured.graph_module, options=options)


def launches(program: Program) -> int:
    return sum(isinstance(line, Launch) for line in program.lines())


def scatters_to_new_memory(program: Program) -> int:
    """The launches of regions that add to elements of new memory: another kernel of text fills it."""
    regions = {kernel.name: parse_region(kernel.source) for kernel in program.kernels}
    launched = [regions[line.kernel] for line in program.lines() if isinstance(line, Launch)]
    return sum(
        not region.overwritten
        and any(isinstance(item, Store) and item.mode == "add" for item in region.kernel.operations)
        for region in launched
    )


def is_private(node: object) -> bool:
    """Whether an output is state that attention saves for its backward, which it may not have computed."""
    is_item = isinstance(node, Node) and node.target is operator.getitem
    return is_item and "attention" in str(node.args[0].target) and node.args[1] > 0  # type: ignore[union-attr,operator]


def assert_equal(captured: CapturedGraph, results: Any, expected: Any) -> None:
    outputs: Any = captured.graph_module.graph.output_node().args[0]
    for node, one, other in zip(outputs, results, expected, strict=True):
        if is_private(node):
            continue
        if not isinstance(other, torch.Tensor) or not other.dtype.is_floating_point:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            continue
        finite = other.isfinite()  # BERT and Llama save masks of -inf for the backward
        torch.testing.assert_close(one[~finite], other[~finite], equal_nan=True)
        actual, expected_values = one[finite].double(), other[finite].double()
        assert (actual - expected_values).norm() <= TOLERANCE * expected_values.norm(), str(node)


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("gpt2", True), *[long_only(name, False) for name in ("llama", "resnet", "bert", "t5", "vit")]],
)
def test_inlined_regions_compute_what_the_graph_does(name: str, dynamic: bool) -> None:
    for captured in capture_graphs(SHALLOW[name], training=True, dynamic=dynamic):
        program = lowered(captured)
        text = lowered(captured, SUBGRAPH.replace(kernels="text"))
        assert launches(program) + scatters_to_new_memory(program) == launches(text)
        for kernel in program.kernels:
            region = parse_region(kernel.source)
            assert str(region.kernel) == region.loop_ir
        expected = captured.graph_module(*copy_inputs(captured.inputs))
        for form in ("in_place", "functional"):
            emitted = fxwrap.to_fx(program, form=form)
            inlined = fxwrap.fx.inline_regions(emitted.graph_module)
            for run in (emitted, inlined):
                assert_equal(captured, run(*copy_inputs(captured.inputs)), expected)


@pytest.mark.long  # `test_equal_layers_share_their_kernels` is of kernels, one of which each region is
def test_the_number_of_regions_does_not_grow_with_layers() -> None:
    counts = []
    for layers in (2, 3):
        (captured,) = capture_graphs(replace(MODELS["gpt2"], layers=layers), training=False)
        program = lowered(captured)
        counts.append((len(program.kernels), launches(program)))
    (few, first), (many, second) = counts
    assert few == many
    assert second > first


def test_metadata_agrees_with_the_launches() -> None:
    for captured in capture_graphs(SHALLOW["gpt2"], training=True):
        program = lowered(captured)
        for line in program.lines():
            if not isinstance(line, Launch):
                continue
            region = parse_region(program.kernel(line.kernel).source)
            sizes = [value.tensor_type.sizes for value in line.outs]
            assert [value.tensor_type.sizes for value in region.results] == sizes
            space = ", ".join([f"{name}: {size}" for name, size in region.index_space])
            assert f" for [{space}]" in region.loop_ir
            for value in region.inputs:
                assert f"{value.name}: " in region.loop_ir.partition("\n")[0] or value.name in str(region.calls)
