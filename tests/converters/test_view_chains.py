"""Chains of view operators: each has the layout of the view, and a view that operators made has a chain."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxwrap.converters.view_chains import view_chain
from fxwrap.converters.view_operators import (
    VIEW_OVERLOADS,
    StridedLayout,
    ViewOperator,
    layout_of,
    result_layout,
    returns_view,
)
from fxwrap.symbolic import SymbolInfo, evaluate, parse_expr, product
from fxwrap.wrapper_ir import TensorType

CPU = torch.device("cpu")
SIZES = ("1", "2", "3", "4", "6", "8", "12", "s0", "s1", "2*s0", "s0*s1", "s1 + 1")
INFOS = {"s0": SymbolInfo("s0", 8, 64), "s1": SymbolInfo("s1", 9, None)}
VALUES = ({"s0": 8, "s1": 9}, {"s0": 11, "s1": 13}, {"s0": 64, "s1": 10})


def tensor_type(sizes: Any, strides: Any, offset: Any = 0) -> TensorType:
    return TensorType(torch.float32, tuple(sizes), tuple(strides), CPU, offset)


@st.composite
def operators(draw: st.DrawFn, layout: StridedLayout) -> ViewOperator:
    """An operator that accepts a tensor, without windows and diagonals if it is symbolic."""
    rank = len(layout.sizes)
    dim = draw(st.integers(0, max(rank - 1, 0)))
    size = layout.sizes[dim] if rank else 1
    possible = ["unsqueeze", "expand"]
    possible += ["permute", "select", "slice", "split", "merge"] if rank > 1 else ["select", "slice"] if rank else []
    possible += ["diagonal"] if rank > 1 and layout.is_static else []
    match draw(st.sampled_from(possible)):
        case "unsqueeze":
            return ViewOperator("unsqueeze", (draw(st.integers(0, rank)),))
        case "expand":
            sizes = [
                draw(st.sampled_from([2, 3])) if item == 1 and draw(st.booleans()) else item for item in layout.sizes
            ]
            return ViewOperator("expand", ((*draw(st.sampled_from([[], [2]])), *sizes),))
        case "permute":
            return ViewOperator("permute", (tuple(draw(st.permutations(range(rank)))),))
        case "select":
            return ViewOperator("select", (dim, draw(st.integers(0, size - 1)) if isinstance(size, int) else 0))
        case "slice" if isinstance(size, int):
            start = draw(st.integers(0, size - 1))
            step = draw(st.sampled_from([1, 1, 2, 3]))
            return ViewOperator("slice", (dim, start, draw(st.integers(start + 1, size)), step))
        case "slice":
            return ViewOperator("slice", (dim, draw(st.sampled_from([0, 1])), size, 1))
        case "split":
            factors = [item for item in (2, 3, 4) if isinstance(size, int) and size % item == 0]
            parts = (size // factors[-1], factors[-1]) if factors else (size, 1)
            return ViewOperator("view", ((*layout.sizes[:dim], *parts, *layout.sizes[dim + 1 :]),))
        case "merge":
            dim = min(dim, rank - 2)
            merged = product(layout.sizes[dim : dim + 2])
            return ViewOperator("view", ((*layout.sizes[:dim], merged, *layout.sizes[dim + 2 :]),))
        case _:
            first, second = draw(st.permutations(range(rank)))[:2]
            return ViewOperator("diagonal", (draw(st.sampled_from([0, 0, 1, -1])), first, second))


@st.composite
def views(draw: st.DrawFn) -> tuple[TensorType, TensorType, bool]:
    """A base, a view of it, and whether it has a diagonal."""
    sizes = tuple(map(parse_expr, draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4))))
    dense = TensorType.contiguous(torch.float32, sizes, CPU)
    order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else range(len(sizes))
    base = tensor_type(
        [dense.sizes[d] for d in order], [dense.strides[d] for d in order], draw(st.sampled_from([0, 7]))
    )
    layout, diagonal = layout_of(base), False
    for _ in range(draw(st.integers(1, 4))):
        operator = draw(operators(layout))
        following = result_layout(operator, layout)
        if following is not None and all(INFOS.keys() >= symbols(size) for size in following.sizes):
            layout, diagonal = following, diagonal or operator.kind == "diagonal"
    return base, tensor_type(layout.sizes, layout.strides, layout.offset), diagonal


def symbols(size: Any) -> set[str]:
    return set() if isinstance(size, int) else {symbol.name for symbol in size.free_symbols}


def at(numbers: Any, values: dict[str, int]) -> Any:
    if isinstance(numbers, tuple):
        return [at(item, values) for item in numbers]
    return int(evaluate(numbers, values))


def tensor_of(type_: TensorType, values: dict[str, int], storage: torch.Tensor) -> torch.Tensor:
    return storage.as_strided(*at((type_.sizes, type_.strides, type_.storage_offset), values))


def apply_chain(tensor: torch.Tensor, base: TensorType, view: TensorType, values: dict[str, int]) -> torch.Tensor:
    """Applies the operators with torch; after each, the tensor has the layout that the chain states."""
    for step in view_chain(base, view, INFOS):
        arguments: list[Any] = at(step.operator.arguments, values)
        if step.operator.kind == "as_strided":
            arguments[2] += tensor.storage_offset()
        tensor = VIEW_OVERLOADS[step.operator.kind](tensor, *arguments)
        layout = step.layout
        assert list(tensor.shape) == at(layout.sizes, values)
        if tensor.numel():
            assert tensor.storage_offset() == at(layout.offset, values)
            strides = zip(tensor.shape, tensor.stride(), at(layout.strides, values), strict=True)
            assert all(size == 1 or one == other for size, one, other in strides)
    return tensor


@given(views())
def test_chains_have_the_layout_of_the_view(case: tuple[TensorType, TensorType, bool]) -> None:
    """By torch, for several values of the symbols; a view that operators made needs no as_strided."""
    base, view, diagonal = case
    storage = torch.arange(400_000)
    for values in VALUES:
        if max(at(base.element_count, values), 1) < 300_000:
            tensor = tensor_of(base, values, storage)
            assert torch.equal(apply_chain(tensor, base, view, values), tensor_of(view, values, storage))
    kinds = [step.operator.kind for step in view_chain(base, view, INFOS)]
    assert diagonal or "as_strided" not in kinds


def typed(sizes: str, strides: str, offset: str = "0") -> TensorType:
    """A type of numbers as texts, which `; ` separates."""
    return tensor_type(map(parse_expr, sizes.split("; ")), map(parse_expr, strides.split("; ")), parse_expr(offset))


@pytest.mark.parametrize("sizes", [(1, 16), (16, 1), (1, 3, 1, 4), (0, 24), (2, 0, 3)])
def test_orders_of_dimensions_have_the_strides_of_all(sizes: tuple[int, ...]) -> None:
    """Grouped matmuls check them: the transpose of one row, or of none, is not a column of a new layout."""
    tensor = torch.arange(product(sizes)).view(sizes)
    base = tensor_type(tensor.shape, tensor.stride())
    for order in itertools.permutations(range(len(sizes))):
        view = tensor.permute(order)
        result = apply_chain(tensor, base, tensor_type(view.shape, view.stride()), {})
        assert torch.equal(result, view) and result.stride() == view.stride(), order


def test_slices_that_maxima_bound_have_chains() -> None:
    """Positions of relative attention: a table that is padded, or cut in the middle, to `2*s2 - 1` rows."""
    base = typed("1; 2*max(0, s2 - 5) + 9; 96", "192*max(0, s2 - 5) + 864; 96; 1")
    view = typed("2*s3; 96; 2*s2 - 1", "0; 1; 96", "96*max(0, 5 - s2)")
    infos = {"s2": SymbolInfo("s2", 2), "s3": SymbolInfo("s3", 2)}
    assert [step.operator.kind for step in view_chain(base, view, infos)] == ["slice", "permute", "expand"]


@pytest.mark.parametrize("column", ["0", "2"])
def test_rows_of_a_length_that_is_a_sum_are_sliced(column: str) -> None:
    base, view = typed("6; s1 + 1", "s1 + 1; 1"), typed("3", "s1 + 1", f"3*s1 + 3 + {column}")
    steps = [step.operator for step in view_chain(base, view, INFOS)]
    assert steps == [ViewOperator("slice", (0, 3, 6, 1)), ViewOperator("select", (1, int(column)))]


def test_a_part_of_unknown_length_does_not_leave_a_dense_base() -> None:
    """The second and third of the parts that `split_with_sizes` makes of 64 rows."""
    base = typed("64; 8", "8; 1")
    for start in ("s0", "s0 + s2"):
        (step,) = view_chain(base, typed("s1; 8", "8; 1", f"8*({start})"), INFOS)
        assert step.operator == ViewOperator("slice", (0, parse_expr(start), parse_expr(f"{start} + s1"), 1))


@pytest.mark.parametrize("start", [0, 14])
def test_a_range_is_cut_before_it_is_divided(start: int) -> None:
    """Longformer's diagonals: rows of 56 elements in lines of 13, although 13 does not divide 56."""
    base, view = typed("8; 4; 4; 14", "224; 56; 14; 1"), typed("32; 3; 12", "56; 13; 1", str(start))
    assert {step.operator.kind for step in view_chain(base, view, {})} == {"view", "slice"}
    apply_chain(torch.arange(1792).view(8, 4, 4, 14), base, view, {})


