"""Matmuls of packed int8 and int4 weights that become matmuls of dequantised weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU, CUDA, DeviceSpec
from fxwrap.lines import ExternCall, Launch
from fxwrap.torch_compat import FakeTensorMode
from tests.support.agreement import assert_as_exact

BF16 = torch.bfloat16
INT8, INT4 = torch.ops.aten._weight_int8pack_mm.default, torch.ops.aten._weight_int4pack_mm.default
COLUMNS, GROUP = 48, 32
SLOW = dataclasses.replace(
    CPU, matmuls=dataclasses.replace(CPU.matmuls, dequantised_packed_rows=((str(INT8), 2), (str(INT4), 2)))
)
"""A CPU whose library is slow with several rows and packed weights, as on GPUs."""


def called(program: fxwrap.Compiled) -> Counter[str]:
    return Counter([line.target.split(".")[1] for line in program.program.lines() if isinstance(line, ExternCall)])


def compiled(target: Any, inputs: list[Tensor], device: DeviceSpec = SLOW, **options: Any) -> fxwrap.Compiled:
    """Returns a call of an operator as a program; it is not traced, since the library has int4 on GPUs only."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(inputs))]
    first, weight, *rest = nodes
    arguments = (first, weight, GROUP, *rest) if target is INT4 else (first, weight, *rest)
    graph.output((graph.call_function(target, arguments),))
    chosen = Options(**{"matmul_kernels": "library", **options}, devices=(device,), compile_cache=False)
    return fxwrap.compile_graph(GraphModule({}, graph), inputs, options=chosen)


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def int8_inputs(rows: int, dtype: torch.dtype, width: int = 64) -> list[Tensor]:
    weight = torch.randint(-128, 128, (COLUMNS, width), dtype=torch.int8)
    return [torch.randn(rows, width).to(dtype), weight, torch.rand(COLUMNS).to(dtype)]


def packed(numbers: Tensor, tiles: int) -> Tensor:
    """Packs int4 numbers [columns, width] as NVIDIA GPUs read them, with so many tiles in the words of a lane."""
    columns, width = numbers.shape
    words = torch.zeros(columns // 8, width // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    column, k = torch.meshgrid(torch.arange(columns), torch.arange(width), indexing="ij")
    digit = k % 16
    place = (column // 8, k // (16 * tiles), column % 8 * 4 + digit % 8 // 2, k // 32 % (tiles // 2))
    shift = k // 16 % 2 * 8 + digit // 8 * 4 + digit % 2 * 16
    words.index_put_(place, numbers.long() << shift, accumulate=True)
    return words.to(torch.int32)  # the highest bit is the sign


def test_few_rows_of_int8_weights_stay_a_call_where_the_library_is_fast() -> None:
    torch.manual_seed(0)
    for rows, device, calls in ((1, SLOW, {"_weight_int8pack_mm": 1}), (5, SLOW, {"mm": 1}),
                                 (5, CPU, {"_weight_int8pack_mm": 1})):  # fmt: skip
        inputs = int8_inputs(rows, torch.float32)
        program = compiled(INT8, inputs, device)
        exact = inputs[0].double() @ inputs[1].double().t() * inputs[2].double()
        assert called(program) == calls
        assert_as_exact(program(*inputs)[0], INT8(*inputs), exact, slack=1e-7)
    assert called(compiled(INT8, inputs, preserve_ops=(str(INT8),))) == {"_weight_int8pack_mm": 1}


@pytest.mark.parametrize("tiles", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_int4_weights_are_unpacked_as_the_library_reads_them(dtype: torch.dtype, tiles: int) -> None:
    torch.manual_seed(0)
    width = 32 * tiles
    numbers, scales = torch.randint(0, 16, (COLUMNS, width)), torch.randn(width // GROUP, COLUMNS, 2).to(dtype)
    scale, zero = scales.double().repeat_interleave(GROUP, 0).unbind(-1)
    for rows, kernels in ((5, "library"), (3, "generated")):
        inputs = [torch.randn(rows, width).to(dtype), packed(numbers, tiles), scales]
        program = compiled(INT4, inputs, matmul_kernels=kernels)
        assert called(program) == ({"mm": 1} if kernels == "library" else {})
        exact = inputs[0].double() @ ((numbers.t() - 8) * scale + zero)
        assert error(program(*inputs)[0], exact) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("target", "rows", "calls", "kernels"),
    [
        (INT8, 1, {}, 1), (INT8, 16, {}, 1), (INT8, 64, {"mm": 1}, 2), (INT4, 7, {"_weight_int4pack_mm": 1}, 0),
        (INT4, 8, {}, 1), (INT4, 64, {"mm": 1}, 1),
    ],
)  # fmt: skip
def test_gpus_dequantise_weights_in_a_matmul_of_few_rows_and_before_one_of_many(
    target: Any, rows: int, calls: dict[str, int], kernels: int
) -> None:
    """No call of many rows is that of the library, whose time grows with the rows."""
    width, columns = 1024, 8192
    with FakeTensorMode():
        inputs = [torch.empty(rows, width, dtype=BF16, device="cuda")]
        if target is INT8:
            inputs += [torch.empty(columns, width, dtype=torch.int8, device="cuda")]
            inputs += [torch.empty(columns, dtype=BF16, device="cuda")]
        else:
            inputs += [torch.empty(columns // 8, width // 128, 32, 4, dtype=torch.int32, device="cuda")]
            inputs += [torch.empty(width // GROUP, columns, 2, dtype=BF16, device="cuda")]
        program = compiled(target, inputs, CUDA, matmul_kernels="auto")
        generated = compiled(target, inputs, CUDA, matmul_kernels="generated")
    assert (called(program), called(generated)) == (calls, {})
    assert sum(isinstance(line, Launch) for line in program.program.lines()) == kernels
