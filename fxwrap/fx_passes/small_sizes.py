"""The least sizes for which the graph of an exported program is the one that was traced.

torch traces with the assumption that a dynamic size is at least 2, and `ExportedProgram.module()` accepts 0 and 1 all
the same: its operators run with the real sizes. A compile decomposes them under the assumption. So the operators of the
exported graph run on fake tensors, once with symbols and once with sizes of 0 and 1. Where both runs call the same
overloads with equal numbers, and results have equal layouts, the compiled graph is right for these sizes too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Interpreter

from fxwrap.fx_passes.effects import FLEX_OPERATORS
from fxwrap.torch_compat import (
    OpOverload,
    TorchDispatchMode,
    detect_fake_mode,
    find_shape_env,
    fresh_fake_mode,
    in_fake_mode,
    symbol_bounds,
    symbol_expression,
    symbol_hint,
    symbolic_number,
    torch_schema,
    tree_leaves,
    without_guards,
    without_logged_errors,
)

_ASSUMED_LEAST_SIZE = 2

_Table: TypeAlias = Mapping[OpOverload, Callable[..., Any]]
_Sizes: TypeAlias = Mapping[sympy.Basic, int]
_Call: TypeAlias = tuple[OpOverload, list[Any], list[Any]]
"""An overload, the numbers and literals among its arguments, and the layouts of its results."""

_SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def least_sizes(exported: ExportedProgram, table: _Table) -> dict[str, int]:
    """Returns the least size, 0 or 1, by the names of symbols that need not be at least 2.

    `table` has the decompositions of the compile. The result is empty for graphs that call graphs (but the functions of
    FlexAttention), for those whose sizes depend on data, and for inputs that are neither tensors nor literals.
    """
    inputs = [node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")]
    sizes = [size for item in inputs if isinstance(item, torch.Tensor) for size in _symbolic(item.shape)]
    shape_env = find_shape_env(sizes)
    if shape_env is None:
        return {}
    symbols = sorted({symbol for size in sizes for symbol in symbol_expression(size).free_symbols}, key=str)
    numbers = {symbol: symbolic_number(shape_env, symbol, "int") for symbol in symbols}
    hints = {symbol: hint for symbol, number in numbers.items() if type(hint := symbol_hint(number)) is int}
    assumed = [symbol for symbol, number in numbers.items() if symbol_bounds(number)[0] == _ASSUMED_LEAST_SIZE]
    traced = _calls(exported, table, inputs) if assumed and hints.keys() == numbers.keys() else None
    if traced is None:
        return {}

    def is_right(sizes: _Sizes) -> bool:
        values = {**hints, **sizes}
        with in_fake_mode(fresh_fake_mode()):
            concrete = [_with_sizes(item, values) for item in inputs]
        calls = _calls(exported, table, concrete)
        return (
            calls is not None
            and len(calls) == len(traced)
            and all(_evaluated(call, values) == _evaluated(other, values) for call, other in zip(calls, traced))
        )

    least: dict[sympy.Basic, int] = {}
    for symbol in assumed:
        accepted = [*itertools.takewhile(lambda size, symbol=symbol: is_right({symbol: size}), (1, 0))]  # type: ignore[misc]
        if accepted:
            least[symbol] = accepted[-1]
    if len(least) > 1 and not is_right(least):
        least = dict.fromkeys(least, 1)  # several empty inputs may have no maximum, say
        if not is_right(least):
            return {}
    return {str(symbol): size for symbol, size in least.items()}


def _symbolic(numbers: Iterable[Any]) -> list[torch.SymInt]:
    return [number for number in numbers if isinstance(number, torch.SymInt)]


def _calls(exported: ExportedProgram, table: _Table, inputs: Sequence[Any]) -> list[_Call] | None:
    """Returns the calls of operators on fake inputs, in order; None if a call fails."""
    mode = detect_fake_mode(inputs)
    recorder = _Recorder(table)
    try:
        with in_fake_mode(mode), without_guards(mode), without_logged_errors(), torch.no_grad(), recorder:
            Interpreter(exported.graph_module).run(*inputs, enable_io_processing=False)
    except Exception:  # noqa: BLE001 - an operator's own, for which the size is refused
        return None
    return recorder.calls


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no annotations
    """Records the calls of operators below the decompositions of a table, and of FlexAttention.

    FlexAttention's functions compute single elements, whatever the sizes are. Graphs that other operators call may be
    others for other sizes, so these raise.
    """

    supports_higher_order_operators = True

    def __init__(self, table: _Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) and str(func) not in FLEX_OPERATORS:
            raise NotImplementedError(f"{func} calls graphs")
        if func in self.table:
            with self:
                result = self.table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        before = _storage_bytes((args, kwargs))
        result = func(*args, **kwargs)
        if _storage_bytes((args, kwargs)) != before:  # torch 2.11: fake rules of views beyond the end enlarge it
            raise IndexError(f"a result of {func} is outside of the memory of its operand")
        if not _is_symbol_call(func):
            arguments = tree_leaves(_with_defaults(func, args, kwargs))
            literals = [item for item in arguments if not isinstance(item, torch.Tensor)]
            self.calls.append((func, literals, [_layout(item) for item in tree_leaves(result)]))
        return result


def _with_defaults(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns all arguments in the schema's order: the dispatcher leaves out numbers that equal their defaults."""
    if not isinstance(func, OpOverload):
        return [args, kwargs]
    arguments = torch_schema(func).arguments
    named = {argument.name: kwargs.get(argument.name, argument.default_value) for argument in arguments}
    named.update(zip(named, args))
    return list(named.values())


