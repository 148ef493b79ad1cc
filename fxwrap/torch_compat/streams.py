"""Dynamo's table of a model's streams and events, by which its graphs refer to them.

Why: the table has no public name. In torch 2.13 index 0 is the current stream; in 2.11 any index may be. In both
AOTAutograd adds further indices for it: a second table of functions that construct the objects of a call shows which.
Both are dictionaries by index, and lists since torch 2.15. fxwrap's numbers reserve 0 for the current stream. The table
is read from `sys.modules`: importing Dynamo takes over a second.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch

_TABLE_MODULE = "torch._dynamo.graph_bytecode_inputs"


def external_object_number(index: int) -> int:
    """Returns the number by which programs refer to the stream or event at an index of Dynamo's table."""
    if _is_current_stream(index):
        return 0
    return index if _reserves_current_stream_index() else index + 1


def _is_current_stream(index: int) -> bool:
    """Whether an index of Dynamo's table is known to be the current stream of each call."""
    constructor = _table_entry("index_to_bytecode_constructor", index)
    if constructor is None:
        return False
    closure = inspect.getclosurevars(constructor).nonlocals
    if "source" in closure:  # in a model
        return type(closure["source"]).__name__ == "CurrentStreamSource"
    # AOTAutograd's
    return getattr(closure.get("construct_fn"), "__qualname__", "").startswith("get_current_stream.")


def _reserves_current_stream_index() -> bool:
    return hasattr(sys.modules.get(_TABLE_MODULE), "CURRENT_STREAM_INDEX")


def external_object_index(node: torch.fx.Node) -> int:
    """Returns the index in Dynamo's table of the stream or event that a node of its graph returns."""
    assert node.target is get_external_object()
    index = node.args[0]
    assert isinstance(index, int)
    return index


def get_external_object() -> Callable[[int], torch.Stream | torch.Event]:
    """Returns the function by which Dynamo's graphs get a stream or event from an index of its table."""
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    return get_external_object_by_index


def new_external_event() -> int:
    """Creates an event for the graph that Dynamo is compiling and returns its index."""
    from torch._dynamo.variables.streams import new_event

    return new_event()


def external_object(number: int) -> object | None:
    """Returns the stream or event with a program's number; None where there is none or it was deleted."""
    index = number if _reserves_current_stream_index() else number - 1
    reference = _table_entry("index_to_external_object_weakref", index)
    return None if reference is None else reference()


def _table_entry(table: str, index: int) -> Callable[[], object] | None:
    """Returns the entry at an index of one of the two tables; None where there is none."""
    entries = getattr(sys.modules.get(_TABLE_MODULE), table, {})
    if isinstance(entries, list):
        return entries[index] if 0 <= index < len(entries) else None
    return entries.get(index)


def external_stream(number: int) -> torch.Stream | None:
    """Returns the model's stream with a program's number; None where there is none."""
    stream = external_object(number)
    return stream if isinstance(stream, torch.Stream) else None
