"""Higher-order operators: control flow over blocks, and operators wrapped with effects or generator states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import FxwrapError
from fxwrap.fx_passes.effects import EMPTY_OPERATORS, FUNCTIONALIZED, USER_KERNELS, mutated_operands, operator_label
from fxwrap.lines import CallFunction, Cond, ExternCall, Launch, Map, ScanLoop, View, While
from fxwrap.lowering.attention import emit_attention
from fxwrap.lowering.attention_gradients import emit_attention_gradients
from fxwrap.lowering.builder import Builder, FakeValue, LoweringRequest, node_error
from fxwrap.lowering.calls.copies import writable_operand
from fxwrap.lowering.calls.nodes import literal, literals
from fxwrap.lowering.control.blocks import (
    BlockLowering,
    CapturedConstant,
    LoweredBlock,
    TypeOrOperand,
    check_branches,
    check_fits,
    emit_copy,
    strides_for,
)
from fxwrap.lowering.control.side_effects import (
    lower_functionalized,
    lower_method_call,
    lower_print,
    lower_run_and_save,
    lower_run_with,
    lower_run_with_generator,
    lower_with_effects,
)
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.lowering.launches import KernelDeclined
from fxwrap.lowering.rules import Declined
from fxwrap.lowering.symbols.unbacked import bind_values, new_values
from fxwrap.symbolic import expression_kind, total
from fxwrap.torch_compat import find_shape_env, new_unbacked_number, triton_kernel_at
from fxwrap.user_kernels import KernelCallError, all_call_arguments, classify_arguments, define_user_kernel
from fxwrap.wrapper_ir import Operand, Result, TensorType, Value


def lower_higher_order(blocks: BlockLowering, node: Node, dead_roots: Collection[str]) -> None:
    """Lowers a call of a higher-order operator. Raises GraphError for one without a lowering.

    `dead_roots` are the names of the roots that the program owns and that nothing uses after this call.
    """
    name = operator_label(node.target)  # type: ignore[arg-type]
    if name in FUNCTIONALIZED:
        lower_functionalized(blocks.builder, node, dead_roots)
    elif name in USER_KERNELS:
        lower_user_kernel(blocks.builder, node, dead_roots)
    elif name in _SINGLE_OPERATOR_WRAPPERS:
        _SINGLE_OPERATOR_WRAPPERS[name](blocks.builder, node)
    elif name in _RULES:
        _RULES[name](blocks, node)
    else:
        reason = f"the higher-order operator '{name}' has no operator schema and no lowering"
        raise node_error(node, reason, "Keep it out of the graph, or run this part with the eager backend")


# --- operands and results ---------------------------------------------------------------------------------------------


def _arguments(node: Node, count: int) -> tuple[Any, ...]:
    """Returns the first `count` arguments of a call; omitted operands are ()."""
    return (*node.args, ())[:count]


def _examples(builder: Builder, operands: Sequence[Operand]) -> list[FakeValue]:
    """Returns fake values for the placeholders of a block with these operands."""
    return [builder.storages.example(item) for item in operands]


def _carried_examples(builder: Builder, node: Node, carried: Sequence[Operand]) -> list[FakeValue]:
    """Returns fake values for loop-carried operands: numbers are new unbacked symbols."""
    shape_env = find_shape_env(builder.fakes[node])
    examples = []
    for item, example in zip(carried, _examples(builder, carried), strict=True):
        if item is not None and not isinstance(item, Value):
            if shape_env is None:
                reason = "it carries numbers, and the graph has no shape environment"
                raise node_error(node, reason, "Trace it with symbols")
            kind = expression_kind(item) if isinstance(item, sympy.Basic) else type(item).__name__
            example = new_unbacked_number(shape_env, kind)
        examples.append(example)
    return examples


def _captured_constants(*blocks: LoweredBlock) -> tuple[list[CapturedConstant], tuple[Value, ...]]:
    """Returns the constants that blocks refer to, each once, and their values in the enclosing graph."""
    captured = {id(payload): (payload, name) for block in blocks for payload, name in block.constants.captured()}
    scope = blocks[0].constants.outer
    return list(captured.values()), tuple([scope.constant(payload, name) for payload, name in captured.values()])


def _bind_results(builder: Builder, node: Node, fakes: Sequence[FakeValue], results: tuple[Result, ...]) -> None:
    """Binds the symbols of results, and records the operand of the node."""
    builder.env[node] = bind_values(builder, node, fakes, results)


def _values(operands: Sequence[Operand]) -> tuple[Value, ...]:
    """Returns operands that are all tensors."""
    values = tuple([operand for operand in operands if isinstance(operand, Value)])
    assert len(values) == len(operands)
    return values


def _tensors(results: Sequence[Result]) -> list[Value | None]:
    return [item if isinstance(item, Value) else None for item in results]


def _types(values: Sequence[Operand]) -> list[TypeOrOperand]:
    return [item.type if isinstance(item, Value) else item for item in values]


def _match_strides(
    builder: Builder, operands: Sequence[Operand], arguments: Sequence[Value | None]
) -> tuple[Operand, ...]:
    """Returns the operands, with copies of those whose strides differ from the block's arguments."""
    matched = []
    for operand, argument in zip(operands, arguments, strict=True):
        if argument is not None and isinstance(operand, Value) and isinstance(operand.type, TensorType):
            strides = strides_for(builder, operand.type, argument.tensor_type)
            if strides != operand.type.strides:
                operand = emit_copy(builder, operand, strides)
        matched.append(operand)
    return tuple(matched)


