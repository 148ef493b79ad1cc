"""The runtime half of the Abacus: its library of array functions, launcher, allocator, guard and copy engine.

`WORK` counts what it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fxwrap.devices import AllocateFunction, DeviceRuntime, KernelRuntime
from fxwrap.errors import FxwrapError
from fxwrap.loop_ir import OPERATIONS

WORK: Counter[str] = Counter()
"""What the device has done, by kind: "launch", "allocate", "copy", "guard", "compile"."""

_ERRORS = {"index": IndexError, "runtime": RuntimeError}
_MODES = {"add": "sum", "max": "amax", "min": "amin", "prod": "prod"}


class Unit:
    """The library that a kernel's text calls; each scalar operation of the loop IR is a function of it."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return OPERATIONS[name].reference

    @staticmethod
    def flat(tensor: Tensor) -> Tensor:
        """Returns the memory from a tensor's first element to its last."""
        last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
        count = last + 1 if tensor.numel() else 0
        return tensor.as_strided((count,), (1,), tensor.storage_offset())

    @staticmethod
    def number(value: Any, dtype: torch.dtype) -> Tensor:
        """Returns a number, or an index, as an array."""
        return torch.as_tensor(value, dtype=dtype)

    @staticmethod
    def position(value: Tensor) -> Tensor:
        """Returns an array that is part of an index."""
        return value.to(torch.int64)

    @staticmethod
    def space(sizes: Sequence[int], parallel: int) -> Space:
        """Returns an index space, of whose axes the first are parallel."""
        return Space(tuple(sizes), parallel)


class Space:
    """An index space, and the operations of kernels over all of it."""

    def __init__(self, sizes: tuple[int, ...], parallel: int) -> None:
        self.sizes = sizes
        self.parallel = parallel
        self.is_empty = 0 in sizes[:parallel]

    def axis(self, number: int) -> Tensor:
        """Returns the positions along an axis."""
        shape = [1] * len(self.sizes)
        shape[number] = -1
        return torch.arange(self.sizes[number]).reshape(shape)

    def load(self, buffer: Tensor, index: Any, mask: Tensor | None = None, other: Any = 0) -> Tensor:
        """Returns elements of a buffer; `other` where the mask is false."""
        index = torch.as_tensor(index, dtype=torch.int64)
        if mask is None:
            return buffer[index].clone()
        index, mask = torch.broadcast_tensors(index, mask)
        loaded = torch.full(index.shape, other, dtype=buffer.dtype)
        loaded[mask] = buffer[index[mask]]
        return loaded

    def reduce(self, kind: str, value: Tensor, axes: Sequence[int]) -> Any:
        """Returns a reduction over some axes that are not parallel, of which 1 element remains."""
        shape = [*[1] * (len(self.sizes) - value.dim()), *value.shape]
        value = value.expand([self.sizes[axis] if axis in axes else size for axis, size in enumerate(shape)])
        order = [*[axis for axis in range(len(self.sizes)) if axis not in axes], *axes]
        first = len(order) - len(axes)
        reduced = _REDUCTIONS[kind](value.permute(order).flatten(first), first)
        results = reduced if isinstance(reduced, tuple) else (reduced,)
        back = sorted(range(len(order)), key=order.__getitem__)
        shaped = tuple([item.reshape(*item.shape, *[1] * len(axes)).permute(back) for item in results])
        return shaped if isinstance(reduced, tuple) else shaped[0]

    def scan(self, kind: str, value: Tensor) -> Any:
        """Returns a scan along the last axis."""
        return _SCANS[kind](self._whole(value), len(self.sizes) - 1)

    def _whole(self, value: Tensor) -> Tensor:
        """Returns an array over all axes that are not parallel."""
        shape = [*[1] * (len(self.sizes) - value.dim()), *value.shape]
        return value.expand(*shape[: self.parallel], *self.sizes[self.parallel :])

    def store(self, buffer: Tensor, index: Any, value: Tensor, mask: Tensor | None, mode: str, varies: bool) -> None:
        """Writes elements of a buffer, or combines them with its elements."""
        over = len(self.sizes) if varies else self.parallel
        everywhere = torch.ones([*self.sizes[:over], *[1] * (len(self.sizes) - over)], dtype=torch.bool)
        index = torch.as_tensor(index, dtype=torch.int64)
        mask = everywhere if mask is None else mask & everywhere
        index, value, mask = torch.broadcast_tensors(index, value, mask)
        if mode == "set":
            buffer[index[mask]] = value[mask]
        else:
            buffer.scatter_reduce_(0, index[mask], value[mask], _MODES[mode], include_self=True)

    def require(self, condition: Tensor, mask: Tensor | None, error: str, message: str) -> None:
        """Raises where a condition does not hold."""
        failed = ~condition if mask is None else ~condition & mask
        if failed.any():
            raise _ERRORS[error](message)


