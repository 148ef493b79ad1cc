"""Slices at numbers that are known when a program runs, diagonals and other windows are overwritten where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.compile import emit
from fxwrap.lines import Assert, ExternCall, Mutate
from fxwrap.testing import assert_emitters_agree
from fxwrap.wrapper_ir import live_bytes
from tests.support.versions import fails_before

aten = torch.ops.aten


class _Cache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(16, 4))


class Slice(_Cache):
    """Rows are written from a position on that is an element of a tensor."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        start = at.item()
        self.rows[start : start + x.shape[0]] = x.tanh()  # type: ignore[misc]
        return self.rows.sum(0)


class Checked(_Cache):
    """The same, where the model states the range of positions."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        start = at.item()
        torch._check(start >= 0)
        torch._check(start + x.shape[0] <= 16)
        self.rows[start : start + x.shape[0]] = x.tanh()  # type: ignore[misc]
        return self.rows.sum(0)


class Row(_Cache):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.rows[at.item()] = x[0].tanh()  # type: ignore[index]
        return self.rows.sum(0)


class Block(_Cache):
    """A slice within a row, which a value computed from it overwrites."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        row = at.item()
        torch._check(row >= 0)
        torch._check(row < 16)
        self.rows[row][1:3] *= x[0, :2]  # type: ignore[index]
        return self.rows * 2


class Strided(_Cache):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.rows.as_strided((3, 2), (9, 2), 5).add_(x[0, :2])
        self.rows.diagonal(-1).mul_(x[1, 0])
        return self.rows.sum(0) + at


_NO_EXPORT = fails_before("2.13", "torch.export asks how long the slice is", GuardOnDataDependentSymNode)
MODULES = (pytest.param(Slice, marks=_NO_EXPORT), Checked, Row, Block, Strided)
POSITIONS = {Slice: (0, 14, -5), Checked: (3, 14), Row: (0, 15, -16, -1), Block: (0, 15), Strided: (0,)}


VALID_POSITIONS = "the source does not fit into dimension 0 at that position, got|out of bounds for storage"
"""The message of the check, or torch's for an earlier view of the same slice."""


def exported(module: type[_Cache]) -> torch.export.ExportedProgram:
    return torch.export.export(module(), (torch.randn(2, 4), torch.tensor(3)))


def run(program: fxwrap.Program, emitter: str, rows: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A program's results by an emitter when its cache has these rows before, and the rows after it."""
    held = program.store.tensors["b_rows"].copy_(rows)
    (result,) = emit(program, emitter)(*inputs)
    return result, held.clone()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "fuse"),
    [
        pytest.param(Slice, True, marks=_NO_EXPORT), (Checked, True), (Row, True), (Block, True), (Strided, True),
        (Block, False),
    ],
)  # fmt: skip
def test_a_cache_is_written_in_place(module: type[_Cache], fuse: bool) -> None:
    program = fxwrap.lower(exported(module), options=Options(fuse=fuse))
    for position in POSITIONS[module]:
        eager, x, at = module(), torch.randn(2, 4), torch.tensor(position)
        rows = eager.rows.clone()
        wanted = eager(x, at)
        for emitter in COMPARED_EMITTERS:
            torch.testing.assert_close(run(program, emitter, rows, x, at), (wanted, eager.rows))
    assert "_scatter.default" not in str(program)
    cache = next(item.value for item in program.constants)
    assert not [line for line in program.lines() if isinstance(line, Mutate) and line.writes == (cache,)]
    if module is not Block:  # which gives a tensor as large
        assert live_bytes(program, include_constants=False).peak < 16 * 4 * 4


@pytest.mark.parametrize(
    ("module", "positions", "error", "text"),
    [
        pytest.param(Slice, (15, -1), RuntimeError, VALID_POSITIONS, marks=_NO_EXPORT),
        (Row, (16, -17), IndexError, "index"),
    ],
)
def test_an_index_out_of_range_always_raises(
    module: type[_Cache], positions: tuple[int, ...], error: type[Exception], text: str
) -> None:
    program, rows = fxwrap.lower(exported(module), options=Options(runtime_asserts=False)), torch.randn(16, 4)
    for emitter in COMPARED_EMITTERS:
        for position in positions:
            with pytest.raises(error, match=text):
                run(program, emitter, rows, torch.randn(2, 4), torch.tensor(position))
            assert torch.equal(program.store.tensors["b_rows"], rows)


def _of_a_matmul(x: Tensor, v: Tensor) -> Tensor:
    """The memory that `mm` gave is written; nobody else reads it."""
    return aten.as_strided_scatter(x @ x, v, [2], [3], 1)


def _after_a_view(x: Tensor, v: Tensor) -> Tensor:
    base = x @ x
    return aten.as_strided_scatter(base, aten.as_strided(base, [2], [3], 1) * v, [2], [3], 1)


def _slice_of_a_matmul(x: Tensor, v: Tensor) -> Tensor:
    return aten.select_scatter(x @ x, v.repeat(2), 0, 1)


