"""The first walk over a graph: every node becomes definitions, a number, or an operator call, with the reason why."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.loop_ir import KERNEL_DTYPES
from fxwrap.lowering.binding import derive_symbols
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.collectives import borrowed
from fxwrap.lowering.definitions import (
    Definition,
    Indices,
    Pointwise,
    Reader,
    Stored,
    Viewed,
    Written,
    broadcast_indices,
    viewed_base,
)
from fxwrap.lowering.effects import is_effectful, launches_kernel, shown_operands, written_operands
from fxwrap.lowering.host_numbers import HostNumbers, NumberRead, is_host_number
from fxwrap.lowering.in_place import InPlace
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.rules import RULES, Call
from fxwrap.lowering.source import location_of
from fxwrap.lowering.windows import Window, place_window
from fxwrap.options import Options
from fxwrap.symbolic import make_symbol
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, storage_identity
from fxwrap.wrapper_ir import TensorType, Value
from fxwrap.wrapper_ir.operators import OperatorFacts, is_assertion, operator_facts


@dataclass(eq=False)
class Step:
    """A node that runs as an operator call: what it reads, what it gives, what it overwrites.

    With `number` it is no call, but reads that number for the node.
    """

    node: Node
    position: int
    reads: list[Definition]
    defines: list[Definition] = field(default_factory=list)
    writes: list[Definition] = field(default_factory=list)
    symbols: set[sympy.Symbol] = field(default_factory=set)
    bound: set[sympy.Symbol] = field(default_factory=set)
    effectful: bool = False
    number: NumberRead | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a node: "fused", "view", "call" or "number", and for a call the reason.

    `node` is its name in the graph, `operator` what it calls, `location` the place in the model's source.
    """

    node: str
    operator: str
    kind: str
    reason: str = ""
    location: str = ""


