"""Checks of run-time inputs for emitted Python, FX and the interpreter.

Emitted C++ does the same checks, with the texts of `native/engine/checks.cpp` and `native/binding/binding.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from fxwrap.errors import InputError, ResultError
from fxwrap.runtime.plain_inputs import PLAIN_CLASSES, is_plain_class
from fxwrap.torch_compat import DTYPE_NAMES

_STRIDED = torch.strided


def check_layout(
    tensor: object,
    name: str,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    device: torch.device,
    operator: str = "",
) -> None:
    """Raises InputError unless `tensor` is a plain tensor of this dtype, sizes, strides (in elements) and device.

    With an operator, the tensor is a result of its call, and the error is a ResultError. Strides of dimensions of size
    1 and of empty tensors are not compared. A device without an index matches all of its type. Subclasses of
    torch.Tensor that define how operators act on them are rejected: they must be desugared first.
    """
    if type(tensor) not in PLAIN_CLASSES and not is_plain_class(type(tensor)):
        actual = "None" if tensor is None else type(tensor).__name__
        expected = _describe(dtype, sizes, strides, device) if tensor is None else "a torch.Tensor"
        raise _layout_error(name, expected, actual, operator)
    assert isinstance(tensor, torch.Tensor)
    check_tensor_layout(tensor, name, dtype, sizes, strides, device, operator)


def check_tensor_layout(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    device: torch.device,
    operator: str = "",
) -> None:
    """Raises as `check_layout` does, for a tensor of any class."""
    if tensor.layout is not _STRIDED:
        actual = "a tensor of another layout than torch.strided"
    elif tensor.is_nested:
        actual = "a nested tensor"
    elif (
        tensor.dtype is dtype
        and tensor.shape == tuple(sizes)
        and _same_device(device, tensor.device)
        and (tensor.stride() == tuple(strides) or _same_strides(tensor, strides))
    ):
        return
    else:
        actual = _describe(tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
    raise _layout_error(name, _describe(dtype, sizes, strides, device), actual, operator)


def _layout_error(name: str, expected: str, actual: str, operator: str) -> InputError | ResultError:
    if not operator:
        return InputError(f"input '{name}': expected {expected}, got {actual}")
    remedy = "Correct its fake implementation (torch.library.register_fake), or the operator"
    return ResultError(
        f"result '{name}' of {operator}: its fake implementation returns {expected}, the operator {actual}. {remedy}"
    )


def check_rank(tensor: object, name: str, rank: int) -> None:
    """Raises InputError unless `tensor` is a plain tensor of this rank."""
    expected = f"a tensor of {rank} dimension{'s' if rank > 1 else ''}"
    actual = "None" if tensor is None else type(tensor).__name__
    if isinstance(tensor, torch.Tensor) and is_plain_class(type(tensor)):
        if tensor.dim() == rank and not tensor.is_nested:
            return
        if tensor.is_nested:
            actual = "a nested tensor"
        elif tensor.layout is _STRIDED:
            actual = _describe(tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
    elif tensor is not None:
        expected = "a torch.Tensor"
    raise InputError(f"input '{name}': expected {expected}, got {actual}")


def check_number(number: object, name: str, kind: str) -> None:
    """Raises InputError unless a scalar is of this kind ("int", "float" or "bool"); ints are valid floats."""
    if not isinstance(number, _NUMBER_CLASSES[kind]):
        article = "an" if kind == "int" else "a"
        raise InputError(f"input '{name}': expected {article} {kind}, got {type(number).__name__}")


_NUMBER_CLASSES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,)}


def check_alignment(tensor: torch.Tensor, name: str, alignment: int) -> None:
    """Raises InputError unless the data pointer is a multiple of `alignment` bytes."""
    if tensor.data_ptr() % alignment:
        raise InputError(f"input '{name}': its address {tensor.data_ptr():#x} is no multiple of {alignment} bytes")


_ERRORS: dict[str, type[Exception]] = {
    "RuntimeError": RuntimeError,
    "IndexError": IndexError,
    "ValueError": ValueError,
    "InputError": InputError,
}


def raise_error(error: str, message: str, shown: int | None = None) -> NoReturn:
    """Raises the error of this name; `shown` is the invalid scalar."""
    raise _ERRORS[error](message if shown is None else f"{message}, got {shown}")


def check_input_count(name: str, expected: int, actual: int) -> None:
    """Raises InputError unless the program `name` got the expected number of inputs."""
    if expected != actual:
        raise InputError(f"program '{name}' takes {expected} inputs, got {actual}")


def _same_device(expected: torch.device, actual: torch.device) -> bool:
    index: int | None = expected.index
    return expected == actual or (index is None and expected.type == actual.type)


def _same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return tensor.numel() == 0 or all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), strides))


def _describe(dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], device: torch.device) -> str:
    shape = ", ".join(map(str, sizes))
    return f"{DTYPE_NAMES[dtype]}[{shape}] on {device} with strides {tuple(strides)}"
