"""Views of views become views of what the first was made from, and views that say nothing new are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fxwrap.device_registry import language_facts
from fxwrap.lines import Alloc, Bind, Launch, View
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Program,
    Role,
    TensorType,
    Value,
    consumed,
    map_line,
    program_arguments,
    reads,
    roots,
    type_symbols,
    used,
)

_OPERANDS = (Role.READ, Role.WRITE, Role.CONSUME, Role.ATTR)


def fold_views(program: Program) -> Program:
    """Returns the program without views that nothing needs.

    A `memory.view` of another one's result becomes a view of that one's base. What reads a view of the base's own type
    reads the base; a kernel, which takes addresses, reads the base of any view that begins where the base does. Memory
    that is allocated for kernels gets the type under which operators read it. A view that is given back is its base if
    it is all that remains of a root made here. Views that nobody reads then are left out. Linear in the number of
    lines.
    """
    pointers = {kernel.name for kernel in program.kernels if language_facts(kernel.language).only_addresses}
    folding = _Folding(pointers)
    functions = tuple([(name, folding.block(block, ())) for name, block in program.functions])
    return program.replace(body=folding.block(program.body, program_arguments(program)), functions=functions)


class _Folding:
    """Folds blocks; one that several lines share stays one. `pointers` are the kernels that take addresses alone."""

    def __init__(self, pointers: Collection[str]) -> None:
        self.pointers = pointers
        self.folded: dict[int, tuple[Block, Block]] = {}  # by identity, with the block itself to keep it alive

    def block(self, block: Block, arguments: Sequence[Value]) -> Block:
        """Returns a block, which sees `arguments` besides its own, without the views that nothing needs."""
        known = self.folded.get(id(block))
        if known is None:
            known = block, Block(block.arguments, self._fold(block.lines, [*arguments, *block.arguments]))
            self.folded[id(block)] = known
        return known[1]

    def _fold(self, lines: Sequence[LineBase], arguments: Sequence[Value]) -> tuple[LineBase, ...]:
        base_of = _bases(lines)
        if base_of:
            retyped = self._retyped(lines, base_of)
            base_of = {name: retyped.get(base.name, base) for name, base in base_of.items()}
            lines = [self._reread(line, base_of, retyped) for line in lines]
            lines[-1] = _with_bases(lines[-1], _replaceable(lines, base_of, arguments), _same_type)
        nested = [map_line(line, lambda inner: self.block(inner, ()), (Role.BLOCK,)) for line in lines]
        return _without_unread(nested)

    def _takes_pointers(self, line: LineBase) -> bool:
        return isinstance(line, Launch) and line.kernel in self.pointers

    def _retyped(self, lines: Sequence[LineBase], base_of: Mapping[str, Value]) -> dict[str, Value]:
        """Returns allocated memory with another type: the one it is read with most often, where that is not its own."""
        wishes: dict[str, Counter[Any]] = {line.result.name: Counter() for line in lines if isinstance(line, Alloc)}
        for line in lines:
            gone = {value.name for value in consumed(line)}
            for value in used(line):
                base = base_of.get(value.name)
                if isinstance(line, View) or value.name in gone:
                    continue
                if base is None and not self._takes_pointers(line):
                    wishes.pop(value.name, None)  # read as what it is
                elif base is not None and base.name in wishes and not self._takes_pointers(line):
                    wishes[base.name][value.type] += 1
        allocated = [line.result for line in lines if isinstance(line, Alloc) and wishes.get(line.result.name)]
        chosen = [(value, wishes[value.name].most_common(1)[0][0]) for value in allocated]
        return {value.name: Value(value.name, type_) for value, type_ in chosen if _fills(type_, value.tensor_type)}

    def _reread(self, line: LineBase, base_of: Mapping[str, Value], retyped: Mapping[str, Value]) -> LineBase:
        """Returns a line with allocated memory under its new type, which reads bases where that is the same to it."""
        if retyped:
            line = map_line(line, lambda item: retyped.get(item.name, item) if type(item) is Value else item)
        if isinstance(line, View):
            base = base_of[line.result.name]
            return line if base is line.base else line.replace(base=base)
        if line.terminator or isinstance(line, Bind):
            return line
        return _with_bases(line, base_of, _same_start if self._takes_pointers(line) else _same_type)


def _bases(lines: Iterable[LineBase]) -> dict[str, Value]:
    """Returns what each view is a view of, by the view's name: the first value before it that is none."""
    found: dict[str, Value] = {}
    for line in lines:
        if isinstance(line, View):
            found[line.result.name] = found.get(line.base.name, line.base)
    return found


def _replaceable(
    lines: Sequence[LineBase], base_of: Mapping[str, Value], arguments: Iterable[Value]
) -> dict[str, Value]:
    """Returns, of the views that are given back, those whose root is made here and is given back by nothing else."""
    given = {value.name for value in arguments}
    root_of = roots(lines, arguments)
    results = dict.fromkeys([value.name for value in reads(lines[-1])])
    sharing = Counter([root_of[name] for name in results])
    alone = [name for name in results if sharing[root_of[name]] == 1 and root_of[name] not in given]
    return {name: base_of[name] for name in alone if name in base_of}


def _fills(type_: TensorType, memory: TensorType) -> bool:
    """Whether a type takes exactly the memory of another, from its start, and needs no symbol to be said beyond its."""
    if not type_.storage_offset == memory.storage_offset == 0 or type_.storage_bytes != memory.storage_bytes:
        return False
    return type_.element_count == memory.element_count and {*type_symbols(type_)} <= {*type_symbols(memory)}


def _with_bases(line: LineBase, base_of: Mapping[str, Value], same: Callable[[Value, Value], bool]) -> LineBase:
    def base_or_itself(item: Any) -> Any:
        if type(item) is not Value:
            return item
        base = base_of.get(item.name)
        return base if base is not None and same(item, base) else item

    changed: LineBase = map_line(line, base_or_itself, _OPERANDS)
    return changed


def _same_type(view: Value, base: Value) -> bool:
    return view.type == base.type


def _same_start(view: Value, base: Value) -> bool:
    return view.tensor_type.storage_offset == base.tensor_type.storage_offset


def _without_unread(lines: Sequence[LineBase]) -> tuple[LineBase, ...]:
    read: set[str] = set()
    kept = []
    for line in reversed(lines):
        if isinstance(line, View) and line.result.name not in read:
            continue
        read.update([value.name for value in used(line)])
        kept.append(line)
    kept.reverse()
    return tuple(kept)
