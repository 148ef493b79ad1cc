"""Sums at indices that are computed from positions alone are gathers; others stay scatters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU
from fxwrap.lines import IndexPut
from fxwrap.lowering.fusion.definitions import Pointwise
from fxwrap.lowering.rules.known_indices import known_index

GPU = replace(CPU, massively_parallel=True)
ROWS, COLUMNS = 9, 7

Formula = Callable[[int, int], Tensor]
"""Returns indices into a dimension of a size, for a number of values."""


def nearest(count: int, size: int) -> Tensor:
    return (torch.arange(count) * (size / count)).long()


def half_pixel(count: int, size: int) -> Tensor:
    return ((torch.arange(count) + 0.5) * (size / count) - 0.5).clamp(min=0).long()


def next_half_pixel(count: int, size: int) -> Tensor:
    return (half_pixel(count, size) + 1).clamp(max=size - 1)


def aligned(count: int, size: int) -> Tensor:
    return (torch.arange(count) * ((size - 1) / (count - 1))).long()


def replicated(count: int, size: int) -> Tensor:
    return (torch.arange(count) - (count - size) // 2).clamp(0, size - 1)


FORMULAS = (nearest, half_pixel, next_half_pixel, aligned)


def added(rows: Formula, columns: Formula, heights: int, widths: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that adds values of so many rows and columns to an image of ROWS x COLUMNS."""

    def function(values: Tensor) -> Tensor:
        image = torch.zeros(*values.shape[:-2], ROWS, COLUMNS, dtype=values.dtype)
        indices = [None, None, rows(heights, ROWS).unsqueeze(1), columns(widths, COLUMNS)]
        return torch.ops.aten._unsafe_index_put(image, indices, values * 2, True)

    return function


def compiled(function: Callable[..., Tensor], *inputs: Tensor, device: fxwrap.DeviceSpec = CPU) -> fxwrap.Compiled:
    return fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=fxwrap.Options(devices=(device,)))


def definition(formula: Callable[[object], object], count: int) -> Pointwise:
    """Returns the definition of an index of so many values, `formula(position)` in float32."""

    def body(reader, indices):  # type: ignore[no-untyped-def]
        return formula(reader.body.index(indices[0]).to(torch.float32)).to(torch.int64)  # type: ignore[attr-defined]

    return Pointwise((count,), torch.int64, torch.device("cpu"), body)


@pytest.mark.parametrize("sizes", [(18, 14), (13, 16), (11, 9)], ids=str)
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda item: item.__name__)
def test_values_at_known_indices_are_gathered(formula: Formula, sizes: tuple[int, int]) -> None:
    function = added(formula, formula, *sizes)
    values = torch.randn(2, 3, *sizes)
    result = compiled(function, values)
    assert not [line for line in result.program.body.lines if isinstance(line, IndexPut)]
    torch.testing.assert_close(result(values)[0], function(values))


def test_edges_that_a_padding_repeats_are_gathered() -> None:
    function, values = added(replicated, replicated, ROWS + 2, COLUMNS + 2), torch.randn(2, 3, ROWS + 2, COLUMNS + 2)
    result = compiled(function, values)
    assert not [line for line in result.program.body.lines if isinstance(line, IndexPut)]
    torch.testing.assert_close(result(values)[0], function(values))


def test_a_gather_adds_to_other_values() -> None:
    rows = nearest(18, ROWS)

    def function(image: Tensor, values: Tensor) -> Tensor:
        return torch.ops.aten.index_put(image, [nearest(18, ROWS)], values, True)

    image, values = torch.randn(ROWS, 5), torch.randn(18, 5)
    assert rows.unique().numel() == ROWS
    torch.testing.assert_close(compiled(function, image, values)(image, values)[0], function(image, values))


def test_values_may_be_broadcast_and_indices_narrow() -> None:
    def function(image: Tensor, values: Tensor) -> Tensor:
        return torch.ops.aten.index_put(image, [None, nearest(18, ROWS).to(torch.int32)], values, True)

    image, values = torch.randn(4, ROWS), torch.randn(4, 1)
    torch.testing.assert_close(compiled(function, image, values)(image, values)[0], function(image, values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    function = added(nearest, nearest, 27, 21)
    values = torch.randn(1, 2, 27, 21).to(dtype)
    exact = function(values.double())
    error = (compiled(function, values, device=GPU)(values)[0].double() - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps / 3


def test_indices_far_apart_are_scattered() -> None:
    """An index with values from all positions has no window."""

    def folded(values: Tensor) -> Tensor:
        return torch.ops.aten.index_put(values.new_zeros(4, 6), [torch.arange(64) % 4], values, True)

    values = torch.randn(64, 6)
    assert known_index(definition(lambda i: i.apply("remainder", 4.0), 64), 4) is None  # type: ignore[attr-defined]
    torch.testing.assert_close(compiled(folded, values)(values)[0], folded(values))


def test_an_index_out_of_bounds_still_raises() -> None:
    def function(values: Tensor) -> Tensor:
        return torch.ops.aten.index_put(values.new_zeros(4, 6), [torch.arange(values.shape[0]) + 1], values, True)

    values = torch.randn(4, 6)
    graph = make_fx(function, tracing_mode="fake")(values)
    result = fxwrap.compile_graph(graph, (values,), options=fxwrap.Options(devices=(GPU,)))
    with pytest.raises(IndexError):
        result(values)


def test_devices_that_round_products_otherwise_find_all_values() -> None:
    """(i + 0.5) / 1.4 - 0.5 is 2 at position 3: with a fused multiply-add, it may be 2 or a little less."""
    size, count = 20, 28
    index = known_index(definition(lambda i: (i + 0.5) * (1 / 1.4) - 0.5, count), size)
    assert index is not None
    starts = {target: index.start(target).constant for target in range(size)}
    for position in range(count):
        exact = (position + 0.5) / 1.4 - 0.5
        for target in {int(exact - 1e-6), int(exact + 1e-6)}:
            start = starts[target]
            assert start is not None and start <= position < start + index.width
    near = next(number for number in range(index.width) if starts[2] + number == 3)  # type: ignore[operator]
    assert near not in index.always


def test_exact_indices_need_no_comparison() -> None:
    index = known_index(definition(lambda i: i * 0.5, 18), 9)
    assert index is not None
    assert (index.width, index.always) == (2, {0, 1})


@pytest.mark.parametrize("name", ["sin", "exp"])
def test_functions_that_devices_compute_otherwise_are_unknown(name: str) -> None:
    assert known_index(definition(lambda i: i.apply(name).apply("abs"), 18), 9) is None  # type: ignore[attr-defined]