def _softmax(value: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    largest = value.amax(dim) if value.shape[dim] else torch.full_like(value.sum(dim), -torch.inf)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    return largest, (value - shift.unsqueeze(dim)).exp().sum(dim)


def _welford(value: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the mean, exactly that of equal elements, and the sum of squared deviations from it."""
    mean = value.mean(dim)
    mean = torch.where(mean.isfinite(), mean + (value - mean.unsqueeze(dim)).mean(dim), mean)
    return mean, (value - mean.unsqueeze(dim)).square().sum(dim)


_REDUCTIONS: dict[str, Callable[[Tensor, int], Any]] = {
    "sum": lambda value, dim: value.sum(dim, dtype=value.dtype),
    "prod": lambda value, dim: value.prod(dim, dtype=value.dtype),
    "max": torch.amax, "min": torch.amin, "argmax": torch.max, "argmin": torch.min, "any": torch.any,
    "all": torch.all, "welford": _welford, "softmax": _softmax,
}  # fmt: skip

_SCANS: dict[str, Callable[[Tensor, int], Any]] = {
    "cumsum": lambda value, dim: value.cumsum(dim, dtype=value.dtype),
    "cumprod": lambda value, dim: value.cumprod(dim, dtype=value.dtype),
    "cummax": lambda value, dim: tuple(value.cummax(dim)), "cummin": lambda value, dim: tuple(value.cummin(dim)),
    "logcumsumexp": torch.logcumsumexp,
}  # fmt: skip


def load(source: str, signature: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Callable[..., None]:
    """Returns the launcher of a kernel's text."""
    if options:
        raise FxwrapError(f"an Abacus kernel has no option '{options[0][0]}'")
    names: dict[str, Any] = {"torch": torch, "inf": torch.inf, "nan": torch.nan}
    exec(compile(source, "<abacus>", "exec"), names)
    kernel, unit = names["kernel"], Unit()

    def launch(grid: Sequence[int], *arguments: Any) -> None:
        assert tuple(grid) == (1, 1, 1) and len(arguments) == len(signature)
        WORK["launch"] += 1
        kernel(unit, *arguments)

    return launch


def precompile_cpp(uses: Sequence[Any]) -> list[FxwrapError | None]:
    """Parses each text and returns its error, or None."""
    errors: list[FxwrapError | None] = []
    for use in uses:
        WORK["compile"] += 1
        try:
            compile(use.kernel.source, "<abacus>", "exec")
        except SyntaxError as error:
            errors.append(FxwrapError(f"the Abacus cannot read it: {error}"))
        else:
            errors.append(None)
    return errors


def allocator(device: torch.device) -> AllocateFunction:
    """Returns the function that allocates on the device."""

    def allocate(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        WORK["allocate"] += 1
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return allocate


@contextmanager
def _guarded() -> Iterator[None]:
    WORK["guard"] += 1
    yield


def guard(_device: torch.device) -> AbstractContextManager[None]:
    """Makes a device current."""
    return _guarded()


def copy(staging: Tensor, source: Tensor, channel: int) -> Tensor:
    """Copies a tensor into memory of the device by its copy engine, and returns that memory."""
    WORK["copy"] += 1
    assert channel in (0, 1)
    return staging.copy_(source)


RUNTIME = DeviceRuntime(
    kernels=KernelRuntime(load, compile=precompile_cpp),
    allocator=allocator,
    guard=guard,
    random_state=lambda _device: torch.get_rng_state(),
    set_random_state=lambda _device, state: torch.set_rng_state(state),
)
