"""Kernel plans, and the mappings between a definition's iteration space and a kernel's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxwrap.loop_ir import (
    ORDERED_REDUCTIONS,
    REDUCTIONS,
    Atom,
    Axis,
    FloorDivide,
    Index,
    IndexLike,
    Modulo,
    as_index,
    count_points,
    delinearize_index,
    linearize_index,
)
from fxwrap.lowering.fusion.definition_plans import DefinitionPlan
from fxwrap.lowering.fusion.definitions import Definition, Reduced, Scanned, Scattered
from fxwrap.lowering.fusion.tracing import IndexTuple, Trace, element_indices
from fxwrap.symbolic import product


@dataclass(eq=False)
class Member:
    """A definition in a kernel; `at` is the point of its iteration space as indices over the kernel's axes."""

    plan: DefinitionPlan
    trace: Trace
    at: IndexTuple

    @property
    def definition(self) -> Definition:
        """The definition."""
        return self.plan.definition

    @property
    def element(self) -> IndexTuple:
        """The indices of the element that an iteration computes."""
        return element_indices(self.definition, self.at)


@dataclass(eq=False)
class KernelPlan:
    """A planned kernel: its axes, its members in order, and the indices at which it computes and reads definitions.

    `overwritten` are definitions whose memory it overwrites with other values, `operands` those that it does not read,
    but its region does. `columns` are the reduced axes of reductions of rows, whose elements are results of reductions
    over the other reduced axes. `rows` are the reduced axes of reductions of columns, if others reduce the rows, which
    are all other axes then.
    """

    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    columns: tuple[Axis, ...] = ()
    rows: tuple[Axis, ...] = ()
    members: list[Member] = field(default_factory=list)
    computed: dict[Definition, IndexTuple] = field(default_factory=dict)
    reads: dict[Definition, list[IndexTuple]] = field(default_factory=dict)
    overwritten: set[Definition] = field(default_factory=set)
    operands: set[Definition] = field(default_factory=set)
    cost: int = 0

    @property
    def space(self) -> tuple[Axis, ...]:
        """All axes, parallel ones first."""
        return (*self.axes, *self.reduced)

    @property
    def device_type(self) -> str:
        """The type of the device that it runs on."""
        return self.members[0].definition.device.type

    def add(self, member: Member) -> None:
        """Adds a member, whose element the kernel then computes."""
        self.members.append(member)
        self.computed[member.definition] = member.element
        self.cost += member.plan.cost

    def has_scan(self) -> bool:
        """Whether a member is a scan."""
        return any(isinstance(member.definition, Scanned) for member in self.members)

    def access_indices(self, definition: Definition) -> Iterator[IndexTuple]:
        """Yields the indices at which it computes or reads a definition."""
        if definition in self.computed:
            yield self.computed[definition]
        yield from self.reads.get(definition, ())


@dataclass(frozen=True)
class IterationMapping:
    """A common iteration space of a kernel and a definition.

    `kernel_axes` maps the kernel's axes to indices in that space, those that change; `at` is the definition's point.
    `columns` and `rows` are those of the kernel.
    """

    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    kernel_axes: Mapping[Atom, IndexLike]
    at: IndexTuple
    columns: tuple[Axis, ...] = ()
    rows: tuple[Axis, ...] = ()


def axes_of(indices: Iterable[Index]) -> set[Axis]:
    """Returns the axes that any of these indices depends on."""
    return {axis for index in indices for axis in index.axes()}


def substituted(at: IndexTuple, axes: Mapping[Atom, IndexLike]) -> IndexTuple:
    """Returns indices with axes replaced."""
    if not axes:
        return at
    return tuple([index.substitute(axes) for index in at])


def empty_plan(trace: Trace) -> KernelPlan:
    """Returns a kernel over a definition's iteration space, without members."""
    return KernelPlan(trace.axes[: trace.parallel_rank], trace.axes[trace.parallel_rank :])


