"""The order in which a kernel's operations are printed: straight-line, or a loop for each stage of reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import Compute, DeviceAssert, IndirectIndex, Kernel, Load, Reduce, Scan, Store, operands

_FEW_LOADS = 8


@dataclass(frozen=True)
class LoopStage:
    """The operations before and in one loop over the row. `last_use` are its loads that no later loop has."""

    before: tuple[int, ...]
    loop: tuple[int, ...]
    last_use: frozenset[int]


@dataclass(frozen=True)
class Schedule:
    """An order of printing.

    Fields: `straight_line` are all operations of a kernel without loops; `stages` those of a looped one; `after_loops`
    the stores after all loops; `reloaded` the loads that several loops have; `inlined` the operations printed inside
    their only user; `barrier` states whether threads must synchronise before the first store.
    """

    straight_line: tuple[int, ...]
    stages: tuple[LoopStage, ...]
    after_loops: tuple[int, ...]
    reloaded: frozenset[int]
    inlined: frozenset[int]
    barrier: bool


def make_schedule(kernel: Kernel, looped: bool) -> Schedule:
    """Returns the order in which a kernel is printed.

    If a buffer is read and written, all stores are in the last loop, since later loops may read the buffer again.
    """
    loaded = {operation.buffer for operation in kernel.operations if isinstance(operation, Load)}
    in_place = not loaded.isdisjoint([item.name for item in kernel.outputs])
    barrier = in_place and (_has_shared_loads(kernel) or _stores_unread_elements(kernel))
    if not looped or not kernel.reduced:
        inlined = _inlined(kernel)
        return Schedule(_hoist_loads(kernel, inlined), (), (), frozenset(), inlined, barrier)
    loops = _stage_loops(kernel, in_place)
    count = max([*kernel.stages, *loops], default=0) + 1
    uses: dict[int, list[int]] = {}
    for number, positions in loops.items():
        for position in positions:
            if isinstance(kernel.operations[position], Load):
                uses.setdefault(position, []).append(number)
    reloaded = frozenset([position for position, numbers in uses.items() if len(numbers) > 1])
    stages = []
    after_loops: list[int] = []
    for number in range(count):
        before: list[int] = []
        for position, operation in enumerate(kernel.operations):
            if kernel.stages[position] == number and not kernel.varying[position] and not isinstance(operation, Reduce):
                (after_loops if in_place and isinstance(operation, Store) else before).append(position)
        last = frozenset([position for position, numbers in uses.items() if numbers[-1] == number])
        stages.append(LoopStage(tuple(before), loops.get(number, ()), last))
    return Schedule((), tuple(stages), tuple(after_loops), reloaded, _inlined(kernel), barrier)


def _hoist_loads(kernel: Kernel, inlined: frozenset[int]) -> tuple[int, ...]:
    """Returns all operations, with the loads that depend on no reduction or scan hoisted before the first of these.

    The compiler moves no load across a reduction, where threads synchronise, nor across a branch, as in exact division.
    Kernels without reductions hoist a few loads only, for the sake of registers. Assertions are hoisted too, so that
    they still precede the loads they guard.
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
        elif isinstance(operation, Load | DeviceAssert) and position >= first:
            if isinstance(operation, DeviceAssert) or operation.buffer not in written:
                early.add(position)
        elif not inlined.isdisjoint(operands(operation)) and not early.isdisjoint(operands(operation)):
            early.add(position)  # the cast that a load is inlined into
        if isinstance(operation, Store):
            written.add(operation.buffer)
    early = {position for position in kernel.backward_slice(early) if position >= first}
    rest = [position for position in range(first, len(operations)) if position not in early]
    return (*range(first), *sorted(early), *rest)


def _stage_loops(kernel: Kernel, in_place: bool) -> dict[int, tuple[int, ...]]:
    """Returns the operations of each stage's loop, in order: its reductions, stores and their varying operands."""
    sinks: dict[int, list[int]] = {}
    for position, operation in enumerate(kernel.operations):
        if isinstance(operation, Reduce) or (isinstance(operation, Store | DeviceAssert) and kernel.varying[position]):
            sinks.setdefault(kernel.stages[position], []).append(position)
    if in_place and sinks:
        last = max(sinks)
        for number in sorted(sinks):
            moved = [position for position in sinks[number] if isinstance(kernel.operations[position], Store)]
            if number != last and moved:
                sinks[number] = [position for position in sinks[number] if position not in moved]
                sinks[last] = sorted([*moved, *sinks[last]])
    slices = {
        number: kernel.backward_slice(items, within=kernel.varying) for number, items in sorted(sinks.items()) if items
    }
    return {number: tuple(sorted(positions)) for number, positions in slices.items()}


