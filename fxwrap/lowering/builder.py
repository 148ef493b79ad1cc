"""The state of one lowering: the values of nodes, their storages and symbols, and the lines so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.fx_passes.fake_propagation import check_desugared
from fxwrap.fx_passes.model_source import location_of, source_of
from fxwrap.lines import WaitCollective
from fxwrap.lowering.control.streams import StreamPlan, StreamTracker
from fxwrap.lowering.in_flight import InFlight
from fxwrap.lowering.symbols.table import GraphSymbols, ProgramSymbols
from fxwrap.names import NameAllocator
from fxwrap.options import Options
from fxwrap.printers import KernelPrinter
from fxwrap.symbolic import floor_divide, product, total
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, is_opaque, storage_identity
from fxwrap.wrapper_ir import Block, KernelDefinition, LineBase, Operand, Origin, Size, Source, TensorType, Value, used

FakeValue: TypeAlias = Any
"""A fake tensor, a number, symbolic or not, an opaque object, None, or a nested tuple, list or dict of these."""

Payload: TypeAlias = Any
"""The content of a constant: a tensor or an opaque object."""

Fakes: TypeAlias = Mapping[Node, FakeValue]
"""The fake values of a graph's nodes."""

NodeOperand: TypeAlias = "Operand | dict[str, Value]"
"""The operand of a node; for a launch of a user's kernel, the tensors that it writes by parameter."""

Keywords: TypeAlias = tuple[tuple[str, Operand], ...]
"""The keyword arguments of a call, in order."""


@dataclass(frozen=True)
class NodeCoverage:
    """The outcome of a node: "fused", "view", "call" or "number"; for a call, `reason` is the decline reason.

    For nodes that one kernel for attention replaces, or might have replaced, `reason` says so.

    `node` is its name in the graph, `operator` the operator that it calls, `location` its line in the model's source.
    """

    node: str
    operator: str
    kind: str
    reason: str = ""
    location: str = ""


def node_coverage(node: Node, name: str, kind: str, reason: str = "") -> NodeCoverage:
    """Returns the outcome of a node under a name."""
    named = isinstance(node.target, OpOverload | HigherOrderOperator)
    target = str(node.target) if named else getattr(node.target, "__name__", "")
    return NodeCoverage(name, target, kind, reason, location_of(node))


@dataclass(frozen=True)
class LoweringRequest:
    """How a program's graphs are lowered.

    Fields: the options; `declined_nodes` get no kernels, for reasons by name; `print_kernel` prints kernels;
    `tuned_devices` are the types of devices on which matmuls are timed, so that those with few rows are kernels first;
    `library_calls` are the matmuls for which the library was faster; `unfused_operands` are the matmuls whose operands
    are materialised: no schedule fits a kernel that computes them too.
    """

    options: Options
    declined_nodes: Mapping[str, str]
    print_kernel: KernelPrinter
    tuned_devices: frozenset[str] = frozenset()
    library_calls: frozenset[str] = frozenset()
    unfused_operands: frozenset[str] = frozenset()


class ProgramKernels:
    """The kernels of a program, by hash."""

    def __init__(self) -> None:
        self._definitions: dict[str, KernelDefinition] = {}
        self._counts: dict[str, int] = {}

    def add(self, definition: KernelDefinition) -> str:
        """Adds a kernel unless an equal one exists; returns its name in the program."""
        existing = self._definitions.get(definition.hash)
        if existing is not None:
            return existing.name
        number = self._counts.get(definition.name, 0)
        self._counts[definition.name] = number + 1
        named = replace(definition, name=f"{definition.name}_{number}")
        self._definitions[definition.hash] = named
        return named.name

    def definitions(self) -> tuple[KernelDefinition, ...]:
        """Returns all kernels in the order in which they were added."""
        return tuple(self._definitions.values())


@dataclass(frozen=True)
class ProgramState:
    """The state shared by the lowerings of all graphs of a program, those of blocks included.

    `constants` are payloads by name, `functions` the blocks that several lines call, by name, and `coverage` the
    outcome of each node. `graph_id` is the `id` of the compiled graph.
    """

    symbols: ProgramSymbols
    graph_id: int = -1
    names: NameAllocator = field(default_factory=NameAllocator)
    kernels: ProgramKernels = field(default_factory=ProgramKernels)
    constants: dict[str, Payload] = field(default_factory=dict)
    functions: dict[str, Block] = field(default_factory=dict)
    coverage: list[NodeCoverage] = field(default_factory=list)


