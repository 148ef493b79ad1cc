"""Samples at the positions of a grid, which are kernels on massively parallel devices alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Launch

PARALLEL = (dataclasses.replace(CPU, massively_parallel=True),)
BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)

Line = TypeVar("Line", ExternCall, Launch)


def sampled(x: Tensor, grid: Tensor, mode: int = BILINEAR, padding: int = ZEROS, corners: bool = False) -> Tensor:
    """ATen's samples of an image or a volume."""
    operator = torch.ops.aten.grid_sampler_2d if x.dim() == 4 else torch.ops.aten.grid_sampler_3d
    result: Tensor = operator(x, grid, mode, padding, corners)
    return result


def compiled(function: Any, inputs: Sequence[Tensor], **options: Any) -> tuple[Tensor, fxwrap.Program]:
    """The result of a function of tensors, and its program."""
    graph = make_fx(function)(*inputs)
    result = fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(devices=PARALLEL, **options))
    return result(*inputs)[0], result.program


def lines(program: fxwrap.Program, kind: type[Line]) -> list[Line]:
    """The lines of a class."""
    return [line for line in program.lines() if isinstance(line, kind)]


def image_and_grid(sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An image or a volume, and positions of which some are at its corners, and some far beyond them."""
    grid = torch.randn(2, *range(4, 4 + len(sizes)), len(sizes), dtype=dtype)
    grid.view(-1)[:5] = torch.tensor([1.0, -1.0, 0.0, 1e6, -3.0], dtype=dtype)
    return torch.randn(2, 3, *sizes, dtype=dtype), grid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(7, 5), (1, 6), (3, 4, 5)])
def test_all_modes_equal_eager(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grid = image_and_grid(sizes, dtype)
    for options in product((BILINEAR, NEAREST), (ZEROS, BORDER, REFLECTION), (False, True)):
        result, program = compiled(lambda x, grid: sampled(x, grid, *options), (x, grid))  # noqa: B023
        assert not lines(program, ExternCall), str(program)
        tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-5
        expected = sampled(x.double(), grid.double(), *options).to(dtype)
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, msg=str(options))


@pytest.mark.parametrize("padding", [ZEROS, BORDER, REFLECTION])
def test_positions_that_are_not_finite_read_no_memory_beyond(padding: int) -> None:
    """Beyond bounds are zeros, or the first element, as on a GPU."""
    x = torch.rand(1, 1, 4, 4) + 1
    grid = torch.tensor([float("nan"), float("inf"), float("-inf")]).repeat_interleave(2).view(1, 1, 3, 2)
    result, _ = compiled(lambda x, grid: sampled(x, grid, BILINEAR, padding), (x, grid))
    last = {ZEROS: 0.0, BORDER: x[0, 0, 3, 3], REFLECTION: x[0, 0, 0, 0]}[padding]
    first = 0.0 if padding == ZEROS else x[0, 0, 0, 0]
    torch.testing.assert_close(result.flatten(), torch.tensor([first, last, first]))


def test_triton_kernels_equal_eager() -> None:
    x, grid = image_and_grid((7, 5), torch.float32)
    for padding in (ZEROS, REFLECTION):
        function = lambda x, grid: sampled(x, grid, BILINEAR, padding)  # noqa: B023, E731
        result, program = compiled(function, (x, grid), cpu_kernels="triton")
        assert not lines(program, ExternCall)
        torch.testing.assert_close(result, function(x, grid))


def test_computed_grids_are_stored_as_coordinates_of_float32() -> None:
    """They are neither rounded to half precision nor computed again for each channel."""
    x, grid = torch.randn(2, 32, 9, 9, dtype=torch.bfloat16), torch.randn(2, 8, 8, 2, dtype=torch.bfloat16)
    function = lambda x, grid: sampled(x, torch.tanh(grid))  # noqa: E731
    result, program = compiled(function, (x, grid))
    launches = lines(program, Launch)
    assert [line.outs[0].type.dtype for line in launches] == [torch.float32, torch.bfloat16], str(program)
    expected = function(x.double(), grid.double())
    assert (result.double() - expected).norm() < 4e-3 * expected.norm()


def test_a_cpu_and_bicubic_samples_call_the_library() -> None:
    x, grid = image_and_grid((7, 5), torch.float32)
    graph = make_fx(lambda x, grid: sampled(x, grid))(x, grid)
    assert lines(fxwrap.lower(graph), ExternCall)
    _, program = compiled(lambda x, grid: sampled(x, grid, BICUBIC), (x, grid))
    assert lines(program, ExternCall)
