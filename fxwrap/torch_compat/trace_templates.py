"""Parts of a trace by `make_fx` that are copied: their nodes, with fake tensors of their own.

Why: the parts of `make_fx` that record a call, and those of functionalisation, have no public names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_slot, track_tensor
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fxwrap.torch_compat.fake_tensors import fake_like
from fxwrap.torch_compat.tensors import storage_identity

_LITERALS = (
    int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_ADDED_META = ("original_aten", "tensor_meta")
"""What `make_fx` writes into a node of a call itself, besides the value."""


class NotRepeatableError(Exception):
    """An argument or a node of a part of the trace that no copy can have."""


class TracedTensor:
    """A fake tensor that a node of the trace computes, with its functional tensor once an ordinary call needs it."""

    def __init__(
        self, fake: FakeTensor, node: Node, layout: tuple[Any, ...], functional: FunctionalTensor | None = None
    ) -> None:
        self.fake, self.node, self.layout, self._functional = fake, node, layout, functional

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to it."""
        return self._functional is not None and self._functional.requires_grad

    def functional(self, tracer: Any) -> FunctionalTensor:
        """Returns the functional tensor, whose calls the tracer records."""
        if self._functional is None:
            with disable_proxy_modes_tracing():  # sizes are computed, which are none of the trace
                track_tensor(self.fake, Proxy(self.node, tracer), constant=None, tracer=tracer)
                self._functional = FunctionalTensor.to_functional(self.fake)
        return self._functional


class _Value(NamedTuple):
    """A fake tensor of a copy: like `fake`, on a storage by number."""

    fake: FakeTensor
    storage: Hashable
    layout: tuple[Any, ...]


@dataclass(frozen=True)
class _Step:
    """A node of a part; `values` are the leaves of its value."""

    node: Node
    name: str | None
    values: Sequence[Any]
    spec: TreeSpec


@dataclass(frozen=True)
class Template:
    """A part of the trace: its nodes, and which of them, or of those that it reads, its results are.

    Fields:
        sources: the nodes that it reads; numbers are those of no tensors, and copies read the same.
        functions: how often the functions of torch are called in it.
        last_function: what the tracer notes of the last one.
    """

    sources: Sequence[Node]
    steps: Sequence[_Step]
    results: Sequence[Node | None]
    functions: Mapping[Any, int]
    last_function: Any


class Mark(NamedTuple):
    """A position in a trace: the last node, and the counts of functions so far."""

    last: Node | None
    functions: Mapping[Any, int]


class Storages:
    """The storages of a part of the trace by number: those of operands, others in their order."""

    def __init__(self, by_number: Mapping[Hashable, torch.UntypedStorage] | None = None) -> None:
        self.by_number = dict(by_number or {})
        self._numbers = {storage_identity(storage): number for number, storage in self.by_number.items()}

    def add(self, tensors: Iterable[FakeTensor], name: str) -> None:
        """Numbers the storages of operands, by name and position."""
        for position, fake in enumerate(tensors):
            if storage_identity(fake) not in self._numbers:
                self._set((name, position), fake.untyped_storage())

    def number(self, fake: FakeTensor) -> Hashable:
        """Returns the number of a tensor's storage; None for another one."""
        return self._numbers.get(storage_identity(fake))

    def number_of_new(self, fake: FakeTensor) -> Hashable:
        """Returns the number of a tensor's storage, a new one if it has none.

        Raises NotRepeatableError for a tensor at an offset in a storage without a number.
        """
        number = self.number(fake)
        if number is None:
            if _number(fake.storage_offset()) != 0:
                raise NotRepeatableError
            number = next(item for item in count(len(self.by_number)) if item not in self.by_number)
            self._set(number, fake.untyped_storage())
        return number

    def fake_like(self, like: FakeTensor, number: Hashable) -> FakeTensor:
        """Returns a fake tensor of the same layout on a storage, which is created if it does not exist."""
        fake = fake_like(like, self.by_number.get(number))
        if number not in self.by_number:
            self._set(number, fake.untyped_storage())
        return fake

    def _set(self, number: Hashable, storage: torch.UntypedStorage) -> None:
        self.by_number[number] = storage
        self._numbers[storage_identity(storage)] = number


