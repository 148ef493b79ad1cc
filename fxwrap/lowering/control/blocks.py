"""Lowers the graphs in a node's operands to blocks of lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.attention.flex import expand_declined_attention
from fxwrap.fx_passes.effects import attribute_of
from fxwrap.fx_passes.prepare import prepare_subgraph
from fxwrap.lines import Alloc, Bind, Yield
from fxwrap.lines.frees import insert_frees
from fxwrap.lowering.builder import (
    Builder,
    ConstantScope,
    FakeValue,
    LoweringRequest,
    Payload,
    node_coverage,
    node_error,
)
from fxwrap.lowering.calls.copies import emit_copy_into
from fxwrap.lowering.calls.nodes import literal
from fxwrap.lowering.control.streams import stream_plan
from fxwrap.lowering.fusion.kernels import dense_strides
from fxwrap.lowering.graph_lowering import GraphLowering
from fxwrap.lowering.rules import RULES
from fxwrap.lowering.symbols.inputs import InputBinder
from fxwrap.names import NameAllocator
from fxwrap.symbolic import Size, canonicalize
from fxwrap.torch_compat import is_opaque, real_object
from fxwrap.wrapper_ir import Block, Operand, Result, TensorType, Type, Value, defined, print_type, types_agree

TypeOrOperand: TypeAlias = "Type | Operand"
"""The type of a value, or an operand that is none."""

CapturedConstant = tuple[Payload, str]
"""The payload and the name of a constant."""


class BlockConstants:
    """The constants that a block refers to; each becomes an argument of the block."""

    def __init__(self, builder: Builder, outer: ConstantScope) -> None:
        self.outer = outer
        self._builder = builder
        self._captured: dict[int, tuple[Payload, Value]] = {}

    def constant(self, payload: Payload, name: str) -> Value:
        """Returns the argument for a constant of the program."""
        if id(payload) not in self._captured:
            type_ = self.outer.constant(payload, name).type
            if isinstance(type_, TensorType):
                argument = self._builder.add_buffer(name, type_)
                self._builder.storages.add_fake(argument, payload)
            else:
                argument = self._builder.add_opaque(name, payload)
            self._captured[id(payload)] = (payload, argument)
        return self._captured[id(payload)][1]

    def captured(self) -> list[CapturedConstant]:
        """Returns the constants that the block refers to, by the names of their arguments."""
        return [(payload, argument.name) for payload, argument in self._captured.values()]


@dataclass(frozen=True, eq=False)
class LoweredBlock:
    """A lowered graph.

    Fields:
        builder: the lowering of the graph, with its lines.
        constants: the constants that it refers to.
        arguments: the block's argument for each operand; None where it takes none, for a number over known symbols.
        yielded: the values that it yields.
        results: for each result of the graph, the index of the yielded value, or an alias of an argument.
    """

    builder: Builder
    constants: BlockConstants
    arguments: tuple[Value | None, ...]
    yielded: tuple[Operand, ...]
    results: tuple[int | Value, ...]

    def block_operands(self, operands: Sequence[Operand]) -> tuple[Operand, ...]:
        """Returns the operands that the block takes as arguments."""
        return tuple([item for item, argument in zip(operands, self.arguments, strict=True) if argument is not None])

    def block(self, captured: Sequence[CapturedConstant] = ()) -> Block:
        """Returns the block; its arguments are followed by these constants of the program."""
        constants = [self.constants.constant(payload, name) for payload, name in captured]
        arguments = (*[value for value in self.arguments if value is not None], *constants)
        return Block(arguments, insert_frees([*self.builder.buffer.lines, Yield(self.yielded)], arguments, ()))


@dataclass(frozen=True, eq=False)
class SharedFunction:
    """A block of the program that several lines call, and the constants that each call passes to it."""

    name: str
    module: GraphModule
    lowered: LoweredBlock
    arguments: tuple[Value, ...]
    constants: tuple[CapturedConstant, ...]


@dataclass(frozen=True)
class BlockLowering:
    """Lowers the graphs in the operands of one graph's nodes.

    `scope` has the constants that the graph can refer to; `functions` are those of the program so far, by the identity
    of their graphs.
    """

    builder: Builder
    scope: ConstantScope
    request: LoweringRequest
    lower_higher_order: Callable[[BlockLowering, Node, Collection[str]], None]
    functions: dict[int, SharedFunction] = field(default_factory=dict)

    def lower(
        self,
        node: Node,
        graph: Node,
        operands: Sequence[Operand],
        examples: Sequence[FakeValue],
        *,
        carried: int = 0,
        result_types: Sequence[TypeOrOperand] | None = None,
        allow_aliases: bool = False,
        duplicate_results: bool = False,
    ) -> LoweredBlock:
        """Lowers a graph in the operands of a node.

        Args:
            node: the call.
            graph: the `get_attr` node of the graph.
            operands: the operands of its placeholders.
            examples: fake values for the placeholders, used where the graph has none.
            carried: the number of leading operands that change between iterations; these are always arguments.
            result_types: the types that the block must yield, if they are fixed.
            allow_aliases: whether the block yields no results that alias arguments or one another.
            duplicate_results: whether the block yields a copy of each result in addition.

        Raises GraphError for a graph that does not fit the call.
        """
        module, options = _module_of(node, graph, len(operands)), self.request.options
        prepared = prepare_subgraph(module, examples, str(graph.target), options, RULES)
        scope = f"{self.builder.scope}{prepared.name}."
        reasons = self.request.declined_nodes.items()
        declined = {item.removeprefix(scope): reason for item, reason in reasons if item.startswith(scope)}
        prepared = expand_declined_attention(prepared, options, declined)
        nodes = list(prepared.graph_module.graph.nodes)
        placeholders = [inner for inner in nodes if inner.op == "placeholder"]
        streams = stream_plan(nodes, options.device_specs(), prepared.fakes)
        builder = Builder(prepared.fakes, self.builder.state, streams, self.builder, prepared.name)
        builder.state.coverage.extend(
            [node_coverage(old, builder.qualified(old), kind) for old, kind in prepared.replaced.items()]
        )
        binder = InputBinder(builder)
        arguments = tuple([
            _argument(builder, binder, placeholder, operand, position < carried)
            for position, (placeholder, operand) in enumerate(zip(placeholders, operands, strict=True))
        ])  # fmt: skip
        binder.bind_sizes([value for value in arguments if value is not None])
        builder.buffer.lines.extend(binder.lines)
        constants = builder.constants = BlockConstants(builder, self.scope)
        nested = BlockLowering(builder, constants, self.request, self.lower_higher_order, self.functions)
        lower_attribute = partial(_lower_attribute, builder, constants)
        body = GraphLowering(nodes, builder, self.request, lower_attribute, partial(self.lower_higher_order, nested))
        body.lower(must_preserve=lambda value: True)
        if builder.storages.mutated & {value.name for value in arguments if value is not None}:
            raise node_error(node, f"'{graph.target}' writes its operands", "Write a copy, and return it")
        yielded, results = _results(builder, body.output, result_types, allow_aliases)
        if duplicate_results:
            yielded = (*yielded, *[emit_copy(builder, value) for value in yielded if isinstance(value, Value)])
        return LoweredBlock(builder, constants, arguments, yielded, results)

    def shared_function(
        self, node: Node, graph: Node, name: str, operands: Sequence[Operand], examples: Sequence[FakeValue]
    ) -> SharedFunction:
        """Returns the function of a graph that several nodes call; the first call lowers it."""
        state, module = self.builder.state, attribute_of(graph)
        function = self.functions.get(id(module))
        if function is None:
            types = [self.builder.symbols.type_of(fake) for fake in self.builder.fakes[node]]
            lowered = self.lower(node, graph, operands, examples, result_types=types, allow_aliases=True)
            constants = tuple(lowered.constants.captured())
            unique = NameAllocator(set(state.functions)).create_name(name)
            block = state.functions[unique] = lowered.block(constants)
            function = SharedFunction(unique, module, lowered, block.arguments, constants)
            self.functions[id(module)] = function
        return function


def _lower_attribute(builder: Builder, constants: BlockConstants, node: Node) -> None:
    """Lowers a `get_attr` node of a block: tensors and opaque objects are constants of the program."""
    payload = real_object(attribute_of(node))
    name = str(node.target).replace(".", "_")
    is_constant = isinstance(payload, torch.Tensor) or is_opaque(payload)
    builder.env[node] = constants.constant(payload, name) if is_constant else payload


def _module_of(node: Node, graph: Node, operand_count: int) -> GraphModule:
    """Returns the graph of a `get_attr` node. Raises GraphError if it is none, or takes another number of operands."""
    module = attribute_of(graph)
    if not isinstance(module, GraphModule):
        raise node_error(node, f"'{graph.target}' is not a graph", "Pass a GraphModule of ATen operators")
    count = len(module.graph.find_nodes(op="placeholder"))
    if count != operand_count:
        reason = f"'{graph.target}' has {count} placeholders, but the call passes {operand_count} operands"
        raise node_error(node, reason, "Pass one operand per placeholder")
    return module


def _argument(
    builder: Builder, binder: InputBinder, placeholder: Node, operand: Operand, carried: bool
) -> Value | None:
    """Returns the block's argument for an operand, or None if it needs none; records the placeholder's operand."""
    fake, symbols = builder.fakes[placeholder], builder.symbols
    value: Value
    if isinstance(fake, torch.Tensor) or is_opaque(fake):
        value = builder.env[placeholder] = builder.add_value(placeholder.name, fake)
        return value
    if operand is None or isinstance(operand, str):
        builder.env[placeholder] = operand
        return None
    expression = builder.env[placeholder] = symbols.expression(fake)
    unknown = symbols.unknown(expression)
    if not unknown and not carried:
        return None
    value = builder.add_scalar(placeholder.name, fake)
    if unknown:
        info = symbols.info(fake)
        symbols.define(info.name)
        binder.lines.append(Bind(info, value, ()))
    return value


def _results(
    builder: Builder, output: Node, result_types: Sequence[TypeOrOperand] | None, allow_aliases: bool
) -> tuple[tuple[Operand, ...], tuple[int | Value, ...]]:
    """Returns the yielded values and the results of a block.

    Each yielded tensor is a distinct root that the block owns, with the strides of its result type.
    """
    storages, tree = builder.storages, output.args[0]
    owned = {value.name for line in builder.buffer.lines for value in defined(line)}
    yielded: list[Operand] = []
    indices: dict[str, int] = {}
    results: list[int | Value] = []
    for position, item in enumerate(tree if isinstance(tree, tuple | list) else (tree,)):
        value = literal(builder, item, output)
        if isinstance(value, Value) and isinstance(value.type, TensorType):
            root = storages.root(value)
            if allow_aliases and value.name in indices:
                results.append(indices[value.name])
                continue
            if allow_aliases and root.name not in owned and root.tensor_type.dtype == value.type.dtype:
                results.append(value)
                continue
            type_ = _tensor_type_at(result_types, position, len(value.type.sizes))
            strides = None if type_ is None else strides_for(builder, value.type, type_)
            is_distinct = root is value and value.name in owned and value.name not in indices
            if not is_distinct or (strides is not None and strides != value.type.strides):
                value = emit_copy(builder, value, strides)
            indices[value.name] = len(yielded)
        results.append(len(yielded))
        yielded.append(value)
    return tuple(yielded), tuple(results)


def _tensor_type_at(types: Sequence[TypeOrOperand] | None, position: int, rank: int) -> TensorType | None:
    """Returns the tensor type of a rank at a position of result types, if there is one."""
    type_ = types[position] if types is not None and position < len(types) else None
    return type_ if isinstance(type_, TensorType) and len(type_.sizes) == rank else None


def strides_for(builder: Builder, type_: TensorType, declared: TensorType) -> tuple[Size, ...]:
    """Returns the strides that a tensor of a type must have where another type of its sizes is declared.

    Symbols of the declared type that the scope of `builder` does not define are those of the tensor's sizes. Strides of
    dimensions of size 0 and 1, and those over other such symbols, are the tensor's own.
    """
    unknown = builder.symbols.unknown
    own = {other: size for size, other in zip(type_.sizes, declared.sizes, strict=True)
           if isinstance(other, sympy.Symbol) and unknown(other)}  # fmt: skip
    strides = []
    for size, stride, other in zip(type_.sizes, type_.strides, declared.strides):
        required = canonicalize(other.xreplace(own)) if isinstance(other, sympy.Basic) and own else other
        strides.append(stride if (isinstance(size, int) and size < 2) or unknown(required) else required)
    return tuple(strides)


def emit_copy(builder: Builder, value: Value, strides: Sequence[Size] | None = None) -> Value:
    """Emits a copy of a tensor, dense or with these strides; returns it."""
    old = value.tensor_type
    strides = dense_strides(old.sizes) if strides is None else tuple(strides)
    copy = builder.add_buffer(value.name, TensorType(old.dtype, old.sizes, strides, old.device))
    builder.emit(Alloc(copy))
    emit_copy_into(builder, copy, value)
    return copy


def check_branches(node: Node, then: Sequence[Operand], else_: Sequence[Operand], results: Sequence[Result]) -> None:
    """Raises GraphError, which shows both, if two branches do not return the results of the call."""
    fits = len(then) == len(else_) == len(results) and all(
        _fits(first, third) and _fits(second, third) and _fits(_with_zero_sizes(first), _with_zero_sizes(second))
        for first, second, third in zip(then, else_, results, strict=True)
    )
    if not fits:
        shown = [", ".join(_describe(item) for item in items) or "nothing" for items in (then, else_)]
        reason = f"its branches disagree: the true one returns {shown[0]}, the false one {shown[1]}"
        remedy = "Make both return the same number of tensors, of equal dtypes, devices and dimensions"
        raise node_error(node, reason, remedy)


def _with_zero_sizes(item: TypeOrOperand) -> TypeOrOperand:
    if not isinstance(item, Value) or not isinstance(item.type, TensorType):
        return item
    return TensorType.contiguous(item.type.dtype, (0,) * len(item.type.sizes), item.type.device)


def check_fits(
    node: Node, function: str, actual: Sequence[Operand], expected_name: str, expected: Sequence[TypeOrOperand]
) -> None:
    """Raises GraphError, which shows both, if two lists of values differ in number, dtype, device or sizes."""
    shown = tuple(", ".join(_describe(item) for item in items) for items in (actual, expected))
    remedy = f"Make {function} return the number and types of {expected_name}"
    if len(actual) != len(expected):
        counts = f"{len(actual)} ({shown[0]}), {expected_name} has {len(expected)} ({shown[1]})"
        raise node_error(node, f"{function} returns {counts}", remedy)
    for result, other in zip(actual, expected, strict=True):
        if not _fits(result, other):
            reason = f"{function} returns {_describe(result)}, {expected_name} has {_describe(other)}"
            raise node_error(node, reason, remedy)


def _fits(actual: TypeOrOperand, expected: TypeOrOperand) -> bool:
    first, second = (item.type if isinstance(item, Value) else item for item in (actual, expected))
    if isinstance(first, TensorType) and isinstance(second, TensorType):
        return types_agree(first, second, compare_strides=False)
    if isinstance(first, TensorType) or isinstance(second, TensorType):
        return False
    return (first is None) == (second is None)


def _describe(item: TypeOrOperand) -> str:
    if isinstance(item, Value | TensorType):
        return print_type(item.type if isinstance(item, Value) else item)
    return str(item)