def _has_shared_loads(kernel: Kernel) -> bool:
    """Whether several threads may load one element of a buffer that is written: its index has fewer axes."""
    outputs = {item.name for item in kernel.outputs}
    axes = {*kernel.axes, *kernel.reduced}
    loads = [item for item in kernel.operations if isinstance(item, Load) and item.buffer in outputs]
    return any(not axes <= load.index.axes() for load in loads)


def _stores_unread_elements(kernel: Kernel) -> bool:
    """Whether one of several stores of an iteration overwrites an element that is loaded, but not for its value.

    The threads that load and store the element may then differ: accesses at different offsets are aligned differently.
    """
    loads = {
        (item.buffer, item.index): number for number, item in enumerate(kernel.operations) if isinstance(item, Load)
    }
    count = Counter([store.buffer for store in kernel.stores])
    return any(
        loads[store.buffer, store.index] not in kernel.backward_slice([store.value])
        for store in kernel.stores
        if count[store.buffer] > 1 and (store.buffer, store.index) in loads
    )


def _inlined(kernel: Kernel) -> frozenset[int]:
    """Returns loads whose only user is a cast, and casts whose only user is a store.

    No store is between a load and the statement that its text is moved into: it could overwrite the element.
    """
    inlined = set()
    for position, (operation, users) in enumerate(zip(kernel.operations, kernel.users, strict=True)):
        if len(users) != 1:
            continue
        user = kernel.operations[users[0]]
        stores_between = any(isinstance(item, Store) for item in kernel.operations[position + 1 : users[0]])
        if isinstance(operation, Load):
            if isinstance(user, Compute) and user.name == "cast" and not stores_between:
                inlined.add(position)
        elif isinstance(operation, Compute) and operation.name == "cast":
            moves_load = isinstance(kernel.operations[operation.operands[0]], Load) and stores_between
            if isinstance(user, Store) and user.value == position and user.mask != position and not moves_load:
                inlined.add(position)
    return frozenset(inlined)


_ATOMIC_WORD_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
ATOMIC_DTYPES = {
    "add": (*_ATOMIC_WORD_DTYPES, torch.float16, torch.bfloat16),
    "max": _ATOMIC_WORD_DTYPES,
    "min": _ATOMIC_WORD_DTYPES,
}
"""The dtypes of each mode of atomic stores. GPUs have no float maximum or minimum, which integer atomics replace."""


def eviction_policy(kernel: Kernel, load: Load, again: bool, last_use: bool) -> str:
    """Returns the eviction policy of a load, or "" for none.

    Elements that later loops or distant programs read again stay in the cache. `again` states that several loops over a
    row have the load, `last_use` that this is the last one.
    """
    if any(isinstance(atom, IndirectIndex) for atom in load.index.atoms()):
        return ""
    if not load.index.axes().issuperset(kernel.axes if kernel.reduced else kernel.axes[:1]):
        return "evict_last"
    if again:
        return "evict_first" if last_use else "evict_last"
    if load.mask is not None and not kernel.reduced and not _depends_on_loads(kernel, load.mask):
        # a segment, as in a cat
        loads = [item for item in kernel.operations if isinstance(item, Load) and item.buffer == load.buffer]
        return "evict_last" if len(loads) == 1 else ""
    return ""


def _depends_on_loads(kernel: Kernel, position: int) -> bool:
    return any(isinstance(kernel.operations[at], Load) for at in kernel.backward_slice([position]))


def atomic_text(mode: str, dtype: torch.dtype, address: str, value: str, mask: str, use: Callable[[str], str]) -> str:
    """Returns the statement that updates memory atomically; `use` records a helper."""
    if mode != "add" and dtype.is_floating_point:
        integers = "tl.int64, tl.uint64" if dtype is torch.float64 else "tl.int32, tl.uint32"
        nan = {"max": {4: "0x7FC00000", 8: "0x7FF8000000000000"}, "min": {4: "-0x400000", 8: "-0x8000000000000"}}
        arguments = f"{address}, {value}, {mask or 'True'}, {integers}, {nan[mode][dtype.itemsize]}"
        return f"{use(f'atomic_{mode}_float')}({arguments})"
    masked = f", mask={mask}" if mask else ""
    return f'tl.atomic_{mode}({address}, {value}{masked}, sem="relaxed")'
