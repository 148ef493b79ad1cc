"""Calls of higher-order operators: control flow over blocks, operators on copies, effects, states of generators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lines import Call, CallFunction, Cond, Map, Scan, View, While
from fxwrap.lowering.binding import bind_values, new_values
from fxwrap.lowering.blocks import BlockLowering, LoweredBlock, check_branches, check_fits, copied
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.effects import FUNCTIONALIZED, USER_KERNELS, operator_label
from fxwrap.lowering.kernels import extent_of
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.side_effects import (
    lower_functionalized,
    lower_print,
    lower_run_and_save,
    lower_run_with,
    lower_run_with_generator,
    lower_with_effects,
)
from fxwrap.lowering.source import location_of
from fxwrap.lowering.user_kernels import lower_user_kernel
from fxwrap.symbolic import expression_kind, total
from fxwrap.torch_compat import shape_env_in, unknown_number
from fxwrap.wrapper_ir import TensorType, Value, types_agree


def lower_higher_order(blocks: BlockLowering, node: Node, dying: Collection[str]) -> None:
    """Lowers a call of a higher-order operator. Raises GraphError for one that has no lowering.

    `dying` are the roots, by name, that the program owns and that nothing touches after this call.
    """
    name = operator_label(node.target)  # type: ignore[arg-type]
    rule = _RULES.get(name)
    if name in FUNCTIONALIZED:
        lower_functionalized(blocks.builder, node, dying)
    elif name in USER_KERNELS:
        lower_user_kernel(blocks.builder, node, dying)
    elif name in _AROUND_ONE:
        _AROUND_ONE[name](blocks.builder, node)
    elif rule is None:
        reason = f"the higher-order operator '{name}' has no operator schema and no lowering"
        raise _error(node, reason, "Keep it out of the graph, or run this part with the eager backend")
    else:
        rule(blocks, node)


# --- what the lines have in common ------------------------------------------------------------------------------------


def _arguments(node: Node, count: int) -> tuple[Any, ...]:
    """Returns so many arguments of a call; operands that are left out are none."""
    return (*node.args, ())[:count]


def _operands(builder: Builder, node: Node, items: Any) -> tuple[Any, ...]:
    return tuple([literal(builder, item, node) for item in items])


def _examples(builder: Builder, operands: Sequence[Any]) -> list[Any]:
    """Returns fake values for the placeholders of a block that takes these operands."""
    return [builder.fake_of[item.name] if isinstance(item, Value) and item.name in builder.fake_of else item
            for item in operands]  # fmt: skip


def _carried_examples(builder: Builder, node: Node, carried: Sequence[Any]) -> list[Any]:
    """Returns fake values for what changes from round to round: numbers of which nothing is known."""
    shape_env = shape_env_in(builder.fakes[node])
    found = []
    for item, example in zip(carried, _examples(builder, carried), strict=True):
        if item is None or isinstance(item, Value):
            found.append(example)
            continue
        if shape_env is None:
            raise _error(node, "it carries numbers, and the graph has no shape environment", "Trace it with symbols")
        kind = expression_kind(item) if isinstance(item, sympy.Basic) else type(item).__name__
        found.append(unknown_number(shape_env, kind))
    return found


def _captures(builder: Builder, *lowered: LoweredBlock) -> tuple[list[tuple[torch.Tensor, str]], tuple[Value, ...]]:
    """Returns the constants that blocks need, and their values outside, in an order of their own."""
    needed: dict[int, tuple[torch.Tensor, str]] = {}
    for block in lowered:
        needed |= {key: (payload, inner.name) for key, (payload, inner) in block.captured.items()}
    return list(needed.values()), tuple([lowered[0].outer.constant(payload, name) for payload, name in needed.values()])


def _finish(builder: Builder, node: Node, fakes: Any, results: tuple[Any, ...]) -> None:
    """Binds the symbols that results bring, and records what the node stands for."""
    builder.env[node] = bind_values(builder, node, fakes, results)


def _types(values: Sequence[Any]) -> list[Any]:
    return [item.type if isinstance(item, Value) else item for item in values]


def _laid_out(builder: Builder, operands: Sequence[Any], arguments: Sequence[Value | None]) -> tuple[Any, ...]:
    """Returns the operands, those copied whose strides are not what a block was traced with."""
    found = []
    for operand, argument in zip(operands, arguments, strict=True):
        if argument is not None and isinstance(operand, Value) and isinstance(operand.type, TensorType):
            if not types_agree(operand.type, argument.type):
                operand = copied(builder, operand, argument.tensor_type)
        found.append(operand)
    return tuple(found)


def _laid_out_slices(builder: Builder, over: Sequence[Any], arguments: Sequence[Value | None]) -> tuple[Any, ...]:
    """Returns the tensors that a loop goes over, those copied whose slices are not what the block was traced with."""
    found = []
    for whole, argument in zip(over, arguments, strict=True):
        assert argument is not None
        type_, slice_ = whole.tensor_type, argument.tensor_type
        if not types_agree(TensorType(type_.dtype, type_.sizes[1:], type_.strides[1:], type_.device), slice_):
            strides = (extent_of(slice_), *slice_.strides)
            whole = copied(builder, whole, TensorType(type_.dtype, type_.sizes, strides, type_.device))
        found.append(whole)
    return tuple(found)


# --- control flow -----------------------------------------------------------------------------------------------------


def _cond(blocks: BlockLowering, node: Node) -> None:
    builder = blocks.builder
    predicate, then_graph, else_graph, items = _arguments(node, 4)
    operands = _operands(builder, node, items)
    examples = _examples(builder, operands)
    test = _predicate(builder, node, literal(builder, predicate, node))
    fakes = builder.fakes[node]
    results = new_values(builder, node, fakes)
    then = blocks.lower(node, then_graph, operands, examples, wanted=_types(results))
    else_ = blocks.lower(node, else_graph, operands, examples, wanted=_types(results))
    check_branches(node, then.yielded, else_.yielded, results)
    constants, outer = _captures(builder, then, else_)
    taken = (*then.taken(_laid_out(builder, operands, then.arguments)), *outer)
    line = Cond(results, test, taken, then.block(constants), else_.block(constants), origin=builder.origin(node))
    builder.emit(line)
    _finish(builder, node, fakes, results)


def _predicate(builder: Builder, node: Node, test: Any) -> Any:
    """Returns a condition as a line takes it. Raises GraphError for what is no truth value."""
    if isinstance(test, bool):
        return test
    if isinstance(test, Value) and isinstance(test.type, TensorType):
        sizes = [size for size in test.type.sizes if isinstance(size, int)]
        if test.type.dtype == torch.bool and all(size == 1 for size in sizes):
            return test
        shown = f"a {test.type.dtype} tensor of sizes {list(test.type.sizes)}"
    elif isinstance(test, sympy.Basic) and expression_kind(test) == "bool":
        return test
    else:
        shown = str(test)
    raise _error(node, f"the predicate is {shown}", "Pass a bool, or a boolean tensor of one element")


def _while_loop(blocks: BlockLowering, node: Node, stacked: bool = False) -> None:
    builder = blocks.builder
    cond_graph, body_graph, carried_items, extra_items = _arguments(node, 4)
    carried, extra = _operands(builder, node, carried_items), _operands(builder, node, extra_items)
    operands, count = (*carried, *extra), len(carried)
    examples = [*_carried_examples(builder, node, carried), *_examples(builder, extra)]
    fakes = builder.fakes[node]
    results = new_values(builder, node, fakes)
    cond = blocks.lower(node, cond_graph, operands, examples, carried=count)
    start = [argument.type for argument in cond.arguments[:count] if argument is not None]
    body = blocks.lower(node, body_graph, operands, examples, carried=count, wanted=start)
    if len(cond.yielded) != 1:
        raise _error(node, f"the condition gives {len(cond.yielded)} values", "Return one truth value")
    _predicate(builder, node, cond.yielded[0])
    check_fits(node, "the body", body.yielded, "what is carried", carried)
    operands = _laid_out(builder, operands, body.arguments)
    constants, outer = _captures(builder, cond, body)
    taken = body.taken(operands)
    line = While(
        results, taken[:count], cond.block(constants), body.block(constants), (*taken[count:], *outer), stacked,
        origin=builder.origin(node),
    )  # fmt: skip
    builder.emit(line)
    _finish(builder, node, fakes, results)


def _scan(blocks: BlockLowering, node: Node) -> None:
    builder = blocks.builder
    graph, init, over_items, extra_items = _arguments(node, 4)
    carried, over = _operands(builder, node, init), _operands(builder, node, over_items)
    extra = _operands(builder, node, extra_items)
    count, fakes = len(carried), builder.fakes[node]
    slices = [_slice_example(builder, value) for value in over]
    examples = [*_examples(builder, carried), *slices, *_examples(builder, extra)]
    results = new_values(builder, node, fakes)
    operands = (*carried, *over, *extra)
    body = blocks.lower(node, graph, operands, examples, carried=count, wanted=_types(carried))
    check_fits(node, "the body", body.yielded[:count], "what is carried", carried)
    check_fits(node, "the body", body.yielded[count:], "a slice of what is stacked", _slice_types(results[count:]))
    end = count + len(over)
    first, last = body.arguments[:count], body.arguments[end:]
    operands = (
        *_laid_out(builder, carried, first), *_laid_out_slices(builder, over, body.arguments[count:end]),
        *_laid_out(builder, extra, last),
    )  # fmt: skip
    taken, (constants, outer) = body.taken(operands), _captures(builder, body)
    line = Scan(
        results, taken[:count], taken[count:end], body.block(constants), (*taken[end:], *outer),
        origin=builder.origin(node),
    )  # fmt: skip
    builder.emit(line)
    _finish(builder, node, fakes, results)


def _associative_scan(blocks: BlockLowering, node: Node) -> None:
    """A scan whose length is not known: a loop from the second element on, which carries what it gives."""
    builder = blocks.builder
    graph, over_items, extra_items = _arguments(node, 3)
    over, extra = _operands(builder, node, over_items), _operands(builder, node, extra_items)
    first = [_window(builder, value, 0) for value in over]
    rest = [_window(builder, value, slice(1, None)) for value in over]
    slices = [_slice_example(builder, value) for value in rest]
    examples = [*_examples(builder, first), *slices, *_examples(builder, extra)]
    count, operands = len(over), (*first, *rest, *extra)
    body = blocks.lower(node, graph, operands, examples, carried=count, wanted=_types(first))
    check_fits(node, "the combine function", body.yielded, "an element", _types(first))
    body.yielded = (*body.yielded, *[copied(body.builder, value) for value in body.yielded])
    taken, (constants, outer) = body.taken(operands), _captures(builder, body)
    results = new_values(builder, node, [builder.fake_of[value.name] for value in (*first, *rest)])
    line = Scan(
        results, taken[:count], taken[count : 2 * count], body.block(constants), (*taken[2 * count :], *outer),
        origin=builder.origin(node),
    )  # fmt: skip
    builder.emit(line)
    fakes = builder.fakes[node]
    whole = new_values(builder, node, fakes)
    for value, start, end in zip(whole, over, results[count:], strict=True):
        parts = (_window(builder, start, slice(0, 1)), end)
        builder.emit(Call((value,), "aten.cat.default", (parts, 0), origin=builder.origin(node)))
    _finish(builder, node, fakes, whole)


def _window(builder: Builder, value: Value, index: Any) -> Value:
    """Returns a window on a tensor: what an index along its first dimension gives."""
    fake = builder.fake_of[value.name]
    with fake.fake_mode:
        shown = fake[index]
    window = builder.add_window(value.name, shown, value)
    builder.emit(View(window, value))
    return window


def _map(blocks: BlockLowering, node: Node) -> None:
    builder = blocks.builder
    graph, over_items, extra_items = _arguments(node, 3)
    over, extra = _operands(builder, node, over_items), _operands(builder, node, extra_items)
    examples = [*[_slice_example(builder, value) for value in over], *_examples(builder, extra)]
    fakes = builder.fakes[node]
    results = new_values(builder, node, fakes)
    body = blocks.lower(node, graph, (*over, *extra), examples)
    check_fits(node, "the body", body.yielded, "a slice of what is stacked", _slice_types(results))
    count = len(over)
    slices = _laid_out_slices(builder, over, body.arguments[:count])
    operands = (*slices, *_laid_out(builder, extra, body.arguments[count:]))
    taken, (constants, outer) = body.taken(operands), _captures(builder, body)
    line = Map(
        results, taken[:count], body.block(constants), (*taken[count:], *outer), origin=builder.origin(node)
    )
    builder.emit(line)
    _finish(builder, node, fakes, results)


def _slice_types(stacked: Sequence[Any]) -> list[Any]:
    """Returns the types of one slice of each tensor, with the strides of a dense one."""
    types = [None if value is None else value.tensor_type for value in stacked]
    return [type_ and TensorType.contiguous(type_.dtype, type_.sizes[1:], type_.device) for type_ in types]


def _slice_example(builder: Builder, value: Any) -> Any:
    fake = builder.fake_of[value.name]
    with fake.fake_mode:
        return fake[0]


def _invoke_subgraph(blocks: BlockLowering, node: Node) -> None:
    """A block that several calls share: it is lowered for the first one. What it shows of operands is viewed here."""
    builder = blocks.builder
    graph, identifier, *items = _arguments(node, len(node.args))
    operands = _operands(builder, node, items)
    fakes = builder.fakes[node]
    shared = blocks.shared_function(node, graph, str(identifier), operands, _examples(builder, operands))
    lowered = shared.lowered
    operands = _laid_out(builder, operands, lowered.arguments)
    outer = shared.outer(blocks.scope)
    first = {index: position for position, index in reversed([*enumerate(lowered.results)]) if isinstance(index, int)}
    given = [fakes[first[index]] for index in range(len(lowered.yielded))]
    results = new_values(builder, node, given)
    taken = (*lowered.taken(operands), *outer)
    builder.emit(CallFunction(results, shared.name, taken, origin=builder.origin(node)))
    _finish(builder, node, given, results)
    own = builder.env[node]
    arguments = dict(zip([argument.name for argument in shared.arguments], taken, strict=True))
    builder.env[node] = tuple([
        own[place] if isinstance(place, int) else _shown(builder, node, position, lowered, place, arguments)
        for position, place in enumerate(lowered.results)
    ])  # fmt: skip


def _shown(
    builder: Builder, node: Node, position: int, lowered: LoweredBlock, window: Value, arguments: Mapping[str, Value]
) -> Value:
    """Returns a result of a function that is a window on one of its arguments, as a window on the operand."""
    base = arguments[lowered.builder.root_of[window.name].name]
    type_ = window.tensor_type
    if type_ == lowered.builder.root_of[window.name].type:
        return base
    offset = total((base.tensor_type.storage_offset, type_.storage_offset))
    value = Value(builder.unique(f"{node.name}_{position}"), replace(type_, storage_offset=offset))
    builder.root_of[value.name] = builder.root_of[base.name]
    builder.fake_of[value.name] = builder.fakes[node][position]
    builder.emit(View(value, base, origin=builder.origin(node)))
    return value


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))


_RULES: Mapping[str, Callable[[BlockLowering, Node], None]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": lambda blocks, node: _while_loop(blocks, node, stacked=True),
    "scan": _scan,
    "associative_scan": _associative_scan,
    "map_impl": _map,
    "invoke_subgraph": _invoke_subgraph,
}
"""The lowering of higher-order operators that run graphs, by name."""

_AROUND_ONE: Mapping[str, Callable[[Builder, Node], None]] = {
    "with_effects": lower_with_effects,
    "print": lower_print,
    "run_and_save_rng_state": lower_run_and_save,
    "run_with_rng_state": lower_run_with,
    "graphsafe_run_with_rng_state": lower_run_with_generator,
}
"""The lowering of higher-order operators that call one operator."""