@pytest.mark.parametrize("function", [_of_a_matmul, _after_a_view, _slice_of_a_matmul])
def test_dead_memory_is_written_without_a_copy(function: Any) -> None:
    arguments, options = (torch.randn(4, 4), torch.randn(2)), Options(fuse=False)
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    assert_emitters_agree(graph, arguments, options=options)
    program = fxwrap.lower(graph, arguments, options=options)
    assert "_scatter.default" not in str(program)


def _read_later(x: Tensor, v: Tensor) -> Any:
    base = x @ x
    return aten.as_strided_scatter(base, v, [2], [3], 1), base.sin()


def _aliasing_source(x: Tensor, v: Tensor) -> Any:
    base = x @ x
    return aten.as_strided_scatter(base, aten.as_strided(base, [2], [1], 2), [2], [1], 1)


def _view_read_later(x: Tensor, v: Tensor) -> Any:
    base = x @ x
    shown = aten.as_strided(base, [2], [3], 1)
    return aten.as_strided_scatter(base, v, [2], [3], 1), shown * 2


def _own_source(x: Tensor, v: Tensor) -> Any:
    base = x @ x
    return aten.as_strided_scatter(base, base, [4, 4], [4, 1], 0)


@pytest.mark.parametrize("function", [_read_later, _aliasing_source, _view_read_later, _own_source])
def test_live_memory_is_not_overwritten(function: Any) -> None:
    arguments = (torch.randn(4, 4), torch.randn(2))
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    for options in (Options(), Options(fuse=False)):
        assert_emitters_agree(graph, arguments, options=options)
        program = fxwrap.lower(graph, arguments, options=options)
        called = [line.target for line in program.lines() if isinstance(line, ExternCall)]
        assert "aten.as_strided_scatter.default" in called


def test_a_kernel_does_not_overwrite_a_view_it_reads() -> None:
    """The view is of other elements than those that are computed."""

    def function(x: Tensor) -> Tensor:
        base = x @ x
        return base + aten.as_strided(base, [4, 4], [1, 4], 0)

    arguments = (torch.randn(4, 4),)
    assert_emitters_agree(make_fx(function, tracing_mode="fake")(*arguments), arguments)


def test_conditions_checked_by_guards_are_not_rechecked() -> None:
    """Sizes and numbers of the caller are guarded for."""

    class Given(_Cache):
        def forward(self, x: Tensor, at: int) -> Tensor:
            self.rows[at : at + x.shape[0]] = x.tanh()
            return self.rows.sum(0)

    shapes = {"x": None, "at": torch.export.Dim.DYNAMIC}
    program = fxwrap.lower(torch.export.export(Given(), (torch.randn(2, 4), 5), dynamic_shapes=shapes))
    assert not [line for line in program.lines() if isinstance(line, Assert) and "does not fit" in line.message]


@pytest.mark.gpu
@pytest.mark.parametrize("module", MODULES)
def test_a_cache_on_a_gpu_is_written_in_place(module: type[_Cache]) -> None:
    """The position is on the GPU too, and read by the host."""
    graph = torch.export.export(module().cuda(), (torch.randn(2, 4, device="cuda"), torch.tensor(3, device="cuda")))
    program = fxwrap.lower(graph)
    assert "_scatter.default" not in str(program)
    for position in POSITIONS[module]:
        eager = module().cuda()
        x, at = torch.randn(2, 4, device="cuda"), torch.tensor(position, device="cuda")
        rows = eager.rows.clone()
        wanted = eager(x, at)
        for emitter in COMPARED_EMITTERS:
            torch.testing.assert_close(run(program, emitter, rows, x, at), (wanted, eager.rows))


OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: torch.slice_scatter(x.expand(3, 4), x.expand(2, 4) * 2, 0, 1, 3),
    "whole slice": lambda x: torch.slice_scatter(x.expand(3, 4), x.expand(3, 4).cumsum(0), 0, 0, 3),
    "row": lambda x: torch.select_scatter(x.expand(3, 4), x * 2, 0, 1),
    "diagonal": lambda x: torch.diagonal_scatter(x.expand(4, 4), x * 2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", OVERLAPPING)
def test_results_of_overlapping_operands_have_memory_for_each_element(case: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        result = OVERLAPPING[case](x)
        product = result @ x
        return result.add_(1), product

    x = torch.rand(4)
    wanted, results = function(x), torch.compile(function, backend="fxwrap")(x)
    torch.testing.assert_close(results, wanted, check_stride=True)
    assert_emitters_agree(make_fx(function, tracing_mode="fake")(x), (x,))


@pytest.mark.parametrize("fuse", [True, False])
def test_calls_read_views_of_a_written_slice_of_a_storage(fuse: bool) -> None:
    """torch's cache of fake results has other storage offsets for the second write than the first one's trace has."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x[1:] = y[1:]
        return x[1:, :] @ y.t()

    for _ in range(2):
        torch.compiler.reset()
        storage, y = torch.randn(22), torch.randn(4, 5)
        x, other = [item[2:].view(4, 5) for item in (storage, storage.clone())]
        actual = torch.compile(function, backend="fxwrap", options={"fuse": fuse})(x, y)
        torch.testing.assert_close(actual, function(other, y))
        assert torch.equal(x, other)
