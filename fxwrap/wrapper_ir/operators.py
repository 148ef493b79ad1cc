"""What an operator's schema says: what it writes, gives and does; and which results of a call are used."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from fxwrap.torch_compat import OpOverload, is_composite
from fxwrap.wrapper_ir.effects import ASSERT, OUTPUT, UNKNOWN, Effect, communication_effect, random_effect
from fxwrap.wrapper_ir.line import leaves
from fxwrap.wrapper_ir.types import Value

_ASSERTING = frozenset({
    "aten._assert_scalar.default", "aten._assert_async.default", "aten._assert_async.msg",
    "aten._assert_tensor_metadata.default",
})  # fmt: skip
_PRINTING = frozenset({"aten._print.default", "fxwrap_runtime.print.default"})

_UNDECLARED_VIEWS = {"aten.unsafe_split.Tensor": 0, "aten.unsafe_split_with_sizes.default": 0}
"""Operators whose results are windows on an argument although their schema does not say so."""

_EXACT_NAMESPACES = ("aten", "prims")
"""Whose operators always give a view where their schema says so; others' fake rules say what they do."""

Replacement = Callable[[OpOverload, Any, Any], tuple[OpOverload, Any, Any]]


@dataclass(frozen=True)
class OperatorFacts:
    """What lowering, and reading an emitted graph back, need of an overload's schema.

    `name` is "namespace.name.overload"; `written` the names of the arguments it writes; `aliased` the position of the
    only argument that results are windows on, or may be if `may_alias` (`reshape`, `contiguous`, operators of others);
    `returns_written` says for each return which written argument it is, if it is one.
    """

    name: str
    argument_names: tuple[str, ...]
    return_count: int
    written: tuple[str, ...]
    is_out: bool
    aliased: int | None
    may_alias: bool
    returns_written: tuple[str | None, ...]
    is_random: bool
    fixed_effects: tuple[Effect, ...]
    replacement: Replacement | None

    @property
    def is_pure(self) -> bool:
        """Whether a call whose results nobody uses can be left out."""
        return not self.written and not self.is_random and not self.fixed_effects

    def operand(self, name: str, arguments: Sequence[Any], keywords: Sequence[tuple[str, Any]]) -> Any:
        """Returns the argument of this name of a call, or None when it was left out."""
        position = self.argument_names.index(name)
        if position < len(arguments):
            return arguments[position]
        return dict(keywords).get(name)

    def written_operands(self, arguments: Sequence[Any], keywords: Sequence[tuple[str, Any]]) -> tuple[Value, ...]:
        """Returns the values a call writes, in the schema's order."""
        operands = [self.operand(name, arguments, keywords) for name in self.written]
        return tuple(leaf for leaf in leaves(tuple(operands)) if isinstance(leaf, Value))

    def returned_operands(self, arguments: Any, keywords: Any) -> tuple[Any, ...] | None:
        """Returns the operands a call gives back, when every return is one of those it writes; else None."""
        if any(name is None for name in self.returns_written):
            return None
        return tuple(self.operand(name, arguments, keywords) for name in self.returns_written if name is not None)

    def effects(self, devices: Sequence[torch.device]) -> tuple[Effect, ...]:
        """Returns the effects of a call with operands and results on these devices."""
        if not self.is_random:
            return self.fixed_effects
        return (*self.fixed_effects, *sorted({random_effect(str(device)) for device in devices}, key=str))


@cache
def operator_facts(overload: OpOverload) -> OperatorFacts:
    """Returns what an overload's schema says."""
    schema = overload._schema
    arguments = schema.arguments
    written = tuple(item.name for item in arguments if item.alias_info is not None and item.alias_info.is_write)
    readers = [
        index for index, item in enumerate(arguments)
        if item.alias_info is not None and not item.alias_info.is_write
    ]  # fmt: skip
    name = operator_name(overload)
    return OperatorFacts(
        name,
        tuple(item.name for item in arguments),
        len(schema.returns),
        written,
        bool(written) and all(item.is_out for item in arguments if item.name in written),
        _UNDECLARED_VIEWS.get(name, readers[0] if len(readers) == 1 else None),
        is_composite(overload) or overload.namespace not in _EXACT_NAMESPACES,
        tuple(_written_twin(arguments, returned) for returned in schema.returns),
        torch.Tag.nondeterministic_seeded in overload.tags,
        _fixed_effects(overload, name, bool(written)),
        _REPLACEMENTS.get(name),
    )


def is_assertion(target: Any) -> bool:
    """Whether an operator does nothing but fail where a condition does not hold."""
    return isinstance(target, OpOverload) and operator_name(target) in _ASSERTING


def operator_name(overload: OpOverload) -> str:
    """Returns "namespace.name.overload", as the IR names an operator."""
    namespace, _, name = overload._schema.name.partition("::")
    return f"{namespace}.{name}.{overload._overloadname}"


def _written_twin(arguments: Any, returned: Any) -> str | None:
    if returned.alias_info is None or not returned.alias_info.is_write:
        return None
    for argument in arguments:
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set == returned.alias_info.before_set:
            return str(argument.name)
    return None


def _fixed_effects(overload: OpOverload, name: str, writes: bool) -> tuple[Effect, ...]:
    if name in _ASSERTING:
        return (ASSERT,)
    if name in _PRINTING:
        return (OUTPUT,)
    if overload.namespace in ("_c10d_functional", "c10d", "c10d_functional"):
        return (communication_effect(""),)
    return (UNKNOWN,) if not overload._schema.returns and not writes else ()


def _convert_element_type(_: OpOverload, arguments: Any, keywords: Any) -> tuple[OpOverload, Any, Any]:
    return torch.ops.aten._to_copy.default, arguments[:1], (("dtype", dict(keywords).get("dtype") or arguments[1]),)


def _view(_: OpOverload, arguments: Any, keywords: Any) -> tuple[OpOverload, Any, Any]:
    return torch.ops.aten.view.default, arguments, keywords


def _clone(_: OpOverload, arguments: Any, keywords: Any) -> tuple[OpOverload, Any, Any]:
    return torch.ops.aten.clone.default, arguments, keywords


_REPLACEMENTS: dict[str, Replacement] = {
    "prims.convert_element_type.default": _convert_element_type,
    "aten.lift_fresh_copy.default": _clone,
    "aten._unsafe_view.default": _view,  # its schema does not say that the result is a view
}
"""Operators that mean the same as an ATen one which every emitter can call."""


def used_items(node: Node) -> set[int] | None:
    """Returns which items of a node's result are taken out, or None when something uses the result whole."""
    used = set()
    for user in node.users:
        if user.target is not operator.getitem or user.args[0] is not node:
            return None
        if user.users:
            used.add(user.args[1])
    return used  # type: ignore[return-value]
