"""Types of the tensors of an emitted graph, expressions of its numbers, and the views that plain tensors may replace.

A node's type is known while its target is that of its line and its operands have the types that they had in the line,
whatever else was rewritten. Lines whose result types do not follow from operands are excluded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from fxwrap import torch_compat
from fxwrap.converters.view_operators import VIEW_OVERLOADS, returns_view, view_operator
from fxwrap.errors import ExpressionError
from fxwrap.lines import Alloc, ExternCall, Launch, View
from fxwrap.runtime.kernel_operators import result_layouts
from fxwrap.runtime.library import cpp_kernel_functional_operator, cpp_kernel_operator
from fxwrap.symbolic import Size, SymbolInfo, apply_callable, is_equal, make_symbol, normalize_arithmetic, size_symbols
from fxwrap.wrapper_ir import TensorType, Value

_ATEN = torch.ops.aten

_ARITHMETIC = frozenset({
    operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.floordiv, operator.mod,
    operator.pow, pow, torch.sym_max, torch.sym_min,
})  # fmt: skip

Known: TypeAlias = dict[Node, TensorType | Size]
"""The types of tensors and the expressions of numbers, by node."""


def known_types(nodes: Iterable[Node]) -> Known:
    """Returns the types and expressions that are known, of nodes in the order of a graph. Linear in their number."""
    known: Known = {}
    infos: dict[str, SymbolInfo] = {}
    for node in nodes:
        info = node.meta.get("fxwrap_symbol")
        number = _number_of(node, known)
        if isinstance(info, SymbolInfo):
            if number is None and info.name not in infos and _defines_symbol(node):
                number = make_symbol(info.name)
            infos.setdefault(info.name, info)
        item = _type_of(node, known, infos) if number is None else number
        if item is not None:
            known[node] = item
    return known


def _defines_symbol(node: Node) -> bool:
    """Whether a number is known by its symbol alone."""
    return node.op == "placeholder" or node.target is _ATEN._local_scalar_dense.default


def _number_of(node: Node, known: Known) -> Size | None:
    """Returns the expression that a node computes from numbers and types that are known."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is _ATEN.sym_size.int:
        base, dim = node.args
        type_ = known.get(base)  # type: ignore[arg-type]
        if not isinstance(type_, TensorType) or not isinstance(dim, int):
            return None
        return type_.sizes[dim] if -len(type_.sizes) <= dim < len(type_.sizes) else None
    if node.target not in _ARITHMETIC:
        return None
    operands = _as_expressions(node.args, known)
    if operands is None:
        return None
    try:
        number: Any = apply_callable(node.target, operands)
        original = node.meta.get("fxwrap_expression")
        is_original = original is not None and normalize_arithmetic(original) == number
    except (ExpressionError, ArithmeticError, ValueError, TypeError):
        return None
    info = node.meta.get("fxwrap_symbol")
    if isinstance(info, SymbolInfo):  # a `symbol.let`
        return make_symbol(info.name) if is_original else None
    return original if is_original else number


def _as_expressions(arguments: Sequence[Any], known: Known) -> tuple[Any, ...] | None:
    """Returns a node's arguments with expressions for nodes; None if one of them is not known or is a tensor."""
    expressions: list[Any] = []
    for argument in arguments:
        item = argument
        if isinstance(argument, Node):
            item = known.get(argument)
        elif isinstance(argument, list | tuple):
            item = _as_expressions(argument, known)
        if isinstance(item, TensorType) or (item is None and argument is not None):
            return None
        expressions.append(item)
    return tuple(expressions)


def _type_of(node: Node, known: Known, infos: dict[str, SymbolInfo]) -> TensorType | None:
    if node.op == "placeholder":
        type_ = node.meta.get("fxwrap_type")
        return type_ if isinstance(type_, TensorType) else None
    line = node.meta.get("fxwrap_line")
    if node.op != "call_function":
        return None
    match line:
        case Alloc():
            return line.result.tensor_type if _is_allocation(node, line.result.tensor_type, known) else None
        case View():
            return line.result.tensor_type if _is_view(node, line, known, infos) else None
        case ExternCall():
            return _result_type(node, line, known)
        case Launch():
            return _launch_result_type(node, line, known)
        case _:
            return None


