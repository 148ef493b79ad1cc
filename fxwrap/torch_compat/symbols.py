"""Symbolic numbers and the ShapeEnv that owns them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import sympy
import torch
from sympy.core.sorting import ordered
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    ConvertIntKey,
    DimDynamic,
    DivideByKey,
    StatelessSymbolicContext,
    free_unbacked_symbols,
    rebind_unbacked,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.utils._pytree import SequenceKey, tree_leaves

# Why: ShapeEnv builds sizes from these sympy functions (FloorDiv, Mod, ...), which have no public name.
from torch.utils._sympy import functions
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo as int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges as ValueRanges
from torch.utils._sympy.value_ranges import bound_sympy as bound_sympy

sympy_functions = functions  # a star import exports it under this name

SymbolicNumber: TypeAlias = torch.SymInt | torch.SymFloat | torch.SymBool
Bound: TypeAlias = int | float | None

# Why: the expression, bounds and hint of a symbolic number have no public accessors.


def symbol_expression(number: SymbolicNumber) -> sympy.Basic:
    """Returns the sympy expression of a symbolic number, as its ShapeEnv simplifies it."""
    return number.node.expr


def symbol_bounds(number: SymbolicNumber, least: Mapping[str, int] = {}) -> tuple[Bound, Bound]:
    """Returns the inclusive bounds that the ShapeEnv knows of a symbolic number, None for an unbounded side.

    `least` has lower bounds of symbols by name that replace those of the ShapeEnv.
    """
    shape_env = number.node.shape_env
    return (None, None) if shape_env is None else _bounds(shape_env, symbol_expression(number), least)


def _bounds(shape_env: ShapeEnv, expression: sympy.Basic, least: Mapping[str, int] = {}) -> tuple[Bound, Bound]:
    if least.keys().isdisjoint([symbol.name for symbol in expression.free_symbols]):
        bounds = shape_env.bound_sympy(expression)
    else:
        known = {symbol: shape_env.var_to_range[symbol] for symbol in expression.free_symbols}
        ranges = {
            symbol: ValueRanges(least.get(symbol.name, bounds.lower), bounds.upper) for symbol, bounds in known.items()
        }
        bounds = bound_sympy(expression, ranges)
    return (None, None) if bounds.is_bool else (_finite(bounds.lower), _finite(bounds.upper))


def _finite(bound: object) -> Bound:
    if bound in (int_oo, -int_oo, sympy.oo, -sympy.oo):
        return None
    number = int(bound) if getattr(bound, "is_integer", False) else float(bound)  # type: ignore[call-overload, arg-type]
    return None if abs(number) >= 2**62 else number


def symbol_hint(number: SymbolicNumber) -> int | float | None:
    """Returns the user's hint for a symbolic number, else its value when the graph was traced; None without."""
    expression, overrides = symbol_expression(number), getattr(number.node.shape_env, "var_to_hint_override", {})
    if expression in overrides:
        return int(overrides[expression])
    hint = number.node.hint if number.node.has_hint() else None
    return hint if isinstance(hint, int | float) else None


def guarded_bounds(shape_env: ShapeEnv | None) -> dict[sympy.Basic, tuple[int | None, int | None]]:
    """Returns the inclusive bounds that guards of the form `expression < number` set, by expression.

    Why: a graph holds only for sizes that satisfy its guards, e.g. `s0//2 == 1` where it was broadcast.
    """
    bounds: dict[sympy.Basic, tuple[int | None, int | None]] = {}
    for guard in shape_env.guards if shape_env is not None else ():
        for relation in (guard.expr, getattr(guard.expr, "reversed", None)):
            if not isinstance(relation, sympy.core.relational.Relational) or not relation.rhs.is_Integer:
                continue
            lower, upper = bounds.get(relation.lhs, (None, None))
            number = int(relation.rhs)
            match relation:
                case sympy.Eq():
                    lower = upper = number
                case sympy.Lt() | sympy.Le():
                    largest = number - isinstance(relation, sympy.Lt)
                    upper = largest if upper is None else min(upper, largest)
                case sympy.Gt() | sympy.Ge():
                    smallest = number + isinstance(relation, sympy.Gt)
                    lower = smallest if lower is None else max(lower, smallest)
                case _:
                    pass
            bounds[relation.lhs] = lower, upper
    return bounds


