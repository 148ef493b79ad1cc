"""Writing at computed places, where no kernel does it: scatter and index_put as lines of their own.

The lines write in place, so that a functional call becomes a copy of its base, and then the line. No copy is made of a
base that the program owns and that nothing reads later: its memory is what the result is in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.lines import SCATTER_OPERATORS, IndexPut, Mutate, Scatter
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.copies import new_copy, taken_over
from fxwrap.lowering.operators import IN_PLACE_FORMS
from fxwrap.wrapper_ir import LineBase, Origin, Value, leaves
from fxwrap.wrapper_ir.operators import OperatorFacts

_SCATTER_LINES = frozenset({
    "aten.scatter_.src", "aten.scatter_.value", "aten.scatter_.reduce", "aten.scatter_.value_reduce",
    "aten.scatter_reduce_.two",
})  # fmt: skip
_INDEX_PUT_LINES = frozenset({"aten.index_put_.default", "aten.index_put_.hacked_twin"})


@dataclass(frozen=True)
class Placing:
    """A call that writes its first argument, or a copy of it, at computed places.

    Fields:
        facts: what its schema says; arguments, keywords: what it is given.
        form: the name of the operator that writes in place.
        base: what is written, or copied first.
        is_functional: whether the base stays as it is.
    """

    facts: OperatorFacts
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    form: str
    base: Value
    is_functional: bool

    def given(self, name: str, default: Any = None) -> Any:
        """Returns an argument by its name in the schema, the default where it was left out or there is none."""
        if name not in self.facts.argument_names:
            return default
        found = self.facts.operand(name, self.arguments, self.keywords)
        return default if found is None else found

    def operands(self) -> list[Value]:
        """Returns the tensors that it is given besides its base."""
        return [leaf for leaf in leaves((self.arguments[1:], self.keywords)) if isinstance(leaf, Value)]

    def own_line(self, target: Value, origin: Origin) -> LineBase | None:
        """Returns the line that does it in the target's memory, or None where the IR has no line of its own."""
        if self.form in _INDEX_PUT_LINES:
            accumulate = self.given("accumulate", False)
            return IndexPut(target, self.given("indices"), self.given("values"), accumulate, origin=origin)
        reduce = self.given("reduce", "")
        if self.form not in _SCATTER_LINES or reduce not in SCATTER_OPERATORS:
            return None
        source = self.given("src" if "src" in self.facts.argument_names else "value")
        dim, index, include_self = self.given("dim"), self.given("index"), self.given("include_self", True)
        return Scatter(target, index, source, dim, reduce, include_self, origin=origin)

    def mutation(self, target: Value, origin: Origin) -> Mutate:
        """Returns the call that does it in the target's memory."""
        arguments = (target, *self.arguments[1:])
        return Mutate((), self.form, arguments, (target,), self.keywords, origin=origin)


def placing_of(
    facts: OperatorFacts, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]
) -> Placing | None:
    """Returns a call as one that writes at computed places, or None where it is another."""
    in_place = IN_PLACE_FORMS.get(facts.name)
    form = in_place or (facts.name if facts.name in _SCATTER_LINES | _INDEX_PUT_LINES else None)
    if form is None or not arguments or not isinstance(arguments[0], Value):
        return None
    return Placing(facts, arguments, keywords, form, arguments[0], in_place is not None)


def lower_placing(builder: Builder, node: Node, placing: Placing, fake: torch.Tensor, dying: Collection[str]) -> bool:
    """Emits a call that writes at computed places and records what its node stands for; says whether it did.

    `dying` are the roots, by name, that the call may write: the program owns them and nothing touches them after it,
    or nothing can tell. A call without a
    line of its own is left to the caller, unless it can write into a base that dies.
    """
    origin = builder.origin(node)
    target: Value | None = placing.base
    if placing.is_functional:
        others = {builder.root_of[operand.name].name for operand in placing.operands()}
        target = taken_over(builder, placing.base, fake, dying, others)
    has_line = placing.own_line(placing.base, origin) is not None
    if not has_line and (target is None or not placing.is_functional):
        return False
    if target is None:
        target = new_copy(builder, node, node.name, fake, placing.base)
    builder.mutated.add(builder.root_of[target.name].name)
    builder.emit(placing.own_line(target, origin) or placing.mutation(target, origin))
    builder.env[node] = target
    return True
