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
    freed = {line.root.name for line in block.lines if isinstance(line, Free) and line.stream == 0}
    buffers: dict[str, Value] = {}  # of collectives, by the names of their results
    uses = _Uses(block)
    in_flight: dict[str, set[str]] = {}  # the results of one collective that are in flight, by the names of all of them
    postponed: list[Free] = []  # of results of such collectives, which use all their buffers until the last wait
    lines: list[LineBase] = []
    for position, line in enumerate(block.lines):
        inner = {name: _with_variants_in(nested, names, operators) for name, nested in blocks(line)}
        if isinstance(line, ExternCall) and line.target in operators and (result := _replaceable_result(line, freed)):
            lines.append(Alloc(result, origin=line.origin))
            lines.append(line.replace(results=(), target=OUT_VARIANTS[line.target], outs=(result,)))
        elif (
            isinstance(line, StartCollective) and line.operator in operators and (pairs := _written_pairs(line, freed))
        ):
            for operand, result in pairs:
                if operand is not None and operand.type == result.type and operand.name not in buffers:
                    is_last = uses.ends_with(position, operand.name) and [item for item, _ in pairs].count(operand) == 1
                    if is_last and operand.name in freed:
                        buffers[result.name] = operand
                        freed.remove(operand.name)  # it lives as long as the result
                        continue
                buffer = buffers[result.name] = Value(names.create_name(f"{result.name}_buffer"), result.type)
                lines.append(Alloc(buffer, origin=line.origin))
                if operand is not None:
                    lines.append(Mutate((), "aten.copy_.default", (buffer, operand), (buffer,), origin=line.origin))
            pending = {result.name for _, result in pairs}
            in_flight |= dict.fromkeys(pending, pending)
            lines.append(_writing(line, tuple([buffers[result.name] for _, result in pairs])))
        elif isinstance(line, WaitCollective) and line.pending.name in in_flight:
            in_flight[line.pending.name].discard(line.pending.name)
            lines.append(line)
            lines += [item.replace(root=buffers[item.root.name]) for item in postponed if not in_flight[item.root.name]]
            postponed = [item for item in postponed if in_flight[item.root.name]]
        elif isinstance(line, Free) and in_flight.get(line.root.name):
            postponed.append(line)
        elif isinstance(line, Free) and line.stream == 0 and line.root.name not in freed:
            continue
        elif isinstance(line, Free) and line.root.name in buffers:
            lines.append(line.replace(root=buffers[line.root.name]))
        else:
            lines.append(line.replace(**inner) if inner else line)
    return Block(block.arguments, tuple(lines))


def _replaceable_result(line: ExternCall, freed: set[str]) -> Value | None:
    """Returns the result of a call that an allocation of the block can replace, or None."""
    if line.outs or line.stream != 0 or line.effect_set:
        return None
    return _freed_result(line.results, line.aliases, freed)


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
