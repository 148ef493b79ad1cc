"""The unit of autotuning: a kernel in several configurations, with the arguments of a launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxwrap.loop_ir import IndirectIndex, Kernel, Load, Store
from fxwrap.printers import KernelRequest, PrintedKernel
from fxwrap.symbolic import Number, symbol_kind

_DEFAULT_SCALARS: dict[str, Number] = {"float": 0.5, "bool": True}
_DEFAULT_UPPER_BOUND = 100
"""The upper bound of integers that are not indices; every integer dtype can hold it."""

BYTES_PER_SECOND = 3e12
"""The memory bandwidth of a large GPU."""
_PROGRAM_BYTES_PER_SECOND = 25e9
"""The bandwidth of one program, of which a multiprocessor runs a few."""


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a kernel: dtype, number of elements and the exclusive upper bound of integers in it."""

    dtype: torch.dtype
    count: int
    upper_bound: int


@dataclass(frozen=True)
class TuningTask:
    """A kernel in several configurations, the default first, to be timed on a device.

    `grids` has the launch grid of each configuration for the traced sizes; `buffers` are the kernel's inputs and
    outputs, `numbers` its scalars, in parameter order. `key` names the kernel's tuning record.
    """

    key: str
    candidates: tuple[PrintedKernel, ...]
    grids: tuple[tuple[int, ...], ...]
    device: torch.device
    buffers: tuple[BufferSpec, ...]
    numbers: tuple[Number, ...]

    @property
    def bytes(self) -> int:
        """The size of all buffers."""
        return sum(item.count * item.dtype.itemsize for item in self.buffers)


Timer: TypeAlias = Callable[[Sequence[TuningTask]], list[list[list[float]]]]
"""Returns, for each task and configuration, samples of the seconds of one launch; none if it cannot be launched."""


def estimated_seconds(request: KernelRequest, printed: PrintedKernel) -> float:
    """Returns the estimated run time on a large GPU, by the bytes that its programs move."""
    kernel, hint = request.kernel, request.hint
    moved = sum(hint(item.extent) * item.dtype.itemsize for item in (*kernel.inputs, *kernel.outputs))
    programs = math.prod(hint(size) for size in printed.grid)
    return moved / min(max(programs, 1) * _PROGRAM_BYTES_PER_SECOND, BYTES_PER_SECOND)


def make_tuning_task(key: str, request: KernelRequest, candidates: Sequence[PrintedKernel]) -> TuningTask:
    """Returns the task of timing a requested kernel in these configurations."""
    kernel, hint = request.kernel, request.hint
    upper_bound = _index_upper_bound(request)
    scalars = [(symbol, _DEFAULT_SCALARS.get(symbol_kind(symbol.name))) for symbol in kernel.symbols]
    return TuningTask(
        key,
        tuple(candidates),
        tuple([tuple([hint(size) for size in candidate.grid]) for candidate in candidates]),
        request.device,
        tuple([BufferSpec(item.dtype, hint(item.extent), upper_bound) for item in (*kernel.inputs, *kernel.outputs)]),
        tuple([hint(symbol) if scalar is None else scalar for symbol, scalar in scalars]),
    )


def _index_upper_bound(request: KernelRequest) -> int:
    """Returns an upper bound of integers that makes all indirect indices valid."""
    sizes = [request.hint(atom.size) for atom in _indirect_indices(request.kernel)]
    return max(min(sizes, default=_DEFAULT_UPPER_BOUND), 1)


def _indirect_indices(kernel: Kernel) -> list[IndirectIndex]:
    accesses = [operation for operation in kernel.operations if isinstance(operation, Load | Store)]
    return [atom for access in accesses for atom in access.index.atoms() if isinstance(atom, IndirectIndex)]
