"""The space of a kernel in the making, and the ways in which a definition's space and a kernel's are one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxwrap.loop_ir import (
    POSITION_RESULTS,
    Atom,
    Axis,
    FloorDivide,
    Index,
    IndexLike,
    Modulo,
    as_index,
    linear_index,
    unflattened,
)
from fxwrap.lowering.definitions import Definition, Reduced, Scanned
from fxwrap.lowering.realise import Use
from fxwrap.lowering.tracing import Multi, Trace, element_of
from fxwrap.symbolic import Size, product


@dataclass(eq=False)
class Member:
    """A definition in a kernel, and the index of its space's point (kept, then reduced) by the kernel's axes."""

    use: Use
    trace: Trace
    at: Multi

    @property
    def element(self) -> Multi:
        """The indices of the element that is computed."""
        return element_of(self.use.definition, self.at)


@dataclass(eq=False)
class KernelPlan:
    """A kernel in the making: its space, its members in order, and where it reads and computes what.

    `overwritten` are definitions in whose memory it writes something else.
    """

    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    members: list[Member] = field(default_factory=list)
    computed: dict[Definition, Multi] = field(default_factory=dict)
    reads: dict[Definition, list[Multi]] = field(default_factory=dict)
    overwritten: set[Definition] = field(default_factory=set)
    cost: int = 0

    @property
    def space(self) -> tuple[Axis, ...]:
        """All axes, parallel ones first."""
        return (*self.axes, *self.reduced)

    @property
    def device_type(self) -> str:
        """The device its tensors are on."""
        return self.members[0].use.definition.device.type

    def scans(self) -> bool:
        """Whether it has a scan."""
        return any(isinstance(member.use.definition, Scanned) for member in self.members)

    def known(self, definition: Definition) -> Iterator[Multi]:
        """Yields the indices at which it computes or reads a definition."""
        if definition in self.computed:
            yield self.computed[definition]
        yield from self.reads.get(definition, ())


@dataclass(frozen=True)
class Placement:
    """A way for a definition to join a kernel: their common space, the kernel's axes in it, the definition's point.

    Axes that `kernel_axes` leaves out stay as they are.
    """

    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    kernel_axes: Mapping[Atom, IndexLike]
    at: Multi


def axes_of(at: Iterable[Index]) -> set[Axis]:
    """Returns the axes that any of these indices depends on."""
    found: set[Axis] = set()
    for index in at:
        found |= index.axes()
    return found


def kernel_of(trace: Trace) -> KernelPlan:
    """Returns a kernel over a definition's own space, without members yet."""
    return KernelPlan(trace.axes[: trace.kept], trace.axes[trace.kept :])


def rebase(kernel: KernelPlan, placement: Placement) -> None:
    """Moves a kernel to another space, in which its axes are index expressions."""
    kernel.axes, kernel.reduced = placement.axes, placement.reduced
    mapping = placement.kernel_axes
    if all(mapping.get(axis, axis) == as_index(axis) for axis in mapping):
        return

    def moved(at: Multi) -> Multi:
        return tuple([index.substitute(mapping) for index in at])

    for member in kernel.members:
        member.at = moved(member.at)
    kernel.computed = {definition: moved(at) for definition, at in kernel.computed.items()}
    kernel.reads = {definition: [moved(at) for at in known] for definition, known in kernel.reads.items()}


def placements(kernel: KernelPlan, definition: Definition, trace: Trace) -> Iterator[Placement]:
    """Yields ways in which a definition's space and a kernel's are one, the likeliest first.

    None of them is checked for what the two read of one another.
    """
    scans = isinstance(definition, Scanned) or kernel.scans()
    for placement in _ways(kernel, definition, trace):
        if not scans or len(placement.reduced) == 1:  # a scan runs along one axis
            yield placement


