"""Training saves the offset of a pooling's maximum in its window as one byte, and computes the index from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxwrap
from fxwrap.devices import CPU, CUDA
from fxwrap.lines import Launch, Return
from fxwrap.wrapper_ir import Value

POOLS = {
    "overlapping": (2, 3, 2, 1, 1, False),
    "uneven": (2, (2, 3), None, (0, 1), 1, False),
    "beyond the end": (2, 3, (1, 2), 1, 1, True),
    "rows": (2, (1, 2), 2, 0, 1, True),
    "gaps": (2, (3, 2), (2, 1), (1, 0), (1, 3), False),
    "one column": (2, (3, 1), 2, (1, 0), 2, False),
    "volume": (3, 2, 2, 0, 1, False),
    "padded volume": (3, (3, 2, 3), (2, 1, 2), 1, 1, True),
    "volume with gaps": (3, 2, 1, 0, (1, 2, 2), False),
}
"""Dimensions, windows, steps, paddings, dilations, and whether a last window may go beyond."""


DEVICE = replace(CPU, massively_parallel=True, instructions_per_byte=CUDA.instructions_per_byte)


def compiled(function: Any, programs: list[fxwrap.Program]) -> Any:
    """Compiles a function for a CPU whose backward of a pooling gathers, as that of a GPU."""

    def collect(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    options = {"emitter": "python", "passes": (collect,), "devices": [DEVICE]}
    return torch.compile(function, backend="fxwrap", fullgraph=True, options=options)


def image(dimensions: int, samples: int = 2) -> Tensor:
    """Returns elements with equal maxima, and one that is no number."""
    sizes = (samples, 3, 7, 9) if dimensions == 2 else (samples, 2, 5, 4, 7)
    x = torch.randint(0, 4, sizes, generator=torch.Generator().manual_seed(0)).double()
    x[1, 1, 3, 3] = torch.nan
    return x


def saved_dtypes(program: fxwrap.Program) -> list[torch.dtype]:
    """The dtypes of the integers that a forward returns."""
    last = program.body.lines[-1]
    assert isinstance(last, Return)
    types = [item.type for item in last.values if isinstance(item, Value)]
    return [item.dtype for item in types if not item.dtype.is_floating_point]  # type: ignore[union-attr]


def gradient(function: Any, x: Tensor, dynamic: Sequence[int] = ()) -> Tensor:
    """Returns the gradient of the sum of a function's results; sizes of `dynamic` dimensions are symbols."""
    x = x.detach().requires_grad_()
    for dim in dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.sampled(3)
@pytest.mark.parametrize("channels_last", [False, True], ids=["rows", "channels last"])
@pytest.mark.parametrize("name", POOLS)
def test_one_byte_per_window_is_saved(name: str, channels_last: bool) -> None:
    dimensions, kernel, stride, padding, dilation, ceil = POOLS[name]
    maximum: Any = F.max_pool2d if dimensions == 2 else F.max_pool3d

    def pool(x: Tensor) -> Tensor:
        return maximum(x.sin(), kernel, stride, padding, dilation, ceil_mode=ceil) * 2

    x = image(dimensions)
    if channels_last:
        x = x.to(memory_format=torch.channels_last if dimensions == 2 else torch.channels_last_3d)
    programs: list[fxwrap.Program] = []
    torch.testing.assert_close(gradient(compiled(pool, programs), x), gradient(pool, x), equal_nan=True)
    assert saved_dtypes(programs[0]) == [torch.uint8]
    assert sum(isinstance(line, Launch) for line in programs[1].body.lines) == 1


def test_a_dynamic_batch_saves_bytes() -> None:
    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x.sin(), 3, 2, 1) * 2

    programs: list[fxwrap.Program] = []
    run = compiled(pool, programs)
    for samples in (2, 3, 5):
        actual, x = gradient(run, image(2, samples), dynamic=[0]), image(2, samples)
        torch.testing.assert_close(actual, gradient(pool, x), equal_nan=True)
    assert len(programs) == 2 and saved_dtypes(programs[0]) == [torch.uint8]


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2), (9, 1), (1, 9)], ids=str)
def test_windows_wider_than_the_plane_save_bytes(sizes: tuple[int, int]) -> None:
    """An offset along a row is then one along the column, too."""

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x.sin(), 3, 1, 1) * 2

    programs: list[fxwrap.Program] = []
    x = torch.randn(2, 3, *sizes, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gradient(compiled(pool, programs), x), gradient(pool, x))
    assert saved_dtypes(programs[0]) == [torch.uint8]


def test_returned_indices_are_saved() -> None:
    def pool(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x.sin(), 3, 2, 1, return_indices=True)

    programs: list[fxwrap.Program] = []
    run, x = compiled(pool, programs), image(2)
    torch.testing.assert_close(run(x)[1], pool(x)[1])
    torch.testing.assert_close(gradient(lambda x: run(x)[0], x), gradient(lambda x: pool(x)[0], x), equal_nan=True)
    assert {*saved_dtypes(programs[-2])} == {torch.int64}
