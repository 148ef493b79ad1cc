"""Calls of the user's Triton kernels: each becomes a launch of a kernel of the program."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import EMPTY_OPERATORS, mutated_operands
from fxwrap.lines import Launch
from fxwrap.lowering.builder import Builder, node_error
from fxwrap.lowering.calls.copies import writable_operand
from fxwrap.lowering.calls.nodes import literal, literals
from fxwrap.torch_compat import triton_kernel_at
from fxwrap.user_kernels import KernelCallError, all_call_arguments, classify_arguments, define_user_kernel
from fxwrap.wrapper_ir import Value


def lower_user_kernel(builder: Builder, node: Node, dead_roots: Collection[str]) -> None:
    """Lowers the launch of a user's Triton kernel, on copies of the tensors that it writes or on its operands.

    An operand is not copied if the program owns it and nothing uses it later: its root is one of `dead_roots`.
    """
    call: dict[str, Any] = dict(node.kwargs)
    kernel = triton_kernel_at(call["kernel_idx"])
    graph_values = Node | torch.SymInt | torch.SymFloat | torch.SymBool
    try:
        arguments = classify_arguments(
            kernel,
            all_call_arguments(call),
            lambda item: literal(builder, item, node) if isinstance(item, graph_values) else item,
            call["tma_descriptor_metadata"],
        )
        written, restored = _written_arguments(builder, node, call, arguments.tensors, dead_roots)
        grids = [literals(builder, grid, node) for grid in call["grid"]]
        definition, scalars = define_user_kernel(kernel, arguments, written, restored, grids)
    except KernelCallError as error:
        raise node_error(node, error.reason, error.remedy) from error
    reads = [value for name, value in arguments.tensors.items() if name not in written]
    name = builder.state.kernels.add(definition)
    launch = Launch(name, (*reads, *scalars), tuple(written.values()), grids[0], origin=builder.origin(node))
    builder.emit(launch)


def _written_arguments(
    builder: Builder, node: Node, call: Mapping[str, Any], tensors: Mapping[str, Value], dead_roots: Collection[str]
) -> tuple[dict[str, Value], list[str]]:
    """Returns the tensors that a launch writes by argument name, and the names of those whose content it may read.

    Records the operand of the node.
    """
    storages = builder.storages
    if "tensors_to_clone" not in call:
        operands = mutated_operands(node, builder.fakes)
        written = {name: tensors[name] for name, item in call["kwargs"].items() if item in operands}
        for value in written.values():
            storages.mark_mutated(value)
        builder.env[node] = None
        return written, list(written)
    names = [name for name in call["tensors_to_clone"] if name in tensors]
    others = {storages.root(value).name for name, value in tensors.items() if name not in names}
    written, restored = {}, []
    for name in names:
        is_read = call["kwargs"][name].target not in EMPTY_OPERATORS
        fake = builder.fakes[node][name]
        written[name] = writable_operand(builder, node, tensors[name], fake, dead_roots, others, is_read=is_read)
        others.add(storages.root(written[name]).name)
        restored += [name] if is_read else []
    builder.env[node] = dict(written)
    return written, restored
