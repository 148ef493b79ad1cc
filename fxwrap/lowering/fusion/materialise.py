"""Which definitions are materialised, and which are recomputed wherever they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import MIN_WINDOW_ITERATIONS, MIN_WINDOW_LOADS, STORAGE_ONLY, as_index
from fxwrap.lowering.fusion.concatenations import ConcatenatedParts
from fxwrap.lowering.fusion.def_use import DefUse, DefUseChains
from fxwrap.lowering.fusion.definition_plans import DefinitionPlan, MaterialisationPlan
from fxwrap.lowering.fusion.definitions import (
    Definition,
    EvenConcatenation,
    Pointwise,
    Reduced,
    Scattered,
    Stored,
    Viewed,
)
from fxwrap.lowering.fusion.tracing import Access, IndexTuple, Trace, has_byte_weights, iteration_space, shared_source
from fxwrap.symbolic import Size, product

_CHEAP = 8
"""Instructions that are cheaper to repeat than a value is to write and read."""
_CHEAP_BROADCAST = 16
_MIN_TABLE_COST, _MIN_TABLE_READS = 12, 16
"""The instructions per element, and the reads of each element, from which on a lookup table pays off."""
_MAX_INLINED_COST = 400
_MAX_READS = 24
_MAX_EXTRA_BYTES = 1.25
"""The bytes that recomputing a cheap tensor may read, relative to those that it saves."""
_CACHED_INSTRUCTIONS_PER_BYTE = 1.5
"""The instructions in the time to read a byte that an iteration beside it has read."""
_MAX_MOVED_COST = 24
"""The instructions of an element that a kernel may compute at other places of its iterations."""
_MIN_NARROWED_READS = 512
"""The reads of each element by a matmul from which on a narrower copy of its operand pays off."""
_MIN_STENCIL_READS = 3
"""An iteration that reads so many elements of one tensor counts as that many consumers."""
_MAX_INLINE_DEPTH = 40
"""The longest chain of inlined definitions: their bodies call one another."""


def plan_materialisation(
    chains: DefUseChains,
    external: Collection[Definition],
    mutations: Iterable[tuple[Definition, int]],
    hint: Callable[[Size], int],
    specs: Mapping[str, DeviceSpec],
    matmuls: Collection[Definition] = (),
) -> MaterialisationPlan:
    """Decides which definitions are materialised; drops those that nothing reads.

    The `external` definitions must be materialised; `mutations` are stored definitions and the positions at which they
    are overwritten. `hint` returns a typical value of a size; `specs` are those of the device types with kernels.
    `matmuls` are the reductions that kernels compute with epilogues.
    """
    overwritten_at: dict[Definition, list[int]] = {}
    for definition, position in mutations:
        overwritten_at.setdefault(definition, []).append(position)
    planner = _MaterialisationPlanner(chains, external, overwritten_at, hint, specs, frozenset(matmuls))
    for use in planner.live_uses():
        planner.plans[use.definition] = planner.plan(use)
    return MaterialisationPlan(planner.plans, frozenset(external), chains.labels, chains.tracer)


_End = TypeVar("_End", bound=Definition)


@dataclass(frozen=True)
class _MaterialisationPlanner:
    """The arguments of `plan_materialisation`, the plans of definitions before the current one, and all live consumers.

    Sizes count as their hints: of elements, iterations and bytes.
    """

    chains: DefUseChains
    external: Collection[Definition]
    overwritten_at: Mapping[Definition, Sequence[int]]
    hint: Callable[[Size], int]
    specs: Mapping[str, DeviceSpec]
    matmuls: frozenset[Definition]
    plans: dict[Definition, DefinitionPlan] = field(default_factory=dict)
    consumers: dict[Definition, list[DefUse]] = field(default_factory=dict)

    @cached_property
    def _parts(self) -> ConcatenatedParts:
        return ConcatenatedParts(self.chains.tracer, self.external)

    def live_uses(self) -> list[DefUse]:
        """Returns the uses that are external or have a live consumer, in order."""
        for use in reversed(self.chains.uses.values()):
            consumers = [consumer for consumer in use.consumers if consumer.definition in self.consumers]
            is_operand = any(consumer.definition in self.consumers for consumer in use.operand_consumers)
            if consumers or is_operand or use.definition in self.external:
                self.consumers[use.definition] = consumers
        return [use for use in self.chains.uses.values() if use.definition in self.consumers]

    def plan(self, use: DefUse) -> DefinitionPlan:
        definition = use.definition
        trace = self.chains.tracer.trace(definition)
        cost, depth, reads, operands = trace.cost, 0, set[Definition](), set[Definition]()
        for other, _ in trace.reads:
            producer = self.plans[other]
            if producer.materialised:
                reads.add(other)
            else:
                cost += producer.cost
                depth = max(depth, producer.depth + 1)
                reads |= producer.reads
                operands |= producer.operands
        for other in self.chains.operands_of(definition):
            producer = self.plans[other]
            operands |= {other} if producer.materialised else producer.reads | producer.operands
        plan = DefinitionPlan(
            definition, use.position, not isinstance(definition, Pointwise | Viewed), cost, depth, frozenset(reads),
            frozenset(operands - reads), self._has_window(definition, trace),
        )  # fmt: skip
        if not isinstance(definition, Pointwise):
            return plan
        if not self._needs_memory(plan):
            if self._should_inline(use, plan):
                return plan
            if self._is_computed_once_a_row(use, plan):
                return replace(plan, cost=0)
        return replace(plan, materialised=True)

    def _has_window(self, definition: Definition, trace: Trace) -> bool:
        """Whether an element has a window, itself or in what is inlined, and iterations enough have several of them."""
        spec = self.specs.get(definition.device.type)
        if not isinstance(definition, Pointwise) or spec is None or not spec.massively_parallel:
            return False
        if self._count(definition.sizes) < 2 * MIN_WINDOW_ITERATIONS:
            return False
        places = Counter([other for other, _ in trace.reads])
        if max(places.values(), default=0) >= MIN_WINDOW_LOADS:
            return True
        return any(plan.has_window and not plan.materialised for plan in map(self.plans.__getitem__, places))

    def _needs_memory(self, plan: DefinitionPlan) -> bool:
        """Whether a definition must be materialised.

        With regions, a result that reads an intermediate result of its operator is: kernels that compute it would share
        the operator.
        """
        is_external = plan.definition in self.external
        is_intermediate = self.chains.is_intermediate
        shares_operator = not is_intermediate(plan.definition) and any(map(is_intermediate, plan.reads))
        return is_external or shares_operator or self._reads_overwritten_memory(plan)

    def _reads_overwritten_memory(self, plan: DefinitionPlan) -> bool:
        """Whether a read tensor is overwritten between the definition and its last consumer."""
        use = self.chains.uses[plan.definition]
        consumers = [*self.consumers[plan.definition], *use.operand_consumers]
        last = max([consumer.position for consumer in consumers], default=plan.position)
        read = plan.reads | plan.operands
        return any(
            plan.position <= position < last for other in read for position in self.overwritten_at.get(other, ())
        )

    def _should_inline(self, use: DefUse, plan: DefinitionPlan) -> bool:
        consumers, cost = self.consumers[plan.definition], plan.cost
        if plan.depth > _MAX_INLINE_DEPTH:
            return False
        if not plan.reads and cost <= _MAX_INLINED_COST // 4:
            return True
        if cost > _MAX_INLINED_COST or len(plan.reads) > _MAX_READS:
            return False
        elements = self._count(plan.definition.sizes)
        if self._is_matmul_epilogue(use, plan, elements) or self._is_reduction_epilogue(plan, elements):
            return False
        if self._is_reduced_window(plan):
            return False
        if self._is_of_one_concatenation(use, elements) or self._is_of_one_scatter(use, elements):
            return True
        if self._is_narrower_than_its_cast(use, plan):
            return False
        widest = max([self._iterations(consumer) for consumer in consumers], default=elements)
        if widest > 2 * elements:
            is_repeated = self._is_lookup_table(use, plan, widest / elements) or self._is_normalised_operand(use, plan)
            is_repeated = is_repeated or self._is_narrowed_operand(use, plan, widest / elements)
            return cost <= _CHEAP_BROADCAST and not is_repeated
        if len(consumers) <= 1 and use.max_reads_per_iteration < _MIN_STENCIL_READS:
            return True
        if cost <= _CHEAP and self._read_bytes(plan) <= self._bytes([plan.definition]) * _MAX_EXTRA_BYTES:
            return True
        if cost <= _CHEAP and self._is_summed_in_half_precision(plan):
            return True
        readers = max(len(consumers), use.max_reads_per_iteration)
        return self._is_cheap_to_recompute(plan, elements, readers) or self._is_recomputed_from_cache(use, plan)

    def _is_reduced_window(self, plan: DefinitionPlan) -> bool:
        """Whether a reduction reads a definition with a window, whose loads iterations of one kernel share.

        Those of a reduction, which have sums in registers, would load each element again for every window.
        """
        consumers = self.consumers[plan.definition]
        return plan.has_window and any(isinstance(item.definition, Reduced) for item in consumers)

    def _is_narrower_than_its_cast(self, use: DefUse, plan: DefinitionPlan) -> bool:
        """Whether an operator reads a definition alone, and several read its results, which are wider.

        If recomputing these takes long, readers compute them from the narrower elements.
        """
        consumers, elements = self.consumers[plan.definition], self._count(plan.definition.sizes)
        if len(consumers) != 1 or type(consumers[0].definition) is not Pointwise:
            return False
        reader, trace = consumers[0], self.chains.tracer.trace(consumers[0].definition)
        is_only = [other for other, _ in trace.reads] == [plan.definition] and self._iterations(reader) == elements
        is_wider = reader.definition.dtype.itemsize > plan.definition.dtype.itemsize and trace.cost <= _CHEAP
        readers = len(self.consumers[reader.definition])
        if not (is_only and is_wider) or readers < 2 or plan.cost <= _CHEAP or reader.definition in self.external:
            return False
        return not self._is_cheap_to_recompute(replace(plan, definition=reader.definition), elements, readers)

    def _is_of_one_concatenation(self, use: DefUse, elements: int) -> bool:
        """Whether all readers of a definition compute parts of one concatenation, element by element, that share reads.

        Its kernel computes a value once for all parts that read it; a kernel of the definition alone would have other
        iterations.
        """
        end, between = self._only_end(use, EvenConcatenation)
        if end is None or use.max_reads_per_iteration > len(end.parts):
            return False
        parts = {self._count(item.sizes) for item in (*between, *end.parts)}
        return parts == {elements} and self._parts.share_reads(end)

    def _is_of_one_scatter(self, use: DefUse, elements: int) -> bool:
        """Whether all readers of a definition compute values of one scatter, element by element.

        No other definition joins the kernel of a scatter, which computes a value once for all values that read it.
        """
        end, between = self._only_end(use, Scattered)
        reads = [use, *[self.chains.uses[item] for item in between]]
        if end is None or any(item.max_reads_per_iteration > 1 for item in reads):
            return False
        return {self._count(end.space), *[self._count(item.sizes) for item in between]} == {elements}

    def _only_end(self, use: DefUse, kind: type[_End]) -> tuple[_End | None, list[Definition]]:
        """Returns the only definition of a kind that is computed from a definition, and those between them.

        None without one, or where a definition between them is not pointwise, or others read it.
        """
        pending, readers = [use], dict[DefUse, None]()
        while pending and len(readers) <= _MAX_READS:
            for reader in self.consumers[pending.pop().definition]:
                if reader not in readers and not isinstance(reader.definition, kind):
                    pending.append(reader)
                readers[reader] = None
        ends = [item.definition for item in readers if isinstance(item.definition, kind)]
        between = [item.definition for item in readers if item.definition not in ends]
        is_only = not pending and len(ends) == 1
        if not is_only or any(type(item) is not Pointwise or item in self.external for item in between):
            return None, between
        return ends[0], between

    def _is_summed_in_half_precision(self, plan: DefinitionPlan) -> bool:
        """Whether only reductions read a half-precision tensor, and recomputing it reads few more bytes.

        In memory each element would be rounded; recomputed, only the sums are.
        """
        consumers = [consumer.definition for consumer in self.consumers[plan.definition]]
        if plan.definition.dtype not in STORAGE_ONLY or not all(isinstance(item, Reduced) for item in consumers):
            return False
        readers, read = len({shared_source(item) for item in consumers}), self._read_bytes(plan)
        materialised = read + readers * self._bytes([plan.definition])
        return readers * read <= _MAX_EXTRA_BYTES * materialised

    def _is_cheap_to_recompute(self, plan: DefinitionPlan, elements: int, readers: int) -> bool:
        """Whether recomputing a tensor for each reader takes less time than writing and reading it."""
        spec = self.specs.get(plan.definition.device.type)
        instructions_per_byte = 0 if spec is None else spec.instructions_per_byte
        recomputed = (readers - 1) * (plan.cost + instructions_per_byte * self._read_bytes(plan) / elements)
        return (
            recomputed <= instructions_per_byte * plan.definition.dtype.itemsize * readers
        )  # one write, all but one read

    def _is_recomputed_from_cache(self, use: DefUse, plan: DefinitionPlan) -> bool:
        """Whether one kernel reads a tensor, which takes longer to write and read than to recompute for each read.

        Its iterations read operands that others have read, as neighbours in a stencil, from a cache. Scatters wait for
        memory, so that each may compute the values that several add.
        """
        spec = self.specs.get(plan.definition.device.type)
        if spec is None or not spec.instructions_per_byte or self._is_computed_by_its_reduction(plan):
            return False
        ends, between = self._ends(use)
        if not ends:
            return False
        elements, itemsize = self._count(plan.definition.sizes), plan.definition.dtype.itemsize
        read = self._read_bytes(plan) / elements
        places = [self._places(end, between, use.definition) for end in ends]
        evaluations = [len(at) * self._iterations(self.chains.uses[end]) / elements for at, end in zip(places, ends)]
        if places == [{tuple([as_index(axis) for axis in self.chains.tracer.trace(ends[0]).axes])}]:
            return False  # the definition's kernel computes the end, too
        if len(ends) > 1:
            return max(evaluations) <= 1 and len(ends) * read <= (1 + len(ends)) * itemsize
        again = plan.cost + _CACHED_INSTRUCTIONS_PER_BYTE * read
        saved = 1.5 * spec.instructions_per_byte * itemsize
        return plan.cost <= _MAX_MOVED_COST and (evaluations[0] - 1) * again <= saved

    def _ends(self, use: DefUse) -> tuple[Sequence[Definition], Set[Definition]]:
        """Returns the only definition that all readers of one lead to, or several scatters, and those between.

        Returns no ends if there are others, or they are far.
        """
        between, ends = set[Definition](), list[Definition]()
        readers = dict.fromkeys(self.consumers[use.definition])
        while readers and (ends or len(readers) > 1) and len(between) <= _MAX_READS:
            reader = min(readers, key=self._order.__getitem__)
            del readers[reader]
            if isinstance(reader.definition, Scattered):
                ends.append(reader.definition)
            elif type(reader.definition) is Pointwise and reader.definition not in self.external:
                between.add(reader.definition)
                readers |= dict.fromkeys(self.consumers[reader.definition])
            else:
                return (), between
        ends += [reader.definition for reader in readers]
        is_known = len(between) <= _MAX_READS and not any(isinstance(end, Viewed | Stored) for end in ends)
        return ends if is_known else (), between

    def _places(self, end: Definition, between: Set[Definition], definition: Definition) -> set[IndexTuple]:
        """Returns the indices at which an iteration evaluates a definition, if it inlines what is between them."""

        def access_of(item: Definition) -> Access:
            return "inlined" if item in between else "fetched"

        trace = self.chains.tracer.trace_inlining(end, access_of)
        return {at for other, at in trace.reads if other is definition}

    def _is_computed_by_its_reduction(self, plan: DefinitionPlan) -> bool:
        """Whether the kernel of a reduction has a definition's operands, which are not in memory, in registers.

        That kernel stores the definition instead of the operands.
        """
        trace = self.chains.tracer.trace_inlining(plan.definition, self._access_of)
        after = [other for other, _ in trace.reads if isinstance(other, Reduced)]
        element = tuple([as_index(axis) for axis in trace.axes])
        operands = [other for other, at in trace.reads if at == element and not isinstance(other, Reduced)]
        in_memory = all(isinstance(other, Stored) or other in self.external for other in operands)
        elements = self._count(plan.definition.sizes)
        return not in_memory and any(
            self._count(item.sizes) * self._count(item.source.reduced) == elements for item in after
        )

    @cached_property
    def _order(self) -> dict[DefUse, int]:
        return {use: number for number, use in enumerate(self.chains.uses.values())}

    def _is_lookup_table(self, use: DefUse, plan: DefinitionPlan, reads_per_element: float) -> bool:
        """Whether elements are expensive and read so often that reading them from a cache is faster.

        A matmul of few rows computes each element of a dequantised matrix once for all rows.
        """
        spec = self.specs.get(plan.definition.device.type)
        rows = 0 if spec is None else dict(spec.matmuls.generated_dequantised_rows).get(plan.definition.dtype, 0)
        are_rows = all(isinstance(consumer.definition, Reduced) for consumer in self.consumers[use.definition])
        if reads_per_element <= rows and are_rows:
            return False
        after_reduction = any(isinstance(other, Reduced) for other in plan.reads)
        expensive = plan.cost - (self._cost_of_rows(plan) if are_rows else 0) >= _MIN_TABLE_COST
        is_table = expensive and reads_per_element >= _MIN_TABLE_READS and not after_reduction
        return is_table and spec is not None and spec.instructions_per_byte > 0

    def _cost_of_rows(self, plan: DefinitionPlan) -> int:
        """Returns the cost of integers that an element shares with its row, as the index of a gathered row."""
        elements = self._count(plan.definition.sizes)
        read = {self.plans[other] for other, _ in self.chains.tracer.trace(plan.definition).reads}
        rows = [item for item in read if self._count(item.definition.sizes) * _MIN_TABLE_READS <= elements]
        return sum(item.cost for item in rows if not (item.materialised or item.definition.dtype.is_floating_point))

    def _is_computed_once_a_row(self, use: DefUse, plan: DefinitionPlan) -> bool:
        """Whether each element is read along one row of a later reduction that shares a tensor with a consumer.

        Their kernel computes the element once for the row.
        """
        elements = self._count(plan.definition.sizes)
        consumers = self.consumers[use.definition]
        widest = max([self._iterations(consumer) for consumer in consumers], default=elements)
        if plan.cost > _CHEAP_BROADCAST or not self._is_lookup_table(use, plan, widest / elements):
            return False
        tensors = self._read_through([consumer.definition for consumer in consumers], widest)
        return any(
            isinstance(item, Reduced)
            and other.position > use.position
            and self._count(item.sizes) == elements
            and elements * self._count(item.source.reduced) == widest
            and not tensors.isdisjoint(self._read_through([item], widest))
            for item, other in self.chains.uses.items()
        )

    def _read_through(self, definitions: Sequence[Definition], elements: int) -> set[Definition]:
        """Returns the tensors of at least so many elements that definitions read, also through pointwise ones."""
        pending, tensors = [*definitions], set[Definition]()
        while pending:
            for other, _ in self.chains.tracer.trace(pending.pop()).reads:
                if other not in tensors and self._count(other.sizes) >= elements:
                    tensors.add(other)
                    if isinstance(other, Pointwise):
                        pending.append(other)
        return tensors

    def _is_normalised_operand(self, use: DefUse, plan: DefinitionPlan) -> bool:
        """Whether a definition has several rows that contractions read, and reads the results of reductions of them.

        The kernel of the reductions writes it too. In a contraction, each tile of columns would compute it again, with
        an element from memory for each of its operands. So would programs of one row and quantised weights, which
        instructions limit as well as memory.
        """
        spec = self.specs.get(plan.definition.device.type)
        if spec is None or not spec.massively_parallel:
            return False
        elements = self._count(plan.definition.sizes)
        after = [other for other in plan.reads if isinstance(other, Reduced) and self._count(other.source.reduced) > 1]
        completes = any(self._count(item.sizes) * self._count(item.source.reduced) == elements for item in after)
        consumers = [consumer.definition for consumer in self.consumers[use.definition]]
        return completes and all(
            isinstance(item, Reduced) and (self._count(item.source.reduced) < elements or has_byte_weights(item))
            for item in consumers
        )

    def _is_narrowed_operand(self, use: DefUse, plan: DefinitionPlan, reads_per_element: float) -> bool:
        """Whether only matmuls read a definition, often, and it is narrower than a tensor that it is computed from.

        Each tile of a matmul would load the wider elements again, and convert them between two copies to shared memory.
        """
        spec = self.specs.get(plan.definition.device.type)
        if spec is None or not spec.massively_parallel or reads_per_element < _MIN_NARROWED_READS:
            return False
        elements, itemsize = self._count(plan.definition.sizes), plan.definition.dtype.itemsize
        is_narrower = any(
            other.dtype.itemsize > itemsize and self._count(other.sizes) >= elements for other in plan.reads
        )
        return is_narrower and all(item.definition in self.matmuls for item in self.consumers[use.definition])

    def _is_matmul_epilogue(self, use: DefUse, plan: DefinitionPlan, elements: int) -> bool:
        """Whether a definition maps a matmul's results, which nothing else reads, one to one, but a consumer does not.

        The matmul's kernel stores it in place of these, so that equal epilogues make kernels of matmuls equal.
        """
        matmul, *others = sorted(plan.reads, key=lambda other: other not in self.matmuls) or [plan.definition]
        if matmul not in self.matmuls or matmul in self.external or self._count(matmul.sizes) != elements:
            return False
        if plan.definition.dtype.itemsize > matmul.dtype.itemsize:
            return False
        if not all(isinstance(other, Stored) for other in others):
            return False
        if all(self._iterations(consumer) == elements for consumer in self.consumers[plan.definition]):
            return False
        readers = self.consumers[matmul]
        while len(readers) == 1 and readers[0] is not use:
            readers = self.consumers[readers[0].definition]
        return readers == [use] and self._reads_once(plan.definition, matmul)

    def _reads_once(self, definition: Definition, other: Definition) -> bool:
        """Whether each element of a definition is computed from another element of one that it reads."""
        trace = self.chains.tracer.trace_inlining(definition, self._access_of)
        points = {at for read, at in trace.reads if read is other}
        axes = {axis for axis in trace.axes if axis.size != 1}
        return len(points) == 1 and axes <= {axis for at in points for index in at for axis in index.axes()}

    def _access_of(self, definition: Definition) -> Access:
        return "fetched" if self.plans[definition].materialised else "inlined"

    def _is_reduction_epilogue(self, plan: DefinitionPlan, elements: int) -> bool:
        """Whether a definition maps the results of a reduction, one to one, to the operand of another reduction.

        The first reduction's kernel computes it in parallel; it is no larger than the results of that reduction.
        """
        after = any(isinstance(other, Reduced) and self._count(other.sizes) == elements for other in plan.reads)
        return after and all(
            isinstance(consumer.definition, Reduced) and self._iterations(consumer) == elements
            for consumer in self.consumers[plan.definition]
        )

    def _iterations(self, use: DefUse) -> int:
        return self._count(iteration_space(use.definition)[0])

    def _read_bytes(self, plan: DefinitionPlan) -> float:
        """Returns the bytes that a definition reads; of a tensor of which it reads a part, as a slice, only these."""
        reads = self.chains.tracer.trace(plan.definition).reads if not plan.depth else ()
        places = Counter([other for other, _ in reads])
        elements = self._count(plan.definition.sizes)
        counts = {other: self._count(other.sizes) for other in plan.reads}
        return sum(
            other.dtype.itemsize * (min(count, elements * places[other]) if other in places else count)
            for other, count in counts.items()
        )

    def _bytes(self, definitions: Iterable[Definition]) -> float:
        return sum(self._count(item.sizes) * item.dtype.itemsize for item in definitions)

    def _count(self, sizes: Iterable[Size]) -> int:
        return max(self.hint(product(sizes)), 1)
