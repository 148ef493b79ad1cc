"""Views as early as possible and once, so that matmuls which share an operand can become one operator."""

from __future__ import annotations

from collections.abc import Iterator

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, ExternCall, View


def hoist_views(program: ir.Program) -> ir.Program:
    """Returns the program whose views of static sizes directly follow the values that they are views of.

    Views of inputs and constants come first in the body. A view reads no elements, so writes do not matter; those of
    allocations stay behind the first write. Equal `memory.view` lines become one unless they are returned. A fused
    operator takes the place of one of the lines that it replaces, where all its operands must be defined: in a traced
    graph, the transposed weight of each matmul directly precedes that matmul. Linear in the number of lines.
    """
    hoisting = _Hoisting(program.body)
    if not hoisting.views:
        return program
    return program.replace(body=ir.Block(program.body.arguments, tuple(hoisting.lines())))


class _Hoisting:
    """The views of a block that move.

    Attributes:
        views: by the name of the base; "" for bases that the block does not define.
        values: the view that replaces each one that is left out, by name.
    """

    def __init__(self, block: ir.Block) -> None:
        self.block = block
        self.first = next((i for i, line in enumerate(block.lines) if ir.defined_symbol(line) is None), 0)
        self.views: dict[str, list[ir.LineBase]] = {}
        self.values: dict[str, ir.Value] = {}
        defined = {value.name for line in block.lines for value in ir.defined(line)}
        fixed = {value.name for line in block.lines if isinstance(line, Alloc) for value in ir.defined(line)}
        returned = {value.name for line in block.lines if line.terminator for value in ir.used(line)}
        equal: dict[tuple[str, ir.TensorType], ir.Value] = {}
        for line in block.lines[self.first :]:
            base = _base(line)
            if base is None or base.name in fixed:
                continue
            base = self.values.get(base.name, base)
            if isinstance(line, View) and line.result.name not in returned:
                first = equal.setdefault((base.name, line.result.tensor_type), line.result)
                if first is not line.result:
                    self.values[line.result.name] = first
            self.views.setdefault(base.name if base.name in defined else "", []).append(line)

    def lines(self) -> Iterator[ir.LineBase]:
        """Yields the lines of the block with views moved."""
        moved = {id(line) for items in self.views.values() for line in items}
        for index, line in enumerate(self.block.lines):
            if index == self.first:
                for view in self.views.get("", ()):
                    yield from self._with_views(view)
            if id(line) not in moved:
                yield from self._with_views(line)

    def _with_views(self, line: ir.LineBase) -> Iterator[ir.LineBase]:
        if any(value.name in self.values for value in ir.defined(line)):
            return  # its views are those of the equal view
        yield ir.map_line(line, self._renamed) if self.values else line
        for value in ir.defined(line):
            for view in self.views.get(value.name, ()):
                yield from self._with_views(view)

    def _renamed(self, item: object) -> object:
        return self.values.get(item.name, item) if type(item) is ir.Value else item


def _base(line: ir.LineBase) -> ir.Value | None:
    """Returns the value that a line does nothing but define views of, or None."""
    if not isinstance(line, View | ExternCall) or line.stream != 0 or ir.writes(line):
        return None
    if isinstance(line, ExternCall) and (line.outs or line.effect_set):
        return None
    operands, results = list(dict.fromkeys(ir.used(line))), ir.defined(line)
    if len(operands) != 1 or not results or not all(_is_static(value) for value in (*operands, *results)):
        return None
    return operands[0] if all(line.alias_of(value) == operands[0] for value in results) else None


def _is_static(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.type.is_static
