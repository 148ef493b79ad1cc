"""Rewriting of a graph for other layouts of its tensors."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.devices import ConvolutionLayoutCosts
from fxwrap.fx_passes.convolutions.layout_costs import LayoutCost, convolution_saving, copy_cost
from fxwrap.fx_passes.convolutions.operands import (
    STRIDE_AND_GROUPS,
    convolution_operands,
    has_broken_channels_last_kernel,
    is_channels_last,
)
from fxwrap.fx_passes.convolutions.patches import PatchConvolution, PatchMatmulWriter
from fxwrap.fx_passes.convolutions.pointwise_results import pointwise_results
from fxwrap.fx_passes.graph_copy import (
    CallResults,
    GraphCopy,
    expression_of,
    fake_call,
    has_static_strides,
    items_of,
    same_strides,
    size_hint,
    storages_of,
)
from fxwrap.fx_passes.matmuls.prepacked_weights import frozen_nodes
from fxwrap.fx_passes.prepared_graph import FxPassContext, PreparedGraph, Target
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.torch_compat import FakeTensor, OpOverload
from fxwrap.wrapper_ir.operators import operator_schema

_aten = torch.ops.aten

_LAYOUT_AGNOSTIC = frozenset({
    "aten.convolution.default", "aten.convolution_backward.default", "aten.max_pool2d_with_indices_backward.default",
})  # fmt: skip
"""Operators without a lowering rule that accept any strides, and whose fake rules compute the result's strides."""

_LAYOUT_SENSITIVE = frozenset({
    "aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default",
    "aten._reshape_alias.default", "aten.view.dtype", "aten.view_copy.dtype",
    "aten.view_as_real.default", "aten.view_as_real_copy.default", "aten.view_as_complex.default",
    "aten.view_as_complex_copy.default",
})  # fmt: skip
"""Operators with a lowering rule whose result depends on the strides of their operand."""


class LayoutNotRestorable(Exception):
    """The original strides of this node cannot be restored, or a convolution's result is not channels-last."""


def _converted_once(graph: PreparedGraph, context: FxPassContext) -> set[Node]:
    """Returns the weights that `freeze_convolutions` converts once."""
    if not context.options.freeze:
        return set()
    specs = context.options.device_specs()
    return {
        node for node in frozen_nodes(graph, context)
        if isinstance(fake := graph.fakes.get(node), FakeTensor)
        and (spec := specs.get(fake.device.type)) is not None and fake.dtype in spec.convolutions.prepacked_dtypes
    }  # fmt: skip


