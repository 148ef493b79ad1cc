"""Operator schemas: the operands that an operator writes and aliases, its effects, and the used results of a call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.fx import Node

from fxwrap.caching import bounded_cache
from fxwrap.torch_compat import FunctionSchema, OpOverload, is_composite, overload_name, takes_object, torch_schema
from fxwrap.wrapper_ir.effects import ASSERT, OUTPUT, UNKNOWN, Effect, communication_effect, random_effect
from fxwrap.wrapper_ir.line import values_in
from fxwrap.wrapper_ir.types import Operand, Value

_ASSERTION_OPERATORS = frozenset({
    "aten._assert_scalar.default", "aten._assert_async.default", "aten._assert_async.msg",
    "aten._assert_tensor_metadata.default",
})  # fmt: skip
_COLLECTIVES = "_c10d_functional"
_INTO_TENSORS = frozenset({"fxwrap.all_gather_into_tensors.default", "fxwrap.reduce_scatter_into_tensors.default"})
_COMMUNICATING_NAMESPACES = frozenset({_COLLECTIVES, "c10d", "c10d_functional", "symm_mem"})
_COMMUNICATING_OPERATORS = frozenset({
    *_INTO_TENSORS, "fxwrap_runtime.matmuls_reduce_scatter.default", "fxwrap_runtime.one_shot_all_reduce.default",
})  # fmt: skip
_OUTPUT_OPERATORS = frozenset({
    "aten._print.default", "fxwrap_runtime.print.default", "fxwrap_runtime.observe.default",
})  # fmt: skip

_UNDECLARED_VIEWS = {"aten.unsafe_split.Tensor": 0, "aten.unsafe_split_with_sizes.default": 0}
"""Operators whose results alias an argument, by its position, although their schemas do not declare it."""

_UNDECLARED_WRITES: dict[str, tuple[str, str | None]] = {
    "_c10d_functional.irecv.default": ("tensor", "tensor"),
    "_c10d_functional.batch_p2p_ops.default": ("tensors", None),
    "symm_mem.one_shot_all_reduce_copy.default": ("symm_buffer", None),
}
"""The argument that an operator writes although its schema does not declare it, and that which it returns.

`batch_p2p_ops` writes and returns those whose operation is "irecv".
"""

_EXACT_NAMESPACES = ("aten", "prims")
"""Namespaces of operators that always return a view if their schema declares one."""

ArgumentT = TypeVar("ArgumentT")
Arguments: TypeAlias = tuple[Operand, ...]
Keywords: TypeAlias = tuple[tuple[str, Operand], ...]
OverloadReplacement: TypeAlias = Callable[[OpOverload, Arguments, Keywords], tuple[OpOverload, Arguments, Keywords]]


@dataclass(frozen=True)
class OperatorSchema:
    """The properties of an overload's schema that lowering and import use.

    `name` is "namespace.name.overload". `mutated_arguments` are the names of the arguments it writes.
    `aliased_argument` is the position of the only argument that results alias, or, if `may_alias`, may alias
    (`reshape`, `contiguous`, custom operators). `is_out_variant` is whether all that it writes are out arguments, each
    a tensor: calls with lists of them, or with optional ones, mutate operands. `mutated_returns` has for each return
    the name of the written argument that it is, or None.
    """

    name: str
    argument_names: tuple[str, ...]
    return_count: int
    mutated_arguments: tuple[str, ...]
    is_out_variant: bool
    aliased_argument: int | None
    may_alias: bool
    mutated_returns: tuple[str | None, ...]
    is_random: bool
    fixed_effects: tuple[Effect, ...]
    replacement: OverloadReplacement | None

    @property
    def is_pure(self) -> bool:
        """Whether a call without used results is dead code."""
        return not self.mutated_arguments and not self.is_random and not self.fixed_effects

    def operand(
        self, name: str, arguments: Sequence[ArgumentT], keywords: Sequence[tuple[str, ArgumentT]]
    ) -> ArgumentT | None:
        """Returns the argument of a call by its name in the schema, or None if the call has none."""
        position = self.argument_names.index(name)
        return arguments[position] if position < len(arguments) else dict(keywords).get(name)

    def written_arguments(
        self, arguments: Sequence[ArgumentT], keywords: Sequence[tuple[str, ArgumentT]]
    ) -> tuple[object, ...]:
        """Returns the arguments that a call writes, in the schema's order: tensors or lists of them."""
        written: list[Any] = [self.operand(name, arguments, keywords) for name in self.mutated_arguments]
        if "op_list" not in self.argument_names:
            return tuple(written)
        operations: Any = self.operand("op_list", arguments, keywords)
        return tuple([item for item, name in zip(written[0], operations, strict=True) if name == "irecv"])

    def mutated_operands(
        self, arguments: Sequence[Operand], keywords: Sequence[tuple[str, Operand]]
    ) -> tuple[Value, ...]:
        """Returns the values that a call writes, in the schema's order."""
        return tuple(values_in(self.written_arguments(arguments, keywords)))

    def returned_operands(
        self, arguments: Sequence[ArgumentT], keywords: Sequence[tuple[str, ArgumentT]]
    ) -> tuple[ArgumentT | None, ...] | None:
        """Returns the operands that a call returns if every return is a written argument, else None."""
        names = [name for name in self.mutated_returns if name is not None]
        if len(names) < len(self.mutated_returns):
            return None
        return tuple([self.operand(name, arguments, keywords) for name in names])

    def effects(self, devices: Sequence[torch.device]) -> tuple[Effect, ...]:
        """Returns the effects of a call with operands and results on these devices."""
        if not self.is_random:
            return self.fixed_effects
        return (*self.fixed_effects, *sorted({random_effect(str(device)) for device in devices}, key=str))


