"""A program as an ExportedProgram: its functional FX graph behind the original signature.

Parameters, buffers and constants become placeholders, the final copies into inputs and buffers become outputs, and the
kernels' texts a constant that the first node registers.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ArgumentSpec,
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap import torch_compat
from fxwrap.converters.exported.signature import ExportedSignature
from fxwrap.converters.fx.metadata import node_metadata
from fxwrap.devices import language_traits
from fxwrap.errors import ExportError
from fxwrap.fx_passes.effects import storage_of
from fxwrap.runtime.kernel_texts import RegisteredKernel, serialize_kernels
from fxwrap.torch_compat import is_opaque
from fxwrap.torch_compat.exported import InvalidExport, make_exported_program, narrowed_ranges
from fxwrap.wrapper_ir import Program, ProgramConstant, ScalarType, Value, symbol_infos

_ATEN = torch.ops.aten
_FXWRAP = torch.ops.fxwrap

NEEDS_IMPORT = "import_fxwrap_before_torch_export_load"
"""The name of the node that registers the kernels: torch's error shows it where nobody has imported fxwrap."""

KERNEL_TEXTS = "fxwrap_kernels"
"""The name of the constant that has the kernels' texts."""


def to_exported_program(program: Program, signature: ExportedSignature, functional: GraphModule) -> ExportedProgram:
    """Returns an exported program with a signature, which computes the same as a program.

    Args:
        program: a verified program.
        signature: the signature of the graph that it was compiled from.
        functional: the program's functional FX graph, whose launches name their kernels by content hash.

    Parameters and buffers are shared, not copied. Raises ExportError for a program that torch.export cannot represent.
    """
    return _Exporter(program, signature, functional).export()


