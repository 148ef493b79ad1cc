"""Scatter and index_put calls that no kernel computes, as lines of the IR.

The lines write in place: a functional call becomes a copy of its base, then the line. The base is not copied if the
program owns it and nothing uses it later; the result then reuses its memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxwrap.fx_passes.operators import IN_PLACE_VARIANTS
from fxwrap.lines import SCATTER_OPERATORS, IndexPut, Mutate, Scatter
from fxwrap.lowering.builder import Builder, Keywords, Operand
from fxwrap.lowering.calls.copies import emit_result_copy, reuse_operand_memory
from fxwrap.wrapper_ir import LineBase, Origin, Value, leaves
from fxwrap.wrapper_ir.operators import OperatorSchema

_SCATTER_LINES = frozenset({
    "aten.scatter_.src", "aten.scatter_.value", "aten.scatter_.reduce", "aten.scatter_.value_reduce",
    "aten.scatter_reduce_.two",
})  # fmt: skip
_INDEX_PUT_LINES = frozenset({"aten.index_put_.default", "aten.index_put_.hacked_twin"})


@dataclass(frozen=True)
class IndirectWrite:
    """A call that writes its first argument, or a copy of it, at indirect indices.

    Fields:
        schema: the operator's schema.
        arguments, keywords: the call's operands.
        in_place_operator: the name of the in-place operator.
        base: the tensor that the call writes, or copies first.
        is_functional: whether the base keeps its content.
    """

    schema: OperatorSchema
    arguments: tuple[Operand, ...]
    keywords: Keywords
    in_place_operator: str
    base: Value
    is_functional: bool

    def argument(self, name: str, default: Operand = None) -> Operand:
        """Returns an argument by its name in the schema; the default if it is None, or not in the schema."""
        if name not in self.schema.argument_names:
            return default
        argument = self.schema.operand(name, self.arguments, self.keywords)
        return default if argument is None else argument

    def operands(self) -> list[Value]:
        """Returns the call's tensors without its base."""
        return [leaf for leaf in leaves((self.arguments[1:], self.keywords)) if isinstance(leaf, Value)]

    def dedicated_line(self, target: Value, origin: Origin) -> LineBase | None:
        """Returns the scatter or index_put line on the target's memory, or None if the IR has no such line."""
        if self.in_place_operator in _INDEX_PUT_LINES:
            accumulate = self.argument("accumulate", False)
            return IndexPut(target, self.argument("indices"), self.argument("values"), accumulate, origin=origin)
        reduce = self.argument("reduce", "")
        if self.in_place_operator not in _SCATTER_LINES or reduce not in SCATTER_OPERATORS:
            return None
        source = self.argument("src" if "src" in self.schema.argument_names else "value")
        dim, index, include_self = self.argument("dim"), self.argument("index"), self.argument("include_self", True)
        return Scatter(target, index, source, dim, reduce, include_self, origin=origin)

    def mutation(self, target: Value, origin: Origin) -> Mutate:
        """Returns the call of the in-place operator on the target's memory."""
        arguments = (target, *self.arguments[1:])
        return Mutate((), self.in_place_operator, arguments, (target,), self.keywords, origin=origin)


def match_indirect_write(
    schema: OperatorSchema, arguments: tuple[Operand, ...], keywords: Keywords
) -> IndirectWrite | None:
    """Returns the indirect write that a call is, or None."""
    variant = IN_PLACE_VARIANTS.get(schema.name)
    operator = variant or (schema.name if schema.name in _SCATTER_LINES | _INDEX_PUT_LINES else None)
    if operator is None or not arguments or not isinstance(arguments[0], Value):
        return None
    return IndirectWrite(schema, arguments, keywords, operator, arguments[0], variant is not None)


def lower_indirect_write(
    builder: Builder, node: Node, write: IndirectWrite, fake: torch.Tensor, dead_roots: Collection[str]
) -> bool:
    """Emits an indirect write and records the operand of its node; returns whether it did.

    `dead_roots` are the names of the roots that the call may overwrite: the program owns them and nothing uses them
    after it. A call without a dedicated line stays an extern call, unless it can overwrite its base.
    """
    origin, storages = builder.origin(node), builder.storages
    target: Value | None = write.base
    if write.is_functional:
        others = {storages.root(operand).name for operand in write.operands()}
        target = reuse_operand_memory(builder, write.base, fake, dead_roots, others)
    has_line = write.dedicated_line(write.base, origin) is not None
    if not has_line and (target is None or not write.is_functional):
        return False
    if target is None:
        target = emit_result_copy(builder, node, node.name, fake, write.base)
    storages.mark_mutated(target)
    builder.emit(write.dedicated_line(target, origin) or write.mutation(target, origin))
    builder.env[node] = target
    return True
