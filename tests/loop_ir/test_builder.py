"""Building kernels: nothing twice, numbers in the right dtype, masks that nest, no dead operations."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, Constant, Kernel, KernelBuilder, Load, as_index, reorder_operations

F32, F64, BF16, I64, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool
P = Axis("p0", 4)


def test_equal_operations_are_shared() -> None:
    body = KernelBuilder()
    one, two = [body.load("x", P, F32).exp() + 1 for _ in range(2)]
    assert one.position == two.position and len(body.operations) == 4


def test_constants_are_equal_by_dtype_and_sign() -> None:
    body = KernelBuilder()
    constants = [body.constant(number, dtype) for number, dtype in ((0.0, F32), (-0.0, F32), (0.0, F64), (0, F32))]
    assert [item.position for item in constants] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("number", "dtype", "expected"),
    [
        (0.1, F32, 0.10000000149011612),
        (0.1, BF16, 0.10009765625),
        (2.7, I64, 2),
        (3, BOOL, True),
        (300, torch.uint8, 44),
    ],
)
def test_numbers_are_converted_as_torch_does(number: float, dtype: torch.dtype, expected: float) -> None:
    assert KernelBuilder().constant(number, dtype).constant == expected


def test_a_widening_and_narrowing_cast_pair_cancels() -> None:
    body = KernelBuilder()
    x = body.load("x", P, BF16)
    assert x.to(F32).to(BF16).position == x.position
    assert x.to(F32).to(F64).to(BF16).position != x.position


def test_masks_nest_and_end() -> None:
    body = KernelBuilder()
    outer, inner = body.index(P) < 3, body.index(P) > 0
    with body.masked(outer):
        one = body.load("x", P, F32)
        with body.masked(inner):
            both = body.load("x", P, F32, 7.0)
    none = body.load("x", P, F32, 7.0)
    loads = [body.operations[item.position] for item in (one, both, none)]
    assert [getattr(item, "mask", None) for item in loads] == [outer.position, (outer & inner).position, None]
    assert [item.other for item in loads if isinstance(item, Load)] == [0, 7.0, 0]


def test_a_shared_operation_has_the_first_origin() -> None:
    body = KernelBuilder()
    with body.origin_scope("first"):
        body.load("x", P, F32)
    with body.origin_scope("second"):
        body.load("x", P, F32)
    assert [item.origin for item in body.operations] == ["first"]


def test_dead_operations_are_eliminated_and_indirect_indices_renumbered() -> None:
    body = KernelBuilder()
    body.constant(5, I64)
    index = body.load("places", P, I64)
    body.store("out", P, body.load("x", body.indirect_index(index, 9), F32))
    kernel = body.finish([P], [], [Buffer("places", I64, 4), Buffer("x", F32, 9)], [Buffer("out", F32, 4)])
    assert not any(isinstance(item, Constant) for item in kernel.operations)
    assert str(kernel.operations[1].index) == "%0"  # type: ignore[union-attr]


def _finished(origin: str, other: float) -> Kernel:
    body = KernelBuilder()
    with body.origin_scope(origin), body.masked(body.index(P) < 3):
        x = body.load("x", P, F32, other)
    body.store("out", P, x)
    return body.finish([P], [], [Buffer("x", F32, 4)], [Buffer("out", F32, 4)])


def test_equal_kernels_are_one_object() -> None:
    kernel = _finished("layer", 0.0)
    assert _finished("layer", 0.0) is kernel
    for origin, other in (("other operator", 0.0), ("layer", -0.0)):
        different = _finished(origin, other)
        assert different is not kernel
        assert different == kernel and hash(different) == hash(kernel), "equality ignores origins"
        assert different.uncompared_fields != kernel.uncompared_fields


def test_renumbering_keeps_operands() -> None:
    body = KernelBuilder()
    left, right = body.load("x", P, F32), body.load("y", P, F32)
    body.store("out", as_index(P), left - right)
    kernel = body.finish([P], [], [Buffer("x", F32, 4), Buffer("y", F32, 4)], [Buffer("out", F32, 4)])
    swapped = reorder_operations(kernel, (1, 0, 2, 3))
    assert swapped.operations[2].operands == (1, 0)  # type: ignore[union-attr]
