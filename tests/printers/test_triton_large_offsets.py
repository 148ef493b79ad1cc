"""Indices of Triton kernels beyond 32 bits: extents, integers that index arithmetic divides, sizes with symbols.

Tensors are files without content, of which the interpreter reads and writes few pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fxwrap.devices import CUDA
from fxwrap.loop_ir import Axis, Index, Kernel, KernelBuilder, as_index, index_range, linearize_index, parse_kernel
from fxwrap.printers import KernelRequest, PrintedKernel, candidate_kernels
from fxwrap.printers.triton import print_triton
from fxwrap.symbolic import make_symbol
from tests.printers.test_cpp_printer_contractions import matmul
from tests.printers.test_triton_grouped_contractions import GROUPED
from tests.printers.triton_kernels import build, check, launch_interpreted
from tests.support.attention_kernel import attention_kernel

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
    tensors = {item.name: _without_content(tmp_path / item.name, item.extent, I8) for item in buffers}
    last = range(max(count - 5, 0), count)
    for at in last:
        tensors["x"][place(at)] = at % 100 + 1
    _run_last_program(kernel, print_triton(kernel), tensors)
    assert [int(tensors["out"][at]) for at in last] == [at % 100 + 1 for at in last]


@dataclass(frozen=True)
class LastElements:
    """A kernel, the last elements of its inputs, with zeros before them, and those of its result."""

    kernel: Kernel
    inputs: Mapping[str, torch.Tensor]
    expected: torch.Tensor


def _random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def _attention(heads: int, rows: int, keys: int) -> LastElements:
    """The last rows of the last head see all keys; no head has a bias."""
    kernel, last = attention_kernel(heads, rows, keys, 16, 16, torch.bfloat16), min(rows, 2)
    query, key, value = _random(last, 16), _random(keys, 16), _random(keys + 1, 16)[1:]
    scores = query.float() @ key.float().t()
    visible = torch.arange(rows - last, rows)[:, None] >= torch.arange(keys) - 2
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return LastElements(kernel, {"query": query, "key": key, "value": value}, weights @ value.float())


def _matmul(rows: int, columns: int) -> LastElements:
    a, b = _random(min(rows, 2), 16), _random(2, 16)
    inputs = {"a": a, "b": b} if rows > columns else {"a": a[-1:], "b": b}
    return LastElements(matmul(rows, columns, 16, "bf16"), inputs, -(inputs["a"].float() @ b.float().t()))


def _grouped(rows: int, groups: int) -> LastElements:
    text = GROUPED.replace("37", str(rows)).replace("[4*24", f"[{groups}*24").replace("<4>", f"<{groups}>")
    a, w, bias = (_random(*sizes, dtype=torch.float16) for sizes in ((2, 40), (24, 40), (24,)))
    inputs = {"a": a, "w": w, "bias": bias.float(), "group": torch.full((rows if rows < 99 else 99,), groups - 1)}
    return LastElements(parse_kernel(text), inputs, a.float() @ w.float().t() + bias)


LAST_ELEMENTS: dict[str, Callable[[], LastElements]] = {
    "rows of attention": lambda: _attention(1, (1 << 27) + 37, 35),
    "heads of attention": lambda: _attention((1 << 25) + 3, 5, 7),
    "keys of decoding": lambda: _attention((1 << 24) + 3, 1, 40),
    "rows of a matmul": lambda: _matmul((1 << 27) + 5, 16),
    "columns of a matmul": lambda: _matmul(4, (1 << 27) + 5),
    "columns of one row": lambda: _matmul(1, (1 << 27) + 5),
    "rows of groups": lambda: _grouped((1 << 26) + 5, 4),
    "groups of rows": lambda: _grouped(37, (1 << 22) + 3),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", LAST_ELEMENTS)
def test_the_last_elements_are_right_in_every_configuration(case: str, tmp_path: Path) -> None:
    last = LAST_ELEMENTS[case]()
    kernel, expected = last.kernel, last.expected.flatten()
    candidates = candidate_kernels(KernelRequest(kernel, "triton", torch.device("cuda", 0), CUDA, int))
    assert len(candidates) > 1
    for candidate in candidates:
        buffers = (*kernel.inputs, *kernel.outputs)
        tensors = {item.name: _without_content(tmp_path / item.name, item.extent, item.dtype) for item in buffers}
        for name, elements in last.inputs.items():
            tensors[name][-elements.numel() :] = elements.flatten()
        _run_last_program(kernel, candidate(), tensors)
        result = tensors[kernel.outputs[0].name][-expected.numel() :].float()
        computed = result != 0  # a program may have few of the columns
        assert computed[-1]
        torch.testing.assert_close(result[computed], expected[computed], rtol=1e-2, atol=1e-2)


def _without_content(path: Path, extent: object, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros that takes no memory before it is written."""
    assert isinstance(extent, int)
    with path.open("wb") as file:
        file.truncate(extent * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=extent, dtype=dtype)


def _run_last_program(kernel: Kernel, printed: PrintedKernel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Runs the program of the last elements: the first one, if programs go through them in reverse."""
    (programs, *_), first, count = printed.grid, "tl.program_id(0)", "tl.num_programs(0)"
    assert isinstance(programs, int)
    assert "tl.int64)" in printed.source
    number = first if f"{count} - 1 - {first}" in printed.source else f"({first} + {programs - 1})"
    source = printed.source.replace(first, number).replace(count, str(programs))
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


def test_remainders_of_negative_constants_are_rounded_down() -> None:
    """Triton's operator truncates, as C does, once a size is a parameter."""
    s0, axis = make_symbol("s0"), Axis("p0", 4)

    def write(body: KernelBuilder) -> None:
        row = (as_index(0) - 2) % s0
        body.store("out", as_index(axis), body.load("x", row * 4 + axis, torch.int32))

    kernel = build([axis], [], {"x": (torch.int32, s0 * 4)}, {"out": (torch.int32, 4)}, write)
    assert "floor_modulo(-2, s0)" in check(kernel, numbers={"s0": 5})
