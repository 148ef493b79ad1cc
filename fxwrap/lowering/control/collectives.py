"""Collectives of a graph: their starts, the waits for their results, and their groups."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import mutated_operands
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.lines import Alloc, ExternCall, Mutate, StartCollective, WaitCollective
from fxwrap.lowering.builder import Builder, FakeValue, Keywords
from fxwrap.lowering.in_flight import Pending
from fxwrap.torch_compat import OpOverload, operator_name
from fxwrap.wrapper_ir import Operand, Result, Value, map_leaves, values_in
from fxwrap.wrapper_ir.operators import OperatorSchema, is_collective, operator_schema

_WAIT = "wait_tensor"
_POINT_TO_POINT = frozenset({"isend", "irecv", "batch_p2p_ops"})
"""Communication between two ranks. A rank may wait only after it started its part of both directions."""

_CONTIGUOUS = frozenset({"broadcast", "all_reduce_coalesced"})
"""Collectives that return contiguous results although their fake tensors have the strides of the operands."""


def starts_collective(node: Node) -> bool:
    """Returns whether a node starts a collective."""
    if not _is_call(node) or _is_wait(node):
        return False
    assert isinstance(node.target, OpOverload)
    return "group_name" in operator_schema(node.target).argument_names


def is_point_to_point(node: Node) -> bool:
    """Returns whether a node starts communication between two ranks, whose operators differ between the ranks."""
    return _is_call(node) and _name(node) in _POINT_TO_POINT


def is_wait(node: Node) -> bool:
    """Returns whether a node waits for a tensor."""
    return _is_wait(node) and isinstance(node.args[0], Node)


def pending_collective(node: Node) -> Node | None:
    """Returns the start that a node waits for, None for other nodes and for results that are ready where they start."""
    if not is_wait(node):
        return None
    started = node.args[0]
    assert isinstance(started, Node)
    if started.target is operator.getitem and isinstance(started.args[0], Node):
        started = started.args[0]
    is_pending = starts_collective(started) and (is_point_to_point(started) or _is_awaited(started))
    return started if is_pending else None


def in_flight_operands(node: Node) -> Sequence[Node]:
    """Returns the operands of the collective that a node waits for, which it uses until then."""
    started = pending_collective(node)
    return () if started is None else started.all_input_nodes


def received_operands(node: Node, fakes: NodeValues) -> Sequence[Node]:
    """Returns the operands that hold received content only after a node, the wait for it."""
    started = pending_collective(node)
    return () if started is None or not is_point_to_point(started) else mutated_operands(started, fakes)


def emit_start(
    builder: Builder,
    node: Node,
    schema: OperatorSchema,
    results: tuple[Result, ...],
    aliases: tuple[Value | None, ...],
    arguments: tuple[Operand, ...],
    keywords: Keywords,
) -> None:
    """Emits the start of a collective."""
    if is_point_to_point(node):
        arguments = _with_private_sends(builder, node, arguments)
    written = schema.mutated_operands(arguments, keywords)
    for value in written:
        builder.storages.mark_mutated(value)
    outs = written if schema.is_out_variant else ()
    all_arguments = (*arguments, *[item for name, item in keywords if name not in schema.mutated_arguments])
    group = "" if is_point_to_point(node) else _group(schema.operand("group_name", all_arguments, keywords))
    origin = builder.origin(node)
    builder.emit(
        StartCollective(
            results, schema.name, all_arguments, group, writes=() if outs else written, outs=outs, aliases=aliases,
            origin=origin,
        )
    )  # fmt: skip
    if is_point_to_point(node):
        operands = frozenset(builder.storages.root_names(values_in(all_arguments)))
        for value in values_in(results):
            root = builder.storages.root(value).name
            fake = builder.storages.fake(value)
            builder.in_flight.start(root, Pending(value, fake, operands - {root}, origin))


def _with_private_sends(builder: Builder, node: Node, arguments: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Returns the arguments with copies of the tensors that are sent, in memory of their own.

    torch registers a send with its result and with the storage that is sent, and Gloo waits for ever the second time. A
    pool slice or the operand of a later collective would be such a storage.
    """
    kinds = {"isend": ("isend",), "irecv": ()}.get(_name(node), arguments[0])
    tensors = values_in(arguments)
    assert isinstance(kinds, tuple | list)
    copies: dict[str, Value] = {}
    for kind, value in zip(kinds, tensors):
        if kind != "isend" or value.name in copies:
            continue
        copy = builder.add_root(f"{node.name}_sent", torch.empty_like(builder.storages.fake(value)))
        builder.emit(ExternCall((copy,), "aten.empty_like.default", (value,), origin=builder.origin(node)))
        builder.emit(Mutate((), "aten.copy_.default", (copy, value), (copy,), origin=builder.origin(node)))
        copies[value.name] = copy
    changed: tuple[Operand, ...] = map_leaves(
        arguments, lambda leaf: copies.get(leaf.name, leaf) if isinstance(leaf, Value) else leaf
    )
    return changed