def _match_slice_strides(
    builder: Builder, stacked: Sequence[Value], arguments: Sequence[Value | None]
) -> tuple[Value, ...]:
    """Returns the tensors that a loop iterates over, with copies of those whose slices differ from the arguments."""
    matched = []
    for whole, argument in zip(stacked, arguments, strict=True):
        assert argument is not None
        type_, slice_ = whole.tensor_type, argument.tensor_type
        own = TensorType(type_.dtype, type_.sizes[1:], type_.strides[1:], type_.device)
        strides = strides_for(builder, own, slice_)
        if strides != own.strides:
            whole = emit_copy(builder, whole, (extent_of(replace(own, strides=strides)), *strides))
        matched.append(whole)
    return tuple(matched)


# --- control flow -----------------------------------------------------------------------------------------------------


def _cond(blocks: BlockLowering, node: Node) -> None:
    builder, fakes = blocks.builder, blocks.builder.fakes[node]
    predicate, then_graph, else_graph, items = _arguments(node, 4)
    operands = literals(builder, items, node)
    examples = _examples(builder, operands)
    test = _predicate(node, literal(builder, predicate, node))
    results = new_values(builder, node, fakes)
    then = blocks.lower(node, then_graph, operands, examples, result_types=_types(results))
    else_ = blocks.lower(node, else_graph, operands, examples, result_types=_types(results))
    check_branches(node, then.yielded, else_.yielded, results)
    constants, outer = _captured_constants(then, else_)
    block_operands = (*then.block_operands(_match_strides(builder, operands, then.arguments)), *outer)
    then_block, else_block = then.block(constants), else_.block(constants)
    builder.emit(Cond(results, test, block_operands, then_block, else_block, origin=builder.origin(node)))
    _bind_results(builder, node, fakes, results)


def _predicate(node: Node, test: Operand) -> Operand:
    """Returns a condition. Raises GraphError if it is not a truth value."""
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
    raise node_error(node, f"the predicate is {shown}", "Pass a bool, or a boolean tensor of one element")


def _while_loop(blocks: BlockLowering, node: Node, stacked: bool = False) -> None:
    builder, fakes = blocks.builder, blocks.builder.fakes[node]
    cond_graph, body_graph, carried_items, extra_items = _arguments(node, 4)
    carried, extra = literals(builder, carried_items, node), literals(builder, extra_items, node)
    operands, count = (*carried, *extra), len(carried)
    examples = [*_carried_examples(builder, node, carried), *_examples(builder, extra)]
    results = new_values(builder, node, fakes)
    cond = blocks.lower(node, cond_graph, operands, examples, carried=count)
    types = [argument.type for argument in cond.arguments[:count] if argument is not None]
    body = blocks.lower(node, body_graph, operands, examples, carried=count, result_types=types)
    if len(cond.yielded) != 1:
        raise node_error(node, f"the condition returns {len(cond.yielded)} values", "Return one truth value")
    _predicate(node, cond.yielded[0])
    check_fits(node, "the body", body.yielded, "the carried state", carried)
    constants, outer = _captured_constants(cond, body)
    block_operands = body.block_operands(_match_strides(builder, operands, body.arguments))
    initial, extra = block_operands[:count], (*block_operands[count:], *outer)
    cond_block, body_block = cond.block(constants), body.block(constants)
    builder.emit(While(results, initial, cond_block, body_block, extra, stacked, origin=builder.origin(node)))
    _bind_results(builder, node, fakes, results)


