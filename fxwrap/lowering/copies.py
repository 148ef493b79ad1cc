"""What calls write that get copies of their operands: copies, or operands that nothing else needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch.fx import Node

from fxwrap.lines import Alloc, Mutate, View
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.kernels import extent_of, same_memory
from fxwrap.symbolic import product
from fxwrap.torch_compat import is_plain_view
from fxwrap.wrapper_ir import TensorType, Value


def writable(
    builder: Builder,
    node: Node,
    value: Value,
    fake: torch.Tensor,
    dying: Collection[str],
    others: Collection[str],
    *,
    is_read: bool = True,
) -> Value:
    """Returns a tensor for a call to write: a copy of its operand, or the operand itself where nothing else needs it.

    Args:
        builder: where the lines of a copy go.
        node: the call.
        value: the operand.
        fake: the call's result that the copy is.
        dying: the roots, by name, that nothing touches after the call.
        others: the roots of the call's other operands, which keep what they hold.
        is_read: whether the operand holds anything; else the copy is fresh memory.
    """
    found = taken_over(builder, value, fake, dying, others)
    if found is not None:
        return found
    type_ = builder.tensor_type(fake)
    if extent_of(type_) == product(type_.sizes) or not is_read:
        return new_copy(builder, node, f"{value.name}_copy", fake, value if is_read else None)
    return _spread_copy(builder, node, value, fake, type_)


def taken_over(
    builder: Builder, value: Value, fake: torch.Tensor, dying: Collection[str], others: Collection[str]
) -> Value | None:
    """Returns a value whose memory a result can be in, now the value of that result too, or None.

    Args:
        builder: where it is recorded that the memory is written, and is the result's.
        value: what the result is a written copy of.
        fake: the result.
        dying: the roots, by name, that may be written: nothing touches them after the call.
        others: the roots of what the call reads besides.
    """
    root = builder.root_of[value.name]
    if root.name not in dying or root.name in others or value.type != builder.tensor_type(fake):
        return None
    if value is not root and not _fills(builder, value, root):
        return None
    builder.fake_of[value.name] = fake
    builder.share_root(fake, root)
    builder.mutated.add(root.name)
    return value


def _fills(builder: Builder, window: Value, root: Value) -> bool:
    """Whether a window is all of its root."""
    return same_memory(root.tensor_type, window.tensor_type) and is_plain_view(
        builder.fake_of[window.name], builder.fake_of[root.name]
    )


def new_copy(builder: Builder, node: Node, name: str, fake: torch.Tensor, source: Value | None) -> Value:
    """Emits the allocation of a result, and the copy of what it begins with, if anything."""
    origin = builder.origin(node)
    copy = builder.add_root(name, fake)
    builder.emit(Alloc(copy, origin=origin))
    if source is not None:
        builder.emit(Mutate((), "aten.copy_.default", (copy, source), (copy,), origin=origin))
    return copy


def _spread_copy(builder: Builder, node: Node, value: Value, fake: torch.Tensor, type_: TensorType) -> Value:
    """Copies a tensor whose elements overlap or have gaps between them, gaps included: a kernel may step over them."""
    origin, old = builder.origin(node), value.tensor_type
    flat = TensorType(type_.dtype, (extent_of(type_),), (1,), type_.device)
    memory = builder.add_buffer(f"{value.name}_memory", flat)
    builder.emit(Alloc(memory, origin=origin))
    source = Value(builder.unique(f"{value.name}_flat"), replace(flat, storage_offset=old.storage_offset))
    builder.root_of[source.name] = builder.root_of[value.name]
    builder.emit(View(source, value, origin=origin))
    builder.emit(Mutate((), "aten.copy_.default", (memory, source), (memory,), origin=origin))
    copy = Value(builder.unique(f"{value.name}_copy"), type_)
    builder.root_of[copy.name] = memory
    builder.fake_of[copy.name] = fake
    builder.share_root(fake, memory)
    builder.emit(View(copy, memory, origin=origin))
    return copy