def rebase(kernel: KernelPlan, mapping: IterationMapping) -> None:
    """Moves a kernel to the space of a mapping."""
    kernel.axes, kernel.reduced = mapping.axes, mapping.reduced
    kernel.columns, kernel.rows = mapping.columns, mapping.rows
    axes = mapping.kernel_axes
    if all(axes.get(axis, axis) == as_index(axis) for axis in axes):
        return
    for member in kernel.members:
        member.at = substituted(member.at, axes)
    kernel.computed = {definition: substituted(at, axes) for definition, at in kernel.computed.items()}
    kernel.reads = {definition: [substituted(at, axes) for at in points] for definition, points in kernel.reads.items()}


def joined_plan(kernel: KernelPlan, mapping: IterationMapping, plan: DefinitionPlan, trace: Trace) -> KernelPlan:
    """Returns a kernel with one more member, in the space of a mapping. It has no record of its reads."""
    members = [Member(item.plan, item.trace, item.at) for item in kernel.members]
    joined = KernelPlan(kernel.axes, kernel.reduced, kernel.columns, kernel.rows, members)
    rebase(joined, mapping)
    joined.add(Member(plan, trace, mapping.at))
    return joined


def iteration_mappings(kernel: KernelPlan, definition: Definition, trace: Trace) -> Iterator[IterationMapping]:
    """Yields mappings between a definition's and a kernel's iteration space, the most likely first.

    The caller checks the dependences between the two.
    """
    has_scan = isinstance(definition, Scanned) or kernel.has_scan()
    for mapping in _candidate_mappings(kernel, definition, trace):
        if not has_scan or len(mapping.reduced) == 1:  # a scan runs along one axis
            yield mapping


def _candidate_mappings(kernel: KernelPlan, definition: Definition, trace: Trace) -> Iterator[IterationMapping]:
    """Yields mappings, including those that split the axis of a scan."""
    own_count, count = count_points(trace.axes), count_points(kernel.space)
    own_reduced = trace.axes[trace.parallel_rank :]
    if own_count == 0:
        return  # there are no indices to compare, and fusion saves nothing
    if kernel.columns:
        yield from _mappings_to_rows_and_columns(kernel, trace)
    elif kernel.rows:
        yield from _mappings_to_rows_or_columns(kernel, definition, trace)
    elif own_count == count:
        for at in _maps_to_kernel_axes(kernel, trace):
            if not _is_bijective(at, trace.axes) or not _preserves_axis_kinds(kernel, trace, at):
                continue
            if not _is_order_dependent(definition) or _same_iteration_order(
                at[trace.parallel_rank :], own_reduced, kernel.reduced
            ):
                yield IterationMapping(kernel.axes, kernel.reduced, {}, at)
        if not kernel.reduced or own_reduced or not trace.axes:
            yield from _mappings_into_definition_space(kernel, trace)
        if kernel.axes and kernel.reduced and own_reduced:
            yield from _mappings_across(kernel, definition, trace)
    elif kernel.reduced and not own_reduced and own_count == count_points(kernel.axes):
        for at in _maps_to_kernel_axes(kernel, trace):
            if _is_bijective(at, trace.axes) and axes_of(at) <= set(kernel.axes):
                yield IterationMapping(kernel.axes, kernel.reduced, {}, at)
    elif kernel.reduced and own_reduced and own_count == count_points(kernel.axes):
        yield from _mappings_of_row_reductions(kernel, trace)


def _mappings_of_row_reductions(kernel: KernelPlan, trace: Trace) -> Iterator[IterationMapping]:
    """Yields mappings to the space of a reduction whose elements are results of the kernel's reductions.

    Some of the kernel's parallel axes become reduced axes, the columns.
    """
    parallel, columns = trace.axes[: trace.parallel_rank], trace.axes[trace.parallel_rank :]
    reduced = tuple([Axis(f"s{number}", axis.size) for number, axis in enumerate(kernel.reduced)])
    own = tuple([as_index(axis) for axis in trace.axes])
    for definition, at in trace.reads:
        computed = kernel.computed.get(definition)
        if computed is None:
            continue
        for solution in (_unify(computed, at, kernel.axes, ()), _match_reshape(definition, computed, at, kernel.axes)):
            if solution is not None and _is_bijective(solution, kernel.axes):
                mapping: dict[Atom, IndexLike] = dict(zip(kernel.space, (*solution, *reduced), strict=True))
                yield IterationMapping(parallel, (*columns, *reduced), mapping, own, columns)