def _scan(blocks: BlockLowering, node: Node) -> None:
    builder, fakes = blocks.builder, blocks.builder.fakes[node]
    graph, init, over_items, extra_items = _arguments(node, 4)
    results = new_values(builder, node, fakes)
    initial, extra = literals(builder, init, node), literals(builder, extra_items, node)
    over = _values(literals(builder, over_items, node))
    count, end = len(initial), len(initial) + len(over)
    carried = _match_strides(builder, initial, _tensors(results[:count]))  # gradients may be expanded
    first = [
        example if item is value else fake
        for item, value, example, fake in zip(initial, carried, _examples(builder, initial), fakes)
    ]
    examples = [*first, *[_slice_example(builder, value) for value in over], *_examples(builder, extra)]
    operands = (*carried, *over, *extra)
    body = blocks.lower(node, graph, operands, examples, carried=count, result_types=_types(carried))
    check_fits(node, "the body", body.yielded[:count], "the carried state", carried)
    check_fits(node, "the body", body.yielded[count:], "a slice of the stacked result", _slice_types(results[count:]))
    operands = (
        *_match_strides(builder, carried, body.arguments[:count]),
        *_match_slice_strides(builder, over, body.arguments[count:end]),
        *_match_strides(builder, extra, body.arguments[end:]),
    )
    _emit_scan(builder, node, body, operands, results, count, end)
    _bind_results(builder, node, fakes, results)


def _emit_scan(
    builder: Builder,
    node: Node,
    body: LoweredBlock,
    operands: Sequence[Operand],
    results: tuple[Result, ...],
    count: int,
    end: int,
) -> None:
    """Emits a scan; `count` operands are carried, those up to `end` are iterated over."""
    block_operands, (constants, outer) = body.block_operands(operands), _captured_constants(body)
    initial, over, extra = block_operands[:count], _values(block_operands[count:end]), (*block_operands[end:], *outer)
    builder.emit(ScanLoop(results, initial, over, body.block(constants), extra, origin=builder.origin(node)))


def _associative_scan(blocks: BlockLowering, node: Node) -> None:
    """Lowers a scan of symbolic length to a loop from the second element on, which carries the last result."""
    builder, fakes = blocks.builder, blocks.builder.fakes[node]
    graph, over_items, extra_items = _arguments(node, 3)
    over, extra = _values(literals(builder, over_items, node)), literals(builder, extra_items, node)
    first = [_slice_view(builder, value, 0) for value in over]
    rest = [_slice_view(builder, value, slice(1, None)) for value in over]
    slices = [_slice_example(builder, value) for value in rest]
    examples = [*_examples(builder, first), *slices, *_examples(builder, extra)]
    count, operands = len(over), (*first, *rest, *extra)
    body = blocks.lower(
        node, graph, operands, examples, carried=count, result_types=_types(first), duplicate_results=True
    )
    check_fits(node, "the combine function", body.yielded[: len(body.results)], "an element", _types(first))
    results = new_values(builder, node, [builder.storages.fake(value) for value in (*first, *rest)])
    _emit_scan(builder, node, body, operands, results, count, 2 * count)
    whole = new_values(builder, node, fakes)
    own = builder.origin(node)
    for position, (value, start, end) in enumerate(zip(whole, over, _values(results[count:]), strict=True)):
        parts = (_slice_view(builder, start, slice(0, 1)), end)
        origin = replace(own, results=((own.nodes[0], position),))
        builder.emit(ExternCall((value,), "aten.cat.default", (parts, 0), origin=origin))
    _bind_results(builder, node, fakes, whole)


def _slice_view(builder: Builder, value: Value, index: int | slice) -> Value:
    """Emits the view of a tensor at an index of its first dimension."""
    view = builder.add_view(value.name, _slice_example(builder, value, index), value)
    builder.emit(View(view, value))
    return view


def _map(blocks: BlockLowering, node: Node) -> None:
    builder, fakes = blocks.builder, blocks.builder.fakes[node]
    graph, over_items, extra_items = _arguments(node, 3)
    over, extra = _values(literals(builder, over_items, node)), literals(builder, extra_items, node)
    examples = [*[_slice_example(builder, value) for value in over], *_examples(builder, extra)]
    results = new_values(builder, node, fakes)
    body = blocks.lower(node, graph, (*over, *extra), examples)
    check_fits(node, "the body", body.yielded, "a slice of the stacked result", _slice_types(results))
    count = len(over)
    slices = _match_slice_strides(builder, over, body.arguments[:count])
    operands = (*slices, *_match_strides(builder, extra, body.arguments[count:]))
    block_operands, (constants, outer) = body.block_operands(operands), _captured_constants(body)
    extra = (*block_operands[count:], *outer)
    builder.emit(Map(results, slices, body.block(constants), extra, origin=builder.origin(node)))
    _bind_results(builder, node, fakes, results)


