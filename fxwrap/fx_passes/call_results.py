"""Fake results of calls by operator, arguments and layouts of operands, each of which is inferred once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import (
    call_text,
    fake_mode_of,
    fresh_like,
    items_of,
    layout_text,
    rebased,
    run_on_fakes,
    storages_of,
)
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import FakeTensorMode, storage_identity, tree_map


class CallResults:
    """Fake results of calls: those of calls with equal operators, arguments and layouts of operands are inferred once.

    Models repeat their layers, and a new fake tensor of known layout takes a tenth of the time of a call on fakes.
    """

    def __init__(self) -> None:
        self._known: dict[str, _CallResult] = {}

    def run(self, node: Node, fakes: NodeValues, like: object = None) -> Any:
        """Returns the fake result of a call, as `run_on_fakes` does."""
        text = call_text(node, fakes)
        if text is None:
            return run_on_fakes(node, fakes, like)
        operands = [fakes[operand] for operand in node.all_input_nodes]
        known = self._known.get(text)
        result = None if known is None else known.of(operands)
        if result is None:
            result = run_on_fakes(node, fakes, like)
            self._known[text] = _CallResult(result, operands, _mode_of_new_tensors(result, operands))
        return result


@dataclass(frozen=True)
class _CallResult:
    """The fake result of a call with some operands; `mode` is its mode if it consists of new tensors."""

    result: Any
    operands: Sequence[Any]
    mode: FakeTensorMode | None

    def of(self, operands: Sequence[Any]) -> Any:
        """Returns the result for operands of the same layouts: new tensors or a view; None where it is neither."""
        if self.mode is not None:
            return tree_map(partial(fresh_like, self.mode), self.result)
        own = storages_of(self.result)
        bases = [position for position, operand in enumerate(self.operands) if storages_of(operand) & own]
        return rebased(self.result, self.operands[bases[0]], operands[bases[0]]) if len(bases) == 1 else None


def _mode_of_new_tensors(result: object, operands: Sequence[Any]) -> FakeTensorMode | None:
    """Returns the mode of a result that consists of tensors of static layouts, each on a storage of its own."""
    tensors = [item for item in items_of(result) if isinstance(item, torch.Tensor)]
    storages = [storage_identity(item) for item in tensors]
    read = {storage for operand in operands for storage in storages_of(operand)}
    are_new = (
        all(layout_text(item) is not None and item.storage_offset() == 0 for item in tensors)
        and len(set(storages)) == len(storages)
        and read.isdisjoint(storages)
    )
    return fake_mode_of(operands) if are_new else None
