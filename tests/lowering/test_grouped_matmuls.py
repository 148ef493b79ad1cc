"""Grouped matmuls as kernels whose blocks of rows have one group each: in Triton's interpreter, beside eager mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Launch
from tests.support.agreement import assert_as_exact
from tests.support.capture import recording_backend

WIDTH, COLUMNS = 16, 32
OPTIONS = Options(matmul_kernels="generated", cpu_kernels="triton", compile_cache=False)


def activated(x: Tensor, into: Tensor, ends: Tensor) -> Tensor:
    return functional.silu(torch._grouped_mm(x, into.transpose(1, 2), ends))


def operands(sizes: Sequence[int], more: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of groups of these sizes and `more` rows that no group has, matrices, and the ends of the groups."""
    generator = torch.Generator().manual_seed(len(sizes))
    x = torch.randn(sum(sizes) + more, WIDTH, generator=generator)
    into = torch.randn(len(sizes), COLUMNS, WIDTH, generator=generator)
    return x.to(dtype), into.to(dtype), torch.tensor(sizes).cumsum(0, dtype=torch.int32)


def exact(x: Tensor, into: Tensor, ends: Tensor) -> Tensor:
    rows = x[: int(ends[-1])].double().tensor_split(ends[:-1].tolist())
    products = [part @ matrix.double().t() for part, matrix in zip(rows, into, strict=True)]
    return functional.silu(torch.cat(products))


def assert_blocks_of_groups(program: fxwrap.Compiled) -> None:
    launches = [line for line in program.program.lines() if isinstance(line, Launch)]
    texts = [program.program.kernel(line.kernel).source for line in launches]
    assert not [line for line in program.program.lines() if isinstance(line, ExternCall)]
    assert len(texts) == 2 and "first_row < end" in texts[1] and "tl.dot" in texts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ([40, 0, 1, 31], 0), ([0, 0, 64, 0], 0), ([20, 0, 12], 40), ([9] * 131, 0),
    ],
    ids=["empty_and_one_row", "one_of_several", "rows_of_no_group", "many"],
)  # fmt: skip
def test_blocks_of_groups_agree(sizes: list[int], more: int, dtype: torch.dtype) -> None:
    inputs = operands(sizes, more, dtype)
    program = fxwrap.compile_graph(make_fx(activated)(*inputs), inputs, options=OPTIONS)
    assert_blocks_of_groups(program)
    (result,) = program(*inputs)
    want = exact(*inputs)
    assert_as_exact(result[: len(want)], activated(*inputs)[: len(want)], want, slack=1e-6)


def test_rows_may_be_of_any_number() -> None:
    programs: list[fxwrap.Compiled] = []
    function = torch.compile(activated, backend=recording_backend(programs, OPTIONS))
    for sizes in ([30, 0, 34], [1, 0, 1], [70, 33, 0], [0, 0, 3]):
        x, into, ends = operands(sizes, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(function(x, into, ends).double(), exact(x, into, ends), rtol=2e-2, atol=2e-2)
    (program,) = programs
    assert_blocks_of_groups(program)


def gathered(x: Tensor, tokens: Tensor, into: Tensor, ends: Tensor) -> Tensor:
    return functional.silu(torch._grouped_mm(x[tokens], into.transpose(1, 2), ends))


def test_gathered_rows_are_checked_before() -> None:
    """The kernel of a matmul has no assertion, whose call would keep a GPU's matrix instructions from overlapping."""
    x, into, ends = operands([90, 0, 60], dtype=torch.bfloat16)
    tokens = torch.arange(150).flip(0)
    device = dataclasses.replace(CPU, massively_parallel=True)
    options = Options(matmul_kernels="generated", cpu_kernels="triton", compile_cache=False, devices=(device,))
    program = fxwrap.compile_graph(make_fx(gathered)(x, tokens, into, ends), (x, tokens, into, ends), options=options)
    launches = [line for line in program.program.lines() if isinstance(line, Launch)]
    texts = [program.program.kernel(line.kernel).source for line in launches]
    assert ["tl.device_assert" in text for text in texts] == [False, True, False] and "tl.dot" in texts[2]
    (result,) = program(x, tokens, into, ends)
    torch.testing.assert_close(result.double(), exact(x[tokens], into, ends), rtol=2e-2, atol=2e-2)
    with pytest.raises(IndexError, match="out of bounds for a dimension of size 150"):
        program(x, tokens + 1, into, ends)


@pytest.mark.parametrize("emitter", ["python", "fx", "cpp"])
def test_many_rows_of_a_group_are_loaded_through_descriptors(emitter: str) -> None:
    """Gathered rows are not, blocks of three sizes have one. Launches by torch's operator for Triton kernels would have
    no scratch memory."""
    x, into, ends = operands([290, 0, 300], dtype=torch.bfloat16)
    tokens = torch.arange(590).flip(0)
    device = dataclasses.replace(CPU, massively_parallel=True, supports_tensor_descriptors=True)
    options = Options(
        matmul_kernels="generated", cpu_kernels="triton", compile_cache=False, devices=(device,), emitter=emitter
    )
    inputs = x, tokens, into, ends
    program = fxwrap.compile_graph(make_fx(gathered)(*inputs), inputs, options=options)
    (text,) = [item.source for item in program.program.kernels if "tl.dot" in item.source]
    assert text.count("tl.make_tensor_descriptor(") == 3
    shifted = torch.cat([into.flatten()[:1], into.flatten()])[1:].view_as(into)
    assert shifted.data_ptr() % 16, "a launch copies it"
    for weights in (into, shifted):
        (result,) = program(x, tokens, weights, ends)
        torch.testing.assert_close(result.double(), exact(x[tokens], into, ends), rtol=2e-2, atol=2e-2)