def _is_allocation(node: Node, type_: TensorType, known: Known) -> bool:
    return (
        node.target is _ATEN.empty_strided.default
        and _arguments_match((type_.sizes, type_.strides), node.args, known)
        and node.kwargs == {"dtype": type_.dtype, "device": type_.device}
    )


def _is_view(node: Node, line: View, known: Known, infos: dict[str, SymbolInfo]) -> bool:
    old, new = line.base.tensor_type, line.result.tensor_type
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or known.get(base) != old or node.kwargs:
        return False
    if node.target is _ATEN.as_strided.default:
        layout = (new.sizes, new.strides)  # a node computes another offset
        return new.storage_offset == old.storage_offset and _arguments_match(layout, node.args[1:], known)
    arguments = _as_expressions(node.args[1:], known)
    operation = None if arguments is None else view_operator(node.target, arguments)
    return returns_view(operation, old, new, {}) or (bool(infos) and returns_view(operation, old, new, infos))


def _result_type(node: Node, line: ExternCall, known: Known) -> TensorType | None:
    """Returns the type of an operator's only result, or of an item of several."""
    call, index = node, None
    if node.target is operator.getitem:
        call, index = node.args  # type: ignore[assignment]
        if call.op != "call_function" or call.meta.get("fxwrap_line") is not line:
            return None
    if not _is_call(call, line, known):
        return None
    results: tuple[object, ...] = line.results
    if index is not None:
        items = results[0] if len(results) == 1 and isinstance(results[0], tuple) else results
        results = items[index : index + 1] if isinstance(index, int) else ()
    result = results[0] if len(results) == 1 else None
    if not isinstance(result, Value) or not isinstance(result.type, TensorType):
        return None
    return result.type if _symbols_of(result) <= _symbols_of((line.arguments, line.keywords, line.outs)) else None


def _symbols_of(item: object) -> set[str]:
    """Returns the symbols of arguments and of the types of values among them."""
    match item:
        case Value(type=TensorType() as type_):
            return _symbols_of((type_.sizes, type_.strides, type_.storage_offset))
        case tuple():
            return set().union(*map(_symbols_of, item))
        case sympy.Basic():
            return size_symbols(item)
        case _:
            return set()


def _launch_result_type(node: Node, line: Launch, known: Known) -> TensorType | None:
    """Returns the type of a result of a functional launch: that of its layout, or of the operand that it copies."""
    if node.target is _ATEN.empty_strided.default:  # the template of a result
        types = [value.tensor_type for value in line.outs]
        return next((type_ for type_ in types if _is_allocation(node, type_, known)), None)
    launch, index = node.args if node.target is operator.getitem else (None, None)
    if not isinstance(launch, Node) or launch.meta.get("fxwrap_line") is not line:
        return None
    if launch.target is torch_compat.triton_launch_functional:
        operands: Any = launch.kwargs.get("kwargs", {})
        is_result = isinstance(index, str) and index in launch.kwargs.get("tensors_to_clone", ())  # type: ignore[operator]
        operand = known.get(operands.get(index)) if is_result else None
        return replace(operand, storage_offset=0) if isinstance(operand, TensorType) else None
    outs: Any = launch.kwargs.get("outs", ())
    is_launch = launch.target is cpp_kernel_functional_operator
    if not is_launch or type(index) is not int or len(outs) != len(line.outs):
        return None
    type_ = replace(line.outs[index].tensor_type, storage_offset=0)
    if outs[index] is not None:
        operand = known.get(outs[index])
        return type_ if isinstance(operand, TensorType) and replace(operand, storage_offset=0) == type_ else None
    layouts, dtypes = launch.kwargs.get("layouts"), launch.kwargs.get("dtypes")
    try:
        sizes, strides, dtype = result_layouts(layouts, dtypes)[outs[:index].count(None)]  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError, IndexError):
        return None
    is_same = (dtype, launch.kwargs.get("device")) == (type_.dtype, type_.device)
    return type_ if is_same and _arguments_match((type_.sizes, type_.strides), (sizes, strides), known) else None


