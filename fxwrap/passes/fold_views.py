"""Folding of views: views of views become views of the base, and redundant views are eliminated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fxwrap import wrapper_ir as ir
from fxwrap.devices import language_traits
from fxwrap.lines import Alloc, Bind, Launch, View

_OPERANDS = (ir.Role.READ, ir.Role.WRITE, ir.Role.CONSUME, ir.Role.ATTR)


def fold_views(program: ir.Program) -> ir.Program:
    """Returns the program without redundant views.

    A `memory.view` of a view becomes a view of its base. Uses of a view of the base's type become uses of the base;
    kernels with pointer arguments use the base of any view at the same offset, unless they have other tensors of the
    base: of these the types say which elements each has. Allocations that only kernels use
    directly get the type of their views. Uses of a view become uses of the first one of its base and type. A returned
    view becomes its base, or that first view, if no other returned value is the same tensor. Unused views are
    eliminated. Linear in the number of lines.
    """
    pointers = {kernel.name for kernel in program.kernels if language_traits(kernel.language).raw_pointer_arguments}
    folder = _ViewFolder(pointers)
    functions = tuple([(name, folder.block(block, ())) for name, block in program.functions])
    return program.replace(body=folder.block(program.body, ir.program_arguments(program)), functions=functions)


class _ViewFolder:
    """Folds views in blocks. `pointers` are the kernels with pointer arguments, which ignore types."""

    def __init__(self, pointers: Collection[str]) -> None:
        self.pointers = pointers
        self.folded: dict[int, tuple[ir.Block, ir.Block]] = {}  # by identity of the block

    def block(self, block: ir.Block, arguments: Sequence[ir.Value]) -> ir.Block:
        """Returns a block without redundant views. `arguments` are visible besides its own."""
        if id(block) not in self.folded:
            lines = self._fold(block.lines, [*arguments, *block.arguments])
            self.folded[id(block)] = block, ir.Block(block.arguments, lines)
        return self.folded[id(block)][1]

    def _fold(self, lines: Sequence[ir.LineBase], arguments: Sequence[ir.Value]) -> tuple[ir.LineBase, ...]:
        base_of = _bases(lines)
        if base_of:
            retyped = self._allocation_types(lines, base_of)
            base_of = {name: retyped.get(base.name, base) for name, base in base_of.items()}
            lines = [self._rewrite_operands(line, base_of, retyped) for line in lines]
            lines = _merge_equal_views(lines)
            lines[-1] = _substitute(lines[-1], _replaceable(lines, base_of, arguments), _same_type)
        nested = [ir.map_line(line, lambda inner: self.block(inner, ()), (ir.Role.BLOCK,)) for line in lines]
        return _eliminate_dead_views(nested)

    def _takes_pointers(self, line: ir.LineBase) -> bool:
        return isinstance(line, Launch) and line.kernel in self.pointers

    def _allocation_types(self, lines: Sequence[ir.LineBase], base_of: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Returns allocated values with the most frequent type of their views, if operators use only views."""
        allocated = {line.result.name: line.result for line in lines if isinstance(line, Alloc)}
        view_types: dict[str, Counter[ir.TensorType]] = {name: Counter() for name in allocated}
        for line in lines:
            if isinstance(line, View) or self._takes_pointers(line):
                continue
            released = {value.name for value in ir.consumed(line)}
            for value in ir.used(line):
                base = base_of.get(value.name)
                if value.name in released:
                    continue
                if base is None:
                    view_types.pop(value.name, None)
                elif base.name in view_types:
                    view_types[base.name][value.tensor_type] += 1
        types = {name: counts.most_common(1)[0][0] for name, counts in view_types.items() if counts}
        covering = {name: item for name, item in types.items() if _covers_exactly(item, allocated[name].tensor_type)}
        return {name: ir.Value(name, item) for name, item in covering.items()}

    def _rewrite_operands(
        self, line: ir.LineBase, base_of: Mapping[str, ir.Value], retyped: Mapping[str, ir.Value]
    ) -> ir.LineBase:
        """Returns a line with retyped allocations that uses bases instead of equivalent views."""
        if retyped:
            line = ir.map_line(line, lambda item: retyped.get(item.name, item) if type(item) is ir.Value else item)
        if isinstance(line, View):
            base = base_of[line.result.name]
            return line if base is line.base else line.replace(base=base)
        if line.terminator or isinstance(line, Bind):
            return line
        line = _substitute(line, base_of, _same_type)
        return _substitute(line, _only_bases(line, base_of), _same_start) if self._takes_pointers(line) else line


