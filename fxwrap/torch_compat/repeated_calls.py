"""Calls that were traced before are copied into the trace, instead of being run again on fake tensors.

Why: layers of a model make the same calls on operands of the same layouts, and torch decomposes and infers each of them
again. The parts of `make_fx` that record a call have no public names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_slot, track_tensor_tree
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from fxwrap.torch_compat.tensors import storage_identity

_LITERALS = (
    int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_ADDED_META = ("original_aten", "tensor_meta")
"""What `make_fx` writes into a node of a call itself, besides the value."""


_FIRST_NEW = 1 << 16
"""The number of the first storage that is no operand's."""


class TracedTensor:
    """A fake tensor that a node of the trace computes, with its functional tensor once an ordinary call needs it."""

    def __init__(
        self, fake: FakeTensor, node: Node, layout: tuple[Any, ...], functional: FunctionalTensor | None = None
    ) -> None:
        self.fake, self.node, self.layout, self._functional = fake, node, layout, functional

    def functional(self, tracer: Any) -> FunctionalTensor:
        """Returns the functional tensor, whose calls the tracer records."""
        if self._functional is None:
            track_tensor_tree(self.fake, Proxy(self.node, tracer), constant=None, tracer=tracer)
            self._functional = FunctionalTensor.to_functional(self.fake)
        return self._functional


class _NotRepeatable(Exception):
    """An argument or a node of a call that no copy can have."""


class _Value(NamedTuple):
    """A fake tensor of a copy: like `fake`, on a storage by number: one of an operand, of an earlier value, or new."""

    fake: FakeTensor
    storage: int
    layout: tuple[Any, ...]


@dataclass(frozen=True)
class _Step:
    """A node of a traced call; `values` are the leaves of its value."""

    node: Node
    name: str | None
    values: Sequence[Any]
    spec: TreeSpec


@dataclass(frozen=True)
class _Template:
    """The nodes of a traced call, and which of them, or of its operands, its results are."""

    operands: Sequence[Node]
    steps: Sequence[_Step]
    results: Sequence[Node]
    spec: TreeSpec
    functions: Mapping[Any, int]
    last_function: Any


