"""The reference evaluator of kernels: runs each operation once on the whole index space, with torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir.atoms import Axis, IndirectIndex, SizeAtom
from fxwrap.loop_ir.body_operations import (
    ASSERT_ERRORS,
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    SymbolicScalar,
)
from fxwrap.loop_ir.index import Atom, Index
from fxwrap.loop_ir.kernel import Kernel, KernelError
from fxwrap.loop_ir.offsets import evaluate_index
from fxwrap.loop_ir.operations import OPERATIONS
from fxwrap.symbolic import Number, evaluate, evaluate_size


def evaluate_kernel(
    kernel: Kernel, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, Number] | None = None
) -> None:
    """Runs a kernel on flat CPU tensors by buffer name, and writes its outputs. `numbers` are its symbols' values.

    Each operation materialises the whole index space. An unmasked access out of a buffer's bounds raises IndexError, an
    input that does not ascend although the kernel says so raises KernelError.
    """
    for buffer in kernel.inputs:
        if buffer.is_ascending and (buffers[buffer.name].diff() < 0).any():
            raise KernelError(f"the elements of '{buffer.name}' do not ascend")
    _Evaluator(kernel, buffers, numbers or {}).run()


class _Evaluator:
    def __init__(self, kernel: Kernel, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, Number]) -> None:
        self.kernel = kernel
        self.buffers = buffers
        self.numbers = numbers
        self.axes = (*kernel.axes, *kernel.reduced)
        self.sizes = tuple([evaluate_size(axis.size, self.numbers) for axis in self.axes])
        self.values: list[Any] = []

    def run(self) -> None:
        if 0 in self.sizes[: len(self.kernel.axes)]:
            return
        for operation in self.kernel.operations:
            self.values.append(self._value(operation))

    def _value(self, operation: Operation) -> Any:
        match operation:
            case Load():
                return self._load(operation)
            case Constant():
                return torch.tensor(operation.value, dtype=operation.dtype)
            case SymbolicScalar():
                return torch.tensor(evaluate(operation.expression, self.numbers), dtype=operation.dtype)
            case IndexValue():
                return self._index(operation.index)
            case Compute():
                used = [self.values[position] for position in operation.operands]
                spec = OPERATIONS[operation.name]
                return spec.reference(*used, operation.dtype) if spec.result == "declared" else spec.reference(*used)
            case Reduce():
                return self._reduce(operation)
            case Scan():
                dim = len(self.axes) - 1
                return _SCANS[operation.kind](
                    self._expand(self.values[operation.operands[0]], self.kernel.reduced), dim
                )
            case ReductionResult():
                return self.values[operation.operation][operation.position]
            case Store():
                return self._store(operation)
            case DeviceAssert():
                return self._assert(operation)
            case _:
                assert_never(operation)

    def _assert(self, operation: DeviceAssert) -> None:
        failed = ~self.values[operation.condition]
        if operation.mask is not None:
            failed = failed & self.values[operation.mask]
        if failed.any():
            raise ASSERT_ERRORS[operation.error](operation.message)

    def _index(self, index: Index) -> torch.Tensor:
        return torch.as_tensor(evaluate_index(index, self._atom), dtype=torch.int64)

    def _atom(self, atom: Atom) -> object:
        match atom:
            case Axis():
                position = self.axes.index(atom)
                shape = [1] * len(self.axes)
                shape[position] = -1
                return torch.arange(self.sizes[position]).reshape(shape)
            case SizeAtom():
                return evaluate_size(atom.expression, self.numbers)
            case IndirectIndex():
                return self.values[atom.operation].to(torch.int64)
            case _:
                raise AssertionError(f"{atom} is no leaf")

    def _load(self, operation: Load) -> torch.Tensor:
        buffer, index = self.buffers[operation.buffer], self._index(operation.index)
        if operation.mask is None:
            return buffer[index].clone()  # a view of one element would change with a later store
        index, mask = torch.broadcast_tensors(index, self.values[operation.mask])  # type: ignore[no-untyped-call]
        loaded = torch.full(index.shape, operation.other, dtype=buffer.dtype)
        loaded[mask] = buffer[index[mask]]
        return loaded

    def _expand(self, value: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
        """Returns a value expanded over some axes; others that it does not vary on keep size 1."""
        shape = [*([1] * (len(self.axes) - value.dim())), *value.shape]
        over = [axis in axes for axis in self.axes]
        return value.expand([self.sizes[dim] if over[dim] else size for dim, size in enumerate(shape)])

    def _reduce(self, operation: Reduce) -> Any:
        axes = self.kernel.reduced_by(operation)
        dims = [self.axes.index(axis) for axis in axes]
        others = [dim for dim in range(len(self.axes)) if dim not in dims]
        value = self._expand(self.values[operation.operands[0]], axes).permute(*others, *dims).flatten(len(others))
        result = _REDUCTIONS[operation.kind](value, len(others))
        place = tuple([slice(None) if dim in others else None for dim in range(len(self.axes))])
        return tuple([item[place] for item in result]) if isinstance(result, tuple) else result[place]

    def _store(self, operation: Store) -> None:
        buffer, value = self.buffers[operation.buffer], self.values[operation.value]
        parts = [self._index(operation.index), value]
        if operation.mask is not None:
            parts.append(self.values[operation.mask])
        if operation.mode != "set":  # every iteration counts
            over = {*self.kernel.axes, *self.kernel.value_axes[self.kernel.operations.index(operation)]}
            shape = [size if axis in over else 1 for axis, size in zip(self.axes, self.sizes, strict=True)]
            parts.append(torch.empty(shape))
        index, value, *rest = torch.broadcast_tensors(*parts)  # type: ignore[no-untyped-call]
        if operation.mask is not None:
            index, value = index[rest[0]], value[rest[0]]
        index, value = index.flatten(), value.flatten()
        if operation.mode == "set":
            buffer[index] = value
        else:
            names = {"add": "sum", "max": "amax", "min": "amin", "prod": "prod"}
            buffer.scatter_reduce_(0, index, value, names[operation.mode], include_self=True)


def _softmax(value: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not value.shape[dim]:
        return tuple([value.sum(dim) + start for start in (-torch.inf, 0.0)])  # type: ignore[return-value]
    largest = value.amax(dim)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    return largest, (value - shift.unsqueeze(dim)).exp().sum(dim)


def _welford(value: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    mean = value.mean(dim)
    return mean, (value - mean.unsqueeze(dim)).square().sum(dim)


_REDUCTIONS: Mapping[str, Callable[[torch.Tensor, int], Any]] = {
    "sum": lambda value, dim: value.sum(dim, dtype=value.dtype),
    "prod": lambda value, dim: value.prod(dim, dtype=value.dtype),
    "max": torch.amax,
    "min": torch.amin,
    "argmax": torch.max,
    "argmin": torch.min,
    "any": torch.any,
    "all": torch.all,
    "welford": _welford,
    "softmax": _softmax,
}

_SCANS: Mapping[str, Callable[[torch.Tensor, int], Any]] = {
    "cumsum": lambda value, dim: value.cumsum(dim, dtype=value.dtype),
    "cumprod": lambda value, dim: value.cumprod(dim, dtype=value.dtype),
    "cummax": lambda value, dim: tuple(value.cummax(dim)),
    "cummin": lambda value, dim: tuple(value.cummin(dim)),
    "logcumsumexp": torch.logcumsumexp,
}
