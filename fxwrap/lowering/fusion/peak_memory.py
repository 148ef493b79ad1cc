"""Compares the peak memory of a program with that of the graph's operators called one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from fxwrap.lowering.builder import Builder
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.symbolic import Size, make_symbol
from fxwrap.torch_compat import storage_identity
from fxwrap.wrapper_ir import Program, live_bytes, symbol_infos


def peak_memory_note(program: Program, builder: Builder, nodes: Sequence[Node], hint: Callable[[Size], int]) -> str:
    """Returns a note for the header of a program whose peak memory is above that of the unfused graph, else "".

    Both count the bytes that the program allocates, with the hints of symbolic sizes.
    """
    hints = builder.symbols.hints(hint)
    hints |= {name: hint(make_symbol(name)) for name in symbol_infos(program) if name not in hints}  # those of blocks
    fused = live_bytes(program, hints, include_inputs=False, include_constants=False).peak
    unfused = _unfused_peak(builder, nodes, hint)
    return f"{fused} bytes, {unfused} without fusion" if fused > unfused else ""


def _unfused_peak(builder: Builder, nodes: Sequence[Node], hint: Callable[[Size], int]) -> int:
    """Returns the peak if every node allocates its results, and each storage is freed after its last user."""
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for other in (node, *node.all_input_nodes):
            for fake in _tensors(builder, other):
                last_use[storage_identity(fake)] = position
    freed_at: dict[int, list[int]] = {}
    for storage, position in last_use.items():
        freed_at.setdefault(position, []).append(storage)
    seen = {
        storage_identity(fake)
        for node in nodes if node.op in ("placeholder", "get_attr")
        for fake in _tensors(builder, node)
    }  # fmt: skip
    allocated: dict[int, int] = {}
    live = peak = 0
    for position, node in enumerate(nodes):
        for fake in _tensors(builder, node):
            storage = storage_identity(fake)
            if storage not in seen:
                seen.add(storage)
                allocated[storage] = hint(extent_of(builder.symbols.tensor_type(fake))) * fake.dtype.itemsize
                live += allocated[storage]
        peak = max(peak, live)
        for storage in freed_at.get(position, ()):
            live -= allocated.pop(storage, 0)
    return peak


def _tensors(builder: Builder, node: Node) -> list[torch.Tensor]:
    fake = builder.fakes.get(node)
    return [item for item in (fake if isinstance(fake, tuple | list) else (fake,)) if isinstance(item, torch.Tensor)]
