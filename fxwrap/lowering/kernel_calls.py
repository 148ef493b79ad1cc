"""The ATen calls of a launch, with each operand by its role: the provenance that patterns of kernels match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fxwrap.lowering.calls.nodes import literal
from fxwrap.lowering.fusion.definitions import Definition, Viewed, definitions_in
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan
from fxwrap.lowering.graph_definitions import DefinitionOperand
from fxwrap.lowering.kernel_nodes import KernelContext, KernelNodes, RegionCut, Source
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import CallOperand, CallResult, KernelCall, KernelCalls, LaunchOperand, UnreadOperand, Value
from fxwrap.wrapper_ir.operators import operator_schema


def kernel_calls(
    context: KernelContext,
    plan: KernelPlan,
    stored: Sequence[Definition],
    arguments: Sequence[object],
    outs: Sequence[Value],
) -> KernelCalls | None:
    """Returns the calls that compute the outputs of a launch, in which the definitions `stored` are.

    None for a launch that computes a part of an operator, converts a result to another dtype or size, or copies the
    initial tensor of a scatter.
    """
    if not all(item in context.definitions.results or item in context.plan.definitions for item in stored):
        return None
    try:
        return _CallBuilder(context, plan, arguments, outs).build(stored)
    except RegionCut:
        return None


@dataclass(eq=False)
class _CallBuilder(KernelNodes):
    arguments: Sequence[object] = ()
    outs: Sequence[Value] = ()
    position_of_call: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        tensors = enumerate(self.arguments)
        self.position_of: Mapping[str, int] = {item.name: index for index, item in tensors if isinstance(item, Value)}

    def build(self, stored: Sequence[Definition]) -> KernelCalls:
        sources = [self.source_of_output(definition) for definition in stored]
        for definition, source in zip(stored, sources, strict=True):
            if not self._is_stored_as(definition, source):
                raise RegionCut(source[0])
        nodes = sorted(self.needed(sources), key=self.context.order.__getitem__)
        self.position_of_call = {node: position for position, node in enumerate(nodes)}
        calls = tuple([self._call(node) for node in nodes])
        types = tuple([self.builder.symbols.tensor_type(self._fake(source)) for source in sources])
        return KernelCalls(calls, tuple([self._tensor(source) for source in sources]), types)

    def is_computed_here(self, definition: Definition) -> bool:
        """Whether the kernel computes a definition; a tensor that is used for its metadata alone is not computed."""
        if isinstance(definition, Viewed):
            return True
        is_unread = definition in self.definitions.results and self.context.plan.access_of(definition) == "unused"
        return not is_unread and super().is_computed_here(definition)

    def _is_stored_as(self, definition: Definition, source: Source) -> bool:
        """Whether an output has the dtype and sizes of the node that computes it."""
        item = self._fake(source)
        if not isinstance(item, torch.Tensor):
            return False
        symbols = self.builder.symbols
        return item.dtype == definition.dtype and tuple(map(symbols.expression, item.shape)) == tuple(definition.sizes)

    def _fake(self, source: Source) -> Any:
        """Returns the fake value of a result."""
        fake = self.builder.fakes[source[0]]
        return fake[source[1]] if source[1] is not None and isinstance(fake, tuple | list) else fake

    def _call(self, node: Node) -> KernelCall:
        assert isinstance(node.target, OpOverload)  # by `needed`
        arguments = tuple([self._operand(node, item) for item in node.args])
        keywords = tuple([(name, self._operand(node, item)) for name, item in node.kwargs.items()])
        is_view = any(isinstance(item, Viewed) for item in definitions_in(self.definitions.operands[node]))
        return KernelCall(operator_schema(node.target).name, arguments, keywords, is_view)

    def _operand(self, node: Node, item: object) -> CallOperand:
        if isinstance(item, Node):
            return self._tensor(self.source(item))
        if isinstance(item, list | tuple):
            return tuple([self._operand(node, part) for part in item])
        return literal(self.builder, item, node)

    def _tensor(self, source: Source) -> CallOperand:
        if self.is_boundary(source):
            return self._in_memory(self.operand_of(source))
        return CallResult(self.position_of_call[source[0]], source[1])

    def _in_memory(self, operand: DefinitionOperand) -> CallOperand:
        """Returns a tensor, tensors or a number that the kernel does not compute."""
        if isinstance(operand, tuple):
            return tuple([self._in_memory(item) for item in operand])
        return self._launch_operand(operand) if isinstance(operand, Definition) else operand

    def _launch_operand(self, definition: Definition) -> LaunchOperand | UnreadOperand:
        value = self.context.values.get(definition)
        if value is None or definition not in self.readable:
            return UnreadOperand()
        if value.name in self.position_of:
            return LaunchOperand(self.position_of[value.name], type=value.type)
        root = self.root(value)
        for index, out in enumerate(self.outs):
            if self.root(out) == root and (out.name == value.name or value.name == root):
                return LaunchOperand(index, is_out=True, is_base=out.name != value.name, type=value.type)
        return UnreadOperand()
