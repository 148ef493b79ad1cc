"""Each call of a graph becomes lines: a view, an operator call, a mutation, or a number."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lines import Call, Mutate, StartCollective, View, WaitCollective
from fxwrap.lowering.binding import bind_results, fails_at_run_time, lower_assert, lower_item
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.collectives import flight_of, group_of, starts_flight
from fxwrap.lowering.fallbacks import lower_placing, placing_of
from fxwrap.lowering.source import location_of
from fxwrap.lowering.streams import StreamPlan, is_own_guard, stream_call
from fxwrap.lowering.windows import lower_window
from fxwrap.torch_compat import OpOverload, is_plain_view, storage_identity
from fxwrap.wrapper_ir import Effect, TensorType, Value, leaves
from fxwrap.wrapper_ir.operators import OperatorFacts, operator_facts, used_items

_LITERALS = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


def lower_call(builder: Builder, node: Node, dying: Collection[str] = frozenset()) -> None:
    """Lowers a call_function node and records what it stands for.

    `dying` are the roots, by name, that the program owns and that nothing touches after this call.
    """
    fake = builder.fakes[node]
    if node.target is operator.getitem and isinstance(builder.env.get(node.args[0]), tuple | dict):  # type: ignore[arg-type]
        builder.env[node] = builder.env[node.args[0]][node.args[1]]  # type: ignore[index]
    elif not isinstance(node.target, OpOverload) and isinstance(fake, torch.Tensor):
        name = getattr(node.target, "__name__", node.target)
        raise _error(
            node,
            f"the Python builtin '{name}' is applied to the tensor '{node.all_input_nodes[0].name}'",
            "Use the torch.ops.aten overload that it stands for",
        )
    elif not isinstance(node.target, OpOverload) or _is_number_already_known(builder, node, fake):
        builder.env[node] = builder.expression(fake)
    elif node.target is torch.ops.aten._local_scalar_dense.default:
        lower_item(builder, node, fake)
    elif node.target is torch.ops.aten._assert_scalar.default:
        lower_assert(builder, node, literal(builder, node.args[0], node), str(node.args[1]))
    elif is_own_guard(node):
        builder.env[node] = None
    elif starts_flight(node):
        _lower_start(builder, node, node.target, fake)
    elif (started := flight_of(node)) is not None:
        _lower_wait(builder, node, started, fake)
    elif builder.streams is not None and stream_call(node):
        _lower_stream_call(builder, builder.streams, node, node.target)
    else:
        _lower_operator(builder, node, node.target, fake, dying)


def _lower_start(builder: Builder, node: Node, target: OpOverload, fake: Any) -> None:
    """Lowers the start of a collective, whose results its wait makes there to use."""
    facts = operator_facts(target)
    arguments = tuple([literal(builder, argument, node) for argument in node.args])
    results, _ = _results(builder, node, facts, fake, arguments, ())
    builder.emit(StartCollective(results, facts.name, arguments, group_of(node), origin=builder.origin(node)))
    _finish(builder, node, facts, results)


def _lower_wait(builder: Builder, node: Node, started: Node, fake: torch.Tensor) -> None:
    """Lowers the wait for a collective's result, which is in the memory that the start made."""
    pending = builder.env[node.args[0]]  # type: ignore[index]
    value = builder.add_window(node.name, fake, pending)
    builder.share_root(fake, builder.root_of[pending.name])
    builder.emit(WaitCollective(value, pending, group_of(started), origin=builder.origin(node)))
    builder.env[node] = value


def _lower_stream_call(builder: Builder, streams: StreamPlan, node: Node, target: OpOverload) -> None:
    lines = streams.lines(node, builder.unique, builder.origin(node))
    if lines is None:
        _lower_operator(builder, node, target, None, frozenset())
        return
    for line in lines:
        builder.lines.append(line)
    builder.env[node] = None


def _is_number_already_known(builder: Builder, node: Node, fake: Any) -> bool:
    """Whether a node gives a number that follows from symbols the program has: `sym_size`, for example."""
    if isinstance(fake, torch.Tensor | tuple | list) or fake is None:
        return False
    expression = builder.expression(fake)
    return not isinstance(expression, sympy.Basic) or all(
        symbol.name in builder.known_symbols for symbol in expression.free_symbols
    )


