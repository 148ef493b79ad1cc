"""Indices of Triton kernels beyond 32 bits: extents, integers that index arithmetic divides, sizes with symbols.

Tensors are files without content, of which the interpreter reads and writes few pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxwrap.loop_ir import Axis, Index, Kernel, KernelBuilder, as_index, index_range, linearize_index
from fxwrap.printers.triton import print_triton
from fxwrap.symbolic import make_symbol
from tests.printers.triton_kernels import build, launch_interpreted

I8 = torch.int8


def _copy(axes: list[Axis], source: Index, elements: int) -> Kernel:
    """A copy of the elements at `source` to contiguous ones."""
    sizes = [axis.size for axis in axes]
    count = 1
    for size in sizes:
        assert isinstance(size, int)
        count *= size

    def write(body: KernelBuilder) -> None:
        body.store("out", linearize_index(axes, sizes), body.load("x", source, I8))

    return build(axes, [], {"x": (I8, elements)}, {"out": (I8, count)}, write)


def _roll() -> tuple[Kernel, Callable[[int], int]]:
    size, shift = 1_500_000_000, 1_000_000_000
    axis = Axis("p0", size)
    return _copy([axis], (as_index(axis) + shift) % size, size), lambda at: (at + shift) % size


def _sparse() -> tuple[Kernel, Callable[[int], int]]:
    size = 1_500_000_000
    axis = Axis("p0", size)
    return _copy([axis], (as_index(axis) * 5 + 1) // 4, size * 5 // 4), lambda at: (at * 5 + 1) // 4


def _matrix() -> tuple[Kernel, Callable[[int], int]]:
    rows, columns = Axis("p0", 50_000), Axis("p1", 50_003)
    source = as_index(columns) * 50_000 + rows
    return _copy([rows, columns], source, 50_000 * 50_003), lambda at: at % 50_003 * 50_000 + at // 50_003


def _strided() -> tuple[Kernel, Callable[[int], int]]:
    axis, stride = Axis("p0", 5), 1 << 30
    return _copy([axis], as_index(axis) * stride, 4 * stride + 1), lambda at: at * stride


CASES = {"roll": _roll, "sparse": _sparse, "matrix": _matrix, "strided": _strided}


@pytest.mark.parametrize("case", CASES)
def test_the_last_elements_are_copied(case: str, tmp_path: Path) -> None:
    kernel, place = CASES[case]()
    count = kernel.outputs[0].extent
    assert isinstance(count, int)
    buffers = (*kernel.inputs, *kernel.outputs)
    tensors = {item.name: _without_content(tmp_path / item.name, item.extent) for item in buffers}
    last = range(max(count - 5, 0), count)
    for at in last:
        tensors["x"][place(at)] = at % 100 + 1
    _run_last_program(kernel, tensors)
    assert [int(tensors["out"][at]) for at in last] == [at % 100 + 1 for at in last]


def _without_content(path: Path, extent: object) -> torch.Tensor:
    """Returns a tensor of zeros that takes no memory before it is written."""
    assert isinstance(extent, int)
    with path.open("wb") as file:
        file.truncate(extent)
    return torch.from_file(str(path), shared=True, size=extent, dtype=I8)


def _run_last_program(kernel: Kernel, tensors: Mapping[str, torch.Tensor]) -> None:
    printed = print_triton(kernel)
    (programs, *_), first = printed.grid, "tl.program_id(0)"
    assert isinstance(programs, int)
    assert ".to(tl.int64)" in printed.source
    source = printed.source.replace(first, f"({first} + {programs - 1})")
    launch_interpreted(kernel, replace(printed, source=source, grid=(1, 1, 1)), tensors)


def test_sizes_that_are_less_for_larger_symbols() -> None:
    s0, s1 = make_symbol("s0"), make_symbol("s1")
    axis = Axis("p0", s0 * (100_000 - s1))

    def write(body: KernelBuilder) -> None:
        body.store("out", as_index(axis), body.load("x", as_index(axis), I8))

    kernel = build([axis], [], {"x": (I8, axis.size)}, {"out": (I8, axis.size)}, write)
    assert "tl.int64" in print_triton(kernel, limits={"s0": 60_000, "s1": 100_000}).source
    assert "tl.int64" not in print_triton(kernel, limits={"s0": 6_000, "s1": 100_000}).source


def test_ranges_of_indices() -> None:
    s0 = make_symbol("s0")
    axis = as_index(Axis("p0", 10))
    assert index_range(axis * -3 + 4, {}) == (-23, 4)
    assert index_range((axis * 3 - 20) // 4, {}) == (-5, 1)
    assert index_range((axis - 20) % 7, {}) == (0, 6)
    assert index_range(axis * s0, {"s0": 8}) == (0, 72)
    assert index_range(axis * s0, {}) == (float("-inf"), float("inf"))
    assert index_range(axis // s0, {"s0": 8}) == (0, 9)