def _ways(kernel: KernelPlan, definition: Definition, trace: Trace) -> Iterator[Placement]:
    """Yields ways in which a definition's space and a kernel's are one, also such as cut what scans run along."""
    own_count, count = count_points(trace.axes), count_points(kernel.space)
    own_reduced = trace.axes[trace.kept :]
    if own_count == 0:
        return  # no indices to compare, and nothing to save
    if own_count == count:
        for at in _maps_into(kernel, trace):
            if not _one_to_one(at, trace.axes) or not _keeps_kinds(kernel, trace, at):
                continue
            if not _combines_in_order(definition) or _walks_alike(at[trace.kept :], own_reduced, kernel.reduced):
                yield Placement(kernel.axes, kernel.reduced, {}, at)
        if not kernel.reduced or own_reduced or not trace.axes:
            yield from _moves_to(kernel, trace, definition)
    elif kernel.reduced and not own_reduced and own_count == count_points(kernel.axes):
        for at in _maps_into(kernel, trace):
            if _one_to_one(at, trace.axes) and axes_of(at) <= set(kernel.axes):
                yield Placement(kernel.axes, kernel.reduced, {}, at)


def _moves_to(kernel: KernelPlan, trace: Trace, definition: Definition) -> Iterator[Placement]:
    """Yields placements in the definition's own space: the kernel's axes become expressions over its axes."""
    kept, reduced = trace.axes[: trace.kept], trace.axes[trace.kept :]
    own = tuple([as_index(axis) for axis in trace.axes])
    for kernel_at in _maps_from(kernel, trace):
        mapping: dict[Atom, IndexLike] = dict(zip(kernel.space, kernel_at, strict=True))
        parallel = axes_of(kernel_at[: len(kernel.axes)])
        over = axes_of(kernel_at[len(kernel.axes) :])
        if kernel.reduced and not (parallel <= set(kept) and over <= set(reduced)):
            continue
        if not _one_to_one(kernel_at, kernel.space):
            continue
        if any(_combines_in_order(member.use.definition) for member in kernel.members) and not _walks_alike(
            kernel_at[len(kernel.axes) :], kernel.reduced, reduced
        ):
            continue
        yield Placement(kept, reduced or kernel.reduced, mapping, own)  # a reduction over one element keeps its axis


def _keeps_kinds(kernel: KernelPlan, trace: Trace, at: Multi) -> bool:
    """Whether what a reduction keeps are parallel axes of the kernel, and what it reduces are reduced ones."""
    if trace.kept == len(trace.axes):
        return True
    if not kernel.reduced:  # all axes of size 1 are over none
        return False
    return axes_of(at[: trace.kept]) <= set(kernel.axes) and axes_of(at[trace.kept :]) <= set(kernel.reduced)


def _combines_in_order(definition: Definition) -> bool:
    """Whether the order in which reduced axes are walked shows in what a definition gives."""
    if isinstance(definition, Scanned):
        return True
    return isinstance(definition, Reduced) and (definition.source.kind, 0) in POSITION_RESULTS


def _walks_alike(at: Multi, axes: Sequence[Axis], others: Sequence[Axis]) -> bool:
    """Whether row-major order over axes is that over others, over which `at` gives their point."""
    return linear_index(at, [axis.size for axis in axes]) == linear_index(others, [axis.size for axis in others])


def _maps_into(kernel: KernelPlan, trace: Trace) -> Iterator[Multi]:
    """Yields the points of a definition's space as expressions over a kernel's axes."""
    sizes = tuple([axis.size for axis in trace.axes])
    tried: set[Multi] = set()
    for definition, at in trace.reads:
        for known in kernel.known(definition):
            for found in (
                _unified(at, known, trace.axes, kernel.reduced),
                _reshaped(definition, at, known, trace.axes),
            ):
                if found is not None and found not in tried:
                    tried.add(found)
                    yield found
    for member in kernel.members:
        if member.at not in tried and tuple([axis.size for axis in member.trace.axes]) == sizes:
            tried.add(member.at)
            yield member.at


def _maps_from(kernel: KernelPlan, trace: Trace) -> Iterator[Multi]:
    """Yields a kernel's axes as expressions over a definition's."""
    for definition, at in trace.reads:
        for known in kernel.known(definition):
            for found in (_unified(known, at, kernel.space, ()), _reshaped(definition, known, at, kernel.space)):
                if found is not None:
                    yield found