def literal(builder: Builder, argument: Any, node: Node) -> Any:
    """Returns an argument of a node as the IR writes it. Raises GraphError for what the IR does not hold."""
    kind = type(argument)
    if kind is Node:
        return builder.env[argument]
    if kind is float:
        return math.nan if math.isnan(argument) else argument  # one NaN, so that equal programs compare equal
    if kind is int or argument is None or kind is bool:
        return argument
    if isinstance(argument, list | tuple):
        return tuple([literal(builder, item, node) for item in argument])
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return builder.expression(argument)
    if isinstance(argument, _LITERALS):
        return argument
    raise _error(node, f"an argument is a {kind.__name__}", "Pass tensors, numbers, strings, dtypes or devices")


def _lower_operator(builder: Builder, node: Node, target: OpOverload, fake: Any, dying: Collection[str]) -> None:
    facts = operator_facts(target)
    arguments = _placed(tuple([literal(builder, argument, node) for argument in node.args]), fake)
    keywords = tuple([
        (name, _placed(literal(builder, argument, node), fake)) for name, argument in node.kwargs.items()
    ])  # fmt: skip
    if facts.replacement is not None:
        target, arguments, keywords = facts.replacement(target, arguments, keywords)
        facts = operator_facts(target)
    placing = placing_of(facts, arguments, keywords)
    if placing is not None and lower_placing(builder, node, placing, fake, dying):
        return
    if lower_window(builder, node, fake, dying):
        return
    if facts.written:
        _lower_mutation(builder, node, facts, arguments, keywords, fake)
    elif facts.aliased is not None and (base := _view_base(builder, node, facts, arguments, fake)) is not None:
        builder.env[node] = _views(builder, node, base, fake)
    else:
        effects = facts.effects(_devices(arguments, keywords, fake))
        results, aliases = _results(builder, node, facts, fake, arguments, keywords)
        builder.emit(
            Call(
                results,
                facts.name,
                arguments,
                keywords,
                aliases=aliases,
                effect_set=effects,
                origin=builder.origin(node),
            )
        )
        _finish(builder, node, facts, results)


def _placed(argument: Any, fake: Any) -> Any:
    """Returns an argument with the index of a device said: without, the one that is current when it runs is meant."""
    if isinstance(argument, tuple):
        return tuple([_placed(item, fake) for item in argument])
    if isinstance(argument, torch.device) and isinstance(fake, torch.Tensor) and argument.type == fake.device.type:
        return fake.device
    return argument


def _view_base(
    builder: Builder, node: Node, facts: OperatorFacts, arguments: tuple[Any, ...], fake: Any
) -> Value | None:
    """Returns the value that all results are plain strided windows on, or None."""
    base = arguments[facts.aliased] if facts.aliased is not None and facts.aliased < len(arguments) else None
    if not isinstance(base, Value) or fails_at_run_time(builder, node):
        return None
    base_fake = builder.fake_of[base.name]
    results = fake if isinstance(fake, tuple | list) else (fake,)
    if facts.may_alias and not all(_on_storage_of(base_fake, item) for item in results):
        return None
    return base if all(is_plain_view(item, base_fake) for item in results) else None


def _on_storage_of(base: torch.Tensor, item: Any) -> bool:
    return isinstance(item, torch.Tensor) and storage_identity(item) == storage_identity(base)


def _views(builder: Builder, node: Node, base: Value, fake: Any) -> Any:
    if isinstance(fake, tuple | list):
        used = used_items(node)
        return tuple([
            _view(builder, f"{node.name}_{index}", node, base, item) if used is None or index in used else None
            for index, item in enumerate(fake)
        ])  # fmt: skip
    return _view(builder, node.name, node, base, fake)


def _view(builder: Builder, name: str, node: Node, base: Value, fake: torch.Tensor) -> Value:
    if builder.tensor_type(fake, builder.offset_in_root(base, fake)) == base.type:
        return base
    value = builder.add_window(name, fake, base)
    builder.emit(View(value, base, origin=builder.origin(node)))
    return value