def _is_call(node: Node, line: ExternCall, known: Known) -> bool:
    if node.target is not torch_compat.operator_overload(line.target):
        return False
    keywords = dict(line.keywords)
    if line.outs:
        keywords.update(zip(torch_compat.out_argument_names(line.target), line.outs, strict=True))
    return (
        _arguments_match(line.arguments, node.args, known)
        and node.kwargs.keys() == keywords.keys()
        and all(_arguments_match(item, node.kwargs[name], known) for name, item in keywords.items())
    )


def _arguments_match(then: object, now: object, known: Known) -> bool:
    """Whether a node's argument is that of its line; a tensor may be another one of the same type."""
    if isinstance(then, Value):
        return isinstance(now, Node) and known.get(now) == then.type
    if isinstance(then, sympy.Expr) and isinstance(now, Node):
        number = known.get(now)
        return number is not None and not isinstance(number, TensorType) and is_equal(then, number)
    if isinstance(then, tuple):
        if not isinstance(now, list | tuple) or len(then) != len(now):
            return False
        return all(_arguments_match(one, other, known) for one, other in zip(then, now, strict=True))
    return type(then) is type(now) and bool(then == now)


_VIEWS = frozenset(VIEW_OVERLOADS.values())
_LAUNCHES = frozenset({cpp_kernel_operator, torch_compat.triton_launch})


def written_arguments(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Returns, for each launch, the graph's inputs and attributes, and their views, that its kernel writes."""
    arguments: set[Node] = set()
    written: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            arguments.add(node)
        elif node.op == "call_function" and node.target in _LAUNCHES:
            written[node] = [item for item in _outputs(node) if item in arguments]
        elif isinstance(node.target, torch_compat.OpOverload) and not arguments.isdisjoint(
            torch_compat.aliased_or_mutated_inputs(node)
        ):
            arguments.add(node)
    return {node: items for node, items in written.items() if items}


def _outputs(launch: Node) -> list[Node]:
    """Returns the tensors that a kernel writes, of a launch as it was emitted."""
    if launch.target is cpp_kernel_operator:
        outs = launch.kwargs.get("outs", ())
    else:
        operands: Any = launch.kwargs.get("kwargs", {})
        kernel = launch.meta.get("fxwrap_registered_kernel")
        tensors = [item for item in operands.values() if isinstance(item, Node)
                   and isinstance(item.meta.get("val"), torch.Tensor)]  # fmt: skip
        outs = tensors[len(tensors) - kernel.outs :] if kernel is not None else ()
    return [item for item in outs if isinstance(item, Node)]  # type: ignore[union-attr]


def untracked_views(nodes: Sequence[Node]) -> frozenset[Node]:
    """Returns the views that may be plain tensors on the same storage, without torch's view tracking.

    The two are indistinguishable if the tensor and its views are read only by kernels and by operators that neither
    mutate nor alias them. A torch view of an input shares its version counter, which a write increments.
    """
    tracked = {item for items in written_arguments(nodes).values() for item in items}
    untracked = []
    for node in reversed(nodes):
        is_checked = isinstance(node.meta.get("fxwrap_line"), ExternCall)  # its operator checks the storage
        if node.op == "call_function" and node.target in _VIEWS and node not in tracked and not is_checked:
            untracked.append(node)
        elif node.op != "call_function" or node.target not in _LAUNCHES:
            tracked.update(torch_compat.aliased_or_mutated_inputs(node))
    return frozenset(untracked)