class RepeatedCalls:
    """The calls of one trace by their functions, literals and layouts of operands."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self._state = 0
        self._templates: dict[Any, _Template | None] = {}
        self._traced: dict[int, tuple[FunctionalTensor, TracedTensor]] = {}

    def enter_state(self) -> None:
        """Lets later calls repeat none of the earlier ones, since modes of torch's have changed."""
        self._state += 1

    def functional(self, arguments: Any) -> Any:
        """Returns nested arguments with functional tensors, which calls take that are not repeated."""
        return tree_map_only(TracedTensor, lambda item: item.functional(self.tracer), arguments)

    def run(self, target: Any, arguments: Any, keywords: Any, call: Callable[..., Any]) -> Any:
        """Returns the results of a call, `TracedTensor`s if it repeats an earlier one; else those of `call`."""
        if target is operator.getitem and isinstance(arguments[0], tuple | list):
            return arguments[0][arguments[1]]

        def run() -> Any:
            return call(target, *self.functional((arguments, keywords)))

        operands: list[TracedTensor] = []
        try:
            key = (target, self._state, self._key(arguments, operands), self._key(keywords, operands))
            template = self._templates[key]
        except _NotRepeatable:
            return run()
        except KeyError:
            return self._record(key, operands, run)
        return run() if template is None else self._repeat(template, operands)

    def _key(self, argument: Any, operands: list[TracedTensor]) -> Any:
        """Returns a hashable description of an argument, and appends its tensors to the operands."""
        if isinstance(argument, FunctionalTensor):
            argument = self._traced_tensor(argument)
        if isinstance(argument, TracedTensor):
            nodes = [item.node for item in operands]
            if argument.node in nodes:
                return nodes.index(argument.node)
            operands.append(argument)
            storages = [storage_identity(item.fake) for item in operands]
            return (len(nodes), storages.index(storages[-1]), *argument.layout)
        if isinstance(argument, torch.SymInt):
            return torch.SymInt, argument.node.expr
        if isinstance(argument, _LITERALS):
            return type(argument), repr(argument) if isinstance(argument, float | complex) else argument  # -0.0 is 0.0
        if isinstance(argument, tuple | list):
            return type(argument), *[self._key(item, operands) for item in argument]
        if isinstance(argument, dict):
            return dict, *[(name, self._key(item, operands)) for name, item in argument.items()]
        if isinstance(argument, slice):
            return slice, *[self._key(item, operands) for item in (argument.start, argument.stop, argument.step)]
        raise _NotRepeatable

    def _traced_tensor(self, functional: FunctionalTensor) -> TracedTensor:
        if id(functional) not in self._traced:
            fake: Any = torch._from_functional_tensor(functional.elem)
            slot = get_proxy_slot(fake, self.tracer, None) if type(fake) is FakeTensor else None
            if slot is None or slot.constant is not None or not _is_copied(fake):
                raise _NotRepeatable
            self._traced[id(functional)] = functional, TracedTensor(fake, slot.proxy.node, _layout_of(fake), functional)
        return self._traced[id(functional)][1]

    def _record(self, key: Any, operands: Sequence[TracedTensor], call: Callable[..., Any]) -> Any:
        before, counts = next(iter(reversed(self.tracer.graph.nodes)), None), dict(self.tracer.torch_fn_counts)
        result = call()
        added = []
        for node in reversed(self.tracer.graph.nodes):
            if node is before:
                break
            added.append(node)
        functions = {
            function: count - counts.get(function, 0) for function, count in self.tracer.torch_fn_counts.items()
        }
        try:
            self._templates[key] = self._template(added[::-1], operands, result, functions)
        except _NotRepeatable:
            self._templates[key] = None
        return result

    def _template(
        self, added: Sequence[Node], operands: Sequence[TracedTensor], result: Any, functions: Mapping[Any, int]
    ) -> _Template:
        """Returns the template of a call that added nodes to the trace. Raises _NotRepeatable if there is none."""
        leaves, spec = tree_flatten(result)
        if not all(isinstance(leaf, FunctionalTensor) for leaf in leaves):
            raise _NotRepeatable
        results = [self._traced_tensor(leaf).node for leaf in leaves]
        sources = [item.node for item in operands]
        live = {*results}
        for node in reversed(added):
            if node in live or node.is_impure():
                live.update([node, *node.all_input_nodes])
        known = {*added, *sources}
        if not all(node in known for node in results):
            raise _NotRepeatable
        storages: dict[int, int] = {}
        for position, item in enumerate(operands):
            storages.setdefault(storage_identity(item.fake), position)
        steps = [self._step(node, known, storages) for node in added if node in live]
        changed = {function: count for function, count in functions.items() if count}
        return _Template(sources, steps, results, spec, changed, self.tracer.torch_fn_metadata)

    def _step(self, node: Node, known: set[Node], storages: dict[int, int]) -> _Step:
        others = [item for item in node.all_input_nodes if item not in known]
        if node.op != "call_function" or "val" not in node.meta or "unbacked_bindings" in node.meta:
            raise _NotRepeatable
        if not all(isinstance(item.meta.get("val"), torch.SymInt) for item in others):
            raise _NotRepeatable
        leaves, spec = tree_flatten(node.meta["val"])
        values: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if type(leaf) is not FakeTensor or not _is_copied(leaf):
                    raise _NotRepeatable
                storage = storage_identity(leaf)
                if storage not in storages and _number(leaf.storage_offset()) != 0:
                    raise _NotRepeatable
                leaf = _Value(leaf, storages.setdefault(storage, _FIRST_NEW + len(storages)), _layout_of(leaf))
            values.append(leaf)
        packet = getattr(node.target, "overloadpacket", None)
        name = None if packet is None else self.tracer.graph._target_to_str(packet.__name__)
        return _Step(node, name, values, spec)

    def _repeat(self, template: _Template, operands: Sequence[TracedTensor]) -> Any:
        """Copies the nodes of a template and returns its results."""
        tracer = self.tracer
        for function, count in template.functions.items():
            tracer.torch_fn_counts[function] = tracer.torch_fn_counts.get(function, 0) + count
        tracer.torch_fn_metadata = template.last_function
        copies = {source: item.node for source, item in zip(template.operands, operands, strict=True)}
        results = dict(zip(template.operands, operands, strict=True))
        storages = {position: item.fake.untyped_storage() for position, item in enumerate(operands)}
        with disable_proxy_modes_tracing():
            for step in template.steps:
                source = step.node
                arguments, keywords = map_arg((source.args, source.kwargs), lambda item: copies.get(item, item))
                copy = copies[source] = tracer.create_node(
                    "call_function", source.target, arguments, keywords, step.name
                )
                copy.meta.update({name: source.meta[name] for name in _ADDED_META if name in source.meta})
                leaves = [_fake_of(value, storages) if isinstance(value, _Value) else value for value in step.values]
                copy.meta["val"] = tree_unflatten(leaves, step.spec)
                if len(leaves) == 1 and isinstance(step.values[0], _Value):
                    results[source] = TracedTensor(leaves[0], copy, step.values[0].layout)
        return tree_unflatten([results[node] for node in template.results], template.spec)


def _fake_of(value: _Value, storages: dict[int, torch.UntypedStorage]) -> FakeTensor:
    """Returns a fake tensor like that of a value on its storage, which is created if it does not exist."""
    like = value.fake
    with torch._C._DisableTorchDispatch(), torch._C._DisablePythonDispatcher():
        if value.storage in storages:
            meta = torch.empty(0, dtype=like.dtype, device="meta")
            meta.set_(storages[value.storage], like.storage_offset(), like.shape, like.stride())
        else:
            meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            storages[value.storage] = meta.untyped_storage()
        return FakeTensor(like.fake_mode, meta, like.device)


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
