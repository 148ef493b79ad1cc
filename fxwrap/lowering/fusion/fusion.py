"""Fusion: which definitions share a kernel, and the order of kernels and operator calls.

Fusion adds kernels and calls in graph order. Each has a key, larger than the keys of the items that it depends on. A
definition joins an existing kernel if its other dependences can run before that kernel and the kernel's users still run
after it, which the keys tell in constant time. So the cost per node does not grow with the length of the graph.

Within a kernel every definition has a mapping: the index of its element at each point of the kernel's iteration space.
Two definitions can be fused if the mappings make one read exactly the element that the other computes, or make both
read the same memory, or one tensor at indirect indices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch.fx import Node

from fxwrap.devices import DeviceSpec, language_traits
from fxwrap.loop_ir import Atom, Axis, Index, IndexLike, IndirectIndex, as_index, count_points
from fxwrap.lowering.fusion.definition_plans import DefinitionPlan, MaterialisationPlan
from fxwrap.lowering.fusion.definitions import (
    Definition,
    InPlaceScatter,
    InPlaceStore,
    InPlaceWrite,
    Pointwise,
    Reduced,
    Scattered,
    fills_a_copy,
)
from fxwrap.lowering.fusion.iteration_mappings import (
    IterationMapping,
    KernelPlan,
    Member,
    axes_of,
    empty_plan,
    iteration_mappings,
    rebase,
    substituted,
)
from fxwrap.lowering.fusion.tracing import Trace, shared_source
from fxwrap.lowering.symbols.cpu_scalars import ScalarRead
from fxwrap.symbolic import Size, product

_MAX_BUFFERS = 40
_MAX_COST = 4000
_MAX_ROW_LENGTH = 32768
_MAX_COLUMN_LENGTH = 256
"""The longest column of which a program has so many that it loads whole cache lines, and has them in registers."""
_COLUMNS_PER_PROGRAM = 64
_MAX_PART_COLUMNS = 8192
"""The most columns of a kernel that reduces rows and columns."""
_MAX_PART_REGISTERS = 6 * 8192
"""The most elements of a row and its sums of columns that a program has in registers at once."""
_MIN_PART_BYTES = 6 << 20
"""The fewest bytes of a tensor of such a kernel: a cache has fewer when the second kernel reads them."""
_MIN_ROWS_PER_COLUMN = 0.5
"""The fewest rows of such a kernel for each column: of fewer, partial sums are much of what it transfers."""
_MAX_CANDIDATES = 4
"""How many of the latest kernels that read a tensor are candidates for a new reader of it."""
_SMALL_KERNEL_POINTS = 65536
"""Kernels up to this size take less time for their memory traffic than for their launch."""


@dataclass(eq=False)
class ScheduledItem:
    """A step of the program, ordered by `key`: an extern call of a node, a kernel, or the read of a scalar."""

    key: float
    first_user: float = float("inf")
    node: Node | None = None
    kernel: KernelPlan | None = None
    scalar_read: ScalarRead | None = None


@dataclass(eq=False)
class Fusion:
    """Schedules calls and definitions, added in graph order; `items()` returns the steps of the program in order.

    `aliases_of` returns the definitions that share memory with a definition, itself included; `specs` are those of the
    device types that have kernels. `can_join` returns whether printers can compute a kernel with one more
    definition, `has_parts` whether such a kernel is split into parts that store its elements, `are_disjoint` whether
    two stored definitions share no element. A kernel computes nodes of one `segment`, by position.
    """

    plan: MaterialisationPlan
    hint: Callable[[Size], int]
    aliases_of: Callable[[Definition], Sequence[Definition]]
    specs: Mapping[str, DeviceSpec]
    can_join: Callable[[KernelPlan, IterationMapping, DefinitionPlan, Trace], bool]
    has_parts: Callable[[KernelPlan, IterationMapping, DefinitionPlan, Trace], bool]
    are_disjoint: Callable[[Definition, Definition], bool]
    segment: Callable[[int], object] | None = None
    _items: list[ScheduledItem] = field(default_factory=list)
    _producer_of: dict[object, ScheduledItem] = field(default_factory=dict)
    _readers: dict[Definition, list[ScheduledItem]] = field(default_factory=dict)
    _last_key: float = 0.0

    def call(
        self, step: Node | ScalarRead, defines: Iterable[object], reads: Iterable[Definition], after: Iterable[object]
    ) -> None:
        """Adds an extern call or the read of a scalar.

        `defines` are definitions, symbols or tokens that later items may depend on.
        """
        item = ScheduledItem(0, node=step) if isinstance(step, Node) else ScheduledItem(0, scalar_read=step)
        self._append(item)
        for definition in reads:
            self._readers.setdefault(definition, []).append(item)
        for producer in self._producers([*reads, *after]):
            producer.first_user = min(producer.first_user, item.key)
        for key in defines:
            self._producer_of[key] = item

    def readers(self, definition: Definition) -> list[ScheduledItem]:
        """Returns the items so far that read a stored definition, which a step that overwrites it must follow."""
        return self._readers.get(definition, [])

    def define(self, plan: DefinitionPlan) -> None:
        """Adds a materialised definition to the kernel where it saves most memory traffic, or to a new kernel."""
        trace = self.plan.tracer.trace_inlining(plan.definition, self.plan.access_of)
        dependences = self._producers(
            [*(item for item, _ in trace.reads), *plan.operands, *trace.symbols, *self._predecessors(plan.definition)]
        )
        best = self._best_kernel(plan, trace, dependences)
        if best is None:
            item = self._append(ScheduledItem(0, kernel=empty_plan(trace)))
            self._add_member(item, plan, trace, trace.axes, dependences)
        else:
            item, mapping = best
            key = self._key_after(item, dependences)
            assert key is not None and item.kernel is not None
            item.key = key
            self._last_key = max(self._last_key, key)
            rebase(item.kernel, mapping)
            self._add_member(item, plan, trace, mapping.at, dependences)

    def _best_kernel(
        self, plan: DefinitionPlan, trace: Trace, dependences: Sequence[ScheduledItem]
    ) -> tuple[ScheduledItem, IterationMapping] | None:
        """Returns the kernel that saves the most bytes, among those for which printers have a schedule, or None."""
        best: list[tuple[float, ScheduledItem, IterationMapping]] = []
        for item in self._candidates(plan, trace, dependences):
            assert item.kernel is not None
            if self._key_after(item, dependences) is None or not self._fits_limits(item.kernel, plan, trace):
                continue
            for mapping in iteration_mappings(item.kernel, plan.definition, trace):
                saved = self._saved_bytes(item.kernel, mapping, plan, trace)
                if saved is not None:
                    saved += 0.25 if item.kernel.rows else 0.0  # it is split anyway
                    best.append((saved, item, mapping))
                    break
        for _, item, mapping in sorted(best, key=lambda candidate: -candidate[0]):
            assert item.kernel is not None
            if self.can_join(item.kernel, mapping, plan, trace):
                return item, mapping
        return None

    def _predecessors(self, definition: Definition) -> list[object]:
        """Returns further dependences of a write in place: the writers and readers of its target, and its symbols."""
        if not isinstance(definition, InPlaceWrite):
            return []
        aliases = self.aliases_of(definition.target)
        readers = [item for alias in aliases for item in self.readers(alias)]
        return [*aliases, *definition.symbols, *readers]

    def divide(self, parts_of: Callable[[KernelPlan], Sequence[KernelPlan]]) -> None:
        """Replaces kernels by independent ones, which run in their place, when all items have been added."""
        items: list[ScheduledItem] = []
        for item in self._items:
            items.append(item)
            if item.kernel is None:
                continue
            item.kernel, *others = parts_of(item.kernel)
            for part in others:
                added = ScheduledItem(item.key, item.first_user, kernel=part)
                items.append(added)
                self._producer_of |= dict.fromkeys(part.computed, added)
                for definition in (*part.reads, *part.operands):
                    self._readers.setdefault(definition, []).append(added)
        self._items = items

    def read_definitions(self) -> Collection[Definition]:
        """Returns the stored definitions that items read."""
        return self._readers.keys()

    def is_stored(self, definition: Definition, item: ScheduledItem) -> bool:
        """Whether a kernel stores a definition that it computes: others read it."""
        return definition in self.plan.external or any(reader is not item for reader in self.readers(definition))

    def dependences(self, item: ScheduledItem) -> list[ScheduledItem]:
        """Returns the items that compute what a kernel reads."""
        assert item.kernel is not None
        symbols = [symbol for member in item.kernel.members for symbol in member.trace.symbols]
        return self._producers([*item.kernel.reads, *item.kernel.operands, *symbols])

    def share_segment(self, item: ScheduledItem, other: ScheduledItem) -> bool:
        """Whether two kernels compute nodes of one segment."""
        assert item.kernel is not None and other.kernel is not None
        positions = [kernel.members[0].plan.position for kernel in (item.kernel, other.kernel)]
        return self.segment is None or len(set(map(self.segment, positions))) == 1

    def items(self) -> list[ScheduledItem]:
        """Returns calls and kernels in an order in which each follows its dependences."""
        return sorted(self._items, key=lambda item: item.key)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _append(self, item: ScheduledItem) -> ScheduledItem:
        self._last_key += 1.0
        item.key = self._last_key
        self._items.append(item)
        return item

    def _producers(self, keys: Iterable[object]) -> list[ScheduledItem]:
        producers: dict[int, ScheduledItem] = {}
        for key in keys:
            item = key if isinstance(key, ScheduledItem) else self._producer_of.get(key)
            if item is not None:
                producers[id(item)] = item
        return list(producers.values())

    def _candidates(
        self, plan: DefinitionPlan, trace: Trace, dependences: Sequence[ScheduledItem]
    ) -> list[ScheduledItem]:
        candidates = {id(item): item for item in dependences if item.kernel is not None}
        source = self._producer_of.get(shared_source(plan.definition))
        if source is not None:
            candidates = {id(source): source} | candidates
        for definition, _ in trace.reads:
            for item in self.readers(definition)[-_MAX_CANDIDATES:]:
                if item.kernel is not None:
                    candidates.setdefault(id(item), item)
        if self._is_small(trace.axes):
            kernels = (item for item in reversed(self._items) if item.kernel is not None)
            candidates |= {id(item): item for item in islice(kernels, _MAX_CANDIDATES)}
        return list(candidates.values())

    def _is_small(self, axes: Iterable[Axis]) -> bool:
        return self.hint(count_points(axes)) <= _SMALL_KERNEL_POINTS

    def _key_after(self, item: ScheduledItem, dependences: Iterable[ScheduledItem]) -> float | None:
        """Returns an item's key with further dependences, or None where a user of it runs before one of these."""
        latest = max([other.key for other in dependences if other is not item], default=0.0)
        if latest < item.key:
            return item.key
        if latest >= item.first_user:
            return None
        key = min(latest + 0.5, (latest + item.first_user) / 2)
        return key if latest < key < item.first_user else None

    def _fits_limits(self, kernel: KernelPlan, plan: DefinitionPlan, trace: Trace) -> bool:
        definition, first = plan.definition, kernel.members[0]
        if fills_a_copy(definition) or fills_a_copy(first.definition):
            return False
        if definition.device != first.definition.device:
            return False
        segment = self.segment
        if segment is not None and segment(first.plan.position) != segment(plan.position):
            return False
        buffers = len(kernel.reads) + len(kernel.computed) + len(trace.reads)
        return buffers <= _MAX_BUFFERS and kernel.cost + plan.cost <= _MAX_COST

    def _saved_bytes(
        self, kernel: KernelPlan, mapping: IterationMapping, plan: DefinitionPlan, trace: Trace
    ) -> float | None:
        """Returns the memory traffic that a mapping saves, or None where it is illegal or saves nothing."""
        definition = plan.definition
        if not self._is_safe_in_place_write(kernel, mapping, definition):
            return None
        if not kernel.overwritten.isdisjoint(plan.operands):
            return None
        saved = 0.0
        axes: dict[Atom, IndexLike] = dict(zip(trace.axes, mapping.at, strict=True))
        unit: dict[Atom, IndexLike] = {axis: 0 for axis in (*mapping.axes, *mapping.reduced) if axis.size == 1}
        for other, at in trace.reads:
            mine = substituted(substituted(at, axes), unit)
            accesses = [substituted(access, mapping.kernel_axes) for access in kernel.access_indices(other)]
            theirs = [substituted(access, unit) for access in accesses]
            if (other in kernel.computed and mine != theirs[0]) or other in kernel.overwritten:
                return None
            if mine in theirs:
                bytes_ = self.hint(product(other.sizes)) * other.dtype.itemsize
                saved += bytes_ * (2 if other in kernel.computed else 1)
        source = shared_source(definition)
        if source is not definition and any(shared_source(member.definition) is source for member in kernel.members):
            saved += 1.0
        if not saved and mapping.at == tuple(map(as_index, kernel.space)) and _share_indirect_reads(kernel, trace):
            saved = 0.75  # elements that both read; which ones is known at run time only
        if not saved and self._is_small(kernel.space) and len(kernel.space) == len(trace.axes) > 0:
            saved = 0.5  # a launch
        return saved if saved > 0 and self._preserves_parallelism(kernel, mapping, plan, trace) else None

    def _is_safe_in_place_write(self, kernel: KernelPlan, mapping: IterationMapping, definition: Definition) -> bool:
        """Whether a kernel reads the memory that a definition overwrites only at the overwritten element.

        A kernel with a scan may not read it: it traverses its elements in another order. Nor may one with a scatter,
        whose elements are known at run time only.
        """
        if not isinstance(definition, InPlaceWrite):
            return True
        reads_nothing = isinstance(definition, InPlaceScatter) or kernel.has_scan()
        aliases = self.aliases_of(definition.target)
        if not kernel.overwritten.isdisjoint(aliases) and not self._is_apart(kernel, definition, aliases):
            return False
        for alias in aliases:
            if reads_nothing and alias in kernel.reads:
                return False
            for at in kernel.reads.get(alias, ()):
                if alias is not definition.target or substituted(at, mapping.kernel_axes) != mapping.at:
                    return False
        return True

    def _is_apart(self, kernel: KernelPlan, definition: InPlaceWrite, aliases: Collection[Definition]) -> bool:
        """Whether a store in place shares no element with those of a kernel, which reads nothing of their memory."""
        written = [member.definition for member in kernel.members if isinstance(member.definition, InPlaceWrite)]
        stores = [item for item in (*written, definition) if isinstance(item, InPlaceStore)]
        if len(stores) <= len(written) or not kernel.reads.keys().isdisjoint(aliases):
            return False
        return all(self.are_disjoint(item.target, definition.target) for item in written)

    def _preserves_parallelism(
        self, kernel: KernelPlan, mapping: IterationMapping, plan: DefinitionPlan, trace: Trace
    ) -> bool:
        """Whether the fused kernel has as much parallelism as two kernels.

        On a massively parallel device, a kernel whose reduction runs down long columns or a few of them, or over rows
        that do not fit in one program, has few programs: these should not write a whole tensor too, unless the rows are
        split into parts, which write elements that do not depend on them. Reductions of rows of a matmul's results are
        split along columns. Nor do kernels with windows, which share loads, have reductions.
        """
        definition, spec = plan.definition, self.specs[kernel.device_type]
        if mapping.reduced and (plan.has_window or any(member.plan.has_window for member in kernel.members)):
            return False
        if mapping.columns:
            return True
        if mapping.rows:
            return self._fits_row_parts(kernel, mapping, definition)
        if not mapping.reduced or not spec.massively_parallel or language_traits(spec.kernel_language).takes_regions:
            return True
        reduced = set(mapping.reduced)
        written = [member.at for member in kernel.members if isinstance(member.definition, Pointwise | Scattered)]
        if isinstance(definition, Pointwise | Scattered):
            if reduced.isdisjoint(axes_of(mapping.at)):
                return True  # a result of each reduction
            written.append(mapping.at)
        whole = [at for at in written if not reduced.isdisjoint(axes_of(at))]
        if not whole:
            return True
        length = self.hint(count_points(mapping.reduced))
        if all(not reduced.isdisjoint(at[-1].axes()) for at in whole):
            return length <= _MAX_ROW_LENGTH or self._has_parts(kernel, mapping, plan, trace)
        programs = self.hint(count_points(mapping.axes)) // _COLUMNS_PER_PROGRAM
        return length <= _MAX_COLUMN_LENGTH and programs >= 2 * spec.multiprocessors

    def _has_parts(self, kernel: KernelPlan, mapping: IterationMapping, plan: DefinitionPlan, trace: Trace) -> bool:
        """Whether the long rows of a kernel are split into parts, which store elements that depend on no reduction."""
        members = [(self.plan.definitions[member.definition], member.at) for member in kernel.members]
        members.append((plan, mapping.at))
        reductions: set[Definition] = {item.definition for item, _ in members if isinstance(item.definition, Reduced)}
        elements = [
            item for item, at in members
            if item.definition not in reductions and not axes_of(at).isdisjoint(mapping.reduced)
        ]  # fmt: skip
        if any(type(item.definition) is not Pointwise or not reductions.isdisjoint(item.reads) for item in elements):
            return False
        return self.has_parts(kernel, mapping, plan, trace)

    def _fits_row_parts(self, kernel: KernelPlan, mapping: IterationMapping, definition: Definition) -> bool:
        """Whether a program of a kernel that reduces rows and columns has a row of all elements and sums in registers.

        Without enough rows for all programs, two kernels read the elements from the cache.
        """
        spec = self.specs[kernel.device_type]
        if not spec.massively_parallel or not language_traits(spec.kernel_language).is_triton:
            return False
        columns = count_points([axis for axis in mapping.reduced if axis not in mapping.rows])
        if not isinstance(columns, int) or columns > _MAX_PART_COLUMNS:
            return False
        members = [(member.definition, member.at, member.trace.parallel_rank) for member in kernel.members]
        members.append((definition, mapping.at, len(definition.sizes)))
        sums = [at for item, at, rank in members if isinstance(item, Reduced) if set(mapping.rows) & axes_of(at[rank:])]
        space = {axis for axis in mapping.reduced if axis.size != 1}
        whole = [other for other, points in kernel.reads.items() if any(space <= axes_of(at) for at in points)]
        rows = self.hint(count_points(mapping.rows))
        itemsize = max([other.dtype.itemsize for other in whole], default=0)
        is_small = rows * columns * itemsize < _MIN_PART_BYTES or rows < _MIN_ROWS_PER_COLUMN * columns
        fits = columns * (len(sums) + len(whole)) <= _MAX_PART_REGISTERS
        return fits and (bool(kernel.rows) or not is_small)

    def _add_member(
        self,
        item: ScheduledItem,
        plan: DefinitionPlan,
        trace: Trace,
        at: Sequence[IndexLike],
        dependences: Iterable[ScheduledItem],
    ) -> None:
        kernel, definition = item.kernel, plan.definition
        assert kernel is not None
        member = Member(plan, trace, tuple([as_index(index) for index in at]))
        axes: dict[Atom, IndexLike] = dict(zip(trace.axes, member.at, strict=True))
        kernel.add(member)
        for other, read_at in trace.reads:
            if other in kernel.computed:
                continue
            mine = substituted(read_at, axes)
            points = kernel.reads.setdefault(other, [])
            if mine not in points:
                points.append(mine)
            self._add_reader(other, item)
        for other in plan.operands:
            if other not in kernel.computed:
                kernel.operands.add(other)
                self._add_reader(other, item)
        for producer in dependences:
            if producer is not item:
                producer.first_user = min(producer.first_user, item.key)
        if isinstance(definition, InPlaceWrite):
            overwritten = self.aliases_of(definition.target)
            kernel.overwritten.update(overwritten)
            self._producer_of |= dict.fromkeys(overwritten, item)
        self._producer_of[definition] = item
        self._producer_of.setdefault(shared_source(definition), item)

    def _add_reader(self, definition: Definition, item: ScheduledItem) -> None:
        readers = self._readers.setdefault(definition, [])
        if item not in readers[-_MAX_CANDIDATES:]:
            readers.append(item)


def _share_indirect_reads(kernel: KernelPlan, trace: Trace) -> bool:
    """Whether both read elements of one tensor at indirect indices, as the corners of interpolated images are."""
    mine = {other for other, at in trace.reads if _is_indirect(at)}
    return any(_is_indirect(at) for other in mine for at in kernel.reads.get(other, ()))


def _is_indirect(at: Sequence[Index]) -> bool:
    return any(isinstance(atom, IndirectIndex) for index in at for atom in index.atoms())