def _mappings_to_rows_and_columns(kernel: KernelPlan, trace: Trace) -> Iterator[IterationMapping]:
    """Yields mappings to the axes of a kernel with reductions of rows: to rows, or to rows and columns."""
    rows, columns = set(kernel.axes), set(kernel.columns)
    rank = trace.parallel_rank
    for at in _maps_to_kernel_axes(kernel, trace):
        own, reduced = axes_of(at[:rank]), axes_of(at[rank:])
        is_row_reduction = bool(reduced) and reduced <= columns and own <= rows
        is_inner = reduced <= set(kernel.reduced) - columns and own <= rows | columns
        if (is_row_reduction or is_inner) and _is_bijective(at, trace.axes) and _has_reduced_axes(trace, at):
            spanned = rows if not (own | reduced) & columns else rows | columns
            if reduced and not is_row_reduction:
                spanned = spanned | set(kernel.reduced)
            if own | reduced == {axis for axis in spanned if axis.size != 1}:
                yield IterationMapping(kernel.axes, kernel.reduced, {}, at, kernel.columns)


def _mappings_across(kernel: KernelPlan, definition: Definition, trace: Trace) -> Iterator[IterationMapping]:
    """Yields mappings of a reduction over a kernel's parallel axes to the space where these are reduced axes, too.

    One of both reduces rows and the other one columns. Rows are the axes along which elements are not contiguous.
    """
    rank = trace.parallel_rank
    for at in _maps_to_kernel_axes(kernel, trace):
        own, reduced = axes_of(at[:rank]), axes_of(at[rank:])
        if own != _wide(kernel.reduced) or reduced != _wide(kernel.axes) or not _is_bijective(at, trace.axes):
            continue
        if not _has_reduced_axes(trace, at):
            continue
        last = {axis for points in kernel.reads.values() for point in points if point for axis in point[-1].axes()}
        rows = kernel.axes if not last.isdisjoint(kernel.reduced) else kernel.reduced
        joined = joined_plan(
            kernel, IterationMapping(kernel.axes, kernel.reduced, {}, at), DefinitionPlan(definition, 0), trace
        )
        if _reduces_columns_last(joined.members, set(rows)):
            yield IterationMapping((), (*kernel.axes, *kernel.reduced), {}, at, rows=rows)


def _mappings_to_rows_or_columns(
    kernel: KernelPlan, definition: Definition, trace: Trace
) -> Iterator[IterationMapping]:
    """Yields mappings to the axes of a kernel that reduces rows and columns: to rows, to columns, or to both."""
    rank, rows = trace.parallel_rank, _wide(kernel.rows)
    columns = _wide(kernel.reduced) - rows
    none = set[Axis]()
    spaces = ((rows, columns), (columns, rows), (rows | columns, none), (rows, none), (columns, none))
    for at in _maps_to_kernel_axes(kernel, trace):
        is_known = (axes_of(at[:rank]), axes_of(at[rank:])) in spaces
        if is_known and _is_bijective(at, trace.axes) and _has_reduced_axes(trace, at):
            mapping = IterationMapping((), kernel.reduced, {}, at, rows=kernel.rows)
            joined = joined_plan(kernel, mapping, DefinitionPlan(definition, 0), trace)
            if _reduces_columns_last(joined.members, rows):
                yield mapping


def _has_reduced_axes(trace: Trace, at: IndexTuple) -> bool:
    """Whether a definition that reduces does so over an axis of the kernel: no other tells which axis it reduces."""
    rank = trace.parallel_rank
    return rank == len(trace.axes) or bool(axes_of(at[rank:]))


def _reduces_columns_last(members: Sequence[Member], rows: Collection[Axis]) -> bool:
    """Whether nothing along rows depends on a reduction over rows.

    No member is a scan or scatter, reductions over rows have one result, and each reduction reads elements of its own.
    """
    dependent = set[Definition]()
    for member in members:
        definition, rank = member.definition, member.trace.parallel_rank
        if isinstance(definition, Scanned | Scattered):
            return False
        depends = any(other in dependent for other, _ in member.trace.reads)
        if depends and not axes_of(member.at).isdisjoint(rows):
            return False
        if isinstance(definition, Reduced):
            whole = _wide(member.trace.axes)
            if not any(whole <= axes_of(at) for _, at in member.trace.reads):
                return False
            if not axes_of(member.at[rank:]).isdisjoint(rows):
                if REDUCTIONS[definition.source.kind].results != 1:
                    return False
                depends = True
        if depends:
            dependent.add(definition)
    return True


