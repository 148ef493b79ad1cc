"""The calling convention of an exported program: names, trees, ranges, parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ArgumentSpec,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, Node

from fxwrap.errors import ExportError
from fxwrap.lines import Return
from fxwrap.symbolic import SymbolInfo, symbol_kind
from fxwrap.torch_compat import is_opaque, tree_flatten
from fxwrap.wrapper_ir import Input, Program, TensorType


def kernel_text_inputs(graph: Graph) -> list[Node]:
    """Returns the placeholders of kernels' texts: one in an exported program that fxwrap emitted with kernels."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.fxwrap.register_kernels.default)
    return [operand for node in nodes for operand in node.all_input_nodes]


@dataclass(frozen=True, eq=False)
class ExportedSignature:
    """What callers of an exported program see of it, and the tensors that it owns.

    Fields:
        inputs: the specification of each placeholder, in order: parameters, buffers and constants before the user's
            inputs. There are no effect tokens.
        outputs: the specifications of the user's outputs.
        vals: the fake value of each placeholder by name, as far as it is known.
        state_dict: parameters and persistent buffers by their names in the model.
        constants: other buffers and constants by their names in the model.
        range_constraints: ranges of symbols.
        module_call_graph: the model's modules, with the trees of the inputs and outputs.
        example_inputs: the arguments and keywords of the export, or None.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...] | None
    module_call_graph: tuple[ModuleCallEntry, ...]
    vals: Mapping[str, Any] = field(default_factory=dict)
    state_dict: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    range_constraints: Mapping[Any, Any] = field(default_factory=dict)
    example_inputs: Any = None

    @classmethod
    def of(cls, exported: ExportedProgram) -> ExportedSignature:
        """Returns the signature of an exported program; it shares the tensors and has no part of the graph.

        The kernels' texts of a program that fxwrap exported are not in it.
        """
        signature = exported.graph_signature
        placeholders = exported.graph.find_nodes(op="placeholder")
        texts = {node.name for node in kernel_text_inputs(exported.graph)}
        inputs = [spec for spec in signature.input_specs if spec.arg.name not in texts]
        targets = {spec.target for spec in signature.input_specs if spec.arg.name in texts}
        return cls(
            inputs=tuple([spec for spec in inputs if spec.kind is not InputKind.TOKEN]),
            outputs=tuple([spec for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]),
            module_call_graph=tuple(exported.module_call_graph),
            vals={node.name: node.meta.get("val") for node in placeholders},
            state_dict=dict(exported.state_dict),
            constants={name: item for name, item in exported.constants.items() if name not in targets},
            range_constraints=dict(exported.range_constraints),
            example_inputs=exported.example_inputs,
        )

    def tensor(self, spec: InputSpec) -> Any:
        """Returns the tensor of a parameter, buffer or constant."""
        target = str(spec.target)
        return self.state_dict[target] if target in self.state_dict else self.constants.get(target)

    def copy_of_modules(self) -> list[ModuleCallEntry]:
        """Returns a copy of the module call graph without the names of the original graph's values."""
        return [ModuleCallEntry(entry.fqn, _without_values(entry.signature)) for entry in self.module_call_graph]


def _without_values(signature: ModuleCallSignature | None) -> ModuleCallSignature | None:
    if signature is None:
        return None
    return ModuleCallSignature([], [], signature.in_spec, signature.out_spec, signature.forward_arg_names)


def signature_of_program(program: Program, vals: Mapping[str, Any]) -> ExportedSignature:
    """Returns the signature of a program that was compiled from a graph: flat inputs and outputs with their names.

    Constants that are parameters stay parameters, the others are buffers. `vals` has fake values of inputs by name.
    Raises ExportError for an input that is neither a tensor nor a number.
    """
    inputs, state = [], {}
    for constant in program.constants:
        name, tensor = constant.value.name, program.store.tensors[constant.value.name]
        if is_opaque(tensor):
            raise ExportError(f"the constant '{name}' is an object of type {type(tensor).__name__}", _PASS_AS_INPUT)
        kind = InputKind.PARAMETER if isinstance(tensor, torch.nn.Parameter) else InputKind.BUFFER
        persistent = True if kind is InputKind.BUFFER else None
        inputs.append(InputSpec(kind, TensorArgument(name), name, persistent))
        state[name] = tensor
    inputs += [InputSpec(InputKind.USER_INPUT, _argument(item), None) for item in program.inputs]
    names = [item.name for item in program.inputs]
    in_spec, out_spec = tree_flatten((tuple(names), {}))[1], tree_flatten((0,) * _result_count(program))[1]
    entry = ModuleCallSignature([], [], in_spec, out_spec, names)
    return ExportedSignature(tuple(inputs), None, (ModuleCallEntry("", entry),), dict(vals), state)


_PASS_AS_INPUT = "Pass it to an operator of your own by name, or save the program with fxwrap.save"


def _argument(item: Input) -> ArgumentSpec:
    if isinstance(item.value, SymbolInfo):
        kinds: dict[str, Any] = {"int": SymIntArgument, "float": SymFloatArgument, "bool": SymBoolArgument}
        argument: ArgumentSpec = kinds[symbol_kind(item.name)](item.name)
        return argument
    if isinstance(item.value.type, TensorType):
        return TensorArgument(item.name)
    raise ExportError(f"the input '{item.name}' is neither a tensor nor a number", _PASS_AS_INPUT)


def _result_count(program: Program) -> int:
    last = program.body.lines[-1]
    assert isinstance(last, Return)
    return len(last.values)