def guarded_equalities(shape_env: ShapeEnv | None) -> list[tuple[sympy.Expr, sympy.Expr]]:
    """Returns both sides of each equality of integers that the guards of a ShapeEnv state."""
    guards = [guard.expr for guard in shape_env.guards] if shape_env is not None else []
    parts = [part for guard in guards for part in (guard.args if isinstance(guard, sympy.And) else (guard,))]
    return [(part.lhs, part.rhs) for part in parts if isinstance(part, sympy.Eq) and part.lhs.is_integer]


def is_positive(shape_env: ShapeEnv, expression: sympy.Basic) -> bool:
    """Whether the ShapeEnv knows that an expression is at least 1."""
    lower, _ = _bounds(shape_env, expression)
    return lower is not None and lower >= 1


def find_shape_env(tree: object) -> ShapeEnv | None:
    """Returns the ShapeEnv of the first symbolic number or fake tensor with one in a nested structure."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, FakeTensor) and leaf.fake_mode.shape_env is not None:
            return leaf.fake_mode.shape_env
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            shape_env: ShapeEnv | None = leaf.node.shape_env
            return shape_env
    return None


def serialize_shape_env(
    shape_env: ShapeEnv, symbols: frozenset[sympy.Symbol], text: Callable[[sympy.Basic], str]
) -> Iterator[str]:
    """Yields texts, in a fixed order, of the state of symbols in a ShapeEnv, and of the symbols related to them.

    That is ranges, hints, replacements, renamings, guards, deferred assertions, divisibility and which symbols are
    sizes. `text` prints an expression.

    Why: a compile cache key needs all of this, and most of it has no public accessor.
    """
    asserted = [item.expr for items in shape_env.deferred_runtime_asserts.values() for item in items]
    relations = [*[guard.expr for guard in shape_env.guards], *asserted, *shape_env.divisible]
    pairs = [*shape_env.replacements.items(), *shape_env.unbacked_renamings.items()]
    groups = [expression.free_symbols for expression in relations]
    groups += [{old} | new.free_symbols for old, new in pairs]
    related, count = set(symbols), -1
    while count != (count := len(related)):
        related.update(*[group for group in groups if group & related])
    hints, overrides = shape_env.backed_var_to_val, shape_env.var_to_hint_override
    for symbol in sorted(related, key=lambda symbol: str(symbol)):
        bounds, size = shape_env.var_to_range.get(symbol), symbol in shape_env.size_like
        yield f"{text(symbol)} {bounds} {hints.get(symbol)} {overrides.get(symbol)} {size}"
    yield from [f"{text(old)} is {text(new)}" for old, new in pairs if old in related]
    yield from sorted([text(expression) for expression in relations if expression.free_symbols & related])


# Why: a node's unbacked symbols are metadata without a public accessor. It may name symbols that were renamed or solved
# after tracing.


def unbacked_bindings(node: torch.fx.Node, fakes: object) -> list[tuple[sympy.Basic, tuple[tuple[str, int], ...]]]:
    """Returns the unbacked symbols that a node defines, as the ShapeEnv simplifies them, each with its key path.

    A renamed symbol is listed under both names: the metadata of nodes may have either. Steps of a path are
    ("at", index), ("size", dim), ("stride", dim), ("storage_offset", 0), ("divide", constant) and ("truth", 0).
    """
    bindings, shape_env = node.meta.get("unbacked_bindings"), find_shape_env(fakes)
    if not bindings or shape_env is None:
        return []
    simplified = []
    for symbol, path in bindings.items():
        steps = [step for key in path if (step := _path_step(key)) is not None]
        if len(steps) == len(path):
            names = dict.fromkeys((symbol, shape_env.unbacked_renamings.get(symbol, symbol)))
            simplified += [(shape_env.replace(name), tuple(steps)) for name in names]
    return list(dict.fromkeys(simplified))


def rename_unbacked(node: torch.fx.Node, result: Any) -> None:
    """Gives the unbacked symbols of a node's new fake result the names that its metadata binds.

    Metadata of another ShapeEnv is left alone: its symbols have nothing to do with those of the result.
    """
    shape_env = find_shape_env(result)
    if shape_env is not None and find_shape_env(node.meta.get("val")) is shape_env:
        rebind_unbacked(shape_env, node, result)


def name_unbacked_as(former: Any, result: Any) -> bool:
    """Gives the unbacked symbols of a new fake result of a call the names that they have in its former one.

    Returns whether the new result then has all unbacked symbols of the former one.
    """
    shape_env = find_shape_env(former)
    if shape_env is None:
        return True
    for old, new in zip(_expressions_in(former), _expressions_in(result)):
        are_unbacked = all(item.is_Symbol and free_unbacked_symbols(item) for item in (old, new))
        if are_unbacked and shape_env.replace(new) != shape_env.replace(old):
            shape_env._rename_unbacked_to(new, old)
    symbols = {symbol for number in _expressions_in(result) for symbol in shape_env.replace(number).free_symbols}
    unbacked = {symbol for number in _expressions_in(former) for symbol in free_unbacked_symbols(number)}
    return unbacked <= symbols


def _expressions_in(tree: Any) -> list[sympy.Basic]:
    """Returns the symbolic numbers of a fake result, those of sizes, strides and offsets included, as expressions.

    That of a truth value is its number, 0 or 1.
    """
    expressions: list[sympy.Basic] = []
    for leaf in tree_leaves(tree):
        numbers = (*leaf.shape, *leaf.stride(), leaf.storage_offset()) if isinstance(leaf, torch.Tensor) else (leaf,)
        for number in numbers:
            expression = symbol_expression(number) if hasattr(number, "node") else sympy.Integer(0)
            expressions.append(expression.lhs if isinstance(expression, sympy.Eq) else expression)
    return expressions


def _path_step(key: object) -> tuple[str, int] | None:
    match key:
        case SequenceKey():
            return "at", key.idx
        case CallMethodKey():
            return key.name, 0
        case DivideByKey():
            return "divide", int(key.divisor)
        case ConvertIntKey():
            return "truth", 0
        case _:
            return None


# Why: a ShapeEnv queues the unbacked symbols that an operator creates until the node that defines them is traced, and
# tracing raises when others are queued. Operators that run for their fake results alone create such symbols.


@contextmanager
def isolate_pending_symbols(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Runs with an empty queue of pending unbacked symbols, and restores the queue afterwards."""
    if shape_env is None:
        yield
        return
    pending = shape_env.pending_fresh_unbacked_symbols
    before = [*pending]
    pending.clear()
    try:
        yield
    finally:
        pending[:] = before