def test_arguments_of_views_are_simplified_by_ranges() -> None:
    """A slice at an unbacked position has sizes that count from the end, unless a range excludes that."""
    base, view = typed("1; 4*min(1, u0)", "4; 1"), typed("min(1, where(u0 < 0, u0 + 1, u0)); 4", "4; 1")
    operator = ViewOperator("view", (view.sizes,))
    assert returns_view(operator, base, view, {"u0": SymbolInfo("u0", 0, 6)})
    assert not returns_view(operator, base, view, {"u0": SymbolInfo("u0")})


@pytest.mark.parametrize(
    ("base", "view", "reason"),
    [
        (typed("4; 6", "6; 1"), typed("3; 3", "5; 2"), "not those of a mixed-radix division: stride 5 has no factor"),
        (typed("4; 6", "7; 1"), typed("4; s0", "7; 1"), "6 elements of its base from 0 on, may leave them"),
        (typed("64; 8", "8; 1"), typed("s0 + 65; 8", "8; 1"), "512 elements of its base from 0 on, may leave them"),
        (typed("4; 6", "7; 2"), typed("4; 6", "7; 1"), "no stride of its base divides the stride 1 of dimension 1"),
        (typed("4; 6", "12; 2"), typed("4; 6", "12; 2", "1"), "the offset 1 is not that of an element"),
    ],
)
def test_as_strided_says_why_there_is_no_chain(base: TensorType, view: TensorType, reason: str) -> None:
    (step,) = view_chain(base, view, INFOS)
    assert step.operator.kind == "as_strided" and reason in step.reason
