"""Lowering the graphs that nodes of a graph hold, to blocks of lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap.errors import GraphError
from fxwrap.lines import Alloc, Bind, Mutate, Yield
from fxwrap.lines.frees import insert_frees
from fxwrap.lowering.associative_scans import with_associative_scans
from fxwrap.lowering.body import Body, Request
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.define import outcome_of
from fxwrap.lowering.effects import attribute_of
from fxwrap.lowering.emit import contiguous_strides
from fxwrap.lowering.fake import fake_values
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.source import GraphSource, location_of
from fxwrap.lowering.symbols import bind_sizes, symbol_info
from fxwrap.wrapper_ir import Block, TensorType, Value, defined, print_type, types_agree


class Scope(Protocol):
    """Where a graph finds the tensors that hang on modules."""

    def constant(self, payload: torch.Tensor, name: str) -> Value:
        """Returns the value of a tensor of the program's own, as this graph sees it."""
        ...


@dataclass(eq=False)
class LoweredBlock:
    """A graph's lines and what they need: its arguments by operand, and constants of the program, by address.

    `arguments` holds None for an operand that the block takes as no argument: a number over symbols that it knows.
    `results` says of each of the graph's results which of the yielded values it is, or which window on an argument.
    """

    builder: Builder
    outer: Scope
    arguments: list[Value | None] = field(default_factory=list)
    yielded: tuple[Any, ...] = ()
    results: tuple[int | Value, ...] = ()
    captured: dict[int, tuple[torch.Tensor, Value]] = field(default_factory=dict)

    def constant(self, payload: torch.Tensor, name: str) -> Value:
        """Returns the argument by which the block gets a tensor of the program's own."""
        known = self.captured.get(id(payload))
        if known is None:
            outer = self.outer.constant(payload, name)
            builder = self.builder
            inner = Value(builder.unique(name), outer.type)
            builder.root_of[inner.name] = inner
            builder.fake_of[inner.name] = payload
            known = self.captured[id(payload)] = (payload, inner)
        return known[1]

    def taken(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Returns those of the operands that the block takes as arguments."""
        return tuple([item for item, argument in zip(operands, self.arguments, strict=True) if argument is not None])

    def block(self, captured: Sequence[tuple[torch.Tensor, str]] = ()) -> Block:
        """Returns the block, which takes its arguments, then these constants of the program."""
        last = [self.constant(payload, name) for payload, name in captured]
        arguments = (*[value for value in self.arguments if value is not None], *last)
        return Block(arguments, insert_frees([*self.builder.lines, Yield(self.yielded)], arguments, ()))


@dataclass(frozen=True, eq=False)
class SharedFunction:
    """A block of the program that several lines run, and the constants that each of them must pass to it."""

    name: str
    module: GraphModule
    lowered: LoweredBlock
    arguments: tuple[Value, ...]
    constants: tuple[tuple[torch.Tensor, str], ...]

    def outer(self, scope: Scope) -> tuple[Value, ...]:
        """Returns the constants, as a caller sees them."""
        return tuple([scope.constant(payload, name) for payload, name in self.constants])


class BlockLowering:
    """Lowers the graphs that one graph's nodes hold."""

    def __init__(
        self,
        builder: Builder,
        scope: Scope,
        request: Request,
        lower_higher_order: Callable[[BlockLowering, Node, Collection[str]], None],
    ) -> None:
        self.builder = builder
        self.scope = scope
        self.request = request
        self.lower_higher_order = lower_higher_order

    def lower(
        self,
        node: Node,
        graph: Node,
        operands: Sequence[Any],
        examples: Sequence[Any],
        *,
        carried: int = 0,
        wanted: Sequence[Any] | None = None,
        windows: bool = False,
    ) -> LoweredBlock:
        """Lowers the graph that an operand of a node is.

        Args:
            node: the call that holds the graph.
            graph: the `get_attr` node of the graph.
            operands: what its placeholders stand for: values and numbers.
            examples: fake tensors and numbers for the placeholders, used where the graph has no fake values.
            carried: so many of the operands change from round to round: they are arguments also where they are numbers.
            wanted: the types that the block must yield, where they are fixed.
            windows: whether results that show arguments, or one another, are left to the caller, and not yielded.

        Raises GraphError for a graph that does not fit.
        """
        module = attribute_of(graph)
        if not isinstance(module, GraphModule):
            raise _error(node, f"'{graph.target}' is no graph", "Pass a GraphModule of ATen operators")
        placeholders = module.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(operands):
            reason = f"'{graph.target}' takes {len(placeholders)} operands, but {len(operands)} are given"
            raise _error(node, reason, "Give it one operand a placeholder")
        source, fakes = with_associative_scans(GraphSource(module, str(graph.target)), fake_values(module, examples))
        module = source.graph_module
        placeholders = module.graph.find_nodes(op="placeholder")
        builder = self.builder.nested(fakes, source.name)
        replaced = source.replaced.items()
        builder.state.outcomes += [outcome_of(old, builder.qualified(old), became) for old, became in replaced]
        lowered = LoweredBlock(builder, self.scope)
        for position, (placeholder, operand) in enumerate(zip(placeholders, operands, strict=True)):
            lowered.arguments.append(_argument(builder, placeholder, operand, position < carried))
        bind_sizes(builder, [value for value in lowered.arguments if value is not None])

        def attribute(inner: Node) -> None:
            payload = attribute_of(inner)
            is_tensor = isinstance(payload, torch.Tensor)
            name = str(inner.target).replace(".", "_")
            builder.env[inner] = lowered.constant(payload, name) if is_tensor else payload

        nested = BlockLowering(builder, lowered, self.request, self.lower_higher_order)
        call = partial(self.lower_higher_order, nested)
        body = Body(module, builder, self.request, attribute, call)
        body.lower(keeps=lambda value: True)
        if builder.mutated & {value.name for value in lowered.arguments if value is not None}:
            raise _error(node, f"'{graph.target}' writes what it is given", "Write a copy, and return it")
        _take_results(lowered, body.output, wanted, windows)
        return lowered

    def shared_function(
        self, node: Node, graph: Node, name: str, operands: Sequence[Any], examples: Sequence[Any]
    ) -> SharedFunction:
        """Returns the function for a graph that several nodes call, which is lowered for the first of them."""
        state, module = self.builder.state, attribute_of(graph)
        known = state.shared.get(id(module))
        if known is None:
            wanted = [self.builder.type_of(fake) for fake in self.builder.fakes[node]]
            lowered = self.lower(node, graph, operands, examples, wanted=wanted, windows=True)
            constants = tuple([(payload, inner.name) for payload, inner in lowered.captured.values()])
            label = state.fresh_function(name)
            block = state.functions[label] = lowered.block(constants)
            known = state.shared[id(module)] = SharedFunction(label, module, lowered, block.arguments, constants)
        return known


def _argument(builder: Builder, placeholder: Node, operand: Any, carried: bool) -> Value | None:
    """Takes an operand as an argument of the block, where it must be one; records what its placeholder stands for."""
    fake = builder.fakes[placeholder]
    if isinstance(fake, torch.Tensor):
        value = builder.env[placeholder] = builder.add_root(placeholder.name, fake)
        return value
    if isinstance(fake, torch.Generator):
        value = builder.env[placeholder] = builder.add_generator(placeholder.name, fake)
        return value
    if operand is None or isinstance(operand, str):
        builder.env[placeholder] = operand
        return None
    expression = builder.env[placeholder] = builder.expression(fake)
    known = not isinstance(expression, sympy.Basic) or all(
        symbol.name in builder.known_symbols for symbol in expression.free_symbols
    )
    if known and not carried:
        return None
    value = Value(builder.unique(placeholder.name), builder.type_of(fake))
    if not known:
        info = symbol_info(builder, fake)
        builder.known_symbols.add(info.name)
        builder.emit(Bind(info, value, ()))
    return value


def _take_results(lowered: LoweredBlock, output: Node, wanted: Sequence[Any] | None, windows: bool) -> None:
    """Records what a block yields: values that it owns, each of its own root and of the type that is wanted."""
    builder = lowered.builder
    tree = output.args[0]
    own = {value.name for line in builder.lines for value in defined(line)}
    yielded: list[Any] = []
    places: dict[str, int] = {}
    results: list[int | Value] = []
    for position, item in enumerate(tree if isinstance(tree, tuple | list) else (tree,)):
        value = literal(builder, item, output)
        if isinstance(value, Value) and isinstance(value.type, TensorType):
            root = builder.root_of[value.name]
            if windows and value.name in places:
                results.append(places[value.name])
                continue
            if windows and root.name not in own and root.tensor_type.dtype == value.type.dtype:
                results.append(value)
                continue
            type_ = _layout(value.type, wanted[position : position + 1] if wanted is not None else ())
            is_own = root is value and value.name in own and value.name not in places
            if not is_own or (type_ is not None and not types_agree(value.type, type_)):
                value = copied(builder, value, type_)
            places[value.name] = len(yielded)
        results.append(len(yielded))
        yielded.append(value)
    lowered.yielded, lowered.results = tuple(yielded), tuple(results)


def _layout(given: TensorType, wanted: Sequence[Any]) -> TensorType | None:
    """Returns the type that a block must give, where that says how the tensor lies in memory: of as many dimensions."""
    found = wanted[0] if wanted else None
    return found if isinstance(found, TensorType) and len(found.sizes) == len(given.sizes) else None


def copied(builder: Builder, value: Value, wanted: TensorType | None = None) -> Value:
    """Emits a copy of a tensor, without gaps or with the sizes and strides that are wanted; returns it."""
    old = value.tensor_type
    if wanted is None:
        strides: tuple[Any, ...] = contiguous_strides(old.sizes)
        wanted = TensorType(old.dtype, old.sizes, strides, old.device)
    else:
        wanted = TensorType(old.dtype, old.sizes, wanted.strides, old.device)
    copy = builder.add_buffer(value.name, wanted)
    builder.emit(Alloc(copy))
    builder.emit(Mutate((), "aten.copy_.default", (copy, value), (copy,)))
    return copy


def check_branches(node: Node, then: Sequence[Any], else_: Sequence[Any], results: Sequence[Any]) -> None:
    """Raises GraphError, which shows both, where two branches do not give what a call of them gives."""
    fits = len(then) == len(else_) == len(results) and all(
        _fits(first, third) and _fits(second, third) and _fits(_without_sizes(first), _without_sizes(second))
        for first, second, third in zip(then, else_, results, strict=True)
    )
    if not fits:
        shown = [", ".join(_shown(item) for item in items) or "nothing" for items in (then, else_)]
        reason = f"its branches disagree: the true one gives {shown[0]}, the false one {shown[1]}"
        raise _error(node, reason, "Make both give the same number of tensors, of equal dtypes, devices and dimensions")


def _without_sizes(item: Any) -> Any:
    if not isinstance(item, Value) or not isinstance(item.type, TensorType):
        return item
    return TensorType.contiguous(item.type.dtype, (0,) * len(item.type.sizes), item.type.device)


def check_fits(node: Node, what: str, given: Sequence[Any], expected: str, wanted: Sequence[Any]) -> None:
    """Raises GraphError, which shows both, where values of two lists differ in number, dtype, device or sizes."""
    shown = tuple(", ".join(_shown(item) for item in items) for items in (given, wanted))
    remedy = f"Make {what} give what {expected} has"
    if len(given) != len(wanted):
        raise _error(node, f"{what} gives {len(given)} ({shown[0]}), {expected} has {len(wanted)} ({shown[1]})", remedy)
    for have, want in zip(given, wanted, strict=True):
        if not _fits(have, want):
            raise _error(node, f"{what} gives {_shown(have)}, {expected} has {_shown(want)}", remedy)


def _fits(have: Any, want: Any) -> bool:
    first, second = (item.type if isinstance(item, Value) else item for item in (have, want))
    if isinstance(first, TensorType) and isinstance(second, TensorType):
        return types_agree(first, second, compare_strides=False)
    return (
        not isinstance(first, TensorType) and not isinstance(second, TensorType) and (first is None) == (second is None)
    )


def _shown(item: Any) -> str:
    if isinstance(item, Value):
        return str(print_type(item.type))
    return str(print_type(item)) if isinstance(item, TensorType) else str(item)


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))
