"""The evaluator, which the printers are compared with: bounds, masks, modes, requirements, aliasing."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import ZERO, Axis, Buffer, Kernel, KernelBuilder, as_index, evaluate_kernel
from fxwrap.symbolic import make_symbol

F32, I64 = torch.float32, torch.int64
P, R = Axis("p0", 3), Axis("r0", 4)


def finish(body: KernelBuilder, reduced: list[Axis] | None = None, size: int = 3) -> Kernel:
    return body.finish([P], reduced or [], [Buffer("x", F32, 12)], [Buffer("out", F32, size)])


def test_reading_out_of_bounds_raises_unless_masked() -> None:
    body = KernelBuilder()
    body.store("out", P, body.load("x", as_index(P) + 10, F32))
    with pytest.raises(IndexError):
        evaluate_kernel(finish(body), {"x": torch.zeros(12), "out": torch.zeros(3)})
    body = KernelBuilder()
    with body.masked(body.index(P) < 2):
        body.store("out", P, body.load("x", as_index(P) + 10, F32, 5.0))
    out = torch.zeros(3)
    evaluate_kernel(finish(body), {"x": torch.arange(12.0), "out": out})
    assert out.tolist() == [10, 11, 5]


@pytest.mark.parametrize(("mode", "expected"), [("add", 17.0), ("max", 4.0), ("min", 1.0), ("prod", 120.0)])
def test_each_iteration_of_a_combining_store_counts(mode: str, expected: float) -> None:
    body = KernelBuilder()
    body.store("out", ZERO, body.load("x", P, F32), mode=mode)
    x = torch.tensor([2.0, 3.0, 4.0, *[0.0] * 9])
    out = torch.tensor([{"add": 8.0, "max": 1.0, "min": 1.0, "prod": 5.0}[mode]])
    evaluate_kernel(finish(body, size=1), {"x": x, "out": out})
    assert out.item() == expected


def test_a_varying_store_runs_for_each_reduced_element() -> None:
    body = KernelBuilder()
    body.store("out", P, body.load("x", as_index(P) * 4 + R, F32), mode="add")
    out = torch.zeros(3)
    evaluate_kernel(finish(body, [R]), {"x": torch.arange(12.0), "out": out})
    assert out.tolist() == [6, 22, 38]


def test_an_invariant_value_is_reduced_once_per_iteration() -> None:
    body = KernelBuilder()
    (total,) = body.reduce("sum", body.load("x", P, F32))
    body.store("out", P, total)
    out = torch.zeros(3)
    evaluate_kernel(finish(body, [R]), {"x": torch.arange(12.0), "out": out})
    assert out.tolist() == [0, 4, 8]


def test_an_assertion_raises_where_its_mask_is_true() -> None:
    body = KernelBuilder()
    with body.masked(body.index(P) < 2):
        body.device_assert(body.load("x", P, F32) > 0, "x must be positive")
    body.store("out", P, body.constant(1.0, F32))
    kernel = finish(body)
    evaluate_kernel(kernel, {"x": torch.tensor([1.0, 1.0, -1.0]), "out": torch.zeros(3)})
    with pytest.raises(IndexError, match="x must be positive"):
        evaluate_kernel(kernel, {"x": torch.tensor([1.0, -1.0, 1.0]), "out": torch.zeros(3)})


def test_a_loaded_element_survives_an_overwrite() -> None:
    body = KernelBuilder()
    first = body.load("out", ZERO, F32)
    body.store("out", ZERO, body.constant(9.0, F32))
    body.store("out", as_index(1), first)
    out = torch.tensor([4.0, 0.0])
    evaluate_kernel(body.finish([], [], [], [Buffer("out", F32, 2)]), {"out": out})
    assert out.tolist() == [9, 4]


def test_sizes_are_passed_at_the_call() -> None:
    size = make_symbol("s0")
    axis = Axis("p0", size)
    body = KernelBuilder()
    body.store("out", axis, body.index(as_index(size) - 1 - axis))
    out = torch.zeros(5, dtype=I64)
    evaluate_kernel(body.finish([axis], [], [], [Buffer("out", I64, size)]), {"out": out}, {"s0": 5})
    assert out.tolist() == [4, 3, 2, 1, 0]


def test_no_iterations_write_nothing() -> None:
    none = Axis("p0", 0)
    body = KernelBuilder()
    body.store("out", none, body.load("x", none, F32))
    out = torch.ones(3)
    kernel = body.finish([none], [], [Buffer("x", F32, 0)], [Buffer("out", F32, 3)])
    evaluate_kernel(kernel, {"x": torch.zeros(0), "out": out})
    assert out.tolist() == [1, 1, 1]


def test_a_softmax_of_all_minus_infinity() -> None:
    body = KernelBuilder()
    largest, total = body.reduce("softmax", body.load("x", as_index(P) * 4 + R, F32))
    body.store("out", P, largest)
    body.store("out", as_index(P) + 3, total)
    out, x = torch.zeros(6), torch.zeros(12)
    x[:4] = -torch.inf
    evaluate_kernel(finish(body, [R], 6), {"x": x, "out": out})
    assert out.tolist() == [-torch.inf, 0, 0, 0, 4, 4]
