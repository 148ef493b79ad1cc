"""Graphs of ATen operators on scalars as operations of a kernel: the functions that attention applies to its scores.

Each operator is lowered by its ordinary rule, to a definition of rank 0 that is inlined. Tensors that the graph reads
are in memory, and the kernel reads them at computed indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import attribute_of
from fxwrap.loop_ir import Buffer, Index, Scalar, as_index, strided_index
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.calls.nodes import literal
from fxwrap.lowering.fusion.definitions import Definition, Pointwise, Stored, Viewed
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.lowering.fusion.tracing import Access, BodyBuilder, IndexTuple
from fxwrap.lowering.rules import RULES, Declined, OperatorCall
from fxwrap.lowering.rules.indexing import analyze_indexing
from fxwrap.options import Options
from fxwrap.symbolic import Number
from fxwrap.torch_compat import OpOverload, flex_scatter_operator, real_object
from fxwrap.wrapper_ir import Operand, Value
from fxwrap.wrapper_ir.operators import operator_schema


@dataclass(frozen=True)
class ScatteredNumber:
    """A number that is added to an element of a tensor: a result of `zeros_and_scatter` in a graph of scalars."""

    indices: tuple[Definition, ...]
    number: Scalar


class ScalarKernelBuilder:
    """A kernel under construction whose buffers are values of a program.

    `inputs` are the buffers that it reads, with their values.
    """

    def __init__(self, builder: Builder, options: Options) -> None:
        self.builder = builder
        self.inputs: list[tuple[Buffer, Value]] = []
        self.reader = BodyBuilder(_access_of, self._fetch, lambda item: self._operators.get(item, ""))
        self.body = self.reader.body
        self._specs = options.device_specs()
        self._names: dict[str, str] = {}
        self._values: dict[Definition, Value] = {}
        self._scalars: dict[Definition, Scalar] = {}
        self._operators: dict[Definition, str] = {}

    def load(self, value: Value, indices: IndexTuple) -> Scalar:
        """Loads an element of a tensor in memory, in its compute dtype; 0 where the body is masked."""
        return self._fetch(self._stored(value), indices, 0)

    def call(self, module: GraphModule, arguments: Sequence[Scalar | Operand]) -> Scalar:
        """Returns the result of a graph of scalars and tensors in memory, which has one; others are None.

        Raises Declined if one of its operators has no rule, or none that computes each element by itself, and if its
        result is another one.
        """
        returned = module.graph.output_node().args[0]
        items = returned if isinstance(returned, tuple | list) else [returned]
        shapes = [getattr(item.meta.get("val"), "shape", None) for item in items if isinstance(item, Node)]
        if shapes != [()]:
            raise Declined("its score_mod or mask_mod does not return one tensor without dimensions")
        (result,) = self.results(module, arguments)
        assert isinstance(result, Scalar)
        return result

    def results(self, module: GraphModule, arguments: Sequence[Scalar | Operand]) -> list[Scalar | ScatteredNumber]:
        """Returns the results of a graph of scalars and tensors in memory that are not None.

        Raises Declined as `call` does.
        """
        remaining = iter(arguments)
        values: dict[Node, Any] = {}
        for node in module.graph.nodes:
            match node.op:
                case "placeholder":
                    values[node] = self._operand(next(remaining), node)
                case "get_attr":
                    values[node] = self._attribute(node)
                case "output":
                    results = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
                    numbers = [values[item] for item in results if isinstance(item, Node)]
                    return [
                        item if isinstance(item, ScatteredNumber) else self.reader.load(item, ()) for item in numbers
                    ]
                case _:
                    values[node] = self._define(node, values)
        raise AssertionError("a graph ends with its output")

    def scatter_index(self, number: ScatteredNumber, target: Value) -> Index:
        """Returns the offset in a tensor of the element that a number is added to; it checks the indices."""
        type_ = target.tensor_type
        indexing = analyze_indexing(type_.sizes, number.indices)
        position = indexing.operand_indices(self.reader, (), writes=True) if number.indices else ()
        return strided_index(tuple(map(as_index, position)), type_.strides)

    # --- operands ---------------------------------------------------------------------------------------------------

    def _operand(self, argument: Scalar | Operand, node: Node) -> Any:
        if isinstance(argument, Value):
            return self._stored(argument)
        if not isinstance(argument, Scalar):
            return argument
        fake = node.meta["val"]
        definition = Stored((), fake.dtype, fake.device)
        self._scalars[definition] = argument
        return definition

    def _attribute(self, node: Node) -> Definition:
        payload = real_object(attribute_of(node))
        if not isinstance(payload, torch.Tensor):
            raise Declined(f"its function reads an attribute of type {type(payload).__name__}")
        return self._stored(self.builder.constants.constant(payload, str(node.target).replace(".", "_")))

    def _stored(self, value: Value) -> Stored:
        type_ = value.tensor_type
        definition = Stored(type_.sizes, type_.dtype, type_.device)
        self._values[definition] = value
        return definition

    def _fetch(self, definition: Definition, at: IndexTuple, other: Number) -> Scalar:
        if definition in self._scalars:
            return self._scalars[definition].to(definition.compute_dtype)
        value = self._values[definition]
        name = self._names.get(value.name)
        if name is None:
            name = self._names[value.name] = f"in{len(self.inputs)}"
            extent = extent_of(value.tensor_type)
            self.inputs.append((Buffer(name, value.tensor_type.dtype, extent), value))
        index = strided_index(at, value.tensor_type.strides)
        return self.body.load(name, index, definition.dtype, other).to(definition.compute_dtype)

    # --- operators --------------------------------------------------------------------------------------------------

    def _define(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """Returns the definition of an operator's result, or a number."""
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            number = self.builder.symbols.expression(fake)
            if self.builder.symbols.unknown(number):
                raise Declined("its function reads a number from a tensor")
            return number
        if node.target is flex_scatter_operator():
            _, indices, number = [self._argument(item, node, values) for item in node.args]
            return ScatteredNumber(indices, self.reader.load(number, ()))
        if not isinstance(node.target, OpOverload):
            raise Declined(f"its function calls '{node.target}'")
        schema = operator_schema(node.target)
        arguments = tuple([self._argument(item, node, values) for item in node.args])
        keywords = tuple([(name, self._argument(item, node, values)) for name, item in node.kwargs.items()])
        if schema.replacement is not None:
            target, arguments, keywords = schema.replacement(node.target, arguments, keywords)
            schema = operator_schema(target)
        if schema.name not in RULES:
            raise Declined(f"its function calls '{schema.name}', which has no lowering rule")
        spec, symbols = self._specs[fake.device.type], self.builder.symbols
        call = OperatorCall(
            schema.name, arguments, dict(keywords), fake, fake.device, symbols.sizes, spec, symbols.may_lack
        )
        result = RULES[schema.name](call)
        if not isinstance(result, Pointwise | Viewed):
            raise Declined(f"its function calls '{schema.name}', which is not computed element by element")
        self._operators[result] = schema.name
        return result

    def _argument(self, item: Any, node: Node, values: Mapping[Node, Any]) -> Any:
        if isinstance(item, Node):
            return values[item]
        if isinstance(item, list | tuple):
            return tuple([self._argument(part, node, values) for part in item])
        return literal(self.builder, item, node)


def _access_of(definition: Definition) -> Access:
    return "inlined" if isinstance(definition, Pointwise) else "fetched"