class _Exporter:
    def __init__(self, program: Program, signature: ExportedSignature, functional: GraphModule) -> None:
        self.program = program
        self.signature = signature
        self.source = functional
        self.graph = Graph()
        self.nodes: dict[Node, Any] = {}  # of the functional graph
        self.inputs: list[InputSpec] = []
        self.placeholders: list[Node] = []
        self.constants = dict(signature.constants)
        self.added: dict[Node, Node] = {}  # the placeholders of constants
        self.mutated: dict[Node, Any] = {}  # the new value of each written placeholder
        self.modules: dict[str, GraphModule] = {}

    def export(self) -> ExportedProgram:
        constants = self._constant_nodes()
        user_inputs = self.source.graph.find_nodes(op="placeholder")
        self._add_model_constants(constants)
        for constant, node in zip(self.program.constants, constants.values(), strict=True):
            if node not in self.nodes:
                self._add_constant(constant, node)
        texts = self._kernel_texts()
        self._add_user_inputs(user_inputs)
        if texts is not None:
            register = self.graph.create_node(
                "call_function", _FXWRAP.register_kernels.default, (texts,), {}, NEEDS_IMPORT
            )
            register.meta = node_metadata(None, None, 0)
        for node in self.source.graph.nodes:
            if node.op != "output" and node not in self.nodes:
                self.nodes[node] = self._copy(node)
        signature = ExportGraphSignature(self.inputs, self._outputs())
        original = self.signature
        try:
            exported = make_exported_program(
                self.modules, self.graph, signature, state_dict=original.state_dict, constants=self.constants,
                range_constraints=self._ranges(), module_call_graph=original.copy_of_modules(),
                example_inputs=original.example_inputs,
            )  # fmt: skip
        except InvalidExport as error:
            raise ExportError(f"torch.export rejects the program: {error}", "Save it with fxwrap.save") from error
        exported.graph_module.meta["custom"] = {"fxwrap": self._description(constants.values())}
        return exported

    def _ranges(self) -> dict[Any, Any]:
        """Returns the ranges of sizes that the program accepts: a compile may assume more than the original ones."""
        bounds = {name: (info.lower, info.upper) for name, info in symbol_infos(self.program).items()}
        return narrowed_ranges(self.signature.range_constraints, bounds)

    def _description(self, constants: Iterable[Node]) -> dict[str, object]:
        """Returns what nodes do not tell of the program; torch.export.save writes it as JSON."""
        targets = {node: spec.target for node, spec in zip(self.placeholders, self.inputs, strict=True)}
        scalars = [item.name for item in self.program.inputs
                   if isinstance(item.value, Value) and isinstance(item.value.type, ScalarType)]  # fmt: skip
        return {
            "name": self.program.name,
            "header": self.program.header,
            "constant_inputs": scalars,
            "constants": [targets[self.added[node]] for node in constants],
            "declared_symbols": {name: asdict(info) for name, info in symbol_infos(self.program).items()},
        }  # fmt: skip

    # --- inputs -----------------------------------------------------------------------------------------------------

    def _constant_nodes(self) -> dict[str, Node]:
        """Returns the node of each constant of the program by its name, in the program's order."""
        nodes = [node for node in self.source.graph.find_nodes(op="get_attr") if "fxwrap_mutable" in node.meta]
        nodes.sort()
        return {item.value.name: node for item, node in zip(self.program.constants, nodes, strict=True)}

    def _add_model_constants(self, constants: Mapping[str, Node]) -> None:
        """Adds the model's parameters, buffers and constants, which the program may have changed or may not use."""
        specs = [spec for spec in self.signature.inputs if spec.kind is not InputKind.USER_INPUT]
        for spec, node in zip(specs, self._nodes_of(specs, constants), strict=True):
            if node is None:
                self._placeholder(spec, self.signature.vals.get(spec.arg.name), {})
            else:
                self.nodes[node] = self.added[node] = self._placeholder(spec, node.meta["val"], node.meta)

    def _nodes_of(self, specs: Sequence[InputSpec], constants: Mapping[str, Node]) -> list[Node | None]:
        """Returns the node of each parameter, buffer and constant: of those with its tensor, the one with its name."""
        names: dict[Hashable, list[str]] = {}
        for name in constants:
            names.setdefault(_tensor_key(self.program.store.tensors[name]), []).append(name)
        same = {spec.arg.name: names.get(_tensor_key(self.signature.tensor(spec)), []) for spec in specs}
        matches = {name: name for name, candidates in same.items() if name in candidates}
        unused = constants.keys() - matches.keys()
        for name, candidates in same.items():
            other = next((other for other in candidates if other in unused), None)
            if name not in matches and other is not None:
                matches[name] = other
                unused.discard(other)
        return [constants.get(matches.get(spec.arg.name, "")) for spec in specs]

    def _add_constant(self, constant: ProgramConstant, node: Node) -> None:
        """Adds a constant that the model does not have, such as a folded one."""
        tensor = self.program.store.tensors[constant.value.name]
        if is_opaque(tensor):
            reason = f"the constant '{constant.value.name}' is an object of type {type(tensor).__name__}"
            raise ExportError(reason, "Save the program with fxwrap.save, or pass the object as an input")
        target = self._unused_target(constant.value.name)
        kind = InputKind.BUFFER if constant.mutable else InputKind.CONSTANT_TENSOR
        spec = InputSpec(kind, TensorArgument(target), target, False if constant.mutable else None)
        self.constants[target] = tensor
        self.nodes[node] = self.added[node] = self._placeholder(spec, node.meta["val"], node.meta)

    def _unused_target(self, name: str) -> str:
        """Returns a name for a constant that no part of the model has."""
        names = {str(spec.target).partition(".")[0] for spec in self.inputs}
        names |= {spec.arg.name for spec in (*self.signature.inputs, *self.inputs)}
        names |= {entry.fqn.partition(".")[0] for entry in self.signature.module_call_graph}
        target, count = name, 0
        while target in names:
            target, count = f"{name}_{count}", count + 1
        return target

    def _add_user_inputs(self, nodes: Sequence[Node]) -> None:
        specs = [spec for spec in self.signature.inputs if spec.kind is InputKind.USER_INPUT]
        if len(specs) != len(nodes):
            reason = f"the program has {len(nodes)} inputs, and the graph that was compiled {len(specs)}"
            raise ExportError(reason, "Export the result of compile_graph without passes that add or remove inputs")
        for spec, node in zip(specs, nodes, strict=True):
            val = self.signature.vals.get(spec.arg.name, node.meta["val"])
            self.nodes[node] = self._placeholder(spec, val, node.meta)

    def _placeholder(self, spec: InputSpec, val: Any, meta: Mapping[str, Any]) -> Node:
        node = self.graph.placeholder(spec.arg.name)
        node.meta = {**(meta or node_metadata(val, None, 0)), "val": val}
        self.inputs.append(InputSpec(spec.kind, replace(spec.arg, name=node.name), spec.target, spec.persistent))
        self.placeholders.append(node)
        return node

    def _kernel_texts(self) -> Node | None:
        """Adds the constant with the kernels' texts, if there are kernels."""
        kernels = _launched_kernels(self.source)
        if not kernels:
            return None
        texts, target = serialize_kernels(kernels), self._unused_target(KERNEL_TEXTS)
        self.constants[target] = texts
        fakes = (node.meta.get("val") for node in self.source.graph.nodes)
        mode = next(fake.fake_mode for fake in fakes if isinstance(fake, torch_compat.FakeTensor))
        val = torch_compat.fake_tensor(mode, torch.empty(texts.shape, dtype=texts.dtype, device="meta"), texts.device)
        return self._placeholder(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(target), target), val, {})

    # --- calls ------------------------------------------------------------------------------------------------------

    def _copy(self, node: Node) -> Any:
        """Returns the copy of a node: a value for copies into inputs and for numbers that a node only renames."""
        if node.target is _ATEN.copy_.default:
            target, value = (self.nodes[operand] for operand in node.args)  # type: ignore[index]
            self.mutated[target] = value
            self.nodes[node.args[0]] = value  # type: ignore[index]
            return value
        if node.target is operator.pos:
            return self._mapped(node.args[0])
        if node.op == "call_module":
            reason = f"'{node.name}' calls a submodule, as fusion regions do, which no exported program may"
            raise ExportError(reason, "Compile without kernels='subgraph' and choose_kernel_form")
        if node.op == "get_attr":
            self.modules[str(node.target)] = _plain_module(getattr(self.source, str(node.target)))
        return self.graph.node_copy(node, self.nodes.__getitem__)

    def _mapped(self, item: Any) -> Any:
        return self.nodes[item] if isinstance(item, Node) else item

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _outputs(self) -> list[OutputSpec]:
        output = self.source.graph.output_node()
        items: Any = output.args[0]
        results = [self._mapped(item) for item in items]
        separate = {result for item, result in zip(items, results) if isinstance(item, Node) and self._is_new(item)}
        specs, values = list[OutputSpec](), list[Node]()
        for placeholder, spec in zip(self.placeholders, self.inputs, strict=True):
            if placeholder in self.mutated:
                value = self._mutation_value(self.mutated[placeholder], separate.union(values))
                values.append(value)
                specs.append(_mutation_spec(spec, value))
        specs += [OutputSpec(OutputKind.USER_OUTPUT, _argument(result), None) for result in results]
        self.graph.output((*values, *results)).meta = dict(output.meta)
        return specs

    def _is_new(self, item: Node) -> bool:
        """Whether a result of the functional graph is no input, which a caller could tell from the written input."""
        return item.op not in ("placeholder", "get_attr")

    def _mutation_value(self, value: Node, others: Collection[Any]) -> Node:
        """Returns the output with the new content of an input: a copy where it aliases an input or another output."""
        inputs = {storage_of(node) for node in self.placeholders}
        if value not in others and storage_of(value) not in inputs:
            return value
        clone = self.graph.call_function(_ATEN.clone.default, (value,))
        fake = value.meta["val"]
        meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        clone.meta = {**value.meta, "val": torch_compat.fake_tensor(fake.fake_mode, meta, fake.device)}
        return clone