def _unified(at: Multi, known: Multi, axes: Sequence[Axis], spare: Sequence[Axis]) -> Multi | None:
    """Solves at(axes) = known for the axes, where each index of `at` is one axis or a constant.

    Axes that `at` does not have are matched, in order, with `spare` ones, when these make as many points.
    """
    found: dict[Axis, Index] = {axis: as_index(0) for axis in axes if axis.size == 1}
    for mine, theirs in zip(at, known, strict=True):
        axis = mine.single_axis
        if axis is None:
            if mine != theirs:
                return None
        elif found.setdefault(axis, theirs) != theirs:
            return None
    if not all(_within(index, axis) for axis, index in found.items()):
        return None  # two windows on one tensor, shifted against each other
    missing = [axis for axis in axes if axis not in found]
    if missing:
        if count_points(missing) != count_points(spare) or not axes_of(found.values()).isdisjoint(spare):
            return None
        position = linear_index(spare, [axis.size for axis in spare])
        found |= dict(zip(missing, unflattened(position, [axis.size for axis in missing]), strict=True))
    return tuple([found[axis] for axis in axes])


def _reshaped(definition: Definition, at: Multi, known: Multi, axes: Sequence[Axis]) -> Multi | None:
    """Solves at(axes) = known where both walk the tensor in its own order, cut into other dimensions."""
    sizes = [axis.size for axis in axes]
    if count_points(axes) != product(definition.sizes):
        return None
    if linear_index(at, definition.sizes) != linear_index(axes, sizes):
        return None
    if not all(_within(index, Axis("", size)) for index, size in zip(known, definition.sizes, strict=True)):
        return None
    return unflattened(linear_index(known, definition.sizes), sizes)


def _within(index: Index, axis: Axis) -> bool:
    """Whether an index is shown to be one that the axis takes."""
    single = index.single_axis
    if single is not None and single.size == axis.size:
        return True
    return index.never_negative() and (as_index(axis.size) - 1 - index).never_negative()


def _one_to_one(at: Multi, axes: Sequence[Axis]) -> bool:
    """Whether a point of axes is another one in each iteration of as many, as it is not on a diagonal.

    That is so where the steps of the iterations' axes are 1, the size of the first, that times the size of the next...
    Divisions must be those of a reshape, whose quotients and remainders say together what was divided.
    """
    position = linear_index(at, [axis.size for axis in axes])
    steps = {axis: position.stride(axis) for axis in axes_of(at) if axis.size != 1}
    expected = as_index(1)
    while steps:
        if any(step is None for step in steps.values()):
            return _divided_whole(position)
        axis = next((axis for axis, step in steps.items() if step in (expected, -expected)), None)
        if axis is None:
            return False
        del steps[axis]
        expected = expected * axis.size
    return expected == as_index(count_points(axes))


def _divided_whole(position: Index) -> bool:
    """Whether quotients and remainders are all the digits of what is divided, as those that a reshape leaves are."""
    numbers: dict[Index, dict[Index, Index | None]] = {}
    for monomial, _ in position.terms:
        for atom in monomial:
            if isinstance(atom, FloorDivide | Modulo):
                number, low, high = _digit(atom)
                if numbers.setdefault(number, {}).setdefault(low, high) != high:
                    return False
    return all(_all_digits(digits) for digits in numbers.values())


def _digit(atom: Atom) -> tuple[Index, Index, Index | None]:
    """Returns which number a quotient or remainder is a digit of: from the first value on, and below the second if any.

    `(x % 12) // 4` counts the fours of x up to 12.
    """
    assert isinstance(atom, FloorDivide | Modulo)
    number, low, high = atom.base, as_index(1), None
    match number.terms:
        case (((FloorDivide() | Modulo() as inner,), 1),):
            number, low, high = _digit(inner)
        case _:
            pass
    reached = low * atom.divisor
    return (number, reached, high) if isinstance(atom, FloorDivide) else (number, low, reached)


def _all_digits(digits: Mapping[Index, Index | None]) -> bool:
    """Whether digits go on from one to the next, from the ones up to the last, which has no end."""
    low: Index | None = as_index(1)
    for _ in digits:
        if low is None or low not in digits:
            return False
        low = digits[low]
    return low is None


def count_points(axes: Iterable[Axis]) -> Size:
    """Returns how many points axes span."""
    return product(axis.size for axis in axes)