def _wide(axes: Iterable[Axis]) -> set[Axis]:
    """Returns the axes of more than one element."""
    return {axis for axis in axes if axis.size != 1}


def _mappings_into_definition_space(kernel: KernelPlan, trace: Trace) -> Iterator[IterationMapping]:
    """Yields mappings to the definition's own space: the kernel's axes become expressions over its axes."""
    parallel, reduced = trace.axes[: trace.parallel_rank], trace.axes[trace.parallel_rank :]
    own = tuple([as_index(axis) for axis in trace.axes])
    order_dependent = any(_is_order_dependent(member.definition) for member in kernel.members)
    for at in _maps_from_kernel_axes(kernel, trace):
        parallel_at, reduced_at = at[: len(kernel.axes)], at[len(kernel.axes) :]
        if kernel.reduced and not (axes_of(parallel_at) <= set(parallel) and axes_of(reduced_at) <= set(reduced)):
            continue
        if not _is_bijective(at, kernel.space):
            continue
        if order_dependent and not _same_iteration_order(reduced_at, kernel.reduced, reduced):
            continue
        mapping: dict[Atom, IndexLike] = dict(zip(kernel.space, at, strict=True))
        yield IterationMapping(parallel, reduced or kernel.reduced, mapping, own)  # keeps a reduced axis of size 1


def _preserves_axis_kinds(kernel: KernelPlan, trace: Trace, at: IndexTuple) -> bool:
    """Whether parallel axes map to parallel axes of the kernel, and reduced axes to reduced ones."""
    if trace.parallel_rank == len(trace.axes):
        return True
    if not kernel.reduced:  # axes of size 1 depend on no axis
        return False
    parallel, reduced = axes_of(at[: trace.parallel_rank]), axes_of(at[trace.parallel_rank :])
    return parallel <= set(kernel.axes) and reduced <= set(kernel.reduced)


def _is_order_dependent(definition: Definition) -> bool:
    """Whether a definition's result depends on the order of its reduced axes."""
    if isinstance(definition, Scanned):
        return True
    return isinstance(definition, Reduced) and definition.source.kind in ORDERED_REDUCTIONS


def _same_iteration_order(at: IndexTuple, axes: Sequence[Axis], others: Sequence[Axis]) -> bool:
    """Whether row-major order over `axes` is row-major order over `others`; `at` are the axes' indices over these."""
    return linearize_index(at, [axis.size for axis in axes]) == linearize_index(others, [axis.size for axis in others])


def _maps_to_kernel_axes(kernel: KernelPlan, trace: Trace) -> Iterator[IndexTuple]:
    """Yields the points of a definition's space as expressions over a kernel's axes."""
    sizes = tuple([axis.size for axis in trace.axes])
    tried: set[IndexTuple] = set()
    for definition, at in trace.reads:
        for access in kernel.access_indices(definition):
            for solution in (
                _unify(at, access, trace.axes, kernel.reduced),
                _match_reshape(definition, at, access, trace.axes),
            ):
                if solution is not None and solution not in tried:
                    tried.add(solution)
                    yield solution
    for member in kernel.members:
        if member.at not in tried and tuple([axis.size for axis in member.trace.axes]) == sizes:
            tried.add(member.at)
            yield member.at


def _maps_from_kernel_axes(kernel: KernelPlan, trace: Trace) -> Iterator[IndexTuple]:
    """Yields a kernel's axes as expressions over a definition's."""
    for definition, at in trace.reads:
        for access in kernel.access_indices(definition):
            for solution in (
                _unify(access, at, kernel.space, ()),
                _match_reshape(definition, access, at, kernel.space),
            ):
                if solution is not None:
                    yield solution


