"""Calls of Triton kernels of the user's: each becomes a launch of a kernel of the program."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lines import Launch
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.copies import writable
from fxwrap.lowering.effects import written_operands
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.operators import EMPTY
from fxwrap.lowering.source import location_of
from fxwrap.torch_compat import triton_kernel_at
from fxwrap.user_kernels import KernelCallError, define_user_kernel, sort_arguments, table_arguments
from fxwrap.wrapper_ir import Value


def lower_user_kernel(builder: Builder, node: Node, dying: Collection[str]) -> None:
    """Lowers the launch of a Triton kernel of the user's, on copies of what it writes, or on its operands themselves.

    No copy is made of an operand that the program owns and nothing reads later. `dying` are the roots, by name, of
    such operands.
    """
    call: dict[str, Any] = dict(node.kwargs)
    kernel = triton_kernel_at(call["kernel_idx"])
    try:
        given = sort_arguments(
            kernel, table_arguments(call), lambda item: _read(builder, node, item), call["tma_descriptor_metadata"]
        )
        written, restored = _written(builder, node, given.tensors, dying)
        grids = [tuple([literal(builder, size, node) for size in grid]) for grid in call["grid"]]
        definition, numbers = define_user_kernel(kernel, given, written, restored, grids)
    except KernelCallError as error:
        raise GraphError(node.name, error.reason, error.remedy, location_of(node)) from error
    reads = [value for name, value in given.tensors.items() if name not in written]
    name = builder.state.add_kernel(definition)
    arguments = (*reads, *numbers)
    builder.emit(Launch(name, arguments, tuple(written.values()), grids[0], origin=builder.origin(node)))


def _read(builder: Builder, node: Node, item: Any) -> Any:
    is_made = isinstance(item, Node | torch.SymInt | torch.SymFloat | torch.SymBool)
    return literal(builder, item, node) if is_made else item


def _written(
    builder: Builder, node: Node, tensors: dict[str, Value], dying: Collection[str]
) -> tuple[dict[str, Value], list[str]]:
    """Returns the memory that a launch writes, by the name of its argument, and the names whose content it may read.

    What the node stands for is recorded.
    """
    call: dict[str, Any] = dict(node.kwargs)
    if "tensors_to_clone" not in call:
        operands = written_operands(node, builder.fakes)
        written = {name: tensors[name] for name, item in call["kwargs"].items() if item in operands}
        builder.mutated |= {builder.root_of[value.name].name for value in written.values()}
        builder.env[node] = None
        return written, list(written)
    names = [name for name in call["tensors_to_clone"] if name in tensors]
    others = {builder.root_of[value.name].name for name, value in tensors.items() if name not in names}
    written, restored = {}, []
    for name in names:
        operand = call["kwargs"][name]
        is_read = operand.target not in EMPTY
        fake = builder.fakes[node][name]
        written[name] = writable(builder, node, tensors[name], fake, dying, others, is_read=is_read)
        others.add(builder.root_of[written[name].name].name)
        restored += [name] if is_read else []
    builder.env[node] = dict(written)
    return written, restored
