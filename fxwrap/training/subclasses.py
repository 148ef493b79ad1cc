"""Tensor subclasses such as DTensor, flattened into the plain tensors that a program reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from fxwrap.torch_compat import flatten_subclass, without_traced_class


@dataclass(frozen=True)
class ConstantPart:
    """An inner object that is no tensor, such as a device mesh: a constant of the program."""

    value: Any


@dataclass(frozen=True)
class SubclassLayout:
    """How a subclass is built from its inner tensors and constants, which `attributes` name in order."""

    kind: Any
    attributes: tuple[str, ...]
    parts: tuple[TensorLayout | ConstantPart, ...]
    context: Any
    size: Any
    stride: Any


_PLAIN = frozenset({Tensor, nn.Parameter})

TensorLayout: TypeAlias = SubclassLayout | None
"""The layout of a tensor; None for a plain tensor."""


def layout_of(tensor: Tensor) -> TensorLayout:
    """Returns the layout of a tensor."""
    flattened = flatten_subclass(tensor)
    if flattened is None:
        return None
    attributes, context = flattened
    inner = [getattr(tensor, name) for name in attributes]
    parts = tuple([layout_of(item) if isinstance(item, Tensor) else ConstantPart(item) for item in inner])
    return SubclassLayout(type(tensor), tuple(attributes), parts, context, tensor.size(), tensor.stride())


def append_parts(tensor: Tensor, layout: TensorLayout, parts: list[Tensor]) -> bool:
    """Appends the plain tensors of a tensor of a layout; False if it has another. Each call of a step asks for all."""
    if layout is None:
        parts.append(without_traced_class(tensor))
        return type(tensor) in _PLAIN or flatten_subclass(tensor) is None
    if type(tensor) is not layout.kind:
        return False
    attributes, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    if context != layout.context or tuple(attributes) != layout.attributes:
        return False
    if tensor.size() != layout.size or tensor.stride() != layout.stride:
        return False
    for name, part in zip(layout.attributes, layout.parts, strict=True):
        item = getattr(tensor, name)
        if isinstance(part, ConstantPart) or not isinstance(item, Tensor):
            if ConstantPart(item) != part:
                return False
        elif not append_parts(item, part, parts):
            return False
    return True


def count_plain(layout: TensorLayout) -> int:
    """Returns the number of plain tensors of a tensor of this layout."""
    if layout is None:
        return 1
    return sum([count_plain(part) for part in layout.parts if not isinstance(part, ConstantPart)])


def layout_text(layout: TensorLayout) -> str:
    """Returns a text that is equal for equal layouts, in other processes too; "" for a plain tensor."""
    if layout is None:
        return ""
    parts = ", ".join(
        [str(part.value) if isinstance(part, ConstantPart) else layout_text(part) for part in layout.parts]
    )
    return f"{layout.kind.__name__}({parts}) {layout.context} of {tuple(layout.size)}"


def plain_tensors(tensor: Tensor, layout: TensorLayout) -> Iterator[Tensor]:
    """Yields the plain tensors of a tensor of this layout."""
    if layout is None:
        yield tensor
        return
    for name, part in zip(layout.attributes, layout.parts, strict=True):
        if not isinstance(part, ConstantPart):
            yield from plain_tensors(getattr(tensor, name), part)


def build(layout: TensorLayout, plain: Iterator[Tensor]) -> Tensor:
    """Returns a tensor of a layout, which takes its plain tensors from an iterator."""
    if layout is None:
        return next(plain)
    inner = {
        name: part.value if isinstance(part, ConstantPart) else build(part, plain)
        for name, part in zip(layout.attributes, layout.parts, strict=True)
    }
    tensor: Tensor = layout.kind.__tensor_unflatten__(inner, layout.context, layout.size, layout.stride)
    return tensor


def build_all(layouts: Sequence[TensorLayout], plain: Iterator[Tensor]) -> list[Tensor]:
    """Returns a tensor of each layout."""
    return [build(layout, plain) for layout in layouts]