# Why: metadata of emitted graphs uses symbolic numbers of the input graph's ShapeEnv, and only private constructors
# create those without running an operator. A SymInt, SymFloat and SymBool have no common public base: hence Any.


def new_unbacked_number(shape_env: ShapeEnv, kind: str) -> Any:
    """Returns a new unbounded, unbacked SymInt, SymFloat or SymBool (`kind` "int", "float" or "bool")."""
    with isolate_pending_symbols(shape_env):
        if kind == "bool":
            return shape_env.create_unbacked_symbool()
        return shape_env.create_unbacked_symfloat() if kind == "float" else shape_env.create_unbacked_symint()


def bounded_item(tensor: torch.Tensor, lower: int, upper: int) -> Any:
    """Returns the number in a fake tensor as an unbacked symbol with these inclusive bounds, which nothing checks."""
    number = tensor.item()
    torch._check(number >= lower)  # type: ignore[no-untyped-call]
    torch._check(number <= upper)  # type: ignore[no-untyped-call]
    return number


def bound_symbol(shape_env: ShapeEnv, number: Any, lower: float | None, upper: float | None) -> None:
    """Bounds an int, inclusively; None is unbounded. Nothing checks the bounds.

    Why: `torch._check` bounds nothing where guards are suppressed, as in fake-tensor propagation.
    """
    symbol = symbol_expression(number)
    known = shape_env.var_to_range[symbol]
    shape_env.constrain_symbol_range(
        symbol, known.lower if lower is None else int(lower), known.upper if upper is None else int(upper)
    )


