"""What is to be timed: a kernel printed in several ways, with what it takes to launch each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxwrap.loop_ir import Gathered, Kernel, Load, Store
from fxwrap.printers import KernelRequest, PrintedKernel
from fxwrap.symbolic import Scalar, symbol_kind

_LIKE_ANY: dict[str, Scalar] = {"float": 0.5, "bool": True}
_SMALL = 100
"""Integers that are no positions are below it, which every integer dtype can hold."""


@dataclass(frozen=True)
class BufferFacts:
    """A buffer of a kernel: its elements' dtype, how many they are, and the number that integers in it stay below."""

    dtype: torch.dtype
    count: int
    below: int


@dataclass(frozen=True)
class TuningWork:
    """A kernel in several ways, the best guess first, to be timed on a device.

    `grids` has a launch grid for each way, of the sizes that the program was traced with; `buffers` are the kernel's
    inputs and outputs, `numbers` its numbers, in the order of its parameters. `key` names the kernel's tuning record.
    """

    key: str
    ways: tuple[PrintedKernel, ...]
    grids: tuple[tuple[int, ...], ...]
    device: torch.device
    buffers: tuple[BufferFacts, ...]
    numbers: tuple[Scalar, ...]

    @property
    def bytes(self) -> int:
        """The memory of all buffers."""
        return sum(item.count * item.dtype.itemsize for item in self.buffers)


BYTES_A_SECOND = 3e12
"""What a large GPU moves; one of its multiprocessors, which runs one program of a few, moves `_BYTES_OF_A_PROGRAM`."""
_BYTES_OF_A_PROGRAM = 25e9


def estimated_seconds(request: KernelRequest, printed: PrintedKernel) -> float:
    """Returns about how long a kernel runs on a large GPU: its buffers are moved by as many programs as there are."""
    kernel, hint = request.kernel, request.hint
    moved = sum(hint(item.extent) * item.dtype.itemsize for item in (*kernel.inputs, *kernel.outputs))
    programs = math.prod(hint(size) for size in printed.grid)
    return moved / min(max(programs, 1) * _BYTES_OF_A_PROGRAM, BYTES_A_SECOND)


Timer: TypeAlias = Callable[[Sequence[TuningWork]], list[list[list[float]]]]
"""Gives for each work and each of its ways samples of the seconds of one launch; none where it cannot be launched."""


def make_work(key: str, request: KernelRequest, ways: Sequence[PrintedKernel]) -> TuningWork:
    """Returns the work of timing the ways to print what is requested."""
    kernel, hint = request.kernel, request.hint
    below = _positions_below(request)
    buffers = [BufferFacts(item.dtype, hint(item.extent), below) for item in (*kernel.inputs, *kernel.outputs)]
    numbers = [_LIKE_ANY.get(symbol_kind(symbol.name)) for symbol in kernel.numbers]
    return TuningWork(
        key,
        tuple(ways),
        tuple([tuple([hint(size) for size in way.grid]) for way in ways]),
        request.device,
        tuple(buffers),
        tuple([hint(s) if like is None else like for s, like in zip(kernel.numbers, numbers, strict=True)]),
    )


def _positions_below(request: KernelRequest) -> int:
    """Returns what integers stay below so that all are positions inside of what the kernel gathers from."""
    sizes = [request.hint(atom.size) for atom in _gathered(request.kernel)]
    return max(min(sizes, default=_SMALL), 1)


def _gathered(kernel: Kernel) -> list[Gathered]:
    accesses = [operation for operation in kernel.operations if isinstance(operation, Load | Store)]
    return [atom for access in accesses for atom in access.index.atoms() if isinstance(atom, Gathered)]