class ConstantScope(Protocol):
    """The constants that a graph can refer to."""

    def constant(self, payload: Payload, name: str) -> Value:
        """Returns the value of a constant of the program in this graph."""
        ...


class LineBuffer:
    """The lines emitted so far; `streams` is None for a graph that uses none."""

    def __init__(self, storages: Storages, streams: StreamTracker | None) -> None:
        self.lines: list[LineBase] = []
        self.streams = streams
        self.stream = 0
        self._storages = storages

    def emit(self, line: LineBase) -> None:
        """Adds a line, on the current stream."""
        if self.streams is not None:
            line = self.streams.plan.assign_stream(line, self.stream)
            self.streams.record_use(self._storages.root_names(used(line)), line)
        self.lines.append(line)

    @contextmanager
    def on_stream(self, number: int) -> Iterator[None]:
        """Makes `number` the current stream."""
        self.stream = number
        yield
        self.stream = 0


class Builder:
    """The lowering of one graph, a program's or a block's, node by node.

    `outer` is the builder of a block's enclosing graph; `scope` makes the names of its nodes unique in the program.
    `env` maps each lowered node to its operand; `constants`, set by the owner, adds the constants that the graph uses.
    """

    def __init__(
        self,
        fakes: Fakes,
        state: ProgramState,
        streams: StreamPlan | None = None,
        outer: Builder | None = None,
        scope: str = "",
    ) -> None:
        self.fakes = fakes
        self.state = state
        self.scope: str = scope if outer is None else f"{outer.scope}{scope}."
        self.env: dict[Node, NodeOperand] = {}
        self.constants: ConstantScope
        self.symbols: GraphSymbols = GraphSymbols(state.symbols, None if outer is None else outer.symbols)
        self.storages = Storages()
        self.buffer = LineBuffer(self.storages, None if streams is None else StreamTracker(streams))
        self.in_flight = InFlight()

    def emit(self, line: LineBase) -> None:
        """Adds a line, on the current stream, after the waits for point-to-point communication that it needs."""
        self.await_in_flight(self.in_flight.blocking(line, self.storages.root_names))
        self.buffer.emit(line)

    def await_in_flight(self, roots: Sequence[str]) -> None:
        """Adds waits for results of point-to-point communication in flight, by the names of their roots."""
        for root in roots:
            pending = self.in_flight.finish(root)
            assert pending is not None
            ready = self.add_view(f"{pending.value.name}_ready", pending.fake, pending.value)
            self.buffer.emit(WaitCollective(ready, pending.value, "", origin=pending.origin))

    # --- nodes ------------------------------------------------------------------------------------------------------

    def qualified(self, node: Node) -> str:
        """Returns a name of a node that is unique among the program's graphs."""
        return self.scope + node.name

    def source(self, node: Node) -> Source:
        """Returns the position of a node in the program's graph and in the model's source."""
        return source_of(node, self.qualified(node), self.state.graph_id)

    def origin(self, node: Node) -> Origin:
        """Returns the origin of the lines of a node."""
        return Origin((self.source(node),))

    def value(self, node: object) -> Value:
        """Returns the operand of a node that is a tensor or another value."""
        assert isinstance(node, Node)
        operand = self.env[node]
        assert isinstance(operand, Value), f"'{node.name}' is no value"
        return operand

    # --- values -----------------------------------------------------------------------------------------------------

    def unique(self, name: str) -> str:
        """Returns an unused name of a value, `name` or one derived from it."""
        return self.state.names.create_name(name)

    def add_scalar(self, name: str, fake: object) -> Value:
        """Adds a value for a scalar."""
        return Value(self.unique(name), self.symbols.type_of(fake))

    def add_opaque(self, name: str, fake: object) -> Value:
        """Adds a value for an opaque object, such as a device mesh or a random number generator."""
        value = Value(self.unique(name), self.symbols.type_of(fake))
        self.storages.add_fake(value, fake)
        return value

    def add_value(self, name: str, fake: object) -> Value:
        """Adds a value for a tensor with a storage of its own, an opaque object or a scalar."""
        if isinstance(fake, torch.Tensor):
            return self.add_root(name, fake)
        return self.add_opaque(name, fake) if is_opaque(fake) else self.add_scalar(name, fake)

    def add_buffer(self, name: str, type_: TensorType) -> Value:
        """Adds a root that is no tensor of the graph."""
        value = Value(self.unique(name), type_)
        self.storages.add(value, value)
        return value

    def add_root(self, name: str, fake: torch.Tensor) -> Value:
        """Adds a root for a tensor of the graph."""
        check_desugared(name, fake)
        value = self.add_buffer(name, self.symbols.tensor_type(fake))
        self.storages.add_fake(value, fake)
        self.storages.share(fake, value, overwrite=False)
        return value

    def add_alias(self, name: str, type_: TensorType, base: Value, fake: torch.Tensor | None = None) -> Value:
        """Adds a value in the memory of another."""
        value = Value(self.unique(name), type_)
        self.storages.add(value, self.storages.root(base))
        if fake is not None:
            self.storages.add_fake(value, fake)
        return value

    def add_view(self, name: str, fake: torch.Tensor, base: Value) -> Value:
        """Adds a value for a tensor of the graph that is a view of another."""
        return self.add_alias(name, self.view_type(fake, base), base, fake)

    def view_type(self, fake: torch.Tensor, base: Value, base_fake: torch.Tensor | None = None) -> TensorType:
        """Returns the type of a view of a value.

        Its offset in the root is computed from the step between the two fake tensors: after CSE, the metadata of base
        and view may belong to different storages, but the step is the same in each. `base_fake` is the fake tensor of
        the node that the view is of, if the value is that of several nodes, as of an input and of a write into it.
        """
        base_fake = self.storages.fake(base) if base_fake is None else base_fake
        offset = base.tensor_type.storage_offset
        start, view_start = base_fake.storage_offset(), fake.storage_offset()
        old_bytes, new_bytes = base_fake.dtype.itemsize, fake.dtype.itemsize
        if old_bytes != new_bytes:
            start, offset = start * old_bytes // new_bytes, floor_divide(product((offset, old_bytes)), new_bytes)
        step: Size = self.symbols.size(view_start - start)
        return self.symbols.tensor_type(fake, total((offset, step)))