def _tensor_key(item: Any) -> Hashable:
    """Returns a key that is equal for tensors with the same memory and layout, and for the same object."""
    if not isinstance(item, torch.Tensor):
        return id(item)
    return torch_compat.storage_identity(item), item.shape, item.stride(), item.storage_offset(), item.dtype


def _mutation_spec(spec: InputSpec, value: Node) -> OutputSpec:
    kinds = {
        InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
        InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
        InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    }
    if spec.kind not in kinds:
        reason = f"the program writes the constant '{spec.target}', which is neither a parameter nor a buffer"
        raise ExportError(reason, "Register it with register_buffer in the model")
    target = spec.arg.name if spec.kind is InputKind.USER_INPUT else spec.target
    return OutputSpec(kinds[spec.kind], TensorArgument(value.name), target)


def _argument(result: Any) -> ArgumentSpec:
    if not isinstance(result, Node):
        return ConstantArgument("", result)
    val = result.meta["val"]
    if isinstance(val, torch.SymInt):
        return SymIntArgument(result.name)
    if isinstance(val, torch.SymFloat):
        return SymFloatArgument(result.name)
    return SymBoolArgument(result.name) if isinstance(val, torch.SymBool) else TensorArgument(result.name)


def _launched_kernels(module: GraphModule) -> list[RegisteredKernel]:
    """Returns the kernels that a graph launches, those of its submodules included. Raises ExportError."""
    kernels: dict[str, RegisteredKernel] = {}
    for graph_module in module.modules():
        for node in graph_module.graph.nodes if isinstance(graph_module, GraphModule) else ():
            kernel = node.meta.get("fxwrap_registered_kernel")
            if isinstance(kernel, RegisteredKernel):
                kernels[kernel.hash] = kernel
    for kernel in kernels.values():
        options = dict(kernel.options)
        if language_traits(kernel.language).user_defined and "live" in options:
            reason = f"the kernel '{kernel.name}' exists only in this process: {options.get('reason', '')}"
            raise ExportError(reason, "Change the kernel so that its text defines all of it")
    return list(kernels.values())


def _plain_module(module: GraphModule) -> GraphModule:
    """Returns a copy of a submodule with torch's own code and only nodes that exported programs may have."""
    graph = Graph()
    nodes: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.target is operator.pos:
            nodes[node] = nodes.get(node.args[0], node.args[0])
        elif node.op == "output":
            graph.output(map_arg(node.args[0], nodes.__getitem__)).meta = dict(node.meta)
        else:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
    inner = {name: _plain_module(item) for name, item in module.named_children() if isinstance(item, GraphModule)}
    return GraphModule(inner, graph)
