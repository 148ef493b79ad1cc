"""Copy coalescing: a tensor that is a copy of another, or is copied into it, uses the other's memory.

A functional graph says `y = copy of x`, a write of `y`, and perhaps `copy y into x`, or into a slice of it. As register
coalescing does for moves, the pass lets `y` be the memory of `x` if their live ranges do not interfere: between a write
of one and the copy that makes them equal again, nothing accesses the other. Then the copies do nothing and are removed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, ExternCall, Free, Mutate, PoolSlice, View
from fxwrap.lines.frees import insert_frees
from fxwrap.symbolic import Size, total
from fxwrap.torch_compat import in_place_of_functional
from fxwrap.wrapper_ir import LineBase, TensorType, Value

_Current: TypeAlias = Literal["both", "target", "copy"]
"""Which of two tensors has the current content of the memory that they would share."""


def coalesce_copies(
    lines: Sequence[LineBase],
    arguments: Iterable[Value],
    copies: Collection[str],
    results: Collection[str] = (),
    owned: Collection[str] = (),
) -> list[LineBase]:
    """Returns the lines of a block without the copies that sharing memory makes superfluous.

    Args:
        lines: the lines of a block without frees.
        arguments: the values that the block sees.
        copies: the names of values that are defined as copies of a tensor: by `aten.clone`, or by `memory.alloc` and
            `aten.copy_`. Other copies are kept.
        results: the names of other values that may share memory with a tensor that they are copied into: allocations,
            and results of operators that have an in-place overload, which then takes the operator's place.
        owned: the names of arguments whose content need not be preserved.
    """
    if not copies and not results:
        return list(lines)
    return _Coalescing(lines, list(arguments), frozenset(copies), frozenset(results), frozenset(owned)).run()


def coalesce_program_copies(program: ir.Program) -> ir.Program:
    """Returns the program with tensors that are only copied into others computed there. Linear in the lines."""
    if not any(_is_copy_line(line) for line in program.lines()) or ir.uses_streams(program):
        return program
    owned = [item.name for item in program.inputs if item.ownership is ir.Ownership.OWNED]
    arguments, released = ir.program_arguments(program), ir.released_inputs(program.inputs)
    body = _coalesce_block(program.body, arguments, released, owned)
    functions = [(name, _coalesce_block(block, block.arguments, (), ())) for name, block in program.functions]
    return program.replace(body=body, functions=tuple(functions))


def _coalesce_block(
    block: ir.Block, arguments: Sequence[Value], released: Sequence[Value], owned: Collection[str]
) -> ir.Block:
    results = [line.result.name for line in block.lines if isinstance(line, Alloc)]
    lines = [line for line in block.lines if not isinstance(line, Free)]
    coalesced = coalesce_copies(lines, arguments, (), results, owned)
    if len(coalesced) == len(lines):
        return block
    return ir.Block(block.arguments, insert_frees(coalesced, arguments, released))


def _is_copy_line(line: LineBase) -> bool:
    return isinstance(line, Mutate) and line.target == "aten.copy_.default"


@dataclass(frozen=True)
class _Access:
    """How a line accesses the two tensors."""

    reads_target: bool
    writes_target: bool
    reads_copy: bool
    writes_copy: bool


class _Coalescing:
    """The lines of one block, of which merges of two tensors change values and remove copies.

    Fields:
        lines: the lines; None for a removed one.
        copies, results, owned: see `coalesce_copies`.
        values: each value as it is now: a copy that was merged has the type and memory of its source.
        root_of, base_of: the root of each value now, and the value whose memory it is a view of: a root, or a slice of
            a pool.
        members: the values of each root.
        defined_at, symbol_at: the positions where values and symbols are defined; -1 for arguments.
        accesses: the positions, in order, where lines access each root.
        excluded: the roots that no merge may touch: those in flight, and consumed ones.
        streams: the streams on which each root is accessed.
        moved: the views that are defined before the line at a position, instead of at their own.
    """

    def __init__(
        self,
        lines: Sequence[LineBase],
        arguments: list[Value],
        copies: frozenset[str],
        results: frozenset[str],
        owned: frozenset[str],
    ) -> None:
        self.lines: list[LineBase | None] = list(lines)
        self.copies = copies
        self.results = results
        self._merged = 0
        self.owned = owned
        self.external = {value.name for value in arguments}
        self.root_of = ir.alias_roots(lines, arguments)
        self.base_of = {name: name for name in self.external}
        self.values = {value.name: value for value in arguments}
        self.defined_at: dict[str, int] = dict.fromkeys(self.external, -1)
        self.accesses: dict[str, list[int]] = {}
        self.members: dict[str, list[str]] = {}
        self.moved: dict[int, list[LineBase]] = {}
        self.excluded: set[str] = set()
        self.streams: dict[str, set[int]] = {}
        self.symbol_at: dict[str, int] = {}
        for position, line in enumerate(lines):
            self._record(position, line)
        for name, root in self.root_of.items():
            self.members.setdefault(root, []).append(name)

    def _record(self, position: int, line: LineBase) -> None:
        for value in ir.defined(line):
            self.values[value.name] = value
            self.defined_at[value.name] = position
            base = None if isinstance(line, PoolSlice) else line.alias_of(value)
            self.base_of[value.name] = value.name if base is None else self.base_of[base.name]
        symbol = ir.defined_symbol(line)
        if symbol is not None:
            self.symbol_at[symbol.name] = position
        if isinstance(line, View | Alloc):
            return
        for value in (*ir.used(line), *ir.defined(line)):
            root = self.root_of[value.name]
            positions = self.accesses.setdefault(root, [])
            if not positions or positions[-1] != position:
                positions.append(position)
            if not line.on_host:
                self.streams.setdefault(root, set()).add(line.stream)
        if line.is_async_start or line.is_async_wait or ir.consumed(line):
            self.excluded.update([self.root_of[value.name] for value in (*ir.used(line), *ir.defined(line))])

    def run(self) -> list[LineBase]:
        """Returns the lines without superfluous copies. A pass over the lines may make others possible.

        Copies whose source is dead come first: to compute their source elsewhere would make them necessary.
        """
        for backwards in (False, True):
            count = -1
            while count != self._merged:
                count = self._merged
                self._merge_all(backwards)
        return self._result()

    def _merge_all(self, backwards: bool) -> None:
        for position, line in enumerate(self.lines):
            match line:
                case ExternCall(
                    target="aten.clone.default", results=(Value() as copy,), arguments=(Value() as source,)
                ):
                    if copy.name in self.copies and self._merge(source, copy, position):
                        self.lines[position] = None
                case ExternCall(results=(Value() as result,)) if result.name in self.results:
                    self._merge_update(line, result, position)
                case Mutate(target="aten.copy_.default", arguments=(Value() as into, Value() as source, *_)):
                    if into.name in self.copies and self.accesses[self.root_of[into.name]][0] == position:
                        self._merge_copy(source, into, position)
                    elif backwards:
                        self._merge_backwards(into, source, position)
                case _:
                    pass

    def _merge_copy(self, source: Value, copy: Value, position: int) -> None:
        """Lets an allocated tensor into which a line copies another be that tensor."""
        allocated = self.defined_at[copy.name]
        if self._merge(source, copy, position):
            self.lines[allocated] = self.lines[position] = None

    def _merge_update(self, line: ExternCall, result: Value, position: int) -> None:
        """Lets the result of an operator be the memory of its first operand, which is overwritten with it later."""
        operator = in_place_of_functional(line.target)
        operand, *others = line.arguments
        if operator is None or line.outs or not isinstance(operand, Value):
            return
        root = self.root_of[operand.name]
        if any(self.root_of[value.name] == root for value in ir.values_in((*others, *line.keywords))):
            return
        if self._merge(operand, result, position, is_update=True) or self._is_only_copied_back(
            operand, result, position
        ):
            self.lines[position] = Mutate(
                (), operator, (operand, *others), (operand,), line.keywords, (), line.effect_set,
                stream=line.stream, origin=line.origin,
            )  # fmt: skip

    def _is_only_copied_back(self, operand: Value, result: Value, position: int) -> bool:
        """Whether the next access of an operand overwrites it with a result, the only use of that; removes the copy.

        Their layouts may differ.
        """
        target, own = self.values[operand.name], self.values[result.name]
        root = self.root_of[target.name]
        accesses = [at for at in self.accesses.get(own.name, ()) if at > position]
        following = self.accesses[root][bisect_right(self.accesses[root], position) :]
        first = next((at for at in following if self.lines[at] is not None), None)
        if accesses != [first] or first is None or len(self.members.get(own.name, ())) > 1:
            return False
        match self.lines[first]:
            case Mutate(target="aten.copy_.default", arguments=(Value() as into, Value() as source, *_)):
                is_copied = source.name == own.name and self.values[into.name].type == target.type
            case _:
                return False
        types = replace(target.tensor_type, strides=(), storage_offset=0), replace(own.tensor_type, strides=())
        if (
            not is_copied
            or self.base_of[into.name] != self.base_of[target.name]
            or types[0] != types[1]
            or root in self.excluded
        ):
            return False
        if len(self.streams.get(root, set()) | self.streams.get(own.name, set())) > 1:
            return False
        self.lines[first] = None
        self._merged += 1
        return True

    def _merge_backwards(self, into: Value, source: Value, position: int) -> None:
        """Lets an allocated tensor that a line copies into another be that memory from the start."""
        now, target = self.values[source.name], self.values[into.name]
        if self.root_of[now.name] == self.root_of[target.name]:
            if now.type == target.type and self.base_of[now.name] == self.base_of[target.name]:
                self.lines[position] = None
            return
        allocated = self.defined_at[now.name]
        if now.name not in self.results or not isinstance(self.lines[allocated], Alloc):
            return
        if self.defined_at[self.root_of[target.name]] >= allocated:
            return
        if self._merge(into, source, allocated):
            self.lines[allocated] = self.lines[position] = None

    # --- merging ----------------------------------------------------------------------------------------------------

    def _merge(self, source: Value, copy: Value, position: int, is_update: bool = False) -> bool:
        """Lets `copy`, a root defined at a position, be the memory of `source`; returns whether that is possible.

        With `is_update` the line there computes new content from that of `source`, which is written back later.
        """
        target, own = self.values[source.name], self.values[copy.name]
        root = self.root_of[target.name]
        if own.name != self.root_of[own.name] or root == own.name or own.name in self.external:
            return False
        if not self.excluded.isdisjoint((root, own.name)) or not _same_layout(target.tensor_type, own.tensor_type):
            return False
        if len(self.streams.get(root, set()) | self.streams.get(own.name, set())) > 1:
            return False
        if not self._is_definable(target, position) or not self._may_return_both(root, own.name):
            return False
        if self._interferes(target, own.name, position, is_update):
            return False
        self._share(target, own, position)
        return True

    def _may_return_both(self, root: str, own: str) -> bool:
        """Whether no two results, and no result and argument, would share memory."""
        last = self.lines[-1]
        assert last is not None
        returned = {self.root_of[value.name] for value in ir.reads(last)}
        return own not in returned or (root not in returned and (root not in self.external or root in self.owned))

    def _interferes(self, target: Value, own: str, position: int, is_update: bool) -> bool:
        """Whether the two contents differ where both are needed."""
        root = self.root_of[target.name]
        target_accesses, own_accesses = self.accesses.get(root, []), self.accesses.get(own, [])
        end = own_accesses[-1] if own_accesses else position
        start, stop = bisect_right(target_accesses, position), bisect_right(target_accesses, end)
        both = sorted({*own_accesses[bisect_right(own_accesses, position) :], *target_accesses[start:stop]})
        current: _Current = "copy" if is_update else "both"
        for at in both:
            line = self.lines[at]
            if line is None:
                continue
            if self._copies_back(line, target, own):
                if current == "target":
                    return True
                current = "both"
                continue
            after = self._after(line, root, own, current)
            if after is None:
                return True
            current = after
        if current != "copy":
            return False
        following = [at for at in target_accesses[stop:] if self.lines[at] is not None][:1]
        if following:
            line = self.lines[following[0]]
            assert line is not None
            return not self._overwrites(line, root)
        return is_update or (root in self.external and root not in self.owned)

    def _after(self, line: LineBase, root: str, own: str, current: _Current) -> _Current | None:
        """Returns which tensor is current after a line; None if the line accesses the other one."""
        access = self._access(line, root, own)
        if (access.writes_copy and (access.reads_target or access.writes_target)) or (
            access.writes_target and access.reads_copy
        ):
            return None
        if current == "copy" and (access.reads_target or access.writes_target) and not self._overwrites(line, root):
            return None
        if current == "target" and (access.reads_copy or access.writes_copy):
            return None
        return "target" if access.writes_target else "copy" if access.writes_copy else current

    def _access(self, line: LineBase, root: str, own: str) -> _Access:
        reads = {self.root_of[value.name] for value in ir.reads(line)}
        writes = {self.root_of[value.name] for value in (*ir.writes(line), *ir.defined(line))}
        return _Access(root in reads - writes, root in writes, own in reads - writes, own in writes)

    def _copies_back(self, line: LineBase, target: Value, own: str) -> bool:
        """Whether a line copies all of the copy into the place of the target."""
        match line:
            case Mutate(target="aten.copy_.default", arguments=(Value() as into, Value() as source, *_)):
                into, source = self.values[into.name], self.values[source.name]
                if self.base_of[into.name] != self.base_of[target.name] or self.root_of[source.name] != own:
                    return False
                is_whole = source.tensor_type.element_count == target.tensor_type.element_count
                return is_whole and into.type == _moved(source.tensor_type, target.tensor_type.storage_offset)
            case _:
                return False

    def _overwrites(self, line: LineBase, root: str) -> bool:
        """Whether a line writes all of a memory without reading it."""
        match line:
            case Mutate(target="aten.copy_.default", arguments=(Value() as into, Value() as source, *_)):
                into, source = self.values[into.name], self.values[source.name]
                is_whole = self.root_of[into.name] == root and into.type == self.values[root].type
                return is_whole and self.root_of[source.name] != root
            case _:
                return False

    def _share(self, target: Value, own: Value, position: int) -> None:
        """Makes every value in a copy's memory one in the target's."""
        self._merged += 1
        root, offset = self.root_of[target.name], target.tensor_type.storage_offset
        if self.defined_at[target.name] > position:  # a view, which only needs its base
            at = self.defined_at[target.name]
            line, base = self.lines[at], self.values[self.base_of[target.name]]
            assert isinstance(line, View), "roots and slices are defined before their copies"
            self.lines[at] = None
            self.moved.setdefault(position, []).append(View(target, base, origin=line.origin))
            self.defined_at[target.name] = position
        for name in self.members.pop(own.name):
            value = self.values[name]
            is_own = value.name == own.name
            self.values[name] = target if is_own else Value(value.name, _moved(value.tensor_type, offset))
            self.root_of[name] = root
            self.base_of[name] = self.base_of[target.name]
            self.members[root].append(name)
        positions = self.accesses.setdefault(root, [])
        for at in self.accesses.pop(own.name, ()):
            insort(positions, at)
        self.streams.setdefault(root, set()).update(self.streams.pop(own.name, ()))

    def _is_definable(self, target: Value, position: int) -> bool:
        """Whether a value is defined before a line, or may be, as a view whose numbers are known there."""
        if self.defined_at[target.name] <= position:
            return True
        return all(self.symbol_at.get(symbol.name, -1) <= position for symbol in ir.type_symbols(target.type))

    def _result(self) -> list[LineBase]:
        """Returns the remaining lines with the values as they are now."""

        def change(item: object) -> object:
            return self.values.get(item.name, item) if type(item) is Value else item

        result: list[LineBase] = []
        for position, line in enumerate(self.lines):
            for view in self.moved.get(position, ()):
                result.append(ir.map_line(view, change))
            if line is not None:
                result.append(ir.map_line(line, change))
        return result


def _same_layout(one: TensorType, other: TensorType) -> bool:
    return replace(one, storage_offset=0) == replace(other, storage_offset=0)


def _moved(type_: TensorType, distance: Size) -> TensorType:
    """Returns the type of a value whose memory begins further behind, in elements."""
    return replace(type_, storage_offset=total((type_.storage_offset, distance)))
