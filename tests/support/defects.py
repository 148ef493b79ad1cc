"""Defects of a compiler, one place each, which the graph fuzzer must notice: most are planted in the Abacus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fxwrap.compile import steps
from fxwrap.loop_ir import OPERATIONS
from fxwrap.memory_planning import MemoryPlan, apply_plan
from fxwrap.wrapper_ir import Program
from tests.devices import abacus_runtime
from tests.devices.abacus_runtime import Space, Unit

Dtypes = tuple[torch.dtype, ...]
FLOATS: Dtypes = (torch.float32, torch.float64)
INTEGERS: Dtypes = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Defect:
    """A defect, as a context in which programs have it, and the graphs that show it: "float" or "integer"."""

    name: str
    graphs: str
    planted: Callable[[], Any]


def _operation(name: str, dtypes: Dtypes, wrong: Callable[..., Tensor]) -> Callable[[], Any]:
    """An operation of the loop IR that is wrong for some dtypes."""

    def run(*operands: Any) -> Any:
        is_wrong = operands[0].dtype in dtypes
        return wrong(*operands) if is_wrong else OPERATIONS[name].reference(*operands)

    return lambda: mock.patch.object(Unit, name, staticmethod(run), create=True)


def _store(dtypes: Dtypes, wrong: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """Values of some dtypes that are wrong when they are written to memory."""
    right = Space.store

    def store(self: Space, buffer: Tensor, index: Any, value: Tensor, *rest: Any) -> None:
        right(self, buffer, index, wrong(value) if value.dtype in dtypes else value, *rest)

    return lambda: mock.patch.object(Space, "store", store)


def _load(dtypes: Dtypes) -> Callable[[], Any]:
    """Reads of the next element instead of the first of a buffer, as by an index that starts at 1."""
    right = Space.load

    def load(self: Space, buffer: Tensor, index: Any, *rest: Any) -> Tensor:
        shift = int(buffer.dtype in dtypes and buffer.numel() > 1)
        return right(self, buffer, (torch.as_tensor(index) + shift).clamp(max=max(buffer.numel() - 1, 0)), *rest)

    return lambda: mock.patch.object(Space, "load", load)


def _reduce(dtypes: Dtypes) -> Callable[[], Any]:
    """Reductions that leave out the last element of an odd number, as by a wrong tail of a vector loop."""
    right = dict(abacus_runtime._REDUCTIONS)

    def without_tail(kind: str) -> Callable[[Tensor, int], Any]:
        def run(value: Tensor, dim: int) -> Any:
            size = value.shape[dim]
            leave = value.dtype in dtypes and size > 1 and size % 2
            return right[kind](value.narrow(dim, 0, size - 1) if leave else value, dim)

        return run

    return lambda: mock.patch.dict(abacus_runtime._REDUCTIONS, {kind: without_tail(kind) for kind in right})


def _accumulate_once() -> Any:
    """Additions to one element that count once, as by stores that are not atomic."""
    right = Space.store

    def store(self: Space, buffer: Tensor, index: Any, value: Tensor, mask: Any, mode: str, varies: bool) -> None:
        if mode != "add":
            return right(self, buffer, index, value, mask, mode, varies)
        shape = torch.broadcast_shapes(torch.as_tensor(index).shape, value.shape)
        before = torch.zeros_like(buffer).copy_(buffer)
        old = before[torch.as_tensor(index, dtype=torch.int64)].expand(shape)
        return right(self, buffer, index, old + value, mask, "set", varies)

    return mock.patch.object(Space, "store", store)


@contextmanager
def _overlapping_pools() -> Iterator[None]:
    """Memory plans whose second buffer in a pool overlaps the first, which lives as long."""

    def apply(program: Program, plan: MemoryPlan) -> Program:
        blocks = []
        for block in plan.blocks:
            pools = [replace(pool, allocations=tuple([replace(one, offset=0) for one in pool.allocations]))
                     for pool in block.pools]  # fmt: skip
            blocks.append(replace(block, pools=tuple(pools)))
        return apply_plan(program, replace(plan, blocks=tuple(blocks)), check=False)

    with mock.patch.object(steps, "apply_plan", apply):
        yield


def _kinds() -> Iterator[Defect]:
    for word, dtypes in (("float", FLOATS), ("integer", INTEGERS)):
        yield Defect(f"{word} term dropped", word, _operation("add", dtypes, lambda one, other: one + 0 * other))
        yield Defect(f"{word} sign error", word, _operation("sub", dtypes, torch.add))
        yield Defect(f"{word} operands swapped", word, _operation("sub", dtypes, lambda one, other: other - one))
        yield Defect(f"{word} index off by one", word, _load(dtypes))
        yield Defect(f"{word} reduction tail", word, _reduce(dtypes))
    half = (torch.float32,)
    yield Defect("float32 rounded to bfloat16", "float", _store(half, lambda value: value.bfloat16().float()))
    yield Defect("float32 rounded to float16", "float", _store(half, lambda value: value.half().float()))
    yield Defect("float64 rounded to float32", "float", _store((torch.float64,), lambda value: value.float().double()))
    yield Defect("integers of 4 bits", "integer", _store(INTEGERS, lambda value: (value + 8) % 16 - 8))
    yield Defect("comparison off at equality", "float", _operation("ge", (*FLOATS, *INTEGERS), torch.gt))
    yield Defect("additions that are not atomic", "integer", _accumulate_once)
    yield Defect("memory of a live buffer reused", "float", _overlapping_pools)


DEFECTS = tuple(_kinds())
