"""Which memory layout a graph's tensors have: channels-last around convolutions, where that saves time.

Libraries convolve tensors whose channels are contiguous without reordering them first. A graph's fake values say which
strides each tensor gets, so a layout is chosen by a copy of the graph in which what convolutions read is made
channels-last, and which is run on fake tensors again: by torch's own rules results follow. What such a graph
gives back has the strides it had before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxwrap.device_spec import DeviceSpec
from fxwrap.lowering.effects import written_operands
from fxwrap.lowering.graph_copy import (
    bytes_of,
    call_on_fakes,
    expression_of,
    expressions_of,
    hinted,
    items_of,
    run_on_fakes,
    storages_of,
)
from fxwrap.lowering.rules import RULES
from fxwrap.lowering.source import GraphSource
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor, OpOverload, UnwrittenModule
from fxwrap.wrapper_ir.operators import operator_facts

_aten = torch.ops.aten

_CONVOLVED: Mapping[Any, tuple[tuple[int, ...], int]] = {
    _aten.convolution.default: ((0, 1), 6),
    _aten.convolution_backward.default: ((0, 1, 2), 7),
}
"""Convolutions: the positions of the tensors that are wanted channels-last, and of what says it is a transposed one."""

_FOLLOWING = frozenset({
    "aten.convolution.default", "aten.convolution_backward.default", "aten.max_pool2d_with_indices_backward.default",
})  # fmt: skip
"""Operators without a lowering rule that take tensors of any strides, and whose strides torch's fake rule knows."""

_ADDRESSING = frozenset({
    "aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default",
    "aten._reshape_alias.default", "aten.view.dtype", "aten.view_copy.dtype",
    "aten.view_as_real.default", "aten.view_as_real_copy.default", "aten.view_as_complex.default",
    "aten.view_as_complex_copy.default",
})  # fmt: skip
"""Operators with a rule whose result says how their operand lies in memory."""

_HALF = frozenset({torch.bfloat16, torch.float16})
_COPY_COST = 1.3
"""What a byte that is copied to another layout costs, in bytes that a library reorders around a convolution."""
_REORDERING = 65536
"""What it costs a library to reorder at all, several times a convolution, in such bytes."""


@dataclass(frozen=True)
class Copies:
    """What a layout costs and saves, in bytes of tensors by the hints of their sizes.

    `copied` are those copied from one layout to another; `saved` those that libraries need not reorder.
    """

    copied: int = 0
    saved: int = 0

    @property
    def pays(self) -> bool:
        """Whether the layout saves more than it costs."""
        return self.saved > _COPY_COST * self.copied


class _CannotKeep(Exception):
    """A tensor's strides cannot be made again, or a convolution does not give channels-last images."""


def with_layouts(
    source: GraphSource,
    fakes: dict[Node, Any],
    options: Options,
    given: Sequence[Any] | None = None,
    free_outputs: Collection[int] = (),
) -> tuple[GraphSource, dict[Node, Any]]:
    """Returns a graph, and fake values of its nodes, whose convolutions read channels-last tensors, where that pays.

    Args:
        source: the graph, which is not changed.
        fakes: what each of its nodes gives.
        options: `layout` says whether layouts are chosen.
        given: fake tensors that the inputs will be like; where their strides are others than those the graph was traced
            with, the graph is adapted to them.
        free_outputs: positions of outputs whose strides need not be those of the graph.
    """
    nodes = list(source.graph_module.graph.nodes)
    moved = _moved_inputs(nodes, fakes, given)
    wanted: frozenset[Node] = frozenset()
    if options.layout == "auto" and options.fuse:
        specs = options.device_specs()
        wanted = frozenset([node for node in nodes if _is_convolution(node, fakes, specs)])
    if not (moved or wanted) or _writes_computed(nodes, fakes):
        return source, fakes
    if wanted:
        try:
            chosen = _Relayout(source, fakes, moved, wanted, free_outputs)
            found = chosen.run()
        except _CannotKeep:
            pass
        else:
            if moved or chosen.copies.pays:
                return found
    return _Relayout(source, fakes, moved, frozenset(), free_outputs).run() if moved else (source, fakes)


def _moved_inputs(
    nodes: Sequence[Node], fakes: Mapping[Node, Any], given: Sequence[Any] | None
) -> dict[Node, FakeTensor]:
    """Returns the inputs that will have other strides than the graph was traced with, and what they will be."""
    placeholders = [node for node in nodes if node.op == "placeholder"]
    found: dict[Node, FakeTensor] = {}
    for node, item in zip(placeholders, given or (), strict=False):
        traced = fakes[node]
        if isinstance(item, FakeTensor) and isinstance(traced, FakeTensor) and item is not traced:
            if item.ndim == traced.ndim and not _same_strides(item, traced):
                found[node] = item
    return found


