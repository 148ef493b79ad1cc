"""Tensors: storages, views and functionalised tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e5m2fnuz: "f8e5m2fnuz",
    torch.float8_e8m0fnu: "f8e8m0fnu",
    torch.float4_e2m1fn_x2: "f4e2m1fn_x2",
    torch.quint8: "qu8",
    torch.qint8: "qi8",
    torch.qint32: "qi32",
    torch.quint4x2: "qu4x2",
    torch.quint2x4: "qu2x4",
    torch.bits8: "bits8",
    torch.bits16: "bits16",
    torch.bits1x8: "bits1x8",
    torch.bits2x4: "bits2x4",
    torch.bits4x2: "bits4x2",
    **{getattr(torch, name): "bc32" for name in ("bcomplex32",) if hasattr(torch, name)},  # since torch 2.14
    **{getattr(torch, f"uint{width}"): f"u{width}" for width in range(1, 8)},
    **{getattr(torch, f"int{width}"): f"i{width}" for width in range(1, 8)},
}
"""The names of all element types in texts of programs, kernels and errors.

Why: releases of torch have different ones.
"""

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def is_desugared(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain: of no subclass but Parameter and FakeTensor."""
    return type(tensor) in _PLAIN_CLASSES


def is_traced_class(kind: type) -> bool:
    """Whether functions act on tensors of a class in a way that is traced, and that operators of a graph do not see.

    AOTAutograd desugars classes with `__torch_dispatch__`. Parameters whose class defines nothing act as any others.
    """
    if kind in _PLAIN_CLASSES or not issubclass(kind, torch.Tensor):
        return False
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    parameter = torch.nn.Parameter
    return not issubclass(kind, parameter) or kind.__torch_function__ is not parameter.__torch_function__


def without_traced_class(item: Any) -> Any:
    """Returns a plain alias of a tensor of a traced class, through which gradients flow, and other objects unchanged.

    Why: the method that returns it is itself subject to the class's `__torch_function__`.
    """
    if not is_traced_class(type(item)):
        return item
    with torch._C.DisableTorchFunctionSubclass():
        return item.as_subclass(torch.Tensor)


def storage_identity(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """Returns a number that tensors share exactly when they share a storage.

    Why: fake tensors have no data pointer, and the address of a StorageImpl has no public accessor.
    """
    storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
    return int(storage._cdata)


def has_distinct_elements(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two indices of a strided tensor are one element, since each stride is beyond the smaller ones' reach.

    False for layouts that interleave and yet are distinct. `torch._debug_has_internal_overlap` does not tell a slice
    from overlapping windows.
    """
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= reach:
            return 0 in sizes
        reach += (size - 1) * stride
    return True


StridedLayout: TypeAlias = tuple[Sequence[Any], Sequence[Any], Any]
"""The sizes, the strides and the offset of a strided tensor, ints or symbolic."""


def are_disjoint_slices(first: StridedLayout, second: StridedLayout) -> bool:
    """Whether two tensors are slices of one along one dimension, at different positions, of constant sizes."""
    low, high = first, second
    numbers = (*low[0], *high[0], *low[1], low[2], *high[1], high[2])
    if not all(isinstance(number, int) for number in numbers) or tuple(low[1]) != tuple(high[1]):
        return False
    if low[2] > high[2]:
        low, high = high, low
    sizes, strides, offset = low
    for dim, stride in enumerate(strides):
        position, rest = divmod(high[2] - offset, stride) if stride else (0, 1)
        if not rest and position >= sizes[dim]:
            reached = [max(pair) for pair in zip(sizes, high[0], strict=True)]
            reached[dim] = position + high[0][dim]
            return has_distinct_elements(reached, strides)
    return False


def is_plain_view(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a (fake) view differs from its base by sizes, strides and offset alone.

    False for views of another dtype, conjugate views and negative views.
    """
    return (
        view.layout is torch.strided
        and view.dtype == base.dtype
        and view.is_conj() == base.is_conj()
        and view.is_neg() == base.is_neg()
    )


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view with the negative bit flipped, as `imag` of a conjugate has it. It has no public name."""
    return torch._neg_view(tensor)


def is_functional_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is functionalised."""
    return torch._is_functional_tensor(tensor)


def is_intercepted_tensor(item: object) -> bool:
    """Whether an object is a fake or functional tensor, for which torch intercepts operators.

    Their modules take long to import, so they are imported here.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(item, FakeTensor | FunctionalTensor)


def find_fake_mode(items: Iterable[object]) -> AbstractContextManager[object] | None:
    """Returns the fake mode of the first fake tensor among objects, which functional tensors may contain; or None."""
    for item in items:
        if isinstance(item, torch.Tensor) and is_intercepted_tensor(item):
            content = getattr(item, "elem", item)  # of a FunctionalTensor: functionalised as C++ does it
            if is_functional_tensor(content):
                content = torch._from_functional_tensor(content)
            mode: AbstractContextManager[object] | None = getattr(content, "fake_mode", None)
            if mode is not None:
                return mode
    return None


def has_real_storage(tensor: torch.Tensor) -> bool:
    """Whether the contents of a tensor are in its own memory: it is not meta and not functionalised."""
    return tensor.data_ptr() != 0 or not (tensor.is_meta or is_functional_tensor(tensor))


# Why: kernels write tensors that autograd may have saved; it notices by their version counters, which have no public
# accessor. The public torch.autograd.graph.increment_version takes twice as long.

increment_versions: Callable[[Sequence[torch.Tensor]], object] = torch._C._increment_version
"""`increment_versions(tensors)` increments the version counters of all but inference tensors."""


def version_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's version counter, which counts in-place writes to it and its views."""
    return tensor._version


# Why: an operator that mutates or aliases memory needs a kernel for functionalisation, which has no public API.


def unwrap_functional_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the up-to-date tensor inside a functionalised one; any other tensor unchanged."""
    if not is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
    return torch._from_functional_tensor(tensor)


def replace_functional_tensor(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Replaces the content of a functionalised tensor and of its base: the functional form of an in-place write."""
    torch._functionalize_replace(tensor, content)
    torch._functionalize_commit_update(tensor)
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]


@contextmanager
def exclude_functionalisation() -> Iterator[None]:
    """Runs operators below functionalisation, as functionalisation itself does."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
        yield
