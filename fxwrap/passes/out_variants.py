"""Out variants of operators, whose results a memory plan can assign, and in-place forms of collectives."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fxwrap.lines import Alloc, ExternCall, Free, Mutate, StartCollective, WaitCollective
from fxwrap.names import NameAllocator
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Operand,
    Program,
    Result,
    TensorType,
    Value,
    blocks,
    defined,
    is_release,
    used,
    value_names,
    values_in,
)

OUT_VARIANTS: Mapping[str, str] = {
    "aten.mm.default": "aten.mm.out",
    "aten.addmm.default": "aten.addmm.out",
    "aten.bmm.default": "aten.bmm.out",
    "aten.baddbmm.default": "aten.baddbmm.out",
    "aten.mv.default": "aten.mv.out",
    "aten.addmv.default": "aten.addmv.out",
    "aten._addmm_activation.default": "aten._addmm_activation.out",
}
"""Operators whose out variant writes its result directly.

Out variants of most others (convolutions, norms, attention) compute a temporary and copy it.
"""

_IN_PLACE: Mapping[str, str] = {
    "_c10d_functional.all_reduce.default": "_c10d_functional.all_reduce_.default",
    "_c10d_functional.all_reduce_coalesced.default": "_c10d_functional.all_reduce_coalesced_.default",
    "_c10d_functional.broadcast.default": "_c10d_functional.broadcast_.default",
}
"""Collectives with an in-place form. Their functional forms copy the operands first."""

_INTO_TENSORS: Mapping[str, str] = {
    "_c10d_functional.all_gather_into_tensor.default": "fxwrap.all_gather_into_tensors.default",
    "_c10d_functional.reduce_scatter_tensor.default": "fxwrap.reduce_scatter_into_tensors.default",
    "_c10d_functional.all_gather_into_tensor_coalesced.default": "fxwrap.all_gather_into_tensors.default",
    "_c10d_functional.reduce_scatter_tensor_coalesced.default": "fxwrap.reduce_scatter_into_tensors.default",
}
"""Collectives, and their form for lists of operands that writes its last argument.