def _is_convolution(node: Node, fakes: Mapping[Node, Any], specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a node is a convolution of images that may read them channels-last, on a device that likes them so."""
    found = _CONVOLVED.get(node.target)
    if found is None:
        return False
    positions, transposed = found
    operands = [node.args[position] for position in positions]
    return node.args[transposed] is False and all(
        isinstance(item, Node) and isinstance(fake := fakes.get(item), FakeTensor) and _is_image(fake, specs)
        for item in operands
    )


def _convolved(node: Node) -> list[Node]:
    """Returns the tensors of a convolution, of a backward one the gradient first; then image and weight."""
    positions, _ = _CONVOLVED[node.target]
    return [node.args[position] for position in positions]  # type: ignore[misc]


def _is_image(fake: FakeTensor, specs: Mapping[str, DeviceSpec]) -> bool:
    if fake.ndim != 4 or fake.layout is not torch.strided:
        return False
    spec = specs.get(fake.device.type)
    return spec is not None and fake.dtype in spec.channels_last


def _writes_computed(nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> bool:
    """Whether a graph overwrites a tensor that it has computed, which a copy in another layout would not follow."""
    given = [fakes.get(node) for node in nodes if node.op in ("placeholder", "get_attr")]
    inputs = {storage for fake in given for storage in storages_of(fake)}
    return any(
        not storages_of(fakes.get(operand)) <= inputs
        for node in nodes if node.op == "call_function" for operand in written_operands(node, fakes)
    )  # fmt: skip


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal sizes have equal strides, as far as is known without asking for it."""
    return expressions_of(one.stride()) == expressions_of(other.stride())


class _Relayout:
    """Copies a graph node by node; `env` holds what each node became, `changed` those whose strides are others now."""

    def __init__(
        self,
        source: GraphSource,
        fakes: dict[Node, Any],
        moved: Mapping[Node, FakeTensor],
        wanted: Collection[Node],
        free_outputs: Collection[int],
    ) -> None:
        self.source = source
        self.old = fakes
        self.moved = moved
        self.wanted = wanted
        self.free_outputs = free_outputs
        self.graph = Graph()
        self.fakes: dict[Node, Any] = {}
        self.env: dict[Node, Node] = {}
        self.changed: set[Node] = set()
        self.constants = dict(source.constants)
        self.copies = Copies()
        self._restored: dict[Node, Node] = {}
        self._images: dict[Node, Node] = {}
        self._fused: set[Node] = set()
        nodes = source.graph_module.graph.nodes
        self._written = {
            storage for node in nodes if node.op == "call_function"
            for operand in written_operands(node, fakes) for storage in storages_of(fakes.get(operand))
        }  # fmt: skip

    def run(self) -> tuple[GraphSource, dict[Node, Any]]:
        """Returns the copy and the fake values of its nodes. Raises _CannotKeep."""
        for node in self.source.graph_module.graph.nodes:
            match node.op:
                case "output":
                    self._output(node)
                case "call_function":
                    self._call(node)
                case _:
                    self._keep(node, self.moved.get(node, self.old.get(node)))
                    if node in self.moved:
                        self.changed.add(node)
        module = UnwrittenModule(self.source.graph_module, self.graph)
        return replace(self.source, graph_module=module, constants=self.constants), self.fakes

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _keep(self, node: Node, fake: Any) -> None:
        """Copies a node as it is."""
        self._define(node, self.graph.node_copy(node, self.env.__getitem__), fake)

    def _define(self, node: Node, made: Node, fake: Any) -> None:
        self.env[node] = made
        self.fakes[made] = fake
        if "val" in made.meta:
            made.meta["val"] = fake

    def _call(self, node: Node) -> None:
        operands = self.env
        if node in self.wanted:
            images = {operand: self._channels_last(operand) for operand in _convolved(node)}
            operands = {operand: images.get(operand, self.env[operand]) for operand in node.all_input_nodes}
            self._count(node)
        elif not any(operand in self.changed for operand in node.all_input_nodes):
            self._keep(node, self.old.get(node))
            return
        if not self._follow(node, operands):
            self._wall(node)
        if operands is not self.env and not _is_channels_last(items_of(self.fakes[self.env[node]])[0]):
            raise _CannotKeep  # torch has no such convolution here, a build without the device's library for example

    def _follow(self, node: Node, operands: Mapping[Node, Node]) -> bool:
        """Copies a call onto its operands' new layouts; returns whether it takes them."""
        if not _follows(node):
            return False
        old = self.old[node]
        try:
            new = self._run(node, operands)
        except (RuntimeError, ValueError):  # views that these strides do not allow
            return False
        if len(items_of(new)) != len(items_of(old)):
            return False
        same = all(
            not isinstance(mine, torch.Tensor) or _same_strides(mine, theirs)
            for mine, theirs in zip(items_of(new), items_of(old), strict=True)
        )
        made = self.graph.node_copy(node, operands.__getitem__)
        if same and not self._shows_operand(node):
            new = old
        else:
            self.changed.add(node)
        self._define(node, made, new)
        if str(node.target) not in _FOLLOWING:
            self._fused.add(node)
        return True

    def _wall(self, node: Node) -> None:
        """Copies a call that gets its operands in the layout they had."""
        operands = {operand: self._as_before(operand) for operand in node.all_input_nodes}
        made = self.graph.node_copy(node, operands.__getitem__)
        shown = self._shows_operand(node)
        self._define(node, made, self._run(node, operands) if shown else self.old.get(node))
        if shown:
            self.changed.add(node)  # it is on other memory; its strides are as they were

    def _run(self, node: Node, operands: Mapping[Node, Node]) -> Any:
        """Runs a call on the fake values of its new operands."""
        return run_on_fakes(node, {operand: self.fakes[operands[operand]] for operand in node.all_input_nodes})

    def _shows_operand(self, node: Node) -> bool:
        """Whether a node's result is on the memory of what it is computed from; an item of several is as these are."""
        if node.target is operator.getitem:
            return self._shows_operand(node.args[0])  # type: ignore[arg-type]
        own = storages_of(self.old.get(node))
        return any(own & storages_of(self.old.get(operand)) for operand in node.all_input_nodes)

    # --- layouts ----------------------------------------------------------------------------------------------------

    def _channels_last(self, node: Node) -> Node:
        """Returns a node whose tensor is channels-last, a copy where it is not."""
        made = self.env[node]
        fake = self.fakes[made]
        if _is_channels_last(fake):
            return made
        lasting = self._written.isdisjoint(storages_of(self.old[node]))
        if lasting and node in self._images:
            return self._images[node]
        copy = self._converted_constant(node, fake) if lasting else None
        if copy is None:
            keywords = {"memory_format": torch.channels_last}
            copy = self._emit(node, _aten.clone.default, (made,), keywords, "channels_last")
            self._pay(node, fake)
        if lasting:
            self._images[node] = copy
        return copy

    def _converted_constant(self, node: Node, fake: FakeTensor) -> Node | None:
        """Returns a constant of the program that is another one in channels-last layout, converted now."""
        payload = self.source.constants.get(node.name) if node.op == "placeholder" else None
        if payload is None:
            return None
        name = f"{node.name}_channels_last"
        with self.graph.inserting_after(self.env[node]):
            made = self.graph.placeholder(name)
        self.constants[made.name] = payload.detach().contiguous(memory_format=torch.channels_last)
        self.fakes[made] = call_on_fakes(_aten.clone.default, (fake,), {"memory_format": torch.channels_last})
        made.meta = {"val": self.fakes[made]}
        return made

    def _as_before(self, node: Node) -> Node:
        """Returns a node that gives what one gave, in the layout that it had."""
        if node not in self.changed:
            return self.env[node]
        known = self._restored.get(node)
        if known is not None:
            return known
        made, old = self.env[node], self.old[node]
        if isinstance(old, torch.Tensor) and _same_strides(self.fakes[made], old):
            return made
        if self._shows_operand(node) and node.op == "call_function":
            operands = {operand: self._as_before(operand) for operand in node.all_input_nodes}
            found = self.graph.node_copy(node, operands.__getitem__)
            self.fakes[found] = self._run(node, operands)
            found.meta["val"] = self.fakes[found]
        elif isinstance(old, torch.Tensor):
            found = self._shown_as(node, old) or self._copied_back(node, old)
        else:
            raise _CannotKeep
        self._restored[node] = found
        return found

    def _shown_as(self, node: Node, old: torch.Tensor) -> Node | None:
        """Returns a view of a node's tensor, where it differs from what it was only in dimensions of one element."""
        made = self.env[node]
        ones = [dim for dim, size in enumerate(old.shape) if type(size) is int and size == 1]
        others = [dim for dim in range(old.ndim) if dim not in ones]
        new = self.fakes[made].stride()
        if not ones or any(expression_of(new[dim]) != expression_of(old.stride(dim)) for dim in others):
            return None
        squeezed = self._emit(node, _aten.squeeze.dims, (made, ones), {}, "squeezed")
        found = self._emit(node, _aten.view.default, (squeezed, list(old.shape)), {}, "as_before")
        return found if _same_strides(self.fakes[found], old) else None

    def _copied_back(self, node: Node, old: torch.Tensor) -> Node:
        """Returns a copy of a node's tensor in the strides that it had: dense ones, its dimensions in any order."""
        magnitudes = [hinted(stride) for stride in old.stride()]
        order = sorted(range(old.ndim), key=lambda dim: -magnitudes[dim])
        made = self.env[node]
        self._pay(node, old)
        if order == list(range(old.ndim)):
            keywords = {"memory_format": torch.contiguous_format}
            found = self._emit(node, _aten.clone.default, (made,), keywords, "as_before")
        else:
            inverse = [order.index(dim) for dim in range(old.ndim)]
            turned = self._emit(node, _aten.permute.default, (made, order), {}, "turned")
            keywords = {"memory_format": torch.contiguous_format}
            dense = self._emit(node, _aten.clone.default, (turned,), keywords, "dense")
            found = self._emit(node, _aten.permute.default, (dense, inverse), {}, "as_before")
        if not _same_strides(self.fakes[found], old):
            raise _CannotKeep
        return found

    def _emit(self, node: Node, target: Callable[..., Any], arguments: Any, keywords: Any, suffix: str) -> Node:
        """Puts in a call that has to do with a node."""
        made = self.graph.create_node("call_function", target, arguments, keywords, f"{node.name}_{suffix}")
        arguments, keywords = map_arg((arguments, keywords), self.fakes.__getitem__)
        self.fakes[made] = call_on_fakes(target, arguments, keywords)
        made.meta = {**node.meta, "val": self.fakes[made]}
        return made

    def _output(self, node: Node) -> None:
        tree = node.args[0]
        items: Iterable[Any] = tree if isinstance(tree, tuple | list) else ()
        fixed = {item for position, item in enumerate(items) if position not in self.free_outputs} if items else set()

        def given(item: Node) -> Node:
            free = bool(self.free_outputs) and item not in fixed and self._is_plain(item)
            return self.env[item] if free else self._as_before(item)

        self.env[node] = self.graph.node_copy(node, given)

    def _is_plain(self, node: Node) -> bool:
        """Whether the strides of what a node gives are known now."""
        fake = self.fakes[self.env[node]]
        return isinstance(fake, torch.Tensor) and all(type(stride) is int for stride in fake.stride())

    # --- cost -------------------------------------------------------------------------------------------------------

    def _count(self, node: Node) -> None:
        """Counts what a library need not reorder: images of every convolution in half precision, else of most.

        With the constants above, this agrees with times taken of the convolutions of ResNet-50 and MobileNetV2 for
        224 by 224 pixels, one and eight images, float32 and bfloat16, on a CPU.
        """
        *others, image, weight = [self.old[operand] for operand in _convolved(node)]
        steps: Any = node.args[4 if others else 3]
        plain = all(size == 1 for size in weight.shape[2:]) and all(step == 1 for step in steps)
        if plain and image.dtype not in _HALF:
            self.copies = replace(self.copies, saved=self.copies.saved + _REORDERING)
            return  # a large matrix product takes either layout
        images = [image, *(others or [self.old[node]])]
        self.copies = replace(self.copies, saved=self.copies.saved + _REORDERING + sum(map(bytes_of, images)))

    def _pay(self, node: Node, fake: torch.Tensor) -> None:
        """Counts a copy, unless the kernel that computes the tensor writes the other layout in its place."""
        if node not in self._fused:
            self.copies = replace(self.copies, copied=self.copies.copied + bytes_of(fake))


def _follows(node: Node) -> bool:
    """Whether what a call computes does not depend on how its operands lie in memory."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    facts = operator_facts(node.target)
    if not facts.is_pure or facts.name in _ADDRESSING:
        return False
    return facts.name in _FOLLOWING or facts.name in RULES


def _is_channels_last(fake: Any) -> bool:
    """Whether what a convolution reads or gives is channels-last; torch 2.11 says no of sizes that are symbols."""
    if not isinstance(fake, torch.Tensor):
        return True
    step: Any = 1
    for dim in (1, 3, 2, 0):
        size = expression_of(fake.shape[dim])
        if size != 1:
            if expression_of(fake.stride(dim)) != step:
                return False
            step *= size
    return True
