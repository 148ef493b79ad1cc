"""Views that direct code writes as plain tensors on the storage of their base, a chain of them as one.

The numbers of a symbolic layout are arithmetic on the graph's numbers that are in scope: torch.fx drops the name of
each value after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch.fx import Node

from fxwrap.converters.fx.types import known_types, untracked_views
from fxwrap.symbolic import FunctionSpec, PythonPrinter, Size, difference
from fxwrap.symbolic.printing import Precedence
from fxwrap.wrapper_ir import TensorType

_OPERATOR_FUNCTIONS = frozenset({"floordiv", "cleandiv", "mod", "python_mod", "modular_indexing"})
"""Functions that are operators in Python, whose text needs no name."""


class StridedViews:
    """The views of a graph that are plain tensors, and the arguments of `strided_view` for each.

    `folded` are those that are only the base of one other view, which is written as a view of their root.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._untracked = untracked_views(nodes)
        self._known = known_types(nodes)
        self._positions = {node: position for position, node in enumerate(nodes)}
        self._last_uses = {operand: node for node in nodes for operand in node.all_input_nodes}
        self._numbers: dict[Size, list[Node]] = {}
        for node, item in self._known.items():
            if not isinstance(item, TensorType):
                self._numbers.setdefault(item, []).append(node)
        self.folded: set[Node] = set()
        self._arguments: dict[Node, list[str] | None] = {}
        for node in nodes:
            if node not in self._untracked:
                continue
            if node not in self._arguments:
                self._arguments[node] = self._write(node)
            if self._is_folded(node):
                self.folded.add(node)

    def arguments(self, node: Node) -> list[str] | None:
        """Returns the texts of the base, sizes, strides and offset of a view; None for any other node."""
        return self._arguments.get(node)

    def _is_folded(self, node: Node) -> bool:
        users = list(node.users)
        if len(users) != 1 or self._arguments[node] is None or users[0] not in self._untracked:
            return False
        base: Any = node.args[0]
        last = self._last_uses[base]  # the generated code drops the base there
        if last is not node and self._positions[last] < self._positions[users[0]]:
            return False
        self.folded.add(node)
        arguments = self._write(users[0])
        self.folded.discard(node)
        if arguments is None:
            return False
        self._arguments[users[0]] = arguments
        return True

    def _types(self, node: Node) -> tuple[TensorType, TensorType] | None:
        """Returns the types of a view's base and of the view, if both are known."""
        base: Any = node.args[0] if node.args else None
        old, new = self._known.get(base), self._known.get(node)
        if not isinstance(old, TensorType) or not isinstance(new, TensorType):
            return None
        return None if old.dtype.is_complex or new.dtype.is_complex else (old, new)  # a conjugate bit may be set

    def _write(self, node: Node) -> list[str] | None:
        if self._types(node) is None:
            return None
        root: Any = node.args[0]
        chain = {node}
        while root in self.folded:
            chain.add(root)
            root = root.args[0]
        old: Any = self._known[root]
        new: Any = self._known[node]
        printer = _NumberPrinter(lambda expression: self._name_in_scope(expression, node, chain))
        try:
            sizes, strides = ([printer.print(number) for number in numbers] for numbers in (new.sizes, new.strides))
            distance = printer.print(difference(new.storage_offset, old.storage_offset))
        except _NotInScope:
            return None
        return [repr(root), _tuple(sizes), _tuple(strides), *([] if distance == "0" else [distance])]

    def _name_in_scope(self, expression: sympy.Basic, user: Node, chain: set[Node]) -> str | None:
        """Returns the name of a number that is not dropped before a node; a chain's names are dropped at its end."""
        for number in self._numbers.get(expression, ()):
            last = self._last_uses.get(number)
            if last is not None and self._positions[number] < self._positions[user]:
                if last in chain or self._positions[last] > self._positions[user]:
                    return repr(number)
        return None


class _NotInScope(Exception):
    """An expression has no text by names that are in scope."""


class _NumberPrinter(PythonPrinter):
    """Prints expressions by the names of numbers; raises _NotInScope if there are none."""

    def __init__(self, name_of: Callable[[sympy.Basic], str | None]) -> None:
        super().__init__()
        self._name_of = name_of

    def function(self, spec: FunctionSpec, operands: Sequence[sympy.Basic]) -> tuple[str, Precedence]:
        if spec.name not in _OPERATOR_FUNCTIONS:
            raise _NotInScope
        return super().function(spec, operands)

    def _render(self, node: sympy.Basic) -> tuple[str, Precedence]:
        if not isinstance(node, sympy.Number):
            name = self._name_of(node)
            if name is not None:
                return name, Precedence.ATOM
            if isinstance(node, sympy.Symbol):
                raise _NotInScope
        return super()._render(node)


def _tuple(texts: list[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