def node_error(node: Node, reason: str, remedy: str) -> GraphError:
    """Returns the error for a node that cannot be lowered, with its location in the model's source."""
    return GraphError(node.name, reason, remedy, location_of(node))


class Storages:
    """Maps each tensor value to its root, the value that owns its memory, and to its fake tensor."""

    def __init__(self) -> None:
        self._roots: dict[str, Value] = {}
        self._fakes: dict[str, Any] = {}
        self._root_of_storage: dict[int, Value] = {}
        self._mutated: set[str] = set()

    def add(self, value: Value, root: Value) -> None:
        """Records the root of a value; `root` may be the value itself."""
        self._roots[value.name] = root

    def add_fake(self, value: Value, fake: object) -> None:
        """Records the fake tensor, or the opaque object, of a value."""
        self._fakes[value.name] = fake

    def share(self, fake: torch.Tensor, root: Value, *, overwrite: bool = True) -> None:
        """Records that the storage of a tensor of the graph is the memory of a root."""
        if overwrite:
            self._root_of_storage[storage_identity(fake)] = root
        else:
            self._root_of_storage.setdefault(storage_identity(fake), root)

    def mark_mutated(self, value: Value) -> None:
        """Records that a line writes the memory of a value."""
        self._mutated.add(self._roots[value.name].name)

    @property
    def mutated(self) -> Set[str]:
        """The names of the roots that lines write."""
        return self._mutated

    def root(self, value: Value) -> Value:
        """Returns the value that owns a value's memory."""
        return self._roots[value.name]

    def root_names(self, values: list[Value]) -> list[str]:
        """Returns the names of the roots of values, without those that have none."""
        return [self._roots[value.name].name for value in values if value.name in self._roots]

    def root_of_fake(self, fake: torch.Tensor) -> Value | None:
        """Returns the root whose memory is the storage of a tensor of the graph, or None."""
        return self._root_of_storage.get(storage_identity(fake))

    def fake(self, value: Value) -> torch.Tensor:
        """Returns the fake tensor of a value."""
        return self._fakes[value.name]  # type: ignore[no-any-return]

    def example(self, operand: object) -> object:
        """Returns the fake tensor, or the opaque object, of a value; other operands are unchanged."""
        return self._fakes.get(operand.name, operand) if isinstance(operand, Value) else operand

    def device_types(self) -> list[str]:
        """Returns the types of the devices of all tensors and generators, sorted."""
        fakes = [fake for fake in self._fakes.values() if isinstance(fake, torch.Tensor | torch.Generator)]
        return sorted({fake.device.type for fake in fakes})
