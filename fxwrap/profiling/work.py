"""The bytes that a line moves and the operations that it computes, from its program alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxwrap.lines import CallFunction, ExternCall, Launch
from fxwrap.loop_ir import Axis, Compute, Kernel, Reduce, accessed_bytes
from fxwrap.symbolic import Number, evaluate_size
from fxwrap.torch_compat import operator_overload
from fxwrap.wrapper_ir import LineBase, Program, TensorType, Value, defined, reads, writes

_NO_ARITHMETIC = frozenset({"cast", "bitcast", "where"})


@dataclass(frozen=True)
class Work:
    """The bytes that are read and written at least once, and the floating-point operations, 0 where unknown.

    `dtype` is that of the operations, for the limit of the device.
    """

    bytes: int = 0
    flops: int = 0
    dtype: torch.dtype = torch.float32


def line_work(line: LineBase, program: Program, values: Mapping[str, Number]) -> Work:
    """Returns the work of a line, for the values of symbols by name.

    A kernel's are those of its loop IR: each element of a tensor is read once, at most as often as loads run, and each
    arithmetic operation counts one. Matmuls, convolutions and attention follow the formulas of torch's FLOP counter.
    """
    match line:
        case Launch():
            return _launch_work(line, program, values)
        case CallFunction():
            inner = [line_work(item, program, values) for item in dict(program.functions)[line.function].lines]
            dtype = max(inner, key=lambda item: item.flops, default=Work()).dtype
            return Work(sum([item.bytes for item in inner]), sum([item.flops for item in inner]), dtype)
        case ExternCall():
            dtype = next((value.tensor_type.dtype for value in _tensors(line)), torch.float32)
            return Work(_tensor_bytes(_tensors(line), values), _call_flops(line, values), dtype)
        case _:
            return Work(_tensor_bytes(_tensors(line), values))


def _tensors(line: LineBase) -> list[Value]:
    """Returns the tensors that a line reads, writes and defines; those that it reads and writes twice."""
    read = {value.name: value for value in reads(line) if isinstance(value.type, TensorType)}
    written = {value.name: value for value in (*writes(line), *defined(line)) if isinstance(value.type, TensorType)}
    return [*read.values(), *written.values()]


def _tensor_bytes(tensors: Iterable[Value], values: Mapping[str, Number]) -> int:
    total = 0
    for value in tensors:
        type_ = value.tensor_type
        dims = zip(type_.sizes, type_.strides, strict=True)
        total += prod([evaluate_size(size, values) for size, stride in dims if stride != 0]) * type_.dtype.itemsize
    return total


def _launch_work(line: Launch, program: Program, values: Mapping[str, Number]) -> Work:
    kernel = program.kernel(line.kernel).loop_ir
    if not isinstance(kernel, Kernel):
        return Work(_tensor_bytes(_tensors(line), values))
    return Work(accessed_bytes(kernel, partial(evaluate_size, environment=values)), *_kernel_flops(kernel, values))


def _kernel_flops(kernel: Kernel, values: Mapping[str, Number]) -> tuple[int, torch.dtype]:
    outer = _iterations(kernel.axes, values)
    inner = outer * _iterations(kernel.reduced, values)
    flops, dtype = 0, torch.float32
    for position, operation in enumerate(kernel.operations):
        if not isinstance(operation, Compute | Reduce) or not operation.dtype.is_floating_point:
            continue
        if isinstance(operation, Reduce) or operation.name not in _NO_ARITHMETIC:
            dtype = operation.dtype
            if kernel.reduces_in_steps:  # products, scores and results are in different spaces
                computed = operation.operands[0] if isinstance(operation, Reduce) else position
                flops += _iterations(kernel.value_axes[computed], values)
            else:
                flops += inner if kernel.varying[position] or isinstance(operation, Reduce) else outer
    return flops, dtype


def _iterations(axes: Iterable[Axis], values: Mapping[str, Number]) -> int:
    return prod([evaluate_size(axis.size, values) for axis in axes])


def _call_flops(line: ExternCall, values: Mapping[str, Number]) -> int:
    # the operator of the CPU computes the same, and torch's counter does not know it
    overload = operator_overload(line.target.replace("flash_attention_for_cpu", "flash_attention"))
    formula = flop_registry.get(getattr(overload, "overloadpacket", None))
    if formula is None:
        return 0
    results = [_meta(item, values) for item in (*line.outs, *line.results)]
    out = results[0] if len(results) == 1 else tuple(results)
    try:
        arguments = [_meta(item, values) for item in line.arguments]
        return int(formula(*arguments, **{name: _meta(item, values) for name, item in line.keywords}, out_val=out))
    except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError):
        return 0  # torch's formula has other arguments


def _meta(item: object, values: Mapping[str, Number]) -> Any:
    """Returns an operand as torch's formulas take it: tensors without memory, numbers."""
    match item:
        case Value(type=TensorType() as type_):
            return torch.empty([evaluate_size(size, values) for size in type_.sizes], dtype=type_.dtype, device="meta")
        case tuple():
            return [_meta(part, values) for part in item]
        case _:
            return item