def _bases(lines: Iterable[ir.LineBase]) -> dict[str, ir.Value]:
    """Returns the base of each view by the view's name: the first value in its chain that is no view."""
    bases: dict[str, ir.Value] = {}
    for line in lines:
        if isinstance(line, View):
            bases[line.result.name] = bases.get(line.base.name, line.base)
    return bases


def _only_bases(line: ir.LineBase, base_of: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    """Returns the bases of those operands of a line that are the only ones of their bases."""
    operands = {value.name for value in ir.used(line)}
    sharing = Counter([base_of[name].name if name in base_of else name for name in operands])
    return {name: base_of[name] for name in operands if name in base_of and sharing[base_of[name].name] == 1}


def _replaceable(
    lines: Sequence[ir.LineBase], base_of: Mapping[str, ir.Value], arguments: Iterable[ir.Value]
) -> dict[str, ir.Value]:
    """Returns the bases of returned views whose root is defined here and has no other returned value."""
    external = {value.name for value in arguments}
    root_of = ir.alias_roots(lines, arguments)
    results = dict.fromkeys([value.name for value in ir.reads(lines[-1])])
    sharing = Counter([root_of[name] for name in results])
    alone = [name for name in results if sharing[root_of[name]] == 1 and root_of[name] not in external]
    return {name: base_of[name] for name in alone if name in base_of}


def _covers_exactly(type_: ir.TensorType, memory: ir.TensorType) -> bool:
    """Whether a type covers exactly the memory of another, without additional symbols."""
    if not type_.storage_offset == memory.storage_offset == 0 or type_.storage_bytes != memory.storage_bytes:
        return False
    return type_.element_count == memory.element_count and {*ir.type_symbols(type_)} <= {*ir.type_symbols(memory)}


def _merge_equal_views(lines: Sequence[ir.LineBase]) -> list[ir.LineBase]:
    """Returns lines that use the first view of each base and type in place of others, which are distinct as results."""
    first: dict[tuple[str, ir.Type], ir.Value] = {}
    views = [line for line in lines if isinstance(line, View)]
    equal = {view.result.name: first.setdefault((view.base.name, view.result.type), view.result) for view in views}
    if len(first) == len(views):
        return list(lines)
    returned = Counter([equal[name].name for name in {value.name for value in ir.reads(lines[-1])} & equal.keys()])
    alone = {name: view for name, view in equal.items() if returned[view.name] == 1}
    return [
        line if isinstance(line, Bind) else _substitute(line, alone if line.terminator else equal, _same_type)
        for line in lines
    ]


def _substitute(
    line: ir.LineBase, others: Mapping[str, ir.Value], same: Callable[[ir.Value, ir.Value], bool]
) -> ir.LineBase:
    """Returns a line with other values as operands, those that are the `same`."""

    def other_or_itself(item: object) -> object:
        other = others.get(item.name) if type(item) is ir.Value else None
        return other if other is not None and type(item) is ir.Value and same(item, other) else item

    changed: ir.LineBase = ir.map_line(line, other_or_itself, _OPERANDS)
    return changed


def _same_type(view: ir.Value, base: ir.Value) -> bool:
    return view.type == base.type


def _same_start(view: ir.Value, base: ir.Value) -> bool:
    return view.tensor_type.storage_offset == base.tensor_type.storage_offset


def _eliminate_dead_views(lines: Sequence[ir.LineBase]) -> tuple[ir.LineBase, ...]:
    read: set[str] = set()
    live = []
    for line in reversed(lines):
        if isinstance(line, View) and line.result.name not in read:
            continue
        read.update([value.name for value in ir.used(line)])
        live.append(line)
    return tuple(reversed(live))