class Defining:
    """Walks a graph's nodes; `known` holds what each stands for: a definition, a tuple of them, or a literal."""

    def __init__(
        self,
        builder: Builder,
        options: Options,
        refused: frozenset[str] = frozenset(),
        in_place: InPlace = InPlace(),  # noqa: B008 - it never changes
    ) -> None:
        self.builder = builder
        self.refused = refused
        self.options = options
        self.known: dict[Node, Any] = {}
        self.steps: list[Step] = []
        self.outcomes: list[Outcome] = []
        self.position_of: dict[Definition, int] = {}
        self.fake_of: dict[Definition, torch.Tensor] = {}
        self.node_of: dict[Definition, Node] = {}
        self.mutations: list[tuple[Definition, int]] = []
        self.windows: dict[Definition, Node] = {}  # slices that are overwritten, by the calls that overwrite them
        self._on_storage: dict[int, list[Definition]] = {}
        self._storage_of: dict[Definition, int] = {}
        self._strides: dict[Stored, tuple[Any, ...]] = {}
        self._bound: set[sympy.Symbol] = set()
        self._numbers = HostNumbers(builder.state.fresh_symbol)
        self._read: set[NumberRead] = set()
        self.in_place = in_place
        self._specs = options.device_specs()

    def stored(self, node: Node, fake: torch.Tensor, name: str = "") -> Stored:
        """Returns a definition for a tensor that is in memory."""
        type_ = self.builder.tensor_type(fake)
        found = Stored(type_.sizes, fake.dtype, fake.device)
        found.name = name or node.name
        self._in_memory(found, fake)
        strides = zip(type_.sizes, type_.strides, strict=True)
        self._strides[found] = tuple([stride for size, stride in strides if size != 1])
        return found

    def _in_memory(self, definition: Definition, fake: torch.Tensor) -> None:
        """Records on which storage a definition is."""
        storage = self._storage_of[definition] = storage_identity(fake)
        self._on_storage.setdefault(storage, []).append(definition)

    def given(self, node: Node, value: Any) -> None:
        """Takes a placeholder or attribute: a tensor in memory, or a literal."""
        is_tensor = isinstance(value, Value) and isinstance(value.type, TensorType)
        self.known[node] = self.stored(node, self.builder.fake_of[value.name]) if is_tensor else value

    def call(self, node: Node, position: int) -> None:
        """Takes a call_function node. Raises GraphError where it needs a number that nothing before it gives."""
        self._take(node, position)
        found = _symbols(self.known[node])
        unknown = {symbol.name for symbol in found - self._bound} - self.builder.known_symbols if found else None
        if unknown:
            reason = f"it needs the number {min(unknown)}, which nothing before it gives"
            remedy = "Compute the number, or read it from a tensor, before"
            raise GraphError(node.name, reason, remedy, location_of(node))

    def _take(self, node: Node, position: int) -> None:
        if not self.options.runtime_asserts and is_assertion(node.target):
            self.known[node] = None
            return
        derive_symbols(self.builder, node)
        fake = self.builder.fakes[node]
        if node.target is operator.getitem and isinstance(self.known.get(node.args[0]), tuple | dict):  # type: ignore[arg-type]
            self.known[node] = self.known[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        if isinstance(node.target, HigherOrderOperator):
            self._step(node, position, fake)
            own = "it is a kernel of the user's"
            self._became(node, "call", own if launches_kernel(node) else "it runs graphs or an operator of its own")
            return
        if node in self.in_place.copies:
            self.known[node] = self.known[node.args[0]]  # type: ignore[index]
            self._became(node, "view")
            return
        if node in self.in_place.parts:
            self.known[node] = None  # what is there when the call that it is a part of has run
            self._became(node, "view")
            return
        if node in self.in_place.windows:
            self._overwrite(node, self.in_place.windows[node], position)
            return
        if node in self.in_place.written:
            self._step(node, position, fake)
            self._became(node, "call", "it writes its operand in place")
            return
        if self._define_copy(node, position):
            return
        reason = "it gives a number"
        if isinstance(node.target, OpOverload) and self._gives_tensors(fake):
            refusal = self._define(node, node.target, fake, position)
            if refusal is None:
                return
            reason = refusal
        elif not self._gives_tensors(fake) and (not isinstance(node.target, OpOverload) or self._is_known_number(fake)):
            self.known[node] = self.builder.expression(fake)
            self._became(node, "number")
            return
        self._step(node, position, fake)
        self._became(node, "call", reason)

    def _became(self, node: Node, kind: str, reason: str = "") -> None:
        self.outcomes.append(outcome_of(node, self.builder.qualified(node), kind, reason))

    # --- definitions ------------------------------------------------------------------------------------------------

    def _define(self, node: Node, target: OpOverload, fake: Any, position: int) -> str | None:
        """Defines a node by its rule; else returns the reason why it stays a call."""
        facts, arguments, keywords = self._arguments(node, target)
        (arguments, keywords), numbers = self._on_one_device(node, fake, (arguments, keywords))
        refusal = self._refusal(node, facts, fake, (arguments, keywords))
        if refusal is not None:
            return refusal
        first = fake if isinstance(fake, torch.Tensor) else next(item for item in fake if item is not None)
        spec = self._specs[first.device.type]
        call = Call(facts.name, arguments, dict(keywords), fake, first.device, self._sizes, spec)
        result = RULES[facts.name](call)
        if isinstance(result, str):
            return result
        self._read_numbers(numbers, position)
        single = isinstance(result, Definition)
        items: Sequence[Any] = (result,) if isinstance(result, Definition) else result
        fakes = (fake,) if single else fake
        names = [node.name] if single else [f"{node.name}_{number}" for number in range(len(items))]
        found = tuple([
            None if item is None else self._placed(node, facts, item, item_fake, position, name)
            for item, item_fake, name in zip(items, fakes, names, strict=True)
        ])  # fmt: skip
        self.known[node] = found[0] if single else found
        views = all(isinstance(item, Viewed) or item is None for item in found)
        self._became(node, "view" if views else "fused")
        return None

    def _placed(
        self, node: Node, facts: OperatorFacts, item: Definition, fake: torch.Tensor, position: int, name: str
    ) -> Definition:
        """Returns a rule's definition under the node's name; a view that eager copies becomes a copy."""
        is_view = facts.aliased is not None and not facts.may_alias
        if isinstance(item, Viewed) and not is_view and not self._shares_memory(node, fake):
            item = copy_of(item)
        if item not in self.position_of:
            item.name, item.origin = name, facts.name
            self.position_of[item] = position
            self.fake_of[item] = fake
            if not isinstance(item, Viewed):
                self._in_memory(item, fake)
            self.node_of[item] = node
        return item

    def _shares_memory(self, node: Node, fake: torch.Tensor) -> bool:
        """Whether a result is on the storage of one of the node's operands."""
        own = storage_identity(fake)
        fakes = [self.builder.fakes.get(operand) for operand in node.all_input_nodes]
        flat = [item for found in fakes for item in (found if isinstance(found, tuple | list) else (found,))]
        return any(isinstance(item, torch.Tensor) and storage_identity(item) == own for item in flat)

    def _refusal(self, node: Node, facts: OperatorFacts, fake: Any, given: Any) -> str | None:
        if not self.options.fuse:
            return "the options ask for no fusion"
        if self.builder.qualified(node) in self.refused:
            return "its kernel could not be generated"
        if str(node.target) in self.options.lowerings:
            return "a lowering of the options' takes it"
        if facts.name in self.options.keep:
            return "the options keep it"
        if not facts.is_pure:
            return "it writes its operands, draws random numbers or has another effect"
        if facts.name not in RULES:
            return "it has no lowering rule"
        results = [item for item in (fake if isinstance(fake, tuple | list) else (fake,)) if item is not None]
        tensors = [*results, *definitions_in(given)]
        devices = {item.device for item in tensors}
        if len(devices) != 1:
            return "its tensors are on several devices"
        device = next(iter(devices))
        if not self._has_kernels(device) or facts.name in self._specs[device.type].prefer_extern:
            return "the device has no kernels for it"
        for item in tensors:
            if item.dtype not in KERNEL_DTYPES:
                return f"kernels have no {item.dtype}"
        return None

    def _has_kernels(self, device: torch.device) -> bool:
        """Whether kernels are generated for a device: its type is known, and so is a language for it."""
        spec = self._specs.get(device.type)
        return spec is not None and bool(spec.kernel_language)

    def _arguments(self, node: Node, target: OpOverload) -> tuple[OperatorFacts, Any, Any]:
        facts = operator_facts(target)
        arguments: Any = tuple([self._literal(argument, node) for argument in node.args])
        keywords: Any = tuple([(name, self._literal(argument, node)) for name, argument in node.kwargs.items()])
        if facts.replacement is not None:
            target, arguments, keywords = facts.replacement(target, arguments, keywords)
            facts = operator_facts(target)
        return facts, arguments, keywords

    def _on_one_device(self, node: Node, fake: Any, given: Any) -> tuple[Any, list[NumberRead]]:
        """Returns an operator's arguments with numbers for tensors of rank 0 on the CPU, where all else is elsewhere.

        With them what must be read before.
        """
        hosts = [item for item in dict.fromkeys(definitions_in(given)) if is_host_number(item)]
        results = fake if isinstance(fake, tuple | list) else (fake,)
        tensors = [item for item in (*results, *definitions_in(given)) if item is not None and item not in hosts]
        devices = {item.device for item in tensors}
        nodes = {self.known[operand]: operand for operand in node.all_input_nodes
                 if isinstance(self.known[operand], Definition)}  # fmt: skip
        if not hosts or len(devices) != 1 or not nodes.keys() >= set(hosts):
            return given, []
        device = next(iter(devices))
        if device.type == "cpu":  # where such tensors are, in torch's rule
            return given, []
        moved = {host: self._numbers.moved(host, device, nodes[host]) for host in hosts}

        def replaced(tree: Any) -> Any:
            if isinstance(tree, tuple):
                return tuple([replaced(item) for item in tree])
            return moved[tree][0] if isinstance(tree, Definition) and tree in moved else tree

        return replaced(given), [read for _, reads in moved.values() for read in reads]

    def _read_numbers(self, numbers: Sequence[NumberRead], position: int) -> None:
        """Adds the steps that read numbers, those that are not read yet."""
        for number in numbers:
            if number not in self._read:
                self._read.add(number)
                step = Step(number.node, position, [number.definition], number=number)
                step.bound = {make_symbol(number.symbol.name)}
                self._bound |= step.bound
                self.steps.append(step)

    def _literal(self, argument: Any, node: Node) -> Any:
        if isinstance(argument, Node):
            return self.known[argument]
        if isinstance(argument, list | tuple):
            return tuple([self._literal(item, node) for item in argument])
        return literal(self.builder, argument, node)

    def _sizes(self, fake: torch.Tensor) -> tuple[Any, ...]:
        return self.builder.tensor_type(fake).sizes

    def _define_copy(self, node: Node, position: int) -> bool:
        """Defines a `copy_` of something computed into a tensor in memory: the kernel that computes it writes there."""
        if node.target is not torch.ops.aten.copy_.default or not self.options.fuse:
            return False
        if self.builder.qualified(node) in self.refused:
            return False
        target, value = [self.known.get(argument) for argument in node.args[:2]]  # type: ignore[arg-type]
        if not isinstance(target, Stored) or not isinstance(value, Definition):
            return False
        if not self.write_into(target, value, node, position):
            return False
        self.known[node] = target
        self._became(node, "fused")
        return True

    def _overwrite(self, node: Node, window: Window, position: int) -> None:
        """Makes the kernel that computes a value write it into a slice of a tensor in memory, or a call copy it there.

        What reads the tensor's old content is computed into memory before, the value too: a kernel may not read
        elements around those it overwrites.
        """
        whole = self.known[node] = self.known[window.base]
        if window.source is None:
            self._became(node, "view")
            return
        value = self.known[window.source]
        fake, types = self.builder.fakes[window.base], self.builder.tensor_type
        placed = place_window(self.builder, types(fake), window)
        type_ = placed.type
        needed = _symbols([type_.sizes, type_.storage_offset, [check.condition for check in placed.checks]])
        target = Stored(type_.sizes, fake.dtype, fake.device)
        target.name = f"{node.name}_window"
        storage = self._storage_of[target] = self._storage_of[whole]
        self._on_storage[storage].append(target)
        self._strides[target] = tuple([
            stride for size, stride in zip(type_.sizes, type_.strides, strict=True) if size != 1
        ])  # fmt: skip
        self.windows[target] = node
        own = self.on_memory_of(whole)
        fuses = self.options.fuse and self.builder.qualified(node) not in self.refused
        fuses = fuses and viewed_base(value) not in own
        if fuses and self.write_into(target, value, node, position, position - 1, needed):
            self._became(node, "fused")
            return
        step = Step(node, position, [value, whole], writes=own, symbols=_symbols(value) | needed)
        self.mutations.extend((definition, position) for definition in own)
        self._numbers.wrote(own)
        self.steps.append(step)
        self._became(node, "call", "it overwrites a slice of its operand")

    def write_into(
        self,
        target: Stored,
        value: Definition,
        node: Node,
        position: int,
        last_read: int | None = None,
        symbols: Collection[sympy.Symbol] = (),
    ) -> bool:
        """Makes a definition overwrite a tensor in memory with a value, where one kernel can do it; says whether.

        What reads that memory and comes up to `last_read` gets memory of its own before. The target is where these
        symbols say.
        """
        types = {target.dtype, value.dtype}
        computed = not isinstance(viewed_base(value), Stored)
        if not computed or not types <= KERNEL_DTYPES or target.device != value.device:
            return False
        if not self._has_kernels(target.device) or any(size == 0 for size in self._strides.get(target, (0,))):
            return False

        def body(reader: Reader, indices: Indices) -> Any:
            return reader.load(value, broadcast_indices(value.sizes, indices)).to(target.compute_dtype)

        written = Written(target.sizes, target.dtype, target.device, body, target, frozenset(symbols))
        written.name, written.origin = node.name, "aten.copy_.default"
        self.position_of[written] = position
        self.node_of[written] = node
        aliases = self.on_memory_of(target)
        read = position if last_read is None else last_read
        self.mutations.extend((definition, read) for definition in aliases)
        self._numbers.wrote(aliases)
        return True

    def on_memory_of(self, target: Definition) -> list[Definition]:
        """Returns every definition that has its memory where a tensor of the graph has it, itself included."""
        storage = self._storage_of.get(target)
        return [target] if storage is None else self._on_storage[storage]

    # --- calls ------------------------------------------------------------------------------------------------------

    def _step(self, node: Node, position: int, fake: Any) -> None:
        if isinstance(node.target, HigherOrderOperator):  # which takes graphs and operators too
            arguments = [self.known[operand] for operand in node.all_input_nodes]
        else:
            arguments = [self._literal(argument, node) for argument in (*node.args, *node.kwargs.values())]
            arguments += [self.known[operand] for operand in borrowed(node)]
        step = Step(node, position, list(definitions_in(arguments)), symbols=_symbols(arguments))
        step.effectful = is_effectful(node)
        step.writes = self._written(node)
        self.mutations.extend((definition, position) for definition in step.writes)
        self._numbers.wrote(step.writes)
        self.known[node] = self._results(node, fake, step)
        step.bound = {symbol for symbol in _symbols(self.known[node]) if symbol.name not in self.builder.known_symbols}
        step.bound -= self._bound
        self._bound |= step.bound
        if is_assertion(node.target):
            step.bound |= step.symbols  # what has to do with these numbers comes after the check
        self.steps.append(step)

    def _written(self, node: Node) -> list[Definition]:
        """Returns every definition on the memory that a call writes."""
        found: dict[Definition, None] = {}
        for item in written_operands(node, self.builder.fakes):
            found |= dict.fromkeys(self._on_storage.get(storage_identity(self.builder.fakes[item]), ()))
        for item in self.in_place.written.get(node, {}).values():
            found |= dict.fromkeys(self.on_memory_of(self.known[item]))
        return list(found)

    def _results(self, node: Node, fake: Any, step: Step) -> Any:
        def make(item: Any, name: str) -> Any:
            if isinstance(item, torch.Tensor):
                found = self.stored(node, item, name)
                step.defines.append(found)
                return found
            if isinstance(item, tuple | list):
                return tuple([make(part, f"{name}_{number}") for number, part in enumerate(item)])
            if isinstance(item, dict):  # what a user's kernel writes, by the names of its parameters
                return {key: make(part, f"{name}_{key}") for key, part in item.items()}
            return None if item is None else self.builder.expression(item)

        written = self.in_place.written.get(node)
        if written is not None:  # these results are the operands that the call writes
            if None in written:
                return self.known[written[None]]
            items = fake.items() if isinstance(fake, dict) else enumerate(fake)
            parts = {key: self.known[written[key]] if key in written else make(item, f"{node.name}_{key}")
                     for key, item in items}  # fmt: skip
            return parts if isinstance(fake, dict) else tuple(parts.values())
        found = make(fake, node.name)
        for position, operand in shown_operands(node).items():
            self._in_memory(found[position], self.builder.fakes[operand])
        return found

    def _gives_tensors(self, fake: Any) -> bool:
        items = fake if isinstance(fake, tuple | list) else (fake,)
        tensors = [item for item in items if item is not None]
        return bool(tensors) and all(isinstance(item, torch.Tensor) for item in tensors)

    def _is_known_number(self, fake: Any) -> bool:
        if fake is None or isinstance(fake, torch.Tensor | tuple | list):
            return False
        known = self.builder.known_symbols
        return all(symbol.name in known or symbol in self._bound for symbol in _symbols(self.builder.expression(fake)))


def outcome_of(node: Node, name: str, kind: str, reason: str = "") -> Outcome:
    """Returns the outcome of a node under a name."""
    named = isinstance(node.target, OpOverload | HigherOrderOperator)
    operator = str(node.target) if named else getattr(node.target, "__name__", "")
    return Outcome(name, operator, kind, reason, location_of(node))


def copy_of(source: Definition) -> Pointwise:
    """Returns a tensor of its own with another's elements."""
    return Pointwise(
        source.sizes, source.dtype, source.device, lambda reader, indices: reader.load(source, indices)
    )  # fmt: skip


def definitions_in(tree: Any) -> Iterator[Definition]:
    """Yields the definitions among the leaves of nested sequences and mappings."""
    if isinstance(tree, Definition):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from definitions_in(item)


def _symbols(tree: Any) -> set[sympy.Symbol]:
    """Returns the symbols in sizes of definitions and in numbers, of nested sequences."""
    if isinstance(tree, Definition):
        return _symbols(tree.sizes)
    if isinstance(tree, tuple | list | dict):
        items = tree.values() if isinstance(tree, dict) else tree
        return {symbol for item in items for symbol in _symbols(item)}
    return set(tree.free_symbols) if isinstance(tree, sympy.Basic) else set()