def new_symbol(shape_env: ShapeEnv, name: str, kind: str, hint: int | None) -> Any:
    """Returns a new SymInt backed by `hint`; an unbacked number without a hint and for other kinds."""
    if kind != "int" or hint is None:
        return new_unbacked_number(shape_env, kind)
    from torch._dynamo.source import ConstantSource

    symbol = shape_env.create_symbol(
        hint, source=ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None,
        positive=None, do_not_specialize_zero_one=True,
    )  # fmt: skip
    return shape_env.create_symintnode(symbol, hint=hint)


def symbolic_number(shape_env: ShapeEnv, expression: sympy.Basic, kind: str) -> Any:
    """Returns the SymInt, SymFloat or SymBool of an expression over symbols of the ShapeEnv."""
    if kind == "int":
        return shape_env.create_symintnode(expression, hint=None)
    if kind == "float":
        return shape_env.create_symfloatnode(expression, hint=None)
    return shape_env.create_symboolnode(expression)


def shape_symbols(shape_env: ShapeEnv) -> dict[str, sympy.Symbol]:
    """Returns the symbols that a ShapeEnv has created, by name."""
    return {symbol.name: symbol for symbol in shape_env.var_to_range}


def unevaluated_boolean(function: type[sympy.Basic], parts: Collection[sympy.Basic]) -> sympy.Basic:
    """Returns a sympy And or Or of these parts without simplification.

    Why: sympy's public constructors simplify, or leave out the set of arguments that And and Or read.
    """
    node = sympy.Basic.__new__(function, *ordered(parts))
    node._argset = frozenset(parts)
    return node


def symbolic_function(name: str) -> Callable[..., object] | None:
    """Returns torch's function of a float or SymFloat, e.g. "cos"; None where torch has none."""
    return getattr(torch, f"_sym_{name}", None)


def symbolic_context(tensor: torch.Tensor, *, all_sizes: bool) -> StatelessSymbolicContext[Any, Any]:
    """Returns which sizes of a fake tensor are symbols: those that `mark_dynamic` marked, or all from 2 on.

    Sizes that are equal by chance have symbols of their own.

    Why: the marks have no public accessor.
    """
    marked = getattr(tensor, "_dynamo_dynamic_indices", ())
    dynamic = [dim in marked or (all_sizes and size > 1) for dim, size in enumerate(tensor.shape)]
    return StatelessSymbolicContext([DimDynamic.DYNAMIC if item else DimDynamic.STATIC for item in dynamic])


def guard_conditions(shape_env: ShapeEnv | None, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.SymBool, str]]:
    """Returns the guards of a ShapeEnv that ranges of symbols do not imply, over sizes of tensors, and their texts.

    Guards with other symbols than these sizes are left out.

    Why: the interpreter of sympy expressions on symbolic numbers has no public name.
    """
    sizes: dict[sympy.Basic, tuple[torch.SymInt, str]] = {}
    if shape_env is None:
        return []
    for position, tensor in enumerate(tensors):
        for dim in range(tensor.dim()):
            size: Any = tensor.size(dim)
            if isinstance(size, torch.SymInt) and isinstance(symbol_expression(size), sympy.Symbol):
                sizes.setdefault(symbol_expression(size), (size, f"input_{position}.size({dim})"))
    names = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, (_, name) in sizes.items()}
    values = {symbol: size for symbol, (size, _) in sizes.items()}
    conditions = {}
    for guard in shape_env.guards:
        condition = shape_env.simplify(guard.expr)
        if not condition.free_symbols or not condition.free_symbols <= values.keys():
            continue
        implied = bound_sympy(condition, shape_env.var_to_range)
        if implied.lower != sympy.true:
            conditions[condition] = str(condition.xreplace(names))
    return [(sympy_interp(PythonReferenceAnalysis, values, item), text) for item, text in conditions.items()]