class TraceRecorder:
    """Reads parts of a trace as templates, and copies them."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self._traced: dict[int, tuple[FunctionalTensor, TracedTensor]] = {}

    def traced_tensor(self, functional: FunctionalTensor) -> TracedTensor:
        """Returns the traced tensor of a functional one.

        Raises NotRepeatableError for other objects, constants and tensors that no layout describes.
        """
        if not isinstance(functional, FunctionalTensor):
            raise NotRepeatableError
        if id(functional) not in self._traced:
            fake: Any = torch._from_functional_tensor(functional.elem)
            slot = get_proxy_slot(fake, self.tracer, None) if type(fake) is FakeTensor else None
            if slot is None or slot.constant is not None or not _is_copied(fake):
                raise NotRepeatableError
            self._traced[id(functional)] = functional, TracedTensor(fake, slot.proxy.node, _layout_of(fake), functional)
        return self._traced[id(functional)][1]

    def key(self, argument: Any, operands: list[TracedTensor]) -> Any:
        """Returns a hashable description of an argument, and appends its tensors to the operands.

        Raises NotRepeatableError for an argument that it cannot describe.
        """
        if isinstance(argument, FunctionalTensor):
            argument = self.traced_tensor(argument)
        if isinstance(argument, TracedTensor):
            return _tensor_key(argument, operands)
        if isinstance(argument, torch.SymInt):
            return torch.SymInt, argument.node.expr
        if isinstance(argument, _LITERALS):
            return type(argument), repr(argument) if isinstance(argument, float | complex) else argument  # -0.0 is 0.0
        if isinstance(argument, tuple | list):
            return type(argument), *[self.key(item, operands) for item in argument]
        if isinstance(argument, dict):
            return dict, *[(name, self.key(item, operands)) for name, item in argument.items()]
        if isinstance(argument, slice):
            return slice, *[self.key(item, operands) for item in (argument.start, argument.stop, argument.step)]
        raise NotRepeatableError

    def mark(self) -> Mark:
        """Returns the present end of the trace."""
        return Mark(next(iter(reversed(self.tracer.graph.nodes)), None), dict(self.tracer.torch_fn_counts))

    def nodes_since(self, mark: Mark) -> list[Node]:
        """Returns the nodes of the trace after a mark."""
        added = []
        for node in reversed(self.tracer.graph.nodes):
            if node is mark.last:
                break
            added.append(node)
        return added[::-1]

    def template(
        self, mark: Mark, sources: Sequence[Node], results: Sequence[Node | None], storages: Storages, keeps_all: bool
    ) -> Template:
        """Returns the template of the part after a mark, which reads `sources`; `storages` are those of their tensors.

        `keeps_all` is whether it has nodes on which no result depends. Raises NotRepeatableError if there is none.
        """
        added = self.nodes_since(mark)
        live = {node for node in results if node is not None}
        for node in reversed(added):
            if keeps_all or node in live or node.is_impure():
                live.update([node, *node.all_input_nodes])
        known = {*added, *sources}
        if not all(node is None or node in known for node in results):
            raise NotRepeatableError
        steps = [self._step(node, known, storages) for node in added if node in live and not _is_number(node)]
        counts = self.tracer.torch_fn_counts
        differences = {function: count - mark.functions.get(function, 0) for function, count in counts.items()}
        functions = {function: count for function, count in differences.items() if count}
        return Template(sources, steps, results, functions, self.tracer.torch_fn_metadata)

    def _step(self, node: Node, known: set[Node], storages: Storages) -> _Step:
        others = [item for item in node.all_input_nodes if item not in known]
        if node.op != "call_function" or "val" not in node.meta or "unbacked_bindings" in node.meta:
            raise NotRepeatableError
        if not all(map(_is_number, others)):
            raise NotRepeatableError
        leaves, spec = tree_flatten(node.meta["val"])
        values: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if type(leaf) is not FakeTensor or not _is_copied(leaf):
                    raise NotRepeatableError
                leaf = _Value(leaf, storages.number_of_new(leaf), _layout_of(leaf))
            values.append(leaf)
        packet = getattr(node.target, "overloadpacket", None)
        name = None if packet is None else self.tracer.graph._target_to_str(packet.__name__)
        return _Step(node, name, values, spec)

    def copy(
        self, template: Template, copies: MutableMapping[Node, Node], storages: Storages
    ) -> dict[Node, TracedTensor]:
        """Copies the nodes of a template, and adds them to `copies`, which has those of its sources.

        Returns the tensors of nodes with one result, by node of the template.
        """
        tracer, results = self.tracer, dict[Node, TracedTensor]()
        for function, number in template.functions.items():
            tracer.torch_fn_counts[function] = tracer.torch_fn_counts.get(function, 0) + number
        tracer.torch_fn_metadata = template.last_function
        with disable_proxy_modes_tracing():
            for step in template.steps:
                source = step.node
                arguments, keywords = map_arg((source.args, source.kwargs), lambda item: copies.get(item, item))
                copy = copies[source] = tracer.create_node(
                    "call_function", source.target, arguments, keywords, step.name
                )
                copy.meta.update({name: source.meta[name] for name in _ADDED_META if name in source.meta})
                leaves = [
                    storages.fake_like(value.fake, value.storage) if isinstance(value, _Value) else value
                    for value in step.values
                ]
                copy.meta["val"] = tree_unflatten(leaves, step.spec)
                if len(leaves) == 1 and isinstance(step.values[0], _Value):
                    results[source] = TracedTensor(leaves[0], copy, step.values[0].layout)
        return results


def _tensor_key(tensor: TracedTensor, operands: list[TracedTensor]) -> Any:
    """Returns the position among the operands of one that is there; else its layout, and appends it.

    The first operand of the same storage is a part of the description.
    """
    for position, item in enumerate(operands):
        if item.node is tensor.node:
            if item is not tensor and (item.requires_grad or tensor.requires_grad):
                raise NotRepeatableError  # the gradients of the two differ
            return position
    operands.append(tensor)
    storages = [storage_identity(item.fake) for item in operands]
    return (len(operands), storages.index(storages[-1]), tensor.requires_grad, *tensor.layout)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _number(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _layout_of(fake: FakeTensor) -> tuple[Any, ...]:
    sizes = [_number(item) for item in (*fake.shape, *fake.stride(), fake.storage_offset())]
    return (*sizes, fake.dtype, fake.device)


def _is_copied(fake: FakeTensor) -> bool:
    """Whether sizes, strides, offset, dtype and device describe a fake tensor and its storage."""
    return (
        fake.layout is torch.strided
        and fake.constant is None
        and not (fake.is_quantized or fake.is_conj() or fake.is_neg() or fake.is_inference())
    )
