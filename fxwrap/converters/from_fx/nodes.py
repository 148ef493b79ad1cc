"""Names, origins and errors of the nodes of an imported graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from fxwrap import wrapper_ir as ir
from fxwrap.converters.access_order import Conflict
from fxwrap.converters.fx.metadata import other_metadata
from fxwrap.errors import FxImportError
from fxwrap.fx_passes.model_source import source_of
from fxwrap.torch_compat import OpOverload


def target_text(node: Node) -> str:
    """Returns the target of a node as text."""
    if node.op == "call_function":
        is_overload = isinstance(node.target, OpOverload)
        return str(node.target if is_overload else getattr(node.target, "__name__", node.target))
    return f"{node.op} of {node.target}"


def failure(node: Node, reason: str, remedy: str) -> FxImportError:
    """Returns the error for a node without a line."""
    return FxImportError(node.name, target_text(node), reason, remedy)


def origin_of(node: Node) -> ir.Origin:
    """Returns the origin of a node's line: that of its metadata, else the node itself with its stacks."""
    origin = node.meta.get("fxwrap_origin")
    if isinstance(origin, ir.Origin):
        return origin
    return ir.Origin((replace(source_of(node), operator=target_text(node)),))


def metadata_of_tools(node: Node) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Returns the metadata of other tools at a node and at the nodes that select its results."""
    nodes = [node, *[user for user in node.users if user.target is operator.getitem]]
    return tuple([(item.name, entries) for item in nodes if (entries := other_metadata(item))])


def order_failure(node: Node, conflict: Conflict) -> FxImportError:
    """Returns the error for two nodes that access one memory in another order than they were emitted in."""
    earlier, own = ("writes" if writes else "reads" for writes in (conflict.earlier_writes, conflict.writes))
    other = conflict.earlier.name
    reason = f"it {own} the memory '{conflict.memory}' after '{other}' {earlier} it, but was emitted before '{other}'"
    if conflict.bytes is not None:
        reason += f"; both access bytes {conflict.bytes[0]} to {conflict.bytes[1] - 1}"
    return failure(node, reason, f"Move it before '{other}', or use the functional form, in which operands order nodes")


def late_read_failure(node: Node, memory: str, write: Node) -> FxImportError:
    """Returns the error for a node of the functional form that reads an input or a buffer after its final write."""
    reason = f"it reads '{memory}' after '{write.name}', the final write of it, and so its new content"
    source = write.args[1] if len(write.args) > 1 else None
    other = f"read '{source}', which is the new content" if isinstance(source, Node) else "read the new content itself"
    return failure(node, reason, f"Move it before '{write.name}' for the old content, or {other}")


def result_name(node: Node, path: Sequence[int]) -> str:
    """Returns the name for an item of a node's result: that of its `getitem` node, if there is one."""
    current = node
    for index in path:
        item = next((u for u in current.users if u.target is operator.getitem and u.args[1] == index), None)
        if item is None:
            return "_".join([node.name, *map(str, path)])
        current = item
    return current.name
