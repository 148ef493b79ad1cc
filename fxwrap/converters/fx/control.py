"""Lines with blocks, emitted as torch's higher-order operators over submodules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.converters.fx.replay import ReplaySpec, mark_replayed
from fxwrap.lines import CallFunction, Cond, Map, ScanLoop, While
from fxwrap.symbolic import make_symbol, symbol_kind
from fxwrap.torch_compat import while_loop_stack_output
from fxwrap.wrapper_ir import Block, LineBase, TensorType, Value, captured_symbols, values_in

_HIGHER = torch.ops.higher_order

# Operators over blocks return a tuple, also of one result: `unpack_results`.


def symbols_of(emitter: GraphEmitter, *blocks: Block) -> tuple[str, ...]:
    """Returns the names of the symbols that submodules for these blocks take, sorted."""
    return captured_symbols(*blocks, functions=dict(emitter.program.functions), argument_types=True)


def _submodule(
    emitter: GraphEmitter, line: LineBase, label: str, block: Block, symbols: tuple[str, ...], single: bool = False
) -> Node:
    """Emits a block as a submodule that takes its arguments, then these symbols; returns its `get_attr` node.

    With `single` it returns its only result, not a tuple.
    """
    name = _module_name(emitter, line, label, block, symbols, single)
    return emitter.writer.node("get_attr", name, (), {}, name, None)


def _module_name(
    emitter: GraphEmitter, line: LineBase, label: str, block: Block, symbols: tuple[str, ...], single: bool = False
) -> str:
    """Emits a block as a submodule unless it is one already; returns its name."""
    name = emitter.modules.name_of(id(block))
    if name is None:
        for symbol in symbols:
            if symbol_kind(symbol) == "float":
                raise emitter.unsupported(line, f"torch's operator takes no float such as {symbol} into a block")
        module = emitter.modules.by_key.get(id(block)) or emitter.module(block, symbols, single)
        name = emitter.modules.add_module(id(block), label, module)
    return name


def operands_of(emitter: GraphEmitter, values: Sequence[object], symbols: Sequence[str] = ()) -> tuple[object, ...]:
    """Returns the operands of a submodule: the nodes of values, then those of symbols."""
    numbers = [emitter.writer.number(make_symbol(name)) for name in symbols]
    return (*[emitter.writer.argument(value) for value in values], *numbers)


def cond(emitter: GraphEmitter, line: Cond) -> None:
    """Emits `cond`: both submodules take the operands, then every symbol that either of them uses."""
    symbols = symbols_of(emitter, line.then, line.else_)
    then = _submodule(emitter, line, "then_block", line.then, symbols)
    else_ = _submodule(emitter, line, "else_block", line.else_, symbols)
    arguments = [emitter.writer.argument(line.predicate), then, else_, operands_of(emitter, line.operands, symbols)]
    emitter.unpack_results(line, line.results, _HIGHER.cond, arguments)


def while_loop(emitter: GraphEmitter, line: While) -> None:
    """Emits `while_loop`: symbols are at the end of the additional inputs."""
    symbols = symbols_of(emitter, line.cond, line.body)
    condition = _submodule(emitter, line, "cond", line.cond, symbols, single=True)
    body = _submodule(emitter, line, "body", line.body, symbols)
    arguments = [condition, body, operands_of(emitter, line.carried), operands_of(emitter, line.extra, symbols)]
    target = while_loop_stack_output if line.stacked else _HIGHER.while_loop
    emitter.unpack_results(line, line.results, target, arguments)


def scan(emitter: GraphEmitter, line: ScanLoop) -> None:
    """Emits `scan`; a reversed one over flipped operands, whose stacked results are flipped too."""
    symbols = symbols_of(emitter, line.body)
    body = _submodule(emitter, line, "body", line.body, symbols)
    carried, over = _distinct_operands(emitter, line), operands_of(emitter, line.over)
    if line.reverse:
        over = tuple([_flip(emitter, value) for value in line.over])
    arguments = [body, carried, list(over), operands_of(emitter, line.extra, symbols)]
    emitter.unpack_results(line, line.results, _HIGHER.scan, arguments)
    if line.reverse:
        for value in values_in(line.results[len(carried) :]):
            emitter.writer.nodes[value.name] = _flip(emitter, value)


def _distinct_operands(emitter: GraphEmitter, line: ScanLoop) -> list[object]:
    """Returns the carried operands of a scan; one that is an operand a second time is an alias of it, of its own.

    torch traces the body with the operands themselves. Two of its parameters that are one tensor become one parameter,
    though a carried one has other content from the second round on. A chain of aliases withstands CSE.
    """
    operands: list[object] = []
    others = operands_of(emitter, line.extra)
    latest: dict[object, object] = {}
    for value, operand in zip(line.carried, operands_of(emitter, line.carried)):
        distinct = operand
        if isinstance(value, Value) and isinstance(value.type, TensorType):
            if operand in latest or operand in others:
                val = emitter.fakes.view(value, value, 0)
                distinct = emitter.writer.call(torch.ops.aten.alias.default, [latest.get(operand, operand)], val=val)
            latest[operand] = distinct
        operands.append(distinct)
    return operands


def _flip(emitter: GraphEmitter, value: Value) -> Node:
    type_ = value.tensor_type
    val = emitter.fakes.fake(TensorType.contiguous(type_.dtype, type_.sizes, type_.device))
    return emitter.writer.call(torch.ops.aten.flip.default, [emitter.writer.argument(value), [0]], val=val)


def map_over(emitter: GraphEmitter, line: Map) -> None:
    """Emits `map_impl`."""
    symbols = symbols_of(emitter, line.body)
    body = _submodule(emitter, line, "body", line.body, symbols)
    arguments = [body, list(operands_of(emitter, line.over)), list(operands_of(emitter, line.extra, symbols))]
    emitter.unpack_results(line, line.results, _HIGHER.map_impl, arguments)


def call_function(emitter: GraphEmitter, line: CallFunction) -> None:
    """Emits `invoke_subgraph`, identified by the function's name, or a call of a submodule that is replayed."""
    functions = dict(emitter.program.functions)
    block = functions[line.function]
    symbols = symbols_of(emitter, block)
    operands = operands_of(emitter, line.operands, symbols)
    if line.max_captures:
        name = _module_name(emitter, line, line.function, block, symbols)
        mark_replayed(emitter.modules.attributes[name], ReplaySpec.of(line, functions))
        emitter.unpack_results(line, line.results, name, operands)
        return
    body = _submodule(emitter, line, line.function, block, symbols)
    emitter.unpack_results(line, line.results, _HIGHER.invoke_subgraph, [body, line.function, *operands])