class LayoutRewriter:
    """Edits a copy of a graph node by node; `changed` holds the nodes whose copies have other strides or storages.

    `preserved` are the convolutions whose operands keep their layouts.
    """

    def __init__(
        self,
        source: PreparedGraph,
        context: FxPassContext,
        restrided: Mapping[Node, FakeTensor],
        convolutions: Collection[Node],
        patches: Mapping[Node, PatchConvolution],
        results: CallResults,
        preserved: Collection[Node] = (),
    ) -> None:
        self.source = source
        self.fused_operators = context.fused_operators
        self.restrided = restrided
        self.convolutions = convolutions
        self.patches = patches
        self.preserved = preserved
        self.results = results
        self.copy = GraphCopy(source)
        self.graph, self.fakes, self.env = self.copy.graph, self.copy.fakes, self.copy.node_map
        self.position: Node  # of the copy, before which calls are inserted
        self.changed: set[Node] = set()
        self.constants = dict(source.constants)
        self.cost = LayoutCost()
        self.costs: dict[Node, LayoutCost] = {}
        self._restored: dict[Node, Node] = {}
        self._channels_last_of: dict[Node, Node] = {}
        self._fused: set[Node] = set()
        self._written = written_storages(source.nodes, source.fakes)
        self._frozen = _converted_once(source, context)
        self._specs = context.options.device_specs()

    def run(self) -> PreparedGraph:
        """Returns the copy. Raises LayoutNotRestorable."""
        for node in self.source.nodes:
            self.position = self.env[node]
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self._call(node)
            elif node in self.restrided:
                self._define(node, self.env, self.restrided[node])
                self.changed.add(node)
        return replace(self.copy.finish(), constants=self.constants)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _define(self, node: Node, operands: Mapping[Node, Node], fake: object) -> None:
        """Sets the operands and the fake value of a node's copy."""
        copy = self.env[node]
        copy.args, copy.kwargs = map_arg((node.args, node.kwargs), operands.__getitem__)
        self.fakes[copy] = fake
        if "val" in copy.meta:
            copy.meta["val"] = fake

    def _call(self, node: Node) -> None:
        operands: Mapping[Node, Node] = self.env
        if node in self.patches or (node.target is operator.getitem and node.args[0] in self.patches):
            self._call_matmuls(node)
            return
        if node in self.convolutions:
            before = self.cost
            images = {operand: self._channels_last(operand) for operand in convolution_operands(node)}
            operands = {operand: images.get(operand, self.env[operand]) for operand in node.all_input_nodes}
            self.cost += self._saving(node)
            self.costs[node] = self.cost - before
        elif not any(operand in self.changed for operand in node.all_input_nodes):
            return
        if not self._propagate_layout(node, operands):
            self._copy_with_original_layouts(node)
        if operands is not self.env and not is_channels_last(items_of(self.fakes[self.env[node]])[0]):
            # Torch has no channels-last kernel here, for example in a build without the device's library.
            raise LayoutNotRestorable(f"'{node.name}'")

    def _call_matmuls(self, node: Node) -> None:
        """Replaces a convolution of patches, or a result of its backward, by matmuls."""
        if not node.users or (node in self.patches and self.patches[node].gradient is not None):
            self.copy.erase(node)  # each of a backward's results is replaced
            return
        source, index = (node, 0) if node in self.patches else node.args
        writer = PatchMatmulWriter(self.copy, self.position, self.patches[source], node.name)  # type: ignore[index]
        results = (writer.result, writer.gradient_of_weight, writer.gradient_of_bias)
        self.copy.substitute(node, results[index](), "fused")  # type: ignore[index]
        self.changed.add(node)

    def _propagate_layout(self, node: Node, operands: Mapping[Node, Node]) -> bool:
        """Copies a call onto operands in new layouts; returns whether the call accepts them."""
        if not self._is_layout_agnostic(node):
            return False
        old = self.source.fakes[node]
        try:
            new = self._propagate_fake(node, operands)
        except (RuntimeError, ValueError):  # a view that these strides do not allow
            return False
        if len(items_of(new)) != len(items_of(old)):
            return False
        is_same = all(
            not isinstance(one, torch.Tensor) or same_strides(one, other)
            for one, other in zip(items_of(new), items_of(old), strict=True)
        )
        is_changed = not is_same or self._aliases_operand(node)
        if is_changed:
            self.changed.add(node)
        self._define(node, operands, new if is_changed else old)
        if str(node.target) not in _LAYOUT_AGNOSTIC:
            self._fused.add(node)
        return True

    def _is_layout_agnostic(self, node: Node) -> bool:
        """Whether the values that a call computes do not depend on its operands' strides."""
        if node.target is operator.getitem:
            return True
        if node in self.preserved:
            return False
        if not isinstance(node.target, OpOverload) or has_broken_channels_last_kernel(node, self.source.fakes):
            return False
        schema = operator_schema(node.target)
        if not schema.is_pure or schema.name in _LAYOUT_SENSITIVE:
            return False
        return schema.name in _LAYOUT_AGNOSTIC or schema.name in self.fused_operators

    def _copy_with_original_layouts(self, node: Node) -> None:
        """Copies a call onto operands in their original layouts."""
        is_view = self._aliases_operand(node)
        is_exact = is_view or str(node.target) in _LAYOUT_SENSITIVE
        operands = {operand: self._restore_layout(operand, is_exact) for operand in node.all_input_nodes}
        fake = self._propagate_fake(node, operands) if is_view else self.source.fakes.get(node)
        self._define(node, operands, fake)
        if is_view:
            self.changed.add(node)  # its storage is another one; its strides are the same

    def _propagate_fake(self, node: Node, operands: Mapping[Node, Node]) -> Any:
        fakes = {operand: self.fakes[operands[operand]] for operand in node.all_input_nodes}
        result = pointwise_results(node, fakes, self.source.fakes[node])
        return self.results.run(node, fakes) if result is None else result

    def _aliases_operand(self, node: Node) -> bool:
        """Whether a node's result aliases an operand of its call."""
        if node.target is operator.getitem:
            return self._aliases_operand(node.args[0])  # type: ignore[arg-type]
        own = storages_of(self.source.fakes.get(node))
        return any(own & storages_of(self.source.fakes.get(operand)) for operand in node.all_input_nodes)

    # --- layouts ----------------------------------------------------------------------------------------------------

    def _channels_last(self, node: Node) -> Node:
        """Returns a node in channels-last layout, by a copy if necessary."""
        current = self.env[node]
        fake = self.fakes[current]
        if is_channels_last(fake):
            return current
        is_reusable = self._written.isdisjoint(storages_of(self.source.fakes[node]))
        if is_reusable and node in self._channels_last_of:
            return self._channels_last_of[node]
        copy = self._converted_constant(node, fake) if is_reusable else None
        if copy is None:
            copy = self._insert(node, "channels_last", _aten.clone.default, current, memory_format=torch.channels_last)
            if node not in self._frozen:
                self._count_copy(node, fake)
        if is_reusable:
            self._channels_last_of[node] = copy
        return copy

    def _converted_constant(self, node: Node, fake: FakeTensor) -> Node | None:
        """Returns a new constant of the program: a constant converted to channels-last at compile time."""
        payload = self.source.constants.get(node.name) if node.op == "placeholder" else None
        if payload is None:
            return None
        with self.graph.inserting_after(self.env[node]):
            constant = self.graph.placeholder(f"{node.name}_channels_last")
        keywords = {"memory_format": torch.channels_last}
        self.constants[constant.name] = payload.detach().contiguous(memory_format=torch.channels_last)
        self.fakes[constant] = fake_call(_aten.clone.default, (fake,), keywords)
        constant.meta = {"val": self.fakes[constant]}
        return constant

    def _restore_layout(self, node: Node, is_exact: bool = True) -> Node:
        """Returns a node in its original layout; or, unless `is_exact`, dense with its dimensions in that order."""
        if node not in self.changed:
            return self.env[node]
        if node not in self._restored:
            self._restored[node] = self._restore(node)
        restored, old = self._restored[node], self.source.fakes[node]
        if is_exact and isinstance(old, torch.Tensor) and not same_strides(self.fakes[restored], old):
            raise LayoutNotRestorable(f"'{node.name}'")
        return restored

    def _restore(self, node: Node) -> Node:
        current, old = self.env[node], self.source.fakes[node]
        if isinstance(old, torch.Tensor) and same_strides(self.fakes[current], old):
            return current
        if self._aliases_operand(node) and node.op == "call_function":
            operands = {operand: self._restore_layout(operand) for operand in node.all_input_nodes}
            with self.graph.inserting_before(self.position):
                restored = self.graph.node_copy(node, operands.__getitem__)
            self.fakes[restored] = restored.meta["val"] = self._propagate_fake(node, operands)
            return restored
        if not isinstance(old, torch.Tensor):
            raise LayoutNotRestorable(f"'{node.name}'")
        return self._restore_by_view(node, old) or self._restore_by_copy(node, old)

    def _restore_by_view(self, node: Node, old: torch.Tensor) -> Node | None:
        """Returns a view with the original strides, if only strides of dimensions of size 1 differ."""
        current = self.env[node]
        ones = [dim for dim, size in enumerate(old.shape) if type(size) is int and size == 1]
        others = [dim for dim in range(old.ndim) if dim not in ones]
        new = self.fakes[current].stride()
        if not ones or any(expression_of(new[dim]) != expression_of(old.stride(dim)) for dim in others):
            return None
        squeezed = self._insert(node, "squeezed", _aten.squeeze.dims, current, ones)
        view = self._insert(node, "restored", _aten.view.default, squeezed, list(old.shape))
        return view if same_strides(self.fakes[view], old) else None

    def _restore_by_copy(self, node: Node, old: torch.Tensor) -> Node:
        """Returns a dense copy with the dimensions in the original order: that of the strides."""
        magnitudes = [size_hint(stride) for stride in old.stride()]
        order = sorted(range(old.ndim), key=lambda dim: -magnitudes[dim])
        current, contiguous = self.env[node], torch.contiguous_format
        self._count_copy(node, old)
        if order == list(range(old.ndim)):
            return self._insert(node, "restored", _aten.clone.default, current, memory_format=contiguous)
        inverse = [order.index(dim) for dim in range(old.ndim)]
        permuted = self._insert(node, "permuted", _aten.permute.default, current, order)
        dense = self._insert(node, "dense", _aten.clone.default, permuted, memory_format=contiguous)
        return self._insert(node, "restored", _aten.permute.default, dense, inverse)

    def _insert(self, node: Node, suffix: str, target: Target, *arguments: object, **keywords: object) -> Node:
        """Inserts a call with a node's metadata."""
        return self.copy.call(self.position, target, arguments, f"{node.name}_{suffix}", keywords, origin=node)

    def _output(self, node: Node) -> None:
        """Returns values in their original layouts; saved ones in any, channels-last if that takes no more memory."""
        results = node.args[0]
        items: Iterable[object] = results if isinstance(results, tuple | list) else ()
        flexible = self.source.flexible_stride_outputs
        fixed = {item for position, item in enumerate(items) if position not in flexible}
        returned: dict[Node, Node] = {}
        copies: dict[Node, Node] = {}
        for item in node.all_input_nodes:
            is_free = bool(flexible) and item not in fixed and has_static_strides(self.fakes[self.env[item]])
            returned[item] = self.env[item] if is_free else self._restore_layout(item)
            if is_free and item in self._channels_last_of:
                copies[item] = self._channels_last_of[item]
        inputs = [self.env[source] for source in self.source.nodes if source.op in ("placeholder", "get_attr")]
        in_memory = self._storages([*inputs, *[value for item, value in returned.items() if item not in copies]])
        for item, copy in copies.items():  # the backward's convolutions read that one
            if in_memory.isdisjoint(self._storages([returned[item]])):
                returned[item] = copy
        self.env[node].args = map_arg(node.args, returned.__getitem__)

    def _storages(self, nodes: Iterable[Node]) -> set[int]:
        return {storage for node in nodes for storage in storages_of(self.fakes.get(node))}

    # --- cost -------------------------------------------------------------------------------------------------------

    def unprofitable_convolutions(self) -> frozenset[Node]:
        """Returns the convolutions that lose more than it costs to keep the layouts of their images.

        Their weights are large beside their images.
        """
        return frozenset([
            node for node, cost in self.costs.items()
            if (cost - self._cost_of_images(node)).gain < 0
        ])  # fmt: skip

    def _cost_of_images(self, node: Node) -> LayoutCost:
        """Returns the cost of copying a convolution's images to other layouts."""
        images = self._images(node)
        return copy_cost(images, self._costs_on(images[0].device))

    def _images(self, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a convolution's image and its result, or the gradient of its result."""
        *gradient, image, _ = convolution_operands(node)
        return self.source.fakes[image], self.source.fakes[gradient[0] if gradient else node]

    def _saving(self, node: Node) -> LayoutCost:
        weight = convolution_operands(node)[-1]
        stride, groups = [node.args[position] for position in STRIDE_AND_GROUPS[node.target]]
        images, is_frozen = self._images(node), weight in self._frozen
        fake, costs = self.source.fakes[weight], self._costs_on(images[0].device)
        return convolution_saving(images, fake, is_frozen, stride, groups, costs)  # type: ignore[arg-type]

    def _costs_on(self, device: torch.device) -> ConvolutionLayoutCosts:
        """Returns the cost model of a device."""
        spec = self._specs.get(device.type)
        return ConvolutionLayoutCosts() if spec is None else spec.convolutions.layout_costs

    def _count_copy(self, node: Node, fake: torch.Tensor) -> None:
        """Counts a copy, unless the kernel that computes the tensor can write the other layout instead."""
        if node not in self._fused:
            self.cost += copy_cost([fake], self._costs_on(fake.device))
