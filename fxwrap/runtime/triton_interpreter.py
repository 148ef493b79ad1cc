"""What Triton's interpreter lacks for generated kernels, put in its place while one runs.

It has no functions of libdevice: each becomes torch's function of the same meaning. It forgets that a compared scalar
is a bool when it spreads it over a block. In Triton 3.6 it makes loop bounds of arrays in a way that NumPy gave up. It
combines elements one by one in Python, where whole slices do as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_MODULE = "triton.language.extra.libdevice"

_SAME = (
    "hypot", "copysign", "nextafter", "atan2", "pow", "fmod", "trunc", "rsqrt", "exp", "exp2", "expm1", "log", "log2",
    "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh",
    "erf", "erfc", "erfinv", "lgamma",
)  # fmt: skip


@cache
def interpreter_additions() -> tuple[tuple[Any, str, Any], ...]:
    """Returns owner, name and function of what the interpreter is given while it runs a kernel."""
    library = importlib.import_module(_MODULE)
    interpreter = importlib.import_module("triton.runtime.interpreter")
    functions: dict[str, Callable[..., torch.Tensor]] = {name: getattr(torch, name) for name in _SAME}
    functions["rint"] = torch.round
    return (
        *[(library, name, _interpreted(function)) for name, function in functions.items()],
        (interpreter.InterpreterBuilder, "create_splat", _splat),
        (interpreter, "_patch_lang_tensor", _with_index(interpreter._patch_lang_tensor)),
        (importlib.import_module("triton.language"), "device_assert", _require),
        (interpreter.ReduceOps, "generic_reduce", _reduce),
        (interpreter.ScanOps, "generic_scan", _scan),
    )


def _interpreted(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Returns a function on the interpreter's tensors, which wrap NumPy arrays; numbers become the tensor's dtype."""
    language = importlib.import_module("triton.language")
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle

    def call(*arguments: Any) -> Any:
        first = next(item for item in arguments if isinstance(item, language.tensor))
        example = torch.from_numpy(first.handle.data)
        values = [
            torch.from_numpy(item.handle.data) if isinstance(item, language.tensor) else torch.tensor(item).to(example)
            for item in arguments
        ]
        result = function(*values).numpy()
        scalar = first.type.scalar
        blocks = [item.type for item in arguments if isinstance(item, language.tensor) and item.type.is_block()]
        found = language.block_type(scalar, list(result.shape)) if blocks else scalar
        return language.tensor(handle(result, scalar), found)

    return call


def _numpy() -> Any:
    """NumPy, which the interpreter needs and nothing else does."""
    return importlib.import_module("numpy")


def _with_index(patch: Callable[..., None]) -> Callable[..., None]:
    """Returns the interpreter's own preparation of tensors, followed by a conversion to an index of our own."""

    def prepare(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return prepare


def _require(condition: Any, message: str = "", mask: Any = None) -> None:
    """Raises IndexError with the message where the condition is false and the mask is true."""
    failed = _numpy().logical_not(condition.handle.data)
    if mask is not None:
        failed = failed & mask.handle.data
    if failed.any():
        raise IndexError(message)


def _splat(builder: Any, result: Any, scalar: Any) -> Any:
    """Spreads a scalar over a block, with the dtype that its data has: that of a comparison is still its operands'."""
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
    return handle(_numpy().full(result.shape, scalar.data.reshape(-1)[0], dtype=scalar.data.dtype), scalar.dtype.scalar)


def _reduce(operations: Any, given: Any) -> Any:
    """Reduces blocks along an axis by pairs of neighbours, all pairs at once."""
    whole = operations.axis is None
    given, axis = operations.unravel(given, operations.axis)
    rank = given[0].handle.data.ndim
    blocks = [item.handle.data for item in given]
    while blocks[0].shape[axis] > 1:
        left = [_slice(block, axis, 0, 2) for block in blocks]
        right = [_slice(block, axis, 1, 2) for block in blocks]
        blocks = _combine(operations, given, left, right)
    if operations.keep_dims and whole:
        blocks = [block.reshape((1,) * rank) for block in blocks]
    elif not operations.keep_dims:
        blocks = [block.squeeze(axis) for block in blocks]
    results = [block if block.ndim else block.item() for block in blocks]
    return [operations.to_tensor(block, item.dtype) for block, item in zip(results, given, strict=True)]


def _scan(operations: Any, given: Any) -> Any:
    """Scans blocks along an axis in steps of 1, 2, 4, ... elements, all elements at once."""
    blocks = [item.handle.data for item in given]
    size, step = blocks[0].shape[operations.axis], 1
    while step < size:
        earlier = [_numpy().roll(block, step, operations.axis) for block in blocks]
        found = _combine(operations, given, earlier, blocks)
        blocks = [block.copy() for block in blocks]
        for block, part in zip(blocks, found, strict=True):
            _slice(block, operations.axis, step, 1)[...] = _slice(part, operations.axis, step, 1)
        step *= 2
    return [operations.to_tensor(block, item.dtype) for block, item in zip(blocks, given, strict=True)]


def _slice(block: Any, axis: int, start: int, step: int) -> Any:
    return block[(slice(None),) * axis + (slice(start, None, step),)]


def _combine(operations: Any, given: Any, left: list[Any], right: list[Any]) -> list[Any]:
    """Applies the combining function of a reduction or scan to blocks of its left and right operands."""
    tensors = [
        operations.to_tensor(_numpy().ascontiguousarray(block), item.dtype)
        for blocks in (left, right)
        for block, item in zip(blocks, given, strict=True)
    ]
    found = operations.combine_fn.fn(*tensors)
    return [item.handle.data for item in (found if isinstance(found, tuple) else (found,))]
