"""Patches of Triton's interpreter for generated kernels, active while one runs.

The interpreter has no libdevice functions: torch's equivalents replace them. It loses the bool dtype of comparisons
when it broadcasts scalars. In Triton 3.6 it converts loop bounds in a way that NumPy removed. Its reductions and scans
combine elements one by one in Python; the patches combine whole slices. Its dot multiplies the bits of bfloat16, and
its casts to bfloat16 truncate where a GPU rounds to the nearest number. It has no atomic addition of bfloat16. It
compares each sum and product of integers with the limits of their type, and reads the result in debug mode only.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fxwrap import torch_compat

_MODULE = "triton.language.extra.libdevice"

_SAME_AS_TORCH = (
    "hypot", "copysign", "nextafter", "atan2", "pow", "fmod", "trunc", "rsqrt", "exp", "exp2", "expm1", "log", "log2",
    "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh",
    "erf", "erfc", "erfinv", "lgamma",
)  # fmt: skip


@cache
def interpreter_patches() -> tuple[tuple[object, str, object], ...]:
    """Returns owner, name and function of each patch."""
    library = importlib.import_module(_MODULE)
    interpreter = importlib.import_module("triton.runtime.interpreter")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    functions: dict[str, Callable[..., torch.Tensor]] = {name: getattr(torch, name) for name in _SAME_AS_TORCH}
    functions["rint"] = torch.round
    return (
        *[(library, name, _interpreted(function)) for name, function in functions.items()],
        (interpreter.InterpreterBuilder, "create_splat", _splat),
        (interpreter.InterpreterBuilder, "create_dot", _dot),
        (
            interpreter.InterpreterBuilder,
            "create_atomic_rmw",
            _atomic(interpreter.InterpreterBuilder.create_atomic_rmw),
        ),
        (interpreter.InterpreterBuilder, "cast_impl", _rounding_cast(interpreter.InterpreterBuilder.cast_impl)),
        torch_compat.interpreter_tensor_patch(_add_index_method),
        torch_compat.interpreter_language_patch(),
        (semantic, "binary_op_sanitize_overflow_impl", _overflow_check(semantic.binary_op_sanitize_overflow_impl)),
        (importlib.import_module("triton.language"), "device_assert", _require),
        (interpreter.ReduceOps, "generic_reduce", _reduce),
        (interpreter.ScanOps, "generic_scan", _scan),
    )


def _interpreted(function: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """Wraps a torch function for the interpreter's tensors, which hold NumPy arrays; scalars get the tensor's dtype."""
    language = importlib.import_module("triton.language")
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle

    def call(*arguments: object) -> Any:
        first = next(item for item in arguments if isinstance(item, language.tensor))
        example = torch.from_numpy(first.handle.data)
        values = [
            torch.from_numpy(item.handle.data) if isinstance(item, language.tensor) else torch.tensor(item).to(example)
            for item in arguments
        ]
        result = function(*values).numpy()
        scalar = first.type.scalar
        blocks = [item.type for item in arguments if isinstance(item, language.tensor) and item.type.is_block()]
        result_type = language.block_type(scalar, list(result.shape)) if blocks else scalar
        return language.tensor(handle(result, scalar), result_type)

    return call


def _numpy() -> Any:
    """Returns NumPy, which only the interpreter needs."""
    return importlib.import_module("numpy")


def _add_index_method(patch: Callable[..., None]) -> Callable[..., None]:
    """Adds `__index__` to the interpreter's patches of tensors."""

    def prepare(tensor: object, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return prepare


def _overflow_check(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the check of integers for overflow, which takes half of a kernel's time."""

    def check(semantic: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
        if semantic.builder.options.debug:
            original(semantic, left, right, operation)

    return check


def _require(condition: Any, message: str = "", mask: Any = None) -> None:
    """Raises IndexError if the condition is false where the mask is true."""
    failed = _numpy().logical_not(condition.handle.data)
    if mask is not None:
        failed = failed & mask.handle.data
    if failed.any():
        raise IndexError(message)


def _splat(builder: Any, result: Any, scalar: Any) -> Any:
    """Broadcasts a scalar to a block with the dtype of its data; the declared dtype of comparisons is wrong."""
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
    return handle(_numpy().full(result.shape, scalar.data.reshape(-1)[0], dtype=scalar.data.dtype), scalar.dtype.scalar)


def _rounding_cast(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Wraps the interpreter's cast: float32 is rounded to the nearest bfloat16, or the even one of two."""

    def cast(builder: Any, value: Any, target: Any) -> Any:
        source, result = value.dtype.scalar, target.scalar
        if not source.is_fp32() or not result.is_bf16():
            return original(builder, value, target)
        rounded = torch.from_numpy(_numpy().array(value.data, ndmin=1)).to(torch.bfloat16).view(torch.uint16)
        handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
        return handle(rounded.numpy().reshape(value.data.shape), result)

    return cast


def _atomic(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the interpreter's atomic operations: bfloat16 elements are added one after the other."""

    def update(builder: Any, operation: Any, pointer: Any, value: Any, mask: Any, *order: Any) -> Any:
        if operation.name != "FADD" or not value.dtype.scalar.is_bf16():
            return original(builder, operation, pointer, value, mask, *order)
        before = _numpy().zeros_like(value.data)
        for lane in zip(*mask.data.nonzero(), strict=True):
            memory = ctypes.c_uint16.from_address(int(pointer.data[lane]))
            before[lane] = memory.value
            terms = torch.tensor([memory.value, int(value.data[lane])], dtype=torch.uint16).view(torch.bfloat16)
            memory.value = int((terms[0] + terms[1]).view(torch.uint16))
        return importlib.import_module("triton.runtime.interpreter").TensorHandle(before, value.dtype.scalar)

    return update


def _dot(_builder: Any, left: Any, right: Any, sums: Any, _precision: Any, _max_imprecise: Any) -> Any:
    """Multiplies blocks in the dtype of the sums, with bfloat16 widened: the interpreter has its bits as integers."""
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
    blocks = []
    for item in (left, right):
        data = item.data
        if item.dtype.scalar.is_bf16():
            data = (data.view("uint16").astype("uint32") << 16).view("float32")
        blocks.append(data)
    return handle(_numpy().matmul(*blocks, dtype=sums.data.dtype) + sums.data, sums.dtype.scalar)


def _reduce(operations: Any, inputs: Any) -> Any:
    """Reduces blocks along an axis by combining all pairs of neighbours at once."""
    whole = operations.axis is None
    inputs, axis = operations.unravel(inputs, operations.axis)
    rank = inputs[0].handle.data.ndim
    blocks = [item.handle.data for item in inputs]
    while blocks[0].shape[axis] > 1:
        left = [_slice(block, axis, 0, 2) for block in blocks]
        right = [_slice(block, axis, 1, 2) for block in blocks]
        blocks = _combine(operations, inputs, left, right)
    if operations.keep_dims and whole:
        blocks = [block.reshape((1,) * rank) for block in blocks]
    elif not operations.keep_dims:
        blocks = [block.squeeze(axis) for block in blocks]
    results = [block if block.ndim else block.item() for block in blocks]
    return [operations.to_tensor(block, item.dtype) for block, item in zip(results, inputs, strict=True)]


def _scan(operations: Any, inputs: Any) -> Any:
    """Scans blocks along an axis in steps of 1, 2, 4, ... elements, all elements at once."""
    blocks = [item.handle.data for item in inputs]
    size, step = blocks[0].shape[operations.axis], 1
    while step < size:
        earlier = [_numpy().roll(block, step, operations.axis) for block in blocks]
        combined = _combine(operations, inputs, earlier, blocks)
        blocks = [block.copy() for block in blocks]
        for block, part in zip(blocks, combined, strict=True):
            _slice(block, operations.axis, step, 1)[...] = _slice(part, operations.axis, step, 1)
        step *= 2
    return [operations.to_tensor(block, item.dtype) for block, item in zip(blocks, inputs, strict=True)]


def _slice(block: Any, axis: int, start: int, step: int) -> Any:
    return block[(slice(None),) * axis + (slice(start, None, step),)]


def _combine(operations: Any, inputs: Any, left: list[Any], right: list[Any]) -> list[Any]:
    """Applies the combining function of a reduction or scan to blocks of its left and right operands."""
    tensors = [
        operations.to_tensor(_numpy().ascontiguousarray(block), item.dtype)
        for blocks in (left, right)
        for block, item in zip(blocks, inputs, strict=True)
    ]
    results = operations.combine_fn.fn(*tensors)
    return [item.handle.data for item in (results if isinstance(results, tuple) else (results,))]