@bounded_cache(4096)
def operator_schema(overload: OpOverload) -> OperatorSchema:
    """Returns the properties of an overload's schema."""
    schema = torch_schema(overload)
    arguments = schema.arguments
    written = [item for item in arguments if item.alias_info is not None and item.alias_info.is_write]
    aliased = [
        index for index, item in enumerate(arguments)
        if item.alias_info is not None and not item.alias_info.is_write
    ]  # fmt: skip
    name = operator_name(overload)
    undeclared = _UNDECLARED_WRITES.get(name)
    return OperatorSchema(
        name,
        tuple([item.name for item in arguments]),
        len(schema.returns),
        tuple([item.name for item in written]) if undeclared is None else undeclared[:1],
        bool(written) and all(item.is_out and str(item.type) == "Tensor" for item in written),
        _UNDECLARED_VIEWS.get(name, aliased[0] if len(aliased) == 1 else None),
        is_composite(overload) or overload.namespace not in _EXACT_NAMESPACES,
        _mutated_returns(schema) if undeclared is None else undeclared[1:],
        torch.Tag.nondeterministic_seeded in overload.tags,
        _fixed_effects(overload, name, bool(written)),
        _REPLACEMENTS.get(name),
    )


def is_assertion(target: object) -> bool:
    """Returns whether an operator only raises an error if a condition is false."""
    return isinstance(target, OpOverload) and operator_name(target) in _ASSERTION_OPERATORS


def is_collective(target: object) -> bool:
    """Returns whether an operator starts a collective or point-to-point communication, or waits for it."""
    if not isinstance(target, OpOverload):
        return False
    return target.namespace == _COLLECTIVES or operator_name(target) in _INTO_TENSORS


def operator_name(overload: OpOverload) -> str:
    """Returns "namespace.name.overload", the name of an operator in the IR."""
    namespace, _, name = torch_schema(overload).name.partition("::")
    return f"{namespace}.{name}.{overload_name(overload)}"


def _mutated_returns(schema: FunctionSchema) -> tuple[str | None, ...]:
    """Returns for each return the name of the first written argument with its alias set, or None."""
    written: dict[frozenset[str], str] = {}
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.setdefault(frozenset(argument.alias_info.before_set), argument.name)
    return tuple([
        written.get(frozenset(item.alias_info.before_set))
        if item.alias_info is not None and item.alias_info.is_write else None
        for item in schema.returns
    ])  # fmt: skip


def _fixed_effects(overload: OpOverload, name: str, writes: bool) -> tuple[Effect, ...]:
    if name in _ASSERTION_OPERATORS:
        return (ASSERT,)
    if name in _OUTPUT_OPERATORS:
        return (OUTPUT,)
    if overload.namespace in _COMMUNICATING_NAMESPACES or name in _COMMUNICATING_OPERATORS:
        return (communication_effect(""),)
    schema = torch_schema(overload)  # a call may change the objects that it takes
    return (UNKNOWN,) if takes_object(schema) or (not schema.returns and not writes) else ()


def _convert_element_type(
    _: OpOverload, arguments: Arguments, keywords: Keywords
) -> tuple[OpOverload, Arguments, Keywords]:
    return torch.ops.aten._to_copy.default, arguments[:1], (("dtype", dict(keywords).get("dtype") or arguments[1]),)


_REPLACEMENTS: dict[str, OverloadReplacement] = {
    "prims.convert_element_type.default": _convert_element_type,
    "aten.lift_fresh_copy.default": lambda _, *call: (torch.ops.aten.clone.default, *call),
    "aten._unsafe_view.default": lambda _, *call: (torch.ops.aten.view.default, *call),  # its schema declares no view
}
"""Operators with an equivalent ATen operator that every emitter can call."""


def used_result_indices(node: Node) -> set[int] | None:
    """Returns the indices of the used items of a node's result, or None if something uses the whole result."""
    indices: set[int] = set()
    for user in node.users:
        if user.target is not operator.getitem or user.args[0] is not node:
            return None
        if user.users:
            if not isinstance(user.args[1], int):
                return None
            indices.add(user.args[1])
    return indices
