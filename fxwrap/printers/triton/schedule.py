"""The order in which a kernel's operations are printed: straight, or a loop for each stage of its reductions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxwrap.loop_ir import Compute, Kernel, Load, Reduce, Require, Scan, Store, operands

_FEW_LOADS = 8


@dataclass(frozen=True)
class Stage:
    """What happens before a loop over the row, and in it. `last_use` are its loads that no later loop has."""

    before: tuple[int, ...]
    loop: tuple[int, ...]
    last_use: frozenset[int]


@dataclass(frozen=True)
class Schedule:
    """An order of printing.

    Fields: `straight` all operations, for a kernel without loops; `stages` for a looped one; `at_end` what is stored
    after all loops; `reloaded` the loads that several loops have; `inlined` the operations printed inside the one that
    uses them; `barrier` whether threads must wait for each other before the first store.
    """

    straight: tuple[int, ...]
    stages: tuple[Stage, ...]
    at_end: tuple[int, ...]
    reloaded: frozenset[int]
    inlined: frozenset[int]
    barrier: bool


def make_schedule(kernel: Kernel, looped: bool) -> Schedule:
    """Returns the order in which a kernel is printed.

    Where a buffer is read and written, all writes wait for the last loop, since an earlier one may be followed by a
    loop that reads the buffer again.
    """
    in_place = not {item.name for item in kernel.outputs}.isdisjoint(_loaded(kernel))
    barrier = in_place and _loads_shared(kernel)
    if not looped or not kernel.reduced:
        inlined = _inlined(kernel)
        return Schedule(_loads_first(kernel, inlined), (), (), frozenset(), inlined, barrier)
    loops = _loops(kernel, in_place)
    count = max([*kernel.stages, *loops], default=0) + 1
    uses: dict[int, list[int]] = {}
    for number, positions in loops.items():
        for position in positions:
            if isinstance(kernel.operations[position], Load):
                uses.setdefault(position, []).append(number)
    reloaded = frozenset([position for position, numbers in uses.items() if len(numbers) > 1])
    stages = []
    at_end: list[int] = []
    for number in range(count):
        before: list[int] = []
        for position, operation in enumerate(kernel.operations):
            if kernel.stages[position] == number and not kernel.varying[position] and not isinstance(operation, Reduce):
                (at_end if in_place and isinstance(operation, Store) else before).append(position)
        last = frozenset([position for position, numbers in uses.items() if numbers[-1] == number])
        stages.append(Stage(tuple(before), loops.get(number, ()), last))
    return Schedule((), tuple(stages), tuple(at_end), reloaded, _inlined(kernel), barrier)


def _loads_first(kernel: Kernel, inlined: frozenset[int]) -> tuple[int, ...]:
    """Returns all operations with the loads that wait for no reduction or scan before the first of these.

    Threads meet in each, and no load is moved across that by a compiler: one behind it would begin when all is idle.
    Where there is none, loads come before all else, since none is moved across a branch either, as exact division has:
    a SwiGLU took 47.6 us instead of 49.3. Many loads would fill the registers.
    Requirements move along, so that what is loaded at positions that they are about still comes after them.
    """
    operations = kernel.operations
    combinations = [position for position, item in enumerate(operations) if isinstance(item, Reduce | Scan)]
    few = sum(isinstance(item, Load) for item in operations) <= _FEW_LOADS
    first = combinations[0] if combinations else 0 if few else len(operations)
    waiting: set[int] = set()
    written: set[str] = set()
    early: set[int] = set()
    for position, operation in enumerate(operations):
        if position in combinations or not waiting.isdisjoint(operands(operation)):
            waiting.add(position)
        elif isinstance(operation, Load | Require) and position >= first:
            if isinstance(operation, Require) or operation.buffer not in written:
                early.add(position)
        elif not inlined.isdisjoint(operands(operation)) and not early.isdisjoint(operands(operation)):
            early.add(position)  # a load is printed inside the cast that uses it
        if isinstance(operation, Store):
            written.add(operation.buffer)
    early = {position for position in _with_operands(kernel, early) if position >= first}
    rest = [position for position in range(first, len(operations)) if position not in early]
    return (*range(first), *sorted(early), *rest)


def _loops(kernel: Kernel, in_place: bool) -> dict[int, tuple[int, ...]]:
    """Returns the operations of each stage's loop, in order: what its reductions and stores need that varies."""
    sinks: dict[int, list[int]] = {}
    for position, operation in enumerate(kernel.operations):
        if isinstance(operation, Reduce) or (isinstance(operation, Store | Require) and kernel.varying[position]):
            sinks.setdefault(kernel.stages[position], []).append(position)
    if in_place and sinks:
        last = max(sinks)
        for number in sorted(sinks):
            moved = [position for position in sinks[number] if isinstance(kernel.operations[position], Store)]
            if number != last and moved:
                sinks[number] = [position for position in sinks[number] if position not in moved]
                sinks[last] = sorted([*moved, *sinks[last]])
    return {number: _needed(kernel, positions) for number, positions in sorted(sinks.items()) if positions}


def _needed(kernel: Kernel, sinks: list[int]) -> tuple[int, ...]:
    return tuple(sorted(_with_operands(kernel, sinks, kernel.varying)))


def _with_operands(kernel: Kernel, sinks: Iterable[int], within: Sequence[bool] | None = None) -> set[int]:
    """Returns operations and what they need; `within` says of each whether it counts."""
    found = set(sinks)
    pending = list(found)
    while pending:
        for used in operands(kernel.operations[pending.pop()]):
            if used not in found and (within is None or within[used]):
                found.add(used)
                pending.append(used)
    return found


def _loaded(kernel: Kernel) -> set[str]:
    return {operation.buffer for operation in kernel.operations if isinstance(operation, Load)}


def _loads_shared(kernel: Kernel) -> bool:
    """Whether several threads may load one element of a buffer that is written: it varies on fewer axes."""
    outputs = {item.name for item in kernel.outputs}
    axes = {*kernel.axes, *kernel.reduced}
    loads = [item for item in kernel.operations if isinstance(item, Load) and item.buffer in outputs]
    return any(not axes <= load.index.axes() for load in loads)


def _inlined(kernel: Kernel) -> frozenset[int]:
    """Returns loads that only a cast uses, and casts that only a store uses, with no store in between."""
    users: dict[int, list[int]] = {}
    for position, operation in enumerate(kernel.operations):
        for used in operands(operation):
            users.setdefault(used, []).append(position)
    found = set()
    for position, using in users.items():
        if len(using) != 1:
            continue
        operation, user = kernel.operations[position], kernel.operations[using[0]]
        between = kernel.operations[position + 1 : using[0]]
        if isinstance(operation, Load):
            cast = isinstance(user, Compute) and user.name == "cast"
            if cast and not any(isinstance(item, Store) for item in between):
                found.add(position)
        elif isinstance(operation, Compute) and operation.name == "cast":
            if isinstance(user, Store) and user.value == position and user.mask != position:
                found.add(position)
    return frozenset(found)
