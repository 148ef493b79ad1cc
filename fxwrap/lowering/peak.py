"""Whether fusion holds more memory at its worst moment than operator calls would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.lowering.builder import Builder
from fxwrap.lowering.kernels import extent_of
from fxwrap.symbolic import Size, make_symbol
from fxwrap.torch_compat import storage_identity
from fxwrap.wrapper_ir import Program, live_bytes, symbol_infos


def peak_note(program: Program, builder: Builder, nodes: list[Node], hint: Callable[[Size], int]) -> str:
    """Returns what the header says of a program whose peak memory is above that of its operators called one by one.

    Both count what the program itself allocates, in bytes, by the hints of symbolic sizes; "" where fusion is no worse.
    """
    values = {str(name): info.hint for name, info in builder.infos.items() if info.hint is not None}
    unknown = {symbol: hint(builder.symbols[symbol]) for symbol in builder.symbols}
    hints = {str(builder.symbols[symbol]): number for symbol, number in unknown.items()} | values
    inner = {name: hint(make_symbol(name)) for name in symbol_infos(program) if name not in hints}  # those of blocks
    hints |= inner
    fused = live_bytes(program, hints, include_inputs=False, include_constants=False).peak
    called = _called_peak(builder, nodes, hint)
    return f"{fused} bytes, {called} without fusion" if fused > called else ""


def _called_peak(builder: Builder, nodes: list[Node], hint: Callable[[Size], int]) -> int:
    """Returns the peak when every node allocates its results, and each storage dies after its last user."""
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for other in (node, *node.all_input_nodes):
            for fake in _tensors(builder.fakes, other):
                last_use[storage_identity(fake)] = position
    held: dict[int, int] = {}
    live = peak = 0
    dying: dict[int, list[int]] = {}
    for storage, position in last_use.items():
        dying.setdefault(position, []).append(storage)
    seen = {storage_identity(fake) for node in nodes if node.op in ("placeholder", "get_attr")
            for fake in _tensors(builder.fakes, node)}  # fmt: skip
    for position, node in enumerate(nodes):
        for fake in _tensors(builder.fakes, node):
            storage = storage_identity(fake)
            if storage not in seen:
                seen.add(storage)
                held[storage] = hint(extent_of(builder.tensor_type(fake))) * fake.dtype.itemsize
                live += held[storage]
        peak = max(peak, live)
        for storage in dying.get(position, ()):
            live -= held.pop(storage, 0)
    return peak


def _tensors(fakes: Mapping[Node, Any], node: Node) -> list[torch.Tensor]:
    found = fakes.get(node)
    items = found if isinstance(found, tuple | list) else (found,)
    return [item for item in items if isinstance(item, torch.Tensor)]
