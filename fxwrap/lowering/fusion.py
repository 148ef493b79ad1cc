"""Fusion: which definitions are computed by one kernel, and in which order kernels and operator calls run.

Items (kernels and calls) are made in graph order and carry a key; an item's key is larger than those of the items it
depends on. A definition joins an existing kernel when all else it depends on can come before that kernel without
passing a user of it, which the keys tell at once. So fusion costs about the same for each node however long the graph.

Within a kernel every definition has a map: the index of its element for each point of the kernel's space. Two
definitions belong together when the maps make one read exactly what the other computes, or both read the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch.fx import Node

from fxwrap.device_spec import DeviceSpec
from fxwrap.loop_ir import Atom, Axis, IndexLike, as_index
from fxwrap.lowering.definitions import Definition, Pointwise, Scattered, Written
from fxwrap.lowering.host_numbers import NumberRead
from fxwrap.lowering.placement import (
    KernelPlan,
    Member,
    Placement,
    axes_of,
    count_points,
    kernel_of,
    placements,
    rebase,
)
from fxwrap.lowering.realise import Use, Uses
from fxwrap.lowering.tracing import Multi, Trace, shared_source
from fxwrap.symbolic import Size, product

_MOST_BUFFERS = 40
_MOST_COST = 4000
_LONGEST_ROW = 32768
_NEIGHBOURS = 4
"""How many of the latest kernels that read a tensor a new reader of it may join."""
_SMALL = 65536
"""Points of a space up to which a launch costs more than its memory traffic."""


@dataclass(eq=False)
class Item:
    """A step of the program: an operator call of a node, a kernel, or the read of a number. Keys order them."""

    key: float
    first_user: float = float("inf")
    node: Node | None = None
    kernel: KernelPlan | None = None
    number: NumberRead | None = None


class Fusion:
    """Takes calls and definitions in graph order; `items()` gives the program's steps in order."""

    def __init__(
        self,
        uses: Uses,
        hint: Callable[[Size], int],
        on_memory_of: Callable[[Definition], Sequence[Definition]],
        specs: Mapping[str, DeviceSpec],
        lane: Callable[[int], object] | None = None,
    ) -> None:
        """`specs` has the facts about each device type that has kernels; a kernel computes nodes of one `lane` only."""
        self.specs = specs
        self.lane = lane
        self.uses = uses
        self.hint = hint
        self.on_memory_of = on_memory_of
        self._items: list[Item] = []
        self._made_by: dict[object, Item] = {}
        self._readers: dict[Definition, list[Item]] = {}
        self._numbering = 0.0

    def call(
        self, what: Node | NumberRead, defines: Iterable[object], reads: Iterable[Definition], after: Iterable[object]
    ) -> None:
        """Adds an operator call or the read of a number.

        `defines` are definitions, symbols or marks that later items may depend on.
        """
        key = self._next()
        item = self._new(Item(key, node=what) if isinstance(what, Node) else Item(key, number=what))
        for definition in reads:
            self._readers.setdefault(definition, []).append(item)
        for depended in self._makers([*reads, *after]):
            depended.first_user = min(depended.first_user, item.key)
        for made in defines:
            self._made_by[made] = item

    def readers(self, definition: Definition) -> list[Item]:
        """Returns the items so far that read a stored definition, to be passed as `after` of what overwrites it."""
        return self._readers.get(definition, [])

    def define(self, use: Use) -> None:
        """Adds a definition that gets memory: to the kernel where it saves most, or to one of its own."""
        trace = self.uses.tracer.trace_inlining(use.definition, self.uses.inlined)
        needed = self._makers([*(definition for definition, _ in trace.reads), *trace.symbols, *self._before(use)])
        best: tuple[float, Item, Placement] | None = None
        for item in self._candidates(use, trace, needed):
            assert item.kernel is not None
            if self._new_key(item, needed) is None or not self._may_grow(item.kernel, use, trace):
                continue
            for placement in placements(item.kernel, use.definition, trace):
                saved = self._saved(item.kernel, placement, use, trace)
                if saved is not None and (best is None or saved > best[0]):
                    best = (saved, item, placement)
                    break
        if best is None:
            item = self._new(Item(self._next(), kernel=kernel_of(trace)))
            self._join(item, use, trace, trace.axes, needed)
        else:
            _, item, placement = best
            key = self._new_key(item, needed)
            assert key is not None
            item.key = key
            self._numbering = max(self._numbering, key)
            assert item.kernel is not None
            rebase(item.kernel, placement)
            self._join(item, use, trace, placement.at, needed)

    def _before(self, use: Use) -> list[object]:
        """Returns what else must come before a definition: for one that overwrites memory, what reads or makes that."""
        if not isinstance(use.definition, Written):
            return []
        found: list[object] = list(self.on_memory_of(use.definition.target))
        found += use.definition.symbols
        return [*found, *(item for definition in found for item in self._readers.get(definition, ()))]  # type: ignore[call-overload]

    def last_readers(self) -> dict[Definition, Item]:
        """Returns the last item that reads each definition, in the order of `items`."""
        place = {id(item): number for number, item in enumerate(self.items())}
        return {
            definition: max(items, key=lambda item: place[id(item)]) for definition, items in self._readers.items()
        }  # fmt: skip

    def items(self) -> list[Item]:
        """Returns calls and kernels in an order in which each comes after what it depends on."""
        return sorted(self._items, key=lambda item: item.key)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _next(self) -> float:
        self._numbering += 1.0
        return self._numbering

    def _new(self, item: Item) -> Item:
        self._items.append(item)
        return item

    def _makers(self, what: Iterable[object]) -> list[Item]:
        found: dict[int, Item] = {}
        for thing in what:
            item = thing if isinstance(thing, Item) else self._made_by.get(thing)
            if item is not None:
                found[id(item)] = item
        return list(found.values())

    def _candidates(self, use: Use, trace: Trace, needed: Sequence[Item]) -> list[Item]:
        found = {id(item): item for item in needed if item.kernel is not None}
        source = self._made_by.get(shared_source(use.definition))
        if source is not None:
            found = {id(source): source} | found
        for definition, _ in trace.reads:
            for item in self._readers.get(definition, [])[-_NEIGHBOURS:]:
                if item.kernel is not None:
                    found.setdefault(id(item), item)
        if self._is_small(trace.axes):
            kernels = (item for item in reversed(self._items) if item.kernel is not None)
            found |= {id(item): item for item in islice(kernels, _NEIGHBOURS)}
        return list(found.values())

    def _is_small(self, axes: Iterable[Axis]) -> bool:
        return self.hint(count_points(axes)) <= _SMALL

    def _new_key(self, item: Item, needed: Iterable[Item]) -> float | None:
        """Returns the key an item gets when it also depends on others, or None where a user of it comes too early."""
        latest = max([other.key for other in needed if other is not item], default=0.0)
        if latest < item.key:
            return item.key
        if latest >= item.first_user:
            return None
        key = min(latest + 0.5, (latest + item.first_user) / 2)
        return key if latest < key < item.first_user else None

    def _may_grow(self, kernel: KernelPlan, use: Use, trace: Trace) -> bool:
        definition = use.definition
        if isinstance(definition, Scattered) or isinstance(kernel.members[0].use.definition, Scattered):
            return False
        if definition.device != kernel.members[0].use.definition.device:
            return False
        if self.lane is not None and self.lane(kernel.members[0].use.position) != self.lane(use.position):
            return False
        buffers = len(kernel.reads) + len(kernel.computed) + len(trace.reads)
        return buffers <= _MOST_BUFFERS and kernel.cost + use.cost <= _MOST_COST

    def _saved(self, kernel: KernelPlan, placement: Placement, use: Use, trace: Trace) -> float | None:
        """Returns the bytes that a placement saves, or None where it would be wrong or saves nothing."""
        if not self._may_write(kernel, placement, use):
            return None
        saved = 0.0
        mapping: dict[Atom, IndexLike] = dict(zip(trace.axes, placement.at, strict=True))
        for definition, at in trace.reads:
            mine = tuple([index.substitute(mapping) for index in at])
            theirs = [
                tuple([index.substitute(placement.kernel_axes) for index in other])
                for other in kernel.known(definition)
            ]  # fmt: skip
            if (definition in kernel.computed and mine != theirs[0]) or definition in kernel.overwritten:
                return None
            if mine in theirs:
                bytes_ = self.hint(product(definition.sizes)) * definition.dtype.itemsize
                saved += bytes_ * (2 if definition in kernel.computed else 1)
        if shared_source(use.definition) is not use.definition and any(
            shared_source(member.use.definition) is shared_source(use.definition) for member in kernel.members
        ):
            saved += 1.0
        if not saved and self._is_small(kernel.space) and len(kernel.space) == len(trace.axes) > 0:
            saved = 0.5  # a launch
        return saved if saved > 0 and self._stays_fast(kernel, placement, use) else None

    def _may_write(self, kernel: KernelPlan, placement: Placement, use: Use) -> bool:
        """Whether a kernel reads the memory that a definition overwrites only at the elements it overwrites.

        One with a scan reads its elements in an order of its own.
        """
        if not isinstance(use.definition, Written):
            return True
        for definition in self.on_memory_of(use.definition.target):
            if definition in kernel.overwritten or (kernel.scans() and definition in kernel.reads):
                return False
            for at in kernel.reads.get(definition, ()):
                same_tensor = definition is use.definition.target
                if not same_tensor or tuple([index.substitute(placement.kernel_axes) for index in at]) != placement.at:
                    return False
        return True

    def _stays_fast(self, kernel: KernelPlan, placement: Placement, use: Use) -> bool:
        """Whether one kernel over the shared space has as much to do in parallel as two would have.

        On a wide device, writing a whole tensor in a kernel whose reduction runs down columns, or over rows that do not
        fit, would leave it to the few programs that the reduction has.
        """
        if not placement.reduced or not self.specs[kernel.device_type].wide:
            return True
        reduced = set(placement.reduced)
        written = [member.at for member in kernel.members if isinstance(member.use.definition, Pointwise)]
        if isinstance(use.definition, Pointwise):
            written.append(placement.at)
        whole = [at for at in written if not reduced.isdisjoint(axes_of(at))]
        if not whole:
            return True
        fits = self.hint(count_points(placement.reduced)) <= _LONGEST_ROW
        return fits and all(not reduced.isdisjoint(at[-1].axes()) for at in whole)

    def _join(self, item: Item, use: Use, trace: Trace, at: Multi | tuple[Axis, ...], needed: Iterable[Item]) -> None:
        kernel = item.kernel
        assert kernel is not None
        member = Member(use, trace, tuple([as_index(index) for index in at]))
        mapping: dict[Atom, IndexLike] = dict(zip(trace.axes, member.at, strict=True))
        kernel.members.append(member)
        kernel.computed[use.definition] = member.element
        kernel.cost += use.cost
        for definition, read_at in trace.reads:
            if definition in kernel.computed:
                continue
            mine = tuple([index.substitute(mapping) for index in read_at])
            known = kernel.reads.setdefault(definition, [])
            if mine not in known:
                known.append(mine)
            readers = self._readers.setdefault(definition, [])
            if item not in readers[-_NEIGHBOURS:]:
                readers.append(item)
        for other in needed:
            if other is not item:
                other.first_user = min(other.first_user, item.key)
        if isinstance(use.definition, Written):
            overwritten = self.on_memory_of(use.definition.target)
            kernel.overwritten.update(overwritten)
            self._made_by |= dict.fromkeys(overwritten, item)
        self._made_by[use.definition] = item
        self._made_by.setdefault(shared_source(use.definition), item)