def _unify(at: IndexTuple, target: IndexTuple, axes: Sequence[Axis], spare: Sequence[Axis]) -> IndexTuple | None:
    """Solves at(axes) = target for the axes, where each index of `at` is one axis or a constant.

    Axes that `at` does not contain are matched with the `spare` ones, in order, if these have as many points.
    """
    solution: dict[Axis, Index] = {axis: as_index(0) for axis in axes if axis.size == 1}
    for mine, theirs in zip(at, target, strict=True):
        axis, other = mine.single_axis, theirs.single_axis
        if other is not None and other.size == 1:
            theirs = as_index(0)
        if axis is None:
            if mine != theirs:
                return None
        elif solution.setdefault(axis, theirs) != theirs:
            return None
    if not all(_is_in_bounds(index, axis) for axis, index in solution.items()):
        return None  # two slices of one tensor at different offsets
    missing = [axis for axis in axes if axis not in solution]
    if missing:
        if count_points(missing) != count_points(spare) or not axes_of(solution.values()).isdisjoint(spare):
            return None
        position = linearize_index(spare, [axis.size for axis in spare])
        solution |= dict(zip(missing, delinearize_index(position, [axis.size for axis in missing]), strict=True))
    return tuple([solution[axis] for axis in axes])


def _match_reshape(
    definition: Definition, at: IndexTuple, target: IndexTuple, axes: Sequence[Axis]
) -> IndexTuple | None:
    """Solves at(axes) = target where both traverse the whole tensor in row-major order, in different shapes."""
    sizes = [axis.size for axis in axes]
    if count_points(axes) != product(definition.sizes):
        return None
    if linearize_index(at, definition.sizes) != linearize_index(axes, sizes):
        return None
    if not all(_is_in_bounds(index, Axis("", size)) for index, size in zip(target, definition.sizes, strict=True)):
        return None
    return delinearize_index(linearize_index(target, definition.sizes), sizes)


def _is_in_bounds(index: Index, axis: Axis) -> bool:
    """Whether an index is provably within an axis."""
    single = index.single_axis
    if single is not None and single.size == axis.size:
        return True
    return index.is_nonnegative() and (as_index(axis.size) - 1 - index).is_nonnegative()


def _is_bijective(at: IndexTuple, axes: Sequence[Axis]) -> bool:
    """Whether each iteration computes another point of `axes`, and all points are computed.

    It is so if the strides of the iterations' axes are 1, the size of the first axis, that times the size of the
    second, and so on. Divisions must be those of a reshape: quotients and remainders that determine their dividend.
    """
    position = linearize_index(at, [axis.size for axis in axes])
    steps = {axis: position.stride(axis) for axis in axes_of(at) if axis.size != 1}
    expected = as_index(1)
    while steps:
        if any(step is None for step in steps.values()):
            return _is_complete_split(position)
        axis = next((axis for axis, step in steps.items() if step in (expected, -expected)), None)
        if axis is None:
            return False
        del steps[axis]
        expected = expected * axis.size
    return expected == as_index(count_points(axes))


def _is_complete_split(position: Index) -> bool:
    """Whether the quotients and remainders in an index together determine each dividend."""
    dividends: dict[Index, dict[Index, Index | None]] = {}
    for monomial, _ in position.terms:
        for atom in monomial:
            if isinstance(atom, FloorDivide | Modulo):
                dividend, low, high = _split_component(atom)
                if dividends.setdefault(dividend, {}).setdefault(low, high) != high:
                    return False
    return all(_covers_split(components) for components in dividends.values())


def _split_component(atom: FloorDivide | Modulo) -> tuple[Index, Index, Index | None]:
    """Returns the dividend of a quotient or remainder, its unit, and its period if it has one.

    `(x % 12) // 4` has the dividend x, the unit 4 and the period 12.
    """
    dividend, low, high = atom.base, as_index(1), None
    match dividend.terms:
        case (((FloorDivide() | Modulo() as inner,), 1),):
            dividend, low, high = _split_component(inner)
        case _:
            pass
    reached = low * atom.divisor
    return (dividend, reached, high) if isinstance(atom, FloorDivide) else (dividend, low, reached)


def _covers_split(components: Mapping[Index, Index | None]) -> bool:
    """Whether each component's period is the next one's unit, from unit 1 to the last, which has no period."""
    low: Index | None = as_index(1)
    for _ in components:
        if low is None or low not in components:
            return False
        low = components[low]
    return low is None
