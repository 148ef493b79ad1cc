"""Index spaces in normal form: fewer axes, contiguous ones innermost, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Index,
    Kernel,
    KernelBuilder,
    as_index,
    canonicalize_axes,
    delinearize_index,
    evaluate_kernel,
    linearize_index,
)
from fxwrap.symbolic import make_symbol

F32, I64 = torch.float32, torch.int64


def sizes_of(kernel: Kernel) -> tuple[list[int], list[int]]:
    return [axis.size for axis in kernel.axes], [axis.size for axis in kernel.reduced]


def copy(axes: Sequence[Axis], read: Index, write: Index, size: int = 24) -> Kernel:
    body = KernelBuilder()
    body.store("out", write, body.load("x", read, F32))
    return body.finish(axes, [], [Buffer("x", F32, size)], [Buffer("out", F32, size)])


def reduce(kind: str, axes: Sequence[Axis], reduced: Sequence[Axis], read: Index) -> Kernel:
    body = KernelBuilder()
    value = body.reduce(kind, body.load("x", read, F32))[-1]
    body.store("out", linearize_index(axes, [axis.size for axis in axes]), value)
    return body.finish(axes, reduced, [Buffer("x", F32, 24)], [Buffer("out", value.dtype, 24)])


def same(kernel: Kernel) -> Kernel:
    """Returns the kernel in normal form, when both compute the same."""
    normal = canonicalize_axes(kernel, int)
    x = torch.randperm(24, generator=torch.Generator().manual_seed(1)).float()
    outs = [torch.zeros(24, dtype=kernel.outputs[0].dtype) for _ in range(2)]
    for each, out in zip((kernel, normal), outs, strict=True):
        evaluate_kernel(each, {"x": x, "out": out})
    assert torch.equal(*outs)
    return normal


A, B, C = Axis("a", 2), Axis("b", 3), Axis("c", 4)
ROW_MAJOR = linearize_index((A, B, C), (2, 3, 4))

CASES: dict[str, tuple[Callable[[], Kernel], tuple[list[int], list[int]]]] = {
    "axes that are walked as one merge": (lambda: copy((A, B, C), ROW_MAJOR, ROW_MAJOR), ([24], [])),
    "a transpose keeps two axes": (
        lambda: copy((A, B, C), ROW_MAJOR, linearize_index((C, A, B), (4, 2, 3))), ([4, 6], [])
    ),
    "the stored axis is innermost": (lambda: copy((C, B), as_index(C) * 3 + B, as_index(B) * 4 + C), ([3, 4], [])),
    "axes of one element go": (
        lambda: copy((Axis("one", 1), C), as_index(C) + Axis("one", 1), as_index(C)), ([4], [])
    ),
    "an axis splits where it is divided": (
        lambda: (lambda p: copy((p,), as_index(p) % 4 * 6 + as_index(p) // 4, as_index(p)))(Axis("p", 24)), ([6, 4], [])
    ),
    "a reduction keeps an axis of one element": (
        lambda: reduce("sum", (C,), (Axis("one", 1),), as_index(C)), ([4], [1])
    ),
    "reduced axes go by stride": (lambda: reduce("sum", (A,), (C, B), ROW_MAJOR), ([2], [12])),
    "positions keep the order of their axes": (lambda: reduce("argmax", (A,), (C, B), ROW_MAJOR), ([2], [4, 3])),
    "flipped axes merge": (lambda: copy((B, C), as_index(B) * -4 - C + 11, as_index(B) * 4 + C), ([12], [])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_normal_form(case: str) -> None:
    make, sizes = CASES[case]
    normal = same(make())
    assert sizes_of(normal) == sizes
    assert [axis.name for axis in normal.axes] == [f"p{number}" for number in range(len(normal.axes))]
    assert canonicalize_axes(normal, int) == normal


def test_differently_split_spaces_normalise_equally() -> None:
    whole = Axis("all", 24)
    one = copy((A, B, C), ROW_MAJOR, ROW_MAJOR)
    two = copy((whole,), as_index(whole), as_index(whole))
    assert canonicalize_axes(one, int) == canonicalize_axes(two, int)


def test_symbolic_sizes_merge_too() -> None:
    size = make_symbol("s0")
    rows, columns = Axis("r", size), Axis("c", 4)
    at = as_index(rows) * 4 + columns
    normal = canonicalize_axes(copy((rows, columns), at, at, 4 * size), lambda item: 8)
    assert [axis.size for axis in normal.axes] == [4 * size]


def test_no_elements() -> None:
    none = Axis("none", 0)
    at = linearize_index((C, none), (4, 0))
    assert canonicalize_axes(copy((C, none), at, at, 0), int).count == 0


@given(
    st.permutations((0, 1, 2)), st.permutations((2, 3, 4)), st.sampled_from([(24,), (6, 4), (4, 6), (2, 12), (12, 2)])
)
def test_permuted_and_reshaped_reads_are_equivalent(order: list[int], sizes: list[int], cut: tuple[int, ...]) -> None:
    """out = x.view(sizes).permute(order).reshape(cut)."""
    axes = [Axis(f"u{number}", size) for number, size in enumerate(cut)]
    position = linearize_index(axes, cut)
    moved = delinearize_index(position, [sizes[dim] for dim in order])
    back = [moved[order.index(dim)] for dim in range(3)]
    normal = same(copy(axes, linearize_index(back, sizes), position))
    assert len(cut) > 1 or not any("//" in str(item) or "%(" in str(item) for item in normal.operations)