def _is_symbol_call(func: OpOverload) -> bool:
    return func.namespace == "prim" or str(func).startswith("aten.sym_")


def _storage_bytes(arguments: Any) -> list[int]:
    """Returns the sizes of the operands' memory, as far as they are known."""
    sizes = [item.untyped_storage().nbytes() for item in tree_leaves(arguments) if isinstance(item, torch.Tensor)]
    return [size for size in sizes if type(size) is int]


def _layout(result: Any) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return list(result.shape), list(result.stride()), result.storage_offset(), result.dtype, result.device


def _with_sizes(item: Any, sizes: _Sizes) -> Any:
    """Returns an input, or one like a tensor with concrete sizes."""
    if not isinstance(item, torch.Tensor):
        return item
    shape, strides = ([_number(number, sizes) for number in numbers] for numbers in (item.shape, item.stride()))
    return torch.empty_strided(shape, strides, dtype=item.dtype, device=item.device)


def _evaluated(call: _Call, sizes: _Sizes) -> Any:
    """Returns a call with concrete numbers, and without strides that say nothing about where elements are."""
    func, literals, layouts = call
    results = [_evaluated_layout(item, sizes) if isinstance(item, tuple) else _number(item, sizes) for item in layouts]
    return func, [_number(item, sizes) for item in literals], results


def _evaluated_layout(layout: tuple[Any, ...], sizes: _Sizes) -> Any:
    shape, strides, offset, *rest = layout
    shape, strides = ([_number(number, sizes) for number in numbers] for numbers in (shape, strides))
    if 0 in shape:
        return shape, rest
    return shape, [stride for size, stride in zip(shape, strides) if size != 1], _number(offset, sizes), rest


def _number(item: Any, sizes: _Sizes) -> Any:
    """Returns a literal, or the number of a symbolic one; the latter itself if it depends on data."""
    if not isinstance(item, _SYMBOLIC_NUMBERS):
        return item
    number = sympy.sympify(symbol_expression(item)).subs(sizes)
    if number.free_symbols:
        return object()
    match item:
        case torch.SymBool():
            return bool(number)
        case torch.SymFloat():
            return float(number)
        case _:
            return int(number)
