"""The unit of autotuning: a kernel in several configurations, with the arguments of a launch."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from fxwrap.loop_ir import IndirectIndex, Kernel, Load, Store
from fxwrap.printers import KernelRequest, PrintedKernel
from fxwrap.runtime.cache_folder import read_cache_file
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


_FIELDS = {"fingerprint": str, "seconds": float, "default_seconds": float}


@dataclass(frozen=True)
class TuningRecord:
    """A kernel's selected configuration: fingerprint of the printed kernel, its seconds and those of the default."""

    fingerprint: str
    seconds: float
    default_seconds: float


class TuningRecords:
    """The records in a folder, by key. Unreadable files are ignored, and replaced by the next write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> TuningRecord | None:
        """Returns the record of a key; None without a valid one."""
        try:
            fields = json.loads(read_cache_file(self._path(key)) or b"")
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or set(fields) != set(_FIELDS):
            return None
        if not all(isinstance(fields[name], kind) for name, kind in _FIELDS.items()):
            return None
        return TuningRecord(**fields)

    def commit(self, key: str, record: TuningRecord, replacing: bool = False) -> TuningRecord:
        """Writes a record and returns the valid one: another process's if it was first.

        `replacing` overwrites an existing record, which is stale. A read-only folder is not an error.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        except OSError:
            return record
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(record), file)
                file.flush()
                os.fsync(file.fileno())
            if not replacing:
                try:
                    os.link(temporary, self._path(key))
                    return record
                except FileExistsError:
                    existing = self.read(key)
                    if existing is not None:
                        return existing
            os.replace(temporary, self._path(key))
            return record
        except OSError:  # a full disk, or a folder in the record's place
            return record
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