def _slice_types(stacked: Sequence[Result]) -> list[TensorType | None]:
    """Returns the types of one dense slice of each tensor."""
    types = [value.tensor_type if isinstance(value, Value) else None for value in stacked]
    return [type_ and TensorType.contiguous(type_.dtype, type_.sizes[1:], type_.device) for type_ in types]


def _slice_example(builder: Builder, value: Value, index: int | slice = 0) -> torch.Tensor:
    fake = builder.storages.fake(value)
    with fake.fake_mode:  # type: ignore[attr-defined]
        return fake[index]


def _invoke_subgraph(blocks: BlockLowering, node: Node) -> None:
    """Lowers a call of a block that several calls share; results that alias operands become views of these."""
    builder, fakes = blocks.builder, blocks.builder.fakes[node]
    graph, identifier, *items = node.args
    assert isinstance(graph, Node)
    operands = literals(builder, items, node)
    function = blocks.shared_function(node, graph, str(identifier), operands, _examples(builder, operands))
    lowered = function.lowered
    operands = _match_strides(builder, operands, lowered.arguments)
    outer = [blocks.scope.constant(payload, name) for payload, name in function.constants]
    first = {index: position for position, index in reversed([*enumerate(lowered.results)]) if isinstance(index, int)}
    yielded_fakes = [fakes[first[index]] for index in range(len(lowered.yielded))]
    results = new_values(builder, node, yielded_fakes)
    block_operands = (*lowered.block_operands(operands), *outer)
    builder.emit(CallFunction(results, function.name, block_operands, origin=builder.origin(node)))
    yielded = bind_values(builder, node, yielded_fakes, results)
    arguments = dict(zip([argument.name for argument in function.arguments], block_operands, strict=True))
    builder.env[node] = tuple([
        yielded[item] if isinstance(item, int) else _view_of_operand(builder, node, position, lowered, item, arguments)
        for position, item in enumerate(lowered.results)
    ])  # fmt: skip


def _view_of_operand(
    builder: Builder, node: Node, position: int, lowered: LoweredBlock, alias: Value, arguments: Mapping[str, Operand]
) -> Value:
    """Returns a function's result that aliases an argument, as a view of the operand."""
    root = lowered.builder.storages.root(alias)
    base, type_ = arguments[root.name], alias.tensor_type
    assert isinstance(base, Value)
    if type_ == root.type:
        return base
    offset = total((base.tensor_type.storage_offset, type_.storage_offset))
    view_type = replace(type_, storage_offset=offset)
    value = builder.add_alias(f"{node.name}_{position}", view_type, base, builder.fakes[node][position])
    builder.emit(View(value, base, origin=builder.origin(node)))
    return value


def _flex_attention(emit: Callable[[Builder, LoweringRequest, Node], None], blocks: BlockLowering, node: Node) -> None:
    """Lowers FlexAttention or its gradients to kernels. Raises KernelDeclined where that is impossible."""
    try:
        emit(blocks.builder, blocks.request, node)
    except (Declined, FxwrapError) as error:
        raise KernelDeclined(frozenset({blocks.builder.qualified(node)}), str(error), expected=True) from error


_RULES: Mapping[str, Callable[[BlockLowering, Node], None]] = {
    "flex_attention": partial(_flex_attention, emit_attention),
    "flex_attention_backward": partial(_flex_attention, emit_attention_gradients),
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": lambda blocks, node: _while_loop(blocks, node, stacked=True),
    "scan": _scan,
    "associative_scan": _associative_scan,
    "map_impl": _map,
    "invoke_subgraph": _invoke_subgraph,
}
"""The lowering of higher-order operators that run graphs, by name."""

_SINGLE_OPERATOR_WRAPPERS: Mapping[str, Callable[[Builder, Node], None]] = {
    "with_effects": lower_with_effects,
    "print": lower_print,
    "call_torchbind": lower_method_call,
    "run_and_save_rng_state": lower_run_and_save,
    "run_with_rng_state": lower_run_with,
    "graphsafe_run_with_rng_state": lower_run_with_generator,
}
"""The lowering of higher-order operators that call one operator."""


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
