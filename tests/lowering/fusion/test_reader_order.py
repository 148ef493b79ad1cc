"""Kernels that read one tensor: the one that can store a result in its memory is the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.devices import CPU
from fxwrap.lines import Alloc
from fxwrap.wrapper_ir import Ownership, live_bytes
from tests.lowering.planned_programs import STRICT, Planned, close, plan

GPU = STRICT.replace(devices=[dataclasses.replace(CPU, massively_parallel=True, kernel_language="triton")])
ROWS, COLUMNS = 8, 300
BORROWED, OWNED, MUTABLE = Ownership.BORROWED, Ownership.OWNED, Ownership.MUTABLE
BYTES = 4 * ROWS * COLUMNS


def rows_and_columns(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised rows of x, and sums of columns, which read x and another tensor in a kernel of their own."""
    return x / x.square().sum(-1, keepdim=True), (x.cos() * y).sum(0)


def planned(function: Callable[..., tuple[Tensor, ...]], *ownership: Ownership) -> Planned:
    """Plans a function of operands with an ownership each, and compares results and operands with eager mode."""
    inputs = [torch.randn(ROWS, COLUMNS) for _ in ownership]
    graph = make_fx(function)(*[item.clone() for item in inputs])
    result = plan(graph, inputs, GPU, ownership=dict(enumerate(ownership)))
    actual, expected = [item.clone() for item in inputs], [item.clone() for item in inputs]
    mutable = [index for index, item in enumerate(ownership) if item is Ownership.MUTABLE]
    results = [*result.run(list(actual)), *[actual[index] for index in mutable]]
    for got, want in zip(results, [*function(*expected), *[expected[index] for index in mutable]], strict=True):
        assert close(got, want), result.program
    return result


def allocated(result: Planned) -> int:
    """Returns the bytes that a program allocates."""
    return sum([line.result.type.storage_bytes for line in result.program.lines() if isinstance(line, Alloc)])


def test_sums_of_columns_precede_the_kernel_that_overwrites_their_operand() -> None:
    result = planned(rows_and_columns, OWNED, BORROWED)
    assert allocated(result) == 4 * COLUMNS
    assert live_bytes(result.program).peak == 2 * BYTES + 4 * COLUMNS


def test_borrowed_operands_and_operands_whose_memory_another_result_gets_do_not_change_the_order() -> None:
    def with_another_operand(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y * x / x.square().sum(-1, keepdim=True), x.cos().sum(0)

    for function, ownership in ((rows_and_columns, (BORROWED, OWNED)), (with_another_operand, (OWNED, OWNED))):
        result = planned(function, *ownership)
        assert [name.rsplit("_", 2)[1] for name in result.launches] == ["div", "sum"], result.launches


def test_readers_that_depend_on_the_result_follow_it() -> None:
    def dependent(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x / x.square().sum(-1, keepdim=True)
        return rows, (x.cos() * rows).sum(0)

    assert allocated(planned(dependent, OWNED)) == BYTES + 4 * COLUMNS


def test_readers_of_mutated_tensors_stay_between_writes() -> None:
    def writes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.mul_(2)
        rows = x / x.square().sum(-1, keepdim=True)
        columns = (x.cos() * y).sum(0)
        y.add_(1)
        return rows, columns

    planned(writes, OWNED, MUTABLE)


def test_readers_that_write_as_many_bytes_stay() -> None:
    """In memory before the result, theirs would be live for longer."""

    def copies(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / x.square().sum(-1, keepdim=True), x.cos().cumsum(0)

    result = planned(copies, OWNED)
    assert "div" in result.launches[0], result.launches