def result_fakes(node: Node, fake: FakeValue) -> FakeValue:
    """Returns the fake tensors of a collective's results with the strides that they have at run time."""
    assert isinstance(node.target, OpOverload)
    if _name(node) not in _CONTIGUOUS:
        return fake
    if isinstance(fake, tuple | list):
        return tuple([torch.empty_like(item, memory_format=torch.contiguous_format) for item in fake])
    return torch.empty_like(fake, memory_format=torch.contiguous_format)


def await_results(builder: Builder, node: Node) -> None:
    """Emits waits directly after the start of a collective, unless the graph waits for each result before its use."""
    if _is_awaited(node):
        return
    fake = builder.fakes[node]
    fakes = iter(fake if isinstance(fake, tuple | list) else (fake,))

    def wait(item: Operand) -> Operand:
        item_fake = next(fakes)
        return item if not isinstance(item, Value) else emit_wait(builder, node, node, item, item_fake)

    builder.env[node] = map_leaves(builder.env[node], wait)


def emit_wait(builder: Builder, node: Node, started: Node, pending: Value, fake: torch.Tensor) -> Value:
    """Emits the wait of a node for a collective's result.

    Returns the value that is ready, a copy if the graph has other strides than the collective returns.
    """
    origin, group = builder.origin(node), _group(_argument(builder, started, "group_name"))
    is_same = pending.tensor_type.strides == builder.symbols.tensor_type(fake).strides
    name = node.name if is_same and node is not started else f"{node.name}_ready"
    value = builder.add_view(name, fake if is_same else builder.storages.fake(pending), pending)
    builder.emit(WaitCollective(value, pending, group, origin=origin))
    if is_same:
        builder.storages.share(fake, builder.storages.root(pending))
        return value
    copy = builder.add_root(node.name, fake)
    builder.emit(Alloc(copy, origin=origin))
    builder.emit(Mutate((), "aten.copy_.default", (copy, value), (copy,), origin=origin))
    return copy


def _argument(builder: Builder, node: Node, name: str) -> Operand:
    assert isinstance(node.target, OpOverload)
    argument = operator_schema(node.target).operand(name, node.args, tuple(node.kwargs.items()))
    return builder.value(argument) if isinstance(argument, Node) else str(argument)


def _group(operand: Operand) -> str:
    return operand.name if isinstance(operand, Value) else str(operand)


def _is_call(node: Node) -> bool:
    return is_collective(node.target)


def _is_wait(node: Node) -> bool:
    return _is_call(node) and _name(node) == _WAIT


def _name(node: Node) -> str:
    assert isinstance(node.target, OpOverload)
    return operator_name(node.target)


def _is_awaited(node: Node) -> bool:
    """Returns whether all users of a collective's results are waits, at least one for each result."""
    assert isinstance(node.target, OpOverload)
    if operator_schema(node.target).mutated_arguments:
        return False  # other nodes use the operand itself
    if not isinstance(node.meta.get("val"), list | tuple):
        return _has_waits_only(node)
    items = {user.args[1] for user in node.users if user.target is operator.getitem and _has_waits_only(user)}
    return len(items) == len(node.users) == len(node.meta["val"])


def _has_waits_only(node: Node) -> bool:
    return bool(node.users) and all(_is_wait(user) for user in node.users)
