"""Lowering one graph, a program's or a block's, to lines: definitions, what gets memory, kernels and calls in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxwrap.errors import GraphError
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.define import Defining, Step, definitions_in
from fxwrap.lowering.definitions import Definition, Written, viewed_base
from fxwrap.lowering.effects import has_effect
from fxwrap.lowering.emit import Emission, symbol_hints
from fxwrap.lowering.fusion import Fusion, Item
from fxwrap.lowering.in_place import calls_in_place
from fxwrap.lowering.realise import Use, Uses
from fxwrap.lowering.source import location_of
from fxwrap.lowering.streams import StreamPlan, stream_number, stream_plan
from fxwrap.options import Options
from fxwrap.printers import KernelPrinter
from fxwrap.symbolic import Size
from fxwrap.wrapper_ir import TensorType, Value

_EFFECTS = "effects"
"""What each operator call with an effect depends on, and makes anew: such calls keep their order."""


@dataclass(frozen=True)
class Request:
    """How a program's graphs are lowered: the options, nodes that get no kernels, and what prints kernels."""

    options: Options
    refused: frozenset[str]
    print_kernel: KernelPrinter


class Body:
    """The lowering of one graph. What its placeholders stand for is in the builder's `env` before.

    Args:
        module: the graph and what hangs on it.
        builder: where lines, values and symbols go.
        request: how kernels are made.
        attribute: takes a `get_attr` node: puts what it stands for into the builder's `env`.
        lower_higher_order: lowers a call of a higher-order operator.
        gives_written: whether what is copied into a placeholder may be given back as the placeholder itself.

    `read_only` holds names of values that nothing may write.
    """

    def __init__(
        self,
        module: GraphModule,
        builder: Builder,
        request: Request,
        attribute: Callable[[Node], None],
        lower_higher_order: Callable[[Node, Collection[str]], None],
        gives_written: bool = False,
    ) -> None:
        self.gives_written = gives_written
        self.nodes: list[Node] = list(module.graph.nodes)
        self.builder = builder
        self.request = request
        self.attribute = attribute
        self.lower_higher_order = lower_higher_order
        self.output = next(node for node in self.nodes if node.op == "output")
        self.read_only: set[str] = set()

    def lower(self, keeps: Callable[[Value], bool]) -> Callable[[Size], int]:
        """Emits the graph's lines, so that every node its output names is in the builder's `env`.

        `keeps` says of a value that was there before whether its memory must not be written. Returns what gives a
        typical value of a size.
        """
        self.builder.streams = stream_plan(self.nodes, self.request.options.device_specs(), self.builder.fakes)
        defining = self._define()
        hint = symbol_hints(self.builder)
        uses = self._uses(defining, hint)
        fusion = self._fused(defining, uses, hint)
        items = fusion.items()
        dying = self._dying(fusion, defining, keeps)
        request = self.request
        emission = Emission(
            self.builder, defining, uses, request.options, hint, dying, request.print_kernel, self.lower_higher_order
        )
        for node, value in self.builder.env.items():
            emission.record(defining.known.get(node), value)
        wanted = {definition for item in items if item.kernel is not None for definition in item.kernel.reads}
        wanted |= {definition for definition, use in uses.by_definition.items() if use.external}
        for item in items:
            self._emit(emission, item, wanted)
        for node in self.output.all_input_nodes:
            emission.ensure(node)
        self.builder.state.outcomes.extend(defining.outcomes)
        return hint

    def _define(self) -> Defining:
        """Walks the graph once: attributes get values, calls definitions or steps."""
        builder = self.builder
        options = self.request.options
        in_place = calls_in_place(self.nodes, builder.fakes, self.gives_written, options.lowerings)
        defining = Defining(builder, options, self.request.refused, in_place)
        needed = _needed(self.nodes)
        for position, node in enumerate(self.nodes):
            if node.op == "get_attr" and node in needed:
                self.attribute(node)
            if node.op == "call_function" and node in needed:
                defining.call(node, position)
            elif node in builder.env:
                defining.given(node, builder.env[node])
        return defining

    def _uses(self, defining: Defining, hint: Callable[[Size], int]) -> Uses:
        """Records what every definition reads, what is needed in memory, and decides what else is."""
        uses = Uses(hint, self.request.options.device_specs())
        for definition, position in defining.position_of.items():
            uses.add(definition, position)
        read = [definition for step in defining.steps for definition in step.reads]
        read += self._definitions_of(self.output.all_input_nodes, defining)
        for definition in read:
            uses.add(viewed_base(definition), 0).external = True
        for definition in defining.position_of:
            if isinstance(definition, Written):
                uses.by_definition[definition].external = True
        streams = self.builder.streams
        if streams is not None:
            for use in uses.by_definition.values():
                own = streams.lane(use.position)
                use.external |= any(streams.lane(consumer.position) != own for consumer in use.consumers)
        uses.decide(defining.mutations)
        return uses

    def _definitions_of(self, nodes: Iterable[Node], defining: Defining) -> list[Definition]:
        return [definition for node in nodes for definition in definitions_in(defining.known[node])]

    def _fused(self, defining: Defining, uses: Uses, hint: Callable[[Size], int]) -> Fusion:
        """Returns operator calls and kernels in the order in which they run."""
        streams = self.builder.streams
        lane = None if streams is None else streams.lane
        fusion = Fusion(uses, hint, defining.on_memory_of, self.request.options.device_specs(), lane)
        events: list[tuple[int, Step | Use]] = [(step.position, step) for step in defining.steps]
        events += [(use.position, use) for use in uses.units()]
        for _, event in sorted(events, key=lambda pair: pair[0]):
            if isinstance(event, Use):
                fusion.define(event)
            else:
                after: list[object] = [*event.symbols, *event.writes, *([_EFFECTS] if event.effectful else [])]
                after += [item for definition in event.writes for item in fusion.readers(definition)]
                made = [*event.defines, *event.bound, *event.writes, *([_EFFECTS] if event.effectful else [])]
                fusion.call(
                    event.number or event.node, made, [viewed_base(definition) for definition in event.reads], after
                )
        return fusion

    def _dying(self, fusion: Fusion, defining: Defining, keeps: Callable[[Value], bool]) -> dict[Definition, Item]:
        """Returns the last reader of each definition whose memory the program may overwrite after that."""
        kept: set[Definition] = {definition for definition, _ in defining.mutations}
        kept |= {viewed_base(item) for item in self._definitions_of(self.output.all_input_nodes, defining)}
        for node, value in self.builder.env.items():
            if isinstance(value, Value) and isinstance(value.type, TensorType) and keeps(value):
                kept |= set(definitions_in(defining.known[node]))
        readers = fusion.last_readers()
        place = {id(item): number for number, item in enumerate(fusion.items())}
        dying = {}
        for definition in readers:
            shown = defining.on_memory_of(definition)  # what dies is memory, with all that shows it
            if kept.isdisjoint(shown):
                items = [readers[other] for other in shown if other in readers]
                dying[definition] = max(items, key=lambda item: place[id(item)])
        return dying

    def _stream(self, item: Item, streams: StreamPlan) -> int:
        if item.kernel is not None:
            return streams.numbers[item.kernel.members[0].use.position]
        return 0 if item.node is None else stream_number(item.node)

    def _emit(self, emission: Emission, item: Item, wanted: set[Definition]) -> None:
        before = len(self.builder.mutated)
        if self.builder.streams is not None:
            self.builder.stream = self._stream(item, self.builder.streams)
        emission.emit(item, wanted)
        self.builder.stream = 0
        if item.node is not None and len(self.builder.mutated) != before:
            for name in self.builder.mutated & self.read_only:
                reason = f"it writes the constant '{name}', which is not mutable"
                remedy = "Register the tensor as a buffer of the module"
                raise GraphError(item.node.name, reason, remedy, location_of(item.node))


def _needed(nodes: Sequence[Node]) -> set[Node]:
    """Returns the nodes that the output, or an effect, depends on."""
    needed: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or node in needed or has_effect(node):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return needed
