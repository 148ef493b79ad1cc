"""Memory for calls that write copies of their operands: a copy, or the operand itself if nothing else uses it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch.fx import Node

from fxwrap.lines import Alloc, Mutate, View
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.fusion.kernels import extent_of, same_memory
from fxwrap.symbolic import product
from fxwrap.torch_compat import is_plain_view
from fxwrap.wrapper_ir import Origin, TensorType, Value


def writable_operand(
    builder: Builder,
    node: Node,
    value: Value,
    fake: torch.Tensor,
    dead_roots: Collection[str],
    others: Collection[str],
    *,
    is_read: bool = True,
) -> Value:
    """Returns a tensor for a call to write: a copy of its operand, or the operand itself if nothing else uses it.

    Args:
        builder, node: the lowering of the graph, and the call.
        value, fake: the operand, and the call's result.
        dead_roots: the names of the roots that nothing uses after the call.
        others: the names of the roots of the call's other operands, which must keep their content.
        is_read: whether the call reads the operand; otherwise the copy is uninitialised memory.
    """
    reused = reuse_operand_memory(builder, value, fake, dead_roots, others)
    if reused is not None:
        return reused
    type_ = builder.symbols.tensor_type(fake)
    if extent_of(type_) == product(type_.sizes) or not is_read:
        return emit_result_copy(builder, node, f"{value.name}_copy", fake, value if is_read else None)
    return _strided_copy(builder, node, value, fake, type_)


def reuse_operand_memory(
    builder: Builder, value: Value, fake: torch.Tensor, dead_roots: Collection[str], others: Collection[str]
) -> Value | None:
    """Returns an operand whose memory a result may overwrite, recorded as the result's value; None if it may not.

    The result `fake` is a modified copy of `value`; the other arguments are those of `writable_operand`.
    """
    storages = builder.storages
    root = storages.root(value)
    if root.name not in dead_roots or root.name in others or value.type != builder.symbols.tensor_type(fake):
        return None
    covers_root = same_memory(root.tensor_type, value.tensor_type)
    if value is not root and not (covers_root and is_plain_view(storages.fake(value), storages.fake(root))):
        return None
    storages.add_fake(value, fake)
    storages.share(fake, root)
    storages.mark_mutated(root)
    return value


def emit_result_copy(builder: Builder, node: Node, name: str, fake: torch.Tensor, source: Value | None) -> Value:
    """Emits the allocation of a result, and the copy of its initial content if there is a source."""
    origin = builder.origin(node)
    copy = builder.add_root(name, fake)
    builder.emit(Alloc(copy, origin=origin))
    if source is not None:
        emit_copy_into(builder, copy, source, origin)
    return copy


def emit_copy_into(builder: Builder, target: Value, source: Value, origin: Origin | None = None) -> None:
    """Emits the copy of a tensor into another."""
    builder.emit(Mutate((), "aten.copy_.default", (target, source), (target,), origin=origin))


def _strided_copy(builder: Builder, node: Node, value: Value, fake: torch.Tensor, type_: TensorType) -> Value:
    """Copies a tensor whose elements overlap or have gaps between them, gaps included: a kernel may access them."""
    origin = builder.origin(node)
    flat = TensorType(type_.dtype, (extent_of(type_),), (1,), type_.device)
    memory = builder.add_buffer(f"{value.name}_memory", flat)
    builder.emit(Alloc(memory, origin=origin))
    source_type = replace(flat, storage_offset=value.tensor_type.storage_offset)
    source = builder.add_alias(f"{value.name}_flat", source_type, value)
    builder.emit(View(source, value, origin=origin))
    emit_copy_into(builder, memory, source, origin)
    copy = builder.add_alias(f"{value.name}_copy", type_, memory, fake)
    builder.storages.share(fake, memory)
    builder.emit(View(copy, memory, origin=origin))
    return copy