torch has out variants without lists only, and with them a wait for one slice of a pool waits for all in the pool.
"""


def run_collectives_in_place(program: Program) -> Program:
    """Returns the program with all_reduces and broadcasts in their operands, if no later line uses these, or in copies.

    Their functional forms copy each operand, also one that nothing uses later. Only for results that the program frees
    and whose type is contiguous. Results are bitwise equal. Linear in the number of lines.
    """
    return _with_variants(program, _IN_PLACE)


def use_out_variants(program: Program) -> Program:
    """Returns the program with out variants of matmuls and collectives that write to `memory.alloc` lines.

    Collectives with an in-place form instead run in place (`run_collectives_in_place`). All_gathers and reduce_scatters
    write a list of `memory.alloc` lines. Only for results that the program frees and whose type is contiguous. Results
    are bitwise equal. Linear in the number of lines.
    """
    return _with_variants(program, {*OUT_VARIANTS, *_IN_PLACE, *_INTO_TENSORS})


def _with_variants(program: Program, operators: Collection[str]) -> Program:
    """Returns the program with variants of these operators that write memory of the program."""
    calls = [line for line in program.lines() if isinstance(line, ExternCall | StartCollective)]
    if not any((line.target if isinstance(line, ExternCall) else line.operator) in operators for line in calls):
        return program
    names = NameAllocator(value_names(program))
    functions = tuple([(name, _with_variants_in(block, names, operators)) for name, block in program.functions])
    return program.replace(body=_with_variants_in(program.body, names, operators), functions=functions)


def _with_variants_in(block: Block, names: NameAllocator, operators: Collection[str]) -> Block:
    """Returns a block, and the blocks of its lines, with variants of these operators."""
    writer = _VariantWriter(block, names)
    for position, line in enumerate(block.lines):
        nested = {name: _with_variants_in(inner, names, operators) for name, inner in blocks(line)}
        if isinstance(line, ExternCall) and line.target in operators:
            writer.write_call(line)
        elif isinstance(line, StartCollective) and line.operator in operators:
            writer.write_start(position, line)
        elif isinstance(line, WaitCollective):
            writer.write_wait(line)
        elif isinstance(line, Free):
            writer.write_free(line)
        else:
            writer.lines.append(line.replace(**nested) if nested else line)
    return Block(block.arguments, tuple(writer.lines))


class _VariantWriter:
    """Writes the lines of a block, with variants of calls and collectives whose results the block frees.

    Fields:
        lines: the lines so far.
        freed: the names of the roots that the block frees on the default stream, and that are not buffers of results.
        buffers: the memory of collectives, by the names of their results.
        in_flight: the results of one collective that are in flight, by the name of each of its results.
        postponed: frees of results of such collectives, which use all their buffers until the last wait.
    """

    def __init__(self, block: Block, names: NameAllocator) -> None:
        self.lines: list[LineBase] = []
        self.freed = {line.root.name for line in block.lines if isinstance(line, Free) and line.stream == 0}
        self.buffers: dict[str, Value] = {}
        self.in_flight: dict[str, set[str]] = {}
        self.postponed: list[Free] = []
        self._names = names
        self._uses = _Uses(block)

    def write_call(self, line: ExternCall) -> None:
        """Writes a call, as its out variant if an allocation of the block can replace its result."""
        is_plain = not line.outs and line.stream == 0 and not line.effect_set
        result = _freed_result(line.results, line.aliases, self.freed) if is_plain else None
        if result is None:
            self.lines.append(line)
            return
        self.lines.append(Alloc(result, origin=line.origin))
        self.lines.append(line.replace(results=(), target=OUT_VARIANTS[line.target], outs=(result,)))

    def write_start(self, position: int, line: StartCollective) -> None:
        """Writes the start of a collective, which writes buffers of the block if it can."""
        pairs = _written_pairs(line, self.freed)
        if not pairs:
            self.lines.append(line)
            return
        operands = [operand for operand, _ in pairs]
        for operand, result in pairs:
            if operand is not None and operands.count(operand) == 1 and self._is_donated(position, operand, result):
                self.buffers[result.name] = operand
                self.freed.remove(operand.name)  # it lives as long as the result
                continue
            buffer = self.buffers[result.name] = Value(self._names.create_name(f"{result.name}_buffer"), result.type)
            self.lines.append(Alloc(buffer, origin=line.origin))
            if operand is not None:
                self.lines.append(Mutate((), "aten.copy_.default", (buffer, operand), (buffer,), origin=line.origin))
        pending = {result.name for _, result in pairs}
        self.in_flight |= dict.fromkeys(pending, pending)
        self.lines.append(_writing(line, tuple([self.buffers[result.name] for _, result in pairs])))

    def _is_donated(self, position: int, operand: Value, result: Value) -> bool:
        """Whether a result can have the memory of an operand, because nothing uses that after the line."""
        is_freed = operand.name in self.freed and operand.name not in self.buffers
        return is_freed and operand.type == result.type and self._uses.ends_with(position, operand.name)

    def write_wait(self, line: WaitCollective) -> None:
        """Writes a wait, and behind the last one of a collective the frees of its buffers."""
        self.lines.append(line)
        if line.pending.name not in self.in_flight:
            return
        self.in_flight[line.pending.name].discard(line.pending.name)
        for free in [item for item in self.postponed if not self.in_flight[item.root.name]]:
            self.lines.append(free.replace(root=self.buffers[free.root.name]))
        self.postponed = [item for item in self.postponed if self.in_flight[item.root.name]]

    def write_free(self, line: Free) -> None:
        """Writes the free of a root, or of its buffer; none of a root that became a buffer."""
        name = line.root.name
        if self.in_flight.get(name):
            self.postponed.append(line)
        elif line.stream != 0 or name in self.freed:
            self.lines.append(line.replace(root=self.buffers.get(name, line.root)))


class _Uses:
    """Where a block uses each root that one of its lines defines, frees excepted.

    A collective reads its operands from its start to the wait for its results.
    """

    def __init__(self, block: Block) -> None:
        self._last: dict[str, int] = {}
        self._reads: dict[str, list[tuple[int, int]]] = {}  # positions of starts and of their waits
        root_of: dict[str, str] = {}
        started: dict[str, tuple[int, list[str]]] = {}  # collectives by the roots of their results
        for position, line in enumerate(block.lines):
            roots = [root_of[item.name] for item in used(line) if item.name in root_of] if not is_release(line) else []
            self._last |= dict.fromkeys(roots, position)
            for start, operands in [started[root] for root in roots if root in started] if line.is_async_wait else ():
                for operand in operands:
                    self._reads.setdefault(operand, []).append((start, position))
            for value in defined(line):
                base = line.alias_of(value)
                root_of[value.name] = value.name if base is None else root_of.get(base.name, base.name)
                self._last.setdefault(root_of[value.name], position)
                if line.is_async_start:
                    started[root_of[value.name]] = (position, roots)

    def ends_with(self, position: int, name: str) -> bool:
        """Whether the line at a position is the last to use a root, and no collective from before it reads it then."""
        reads = self._reads.get(name, ())
        return self._last.get(name) == position and not any(start < position < wait for start, wait in reads)


def _written_pairs(line: StartCollective, freed: set[str]) -> list[tuple[Value | None, Value]]:
    """Returns the results of a collective that can write buffers of the block, none for another one.

    Each is with the operand that its buffer holds first, if the collective runs in place.
    """
    if line.stream != 0 or any(line.aliases):
        return []
    results = values_in(line.results)
    operands: list[Value] | list[None] = [None] * len(results)
    if line.operator in _IN_PLACE:
        operands = values_in(line.arguments[:1])
    types = [value.tensor_type for value in results]
    if not freed.issuperset([item.name for item in results]) or not all(
        item.is_contiguous and not item.layout for item in types
    ):
        return []
    return list(zip(operands, results, strict=True)) if len(operands) == len(results) else []


def _writing(line: StartCollective, buffers: tuple[Value, ...]) -> StartCollective:
    """Returns a collective in the form that writes these buffers."""
    if line.operator in _INTO_TENSORS:
        operands = line.arguments[0] if isinstance(line.arguments[0], tuple) else line.arguments[:1]
        arguments: tuple[Operand, ...] = (operands, *line.arguments[1:], buffers)
        results = (tuple(values_in(line.results)),)
        return line.replace(
            results=results, operator=_INTO_TENSORS[line.operator], arguments=arguments, writes=buffers, aliases=buffers
        )
    first = buffers if isinstance(line.arguments[0], tuple) else buffers[0]
    arguments = (first, *line.arguments[1:])
    return line.replace(operator=_IN_PLACE[line.operator], arguments=arguments, writes=buffers, aliases=buffers)


def _freed_result(results: tuple[Result, ...], aliases: tuple[Value | None, ...], freed: set[str]) -> Value | None:
    match results:
        case (Value(type=TensorType() as type_) as result,) if result.name in freed and not any(aliases):
            return result if type_.is_contiguous and type_.storage_offset == 0 and not type_.layout else None
        case _:
            return None