def _base_of(builder: Builder, facts: OperatorFacts, arguments: Any, keywords: Any, fake: torch.Tensor) -> Value | None:
    """Returns the operand that a result is a window on: by the schema, or else because they share a storage."""
    if facts.aliased is not None and not facts.may_alias:
        declared = arguments[facts.aliased]
        return declared if isinstance(declared, Value) else None
    root = builder.root_by_storage.get(storage_identity(fake))
    candidates = _operands(arguments, keywords) if root is not None else ()
    return next((operand for operand in candidates if builder.root_of[operand.name] is root), None)


def _results(
    builder: Builder, node: Node, facts: OperatorFacts, fake: Any, arguments: Any, keywords: Any
) -> tuple[tuple[Any, ...], tuple[Value | None, ...]]:
    """Makes the values an operator defines, one tree a return of its schema, and what each is a window on."""
    count = facts.return_count
    fakes = () if count == 0 else (fake,) if count == 1 else tuple(fake)
    used = used_items(node) if isinstance(fake, tuple | list) else None
    aliases: list[Value | None] = []

    def make(item: Any, name: str, wanted: bool) -> Any:
        if item is None or not wanted:
            aliases.append(None)
            return None
        if isinstance(item, tuple | list):
            chosen = used if count == 1 else None
            return tuple([
                make(part, f"{name}_{index}", chosen is None or index in chosen) for index, part in enumerate(item)
            ])  # fmt: skip
        if not isinstance(item, torch.Tensor):
            aliases.append(None)
            return Value(builder.unique(name), builder.type_of(item))
        base = _base_of(builder, facts, arguments, keywords, item)
        aliases.append(base)
        return builder.add_root(name, item) if base is None else builder.add_window(name, item, base)

    names = [node.name] if count == 1 else [f"{node.name}_{index}" for index in range(count)]
    results = tuple([
        make(item, name, used is None or count == 1 or index in used)
        for index, (item, name) in enumerate(zip(fakes, names, strict=True))
    ])  # fmt: skip
    return results, tuple(aliases) if any(alias is not None for alias in aliases) else ()


def _finish(builder: Builder, node: Node, facts: OperatorFacts, results: tuple[Any, ...]) -> None:
    """Records what a node stands for, and binds the symbols that its results bring."""
    fake = builder.fakes[node]
    found = bind_results(builder, node, () if not results else (fake,) if facts.return_count == 1 else fake, results)
    builder.env[node] = None if not found else found[0] if facts.return_count == 1 else found


def _operands(arguments: Any, keywords: Any) -> list[Value]:
    """Returns the tensors among a call's arguments."""
    found = leaves((arguments, keywords))
    return [leaf for leaf in found if isinstance(leaf, Value) and isinstance(leaf.type, TensorType)]


def _devices(arguments: Any, keywords: Any, fake: Any) -> list[torch.device]:
    """Returns the devices of a call's operands and results."""
    devices = [operand.tensor_type.device for operand in _operands(arguments, keywords)]
    results = fake if isinstance(fake, tuple | list) else (fake,)
    return devices + [item.device for item in results if isinstance(item, torch.Tensor)]


def _lower_mutation(
    builder: Builder, node: Node, facts: OperatorFacts, arguments: Any, keywords: Any, fake: Any
) -> None:
    written = facts.written_operands(arguments, keywords)
    for value in written:
        builder.mutated.add(builder.root_of[value.name].name)
    effects: tuple[Effect, ...] = facts.effects(_devices(arguments, keywords, fake))
    if facts.is_out:
        inputs = tuple([item for item in keywords if item[0] not in facts.written])
        builder.emit(Call((), facts.name, arguments, inputs, written, effect_set=effects, origin=builder.origin(node)))
        builder.env[node] = written[0] if facts.return_count == 1 else written
        return
    same = facts.returned_operands(arguments, keywords)
    if same is not None:  # every return is an operand itself, or there is none
        results: tuple[Any, ...] = ()
        builder.env[node] = None if not same else same[0] if len(same) == 1 else same
        builder.emit(
            Mutate(results, facts.name, arguments, written, keywords, (), effects, origin=builder.origin(node))
        )
        return
    results, aliases = _results(builder, node, facts, fake, arguments, keywords)
    builder.emit(
        Mutate(results, facts.name, arguments, written, keywords, aliases, effects, origin=builder.origin(node))
    )
    _finish(builder, node, facts, results)


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))
