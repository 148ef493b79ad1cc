"""Lines that hold blocks, as torch's higher-order operators over submodules."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from fxwrap.converters.fx_nodes import GraphWriter
from fxwrap.converters.fx_replay import ReplayFacts, mark_replayed
from fxwrap.converters.fx_values import FakeValues
from fxwrap.errors import Unsupported
from fxwrap.lines import CallFunction, Cond, Map, Scan, While
from fxwrap.symbolic import make_symbol, symbol_kind
from fxwrap.torch_compat import while_loop_stack_output
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Program,
    TensorType,
    Value,
    outer_symbols,
)

_HIGHER = torch.ops.higher_order


class Modules:
    """What hangs on an emitted module: constants and the submodules of nested blocks, by name.

    `of_block` are the submodules of the whole program, by their block's id: a function is one module wherever it is.
    """

    def __init__(self, of_block: dict[int, GraphModule] | None = None) -> None:
        self.attributes: dict[str, Any] = {}
        self.of_block = {} if of_block is None else of_block
        self._names: dict[int, str] = {}

    def add(self, wish: str, attribute: Any) -> str:
        """Keeps an attribute and returns the name it got, as near to the wish as can be."""
        name = "".join([letter if letter.isalnum() else "_" for letter in wish])
        name = name if name[:1].isalpha() or name[:1] == "_" else f"_{name}"
        found, count = name, 0
        while found in self.attributes or keyword.iskeyword(found) or hasattr(GraphModule, found):
            found, count = f"{name}_{count}", count + 1
        self.attributes[found] = attribute
        return found

    def known(self, block: Block) -> str | None:
        """Returns the name of the submodule that a block has become already."""
        return self._names.get(id(block))

    def emitted(self, block: Block, label: str, made: GraphModule) -> str:
        """Keeps the submodule of a block and returns the name it got."""
        self.of_block[id(block)] = made
        name = self._names[id(block)] = self.add(label, made)
        return name


class BlockConverter(Protocol):
    """What the lines here need of the converter."""

    program: Program
    fakes: FakeValues
    writer: GraphWriter
    modules: Modules

    def nested(self) -> BlockConverter:
        """Returns a converter for a block inside this one."""
        ...

    def module(self, block: Block, symbols: Sequence[str], lone: bool) -> GraphModule:
        """Returns a block as a module of its own, which takes its arguments, then these symbols."""
        ...

    def take_results(self, line: LineBase, items: tuple[Any, ...], target: Any, arguments: Sequence[Any]) -> None:
        """Adds a call that gives a tuple, and takes what the line defines out of it."""
        ...

    def unsupported(self, line: LineBase, reason: str) -> Unsupported:
        """Returns the error for a line that has no form."""
        ...


def _symbols_of(converter: BlockConverter, *nested: Block) -> tuple[str, ...]:
    """Returns the names of the symbols that submodules for these blocks take, sorted."""
    return outer_symbols(*nested, functions=dict(converter.program.functions), argument_types=True)


def submodule(
    converter: BlockConverter, line: LineBase, label: str, block: Block, symbols: tuple[str, ...], lone: bool = False
) -> Node:
    """Emits a block as a submodule that takes its arguments, then these symbols; returns the node that gets it.

    With `lone` it gives its only result by itself, not in a tuple.
    """
    name = _module_name(converter, line, label, block, symbols, lone)
    return converter.writer.node("get_attr", name, (), {}, name, None)


def _module_name(
    converter: BlockConverter, line: LineBase, label: str, block: Block, symbols: tuple[str, ...], lone: bool = False
) -> str:
    """Emits a block as a submodule, if it is none yet; returns its name."""
    name = converter.modules.known(block)
    if name is None:
        for symbol in symbols:
            if symbol_kind(symbol) == "float":
                raise converter.unsupported(line, f"torch's operator takes no float such as {symbol} into a block")
        made = converter.modules.of_block.get(id(block)) or converter.nested().module(block, symbols, lone)
        name = converter.modules.emitted(block, label, made)
    return name


def _operands(converter: BlockConverter, values: Sequence[Any], symbols: Sequence[str] = ()) -> tuple[Any, ...]:
    """Returns values, then symbols, as arguments."""
    numbers = [converter.writer.number(make_symbol(name)) for name in symbols]
    return (*[converter.writer.argument(value) for value in values], *numbers)


def cond(converter: BlockConverter, line: Cond) -> None:
    """Writes `cond`: both submodules take the operands, then every symbol that either of them uses."""
    symbols = _symbols_of(converter, line.then, line.else_)
    then = submodule(converter, line, "then_block", line.then, symbols)
    else_ = submodule(converter, line, "else_block", line.else_, symbols)
    predicate = converter.writer.argument(line.predicate)
    operands = _operands(converter, line.operands, symbols)
    results(converter, line, _HIGHER.cond, [predicate, then, else_, operands])


def while_loop(converter: BlockConverter, line: While) -> None:
    """Writes `while_loop`: symbols travel at the end of what does not change from round to round."""
    symbols = _symbols_of(converter, line.cond, line.body)
    condition = submodule(converter, line, "cond", line.cond, symbols, lone=True)
    body = submodule(converter, line, "body", line.body, symbols)
    carried, extra = _operands(converter, line.carried), _operands(converter, line.extra, symbols)
    target = while_loop_stack_output if line.stacked else _HIGHER.while_loop
    results(converter, line, target, [condition, body, carried, extra])


def scan(converter: BlockConverter, line: Scan) -> None:
    """Writes `scan`; a reversed one over flipped operands, whose stacked results are flipped back."""
    symbols = _symbols_of(converter, line.body)
    body = submodule(converter, line, "body", line.body, symbols)
    carried, over = _operands(converter, line.carried), _operands(converter, line.over)
    if line.reverse:
        over = tuple([_flip(converter, value) for value in line.over])
    arguments = [body, list(carried), list(over), _operands(converter, line.extra, symbols)]
    results(converter, line, _HIGHER.scan, arguments)
    if line.reverse:
        for value in line.results[len(carried) :]:
            if value is not None:
                converter.writer.nodes[value.name] = _flip(converter, value)


def _flip(converter: BlockConverter, value: Value) -> Node:
    type_ = value.tensor_type
    val = converter.fakes.root(Value("", TensorType.contiguous(type_.dtype, type_.sizes, type_.device)))
    return converter.writer.call(torch.ops.aten.flip.default, [converter.writer.argument(value), [0]], val=val)


def map_over(converter: BlockConverter, line: Map) -> None:
    """Writes `map_impl`."""
    symbols = _symbols_of(converter, line.body)
    body = submodule(converter, line, "body", line.body, symbols)
    over, extra = _operands(converter, line.over), _operands(converter, line.extra, symbols)
    results(converter, line, _HIGHER.map_impl, [body, list(over), list(extra)])


def call_function(converter: BlockConverter, line: CallFunction) -> None:
    """Writes `invoke_subgraph`, identified by the function's name; a plain call of the submodule if it is replayed."""
    block = dict(converter.program.functions)[line.function]
    symbols = _symbols_of(converter, block)
    operands = _operands(converter, line.operands, symbols)
    if line.replay:
        name = _module_name(converter, line, line.function, block, symbols)
        mark_replayed(converter.modules.attributes[name], ReplayFacts.of(line, block))
        results(converter, line, name, operands)
        return
    body = submodule(converter, line, line.function, block, symbols)
    results(converter, line, _HIGHER.invoke_subgraph, [body, line.function, *operands])


def results(converter: BlockConverter, line: Any, target: Any, arguments: Sequence[Any]) -> None:
    """Adds a call of an operator that gives its results as a tuple, also where there is only one."""
    converter.take_results(line, line.results, target, arguments)
