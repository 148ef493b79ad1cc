"""Import of kernel launches, by the content hash of the node and the definition that has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap import user_kernels
from fxwrap.converters.from_fx.functional import copy_operand, new_result
from fxwrap.converters.from_fx.graph_importer import GraphImporter, NodeImporters
from fxwrap.converters.from_fx.kernel_table import definition_of
from fxwrap.converters.from_fx.nodes import failure, result_name
from fxwrap.errors import FxwrapError, KernelTextError
from fxwrap.lines import Launch
from fxwrap.printers import SIGNATURE_TYPES
from fxwrap.runtime import kernel_operators, kernel_table
from fxwrap.runtime.kernel_texts import parse_kernels
from fxwrap.runtime.triton.side_table import argument_names
from fxwrap.torch_compat import arguments_by_name, triton_kernel_at, triton_launch, triton_launch_functional
from fxwrap.wrapper_ir import DTYPES, KernelDefinition, Tag, TensorType, Value

_FXWRAP = torch.ops.fxwrap


def _definition(importer: GraphImporter, node: Node, kernel_hash: str) -> KernelDefinition:
    definition = importer.state.kernels.get(kernel_hash)
    if definition is None:
        reason = f"no kernel with the content hash {kernel_hash} is known"
        raise failure(node, reason, "Pass the program's kernel definitions: from_fx(graph, kernels=program.kernels)")
    return definition


def _register_kernels(importer: GraphImporter, node: Node) -> None:
    """Reads the kernels of an exported program, whose texts are no constant of the imported one."""
    state, texts = importer.state, importer.tensor(node, node.args[0])
    path = next((path for path, value in state.constants.items() if value.name == texts.name), None)
    if path is None:
        raise failure(node, "the kernels' texts are not a constant of the graph", "Import the exported program itself")
    del state.constants[path]
    try:
        kernels = parse_kernels(state.payloads.pop(texts.name))
    except KernelTextError as error:
        raise failure(node, str(error), "Import an undamaged program") from error
    state.kernels.learn([definition_of(kernel) for kernel in kernels.values()])
    importer.env[node] = None


# --- kernels of fxwrap::cpp_kernel ------------------------------------------------------------------------------------


def _cpp_kernel(importer: GraphImporter, node: Node) -> None:
    arguments = _arguments(importer, node)
    _import_cpp_launch(importer, node, arguments, arguments["outs"])
    importer.env[node] = None


def _cpp_kernel_functional(importer: GraphImporter, node: Node) -> None:
    """Imports a functional launch: copies of its outs, and allocations, which a launch then writes."""
    arguments = _arguments(importer, node)
    device = torch.device(arguments["device"])
    try:
        layouts = iter(kernel_operators.result_layouts(arguments["layouts"], arguments["dtypes"]))
        outs = [
            _new_result(importer, node, index, layouts, device) if out is None else copy_operand(importer, node, out)
            for index, out in enumerate(arguments["outs"])
        ]
    except (ValueError, TypeError, AttributeError, StopIteration) as error:
        reason = "layouts and dtypes do not describe the results of the kernel"
        raise failure(node, f"{reason}: {error}", "Pass rank, sizes and strides, and a dtype, for each None") from error
    importer.env[node] = tuple(outs)
    copy_of = {out.name: copy for out, copy in zip(arguments["outs"], outs, strict=True) if out is not None}
    arguments["ins"] = tuple([copy_of.get(item.name, item) for item in arguments["ins"]])
    _import_cpp_launch(importer, node, arguments, tuple(outs))


def _arguments(importer: GraphImporter, node: Node) -> dict[str, Any]:
    return {name: importer.argument(node, item) for name, item in arguments_by_name(node).items()}


def _new_result(
    importer: GraphImporter, node: Node, index: int, layouts: Iterator[kernel_operators.NewLayout], device: torch.device
) -> Value:
    sizes, strides, dtype = next(layouts)
    assert dtype is not None
    type_ = TensorType(dtype, tuple(sizes), tuple(strides), device)
    return new_result(importer, node, result_name(node, (index,)), type_, index)


def _import_cpp_launch(
    importer: GraphImporter, node: Node, arguments: Mapping[str, Any], outs: tuple[Value, ...]
) -> None:
    kernel = _definition(importer, node, arguments["kernel"])
    sizes, floats = arguments["sizes"], arguments["numbers"]
    try:
        scalars = kernel_operators.order_scalar_arguments(kernel.signature, sizes, floats, lambda size: size)
    except ValueError:
        scalars = [*sizes, *floats]
    emit_launch(importer, node, kernel, arguments["ins"], outs, scalars, arguments["grid"])


# --- Triton kernels ---------------------------------------------------------------------------------------------------


def _triton_kernel(importer: GraphImporter, node: Node) -> None:
    _import_triton_launch(importer, node, {})
    importer.env[node] = None


def _triton_kernel_functional(importer: GraphImporter, node: Node) -> None:
    """Imports the functionalised form of a launch, which writes copies and returns them by name."""
    items: Any = node.kwargs["kwargs"]
    names: Any = node.kwargs["tensors_to_clone"]
    copies = {name: copy_operand(importer, node, importer.tensor(node, items[name])) for name in names}
    _import_triton_launch(importer, node, copies)
    importer.env[node] = copies


def _import_triton_launch(importer: GraphImporter, node: Node, copies: Mapping[str, Value]) -> None:
    kernel_hash = _triton_hash(node)
    if not kernel_hash:
        _import_user_triton_launch(importer, node, copies)
        return
    kernel = _definition(importer, node, kernel_hash)
    items: Any = node.kwargs["kwargs"]
    operands = {name: importer.argument(node, item) for name, item in items.items()} | dict(copies)
    first_grid, *other_grids = importer.argument(node, node.kwargs["grid"])
    try:
        names = argument_names(kernel.language, kernel.source, kernel.signature, kernel.options)
    except FxwrapError as error:
        raise failure(node, str(error), "Import the graph in a process where the kernel can be loaded") from error
    if set(names) != set(operands):
        reason = f"the kernel takes ({', '.join(names)}), not ({', '.join(operands)})"
        raise failure(node, reason, "Pass the arguments that it takes, by name")
    ordered = [operands[name] for name in names]
    tensors = [item for item in ordered if isinstance(item, Value)]
    scalars = [item for item in ordered if not isinstance(item, Value)]
    scalars += [size for grid in other_grids for size in grid]
    split = len(tensors) - _output_count(importer, node, kernel)
    emit_launch(importer, node, kernel, tensors[:split], tensors[split:], scalars, first_grid)


def _import_user_triton_launch(importer: GraphImporter, node: Node, copies: Mapping[str, Value]) -> None:
    """Imports the launch of a kernel that the user put into the graph."""
    call: dict[str, Any] = dict(node.kwargs)
    kernel = triton_kernel_at(call["kernel_idx"])
    grids = [importer.argument(node, grid) for grid in call["grid"]]

    def argument(item: object) -> object:
        is_symbolic = isinstance(item, Node | torch.SymInt | torch.SymFloat | torch.SymBool)
        return importer.argument(node, item) if is_symbolic else item

    try:
        arguments = user_kernels.classify_arguments(
            kernel, user_kernels.all_call_arguments(call), argument, call["tma_descriptor_metadata"]
        )
        tensors = arguments.tensors
        written = {name: copies.get(name, tensors[name]) for name in _written_arguments(node, tensors)}
        uninitialized = importer.uninitialized
        preserved = [name for name, value in written.items() if importer.root_of[value.name] not in uninitialized]
        definition, scalars = user_kernels.define_user_kernel(kernel, arguments, written, preserved, grids)
    except user_kernels.KernelCallError as error:
        raise failure(node, error.reason, error.remedy) from error
    reads = [value for name, value in tensors.items() if name not in written]
    definition = importer.state.kernels.add(definition)
    emit_launch(importer, node, definition, reads, list(written.values()), scalars, grids[0])


def _written_arguments(node: Node, tensors: Mapping[str, Value]) -> list[str]:
    call: dict[str, Any] = dict(node.kwargs)
    vals = {name: item.meta.get("val") if isinstance(item, Node) else item for name, item in call["kwargs"].items()}
    unknown = [name for name in tensors if not isinstance(vals.get(name), torch.Tensor)]
    if unknown and "tensors_to_clone" not in call:
        reason = f"its argument '{unknown[0]}' has no meta['val'], which is needed to find what the kernel writes"
        raise failure(node, reason, "Set it to a fake tensor, for example with torch.fx.passes.fake_tensor_prop")
    return user_kernels.mutated_argument_names(call, vals)


def _triton_hash(node: Node) -> str:
    """Returns the content hash of the kernel that a node launches, "" for one that fxwrap did not emit.

    Raises FxImportError for a kernel that is not in torch's table, or is not the one that the node was emitted for.
    """
    index: Any = node.kwargs["kernel_idx"]
    remedy = "Emit the graph again in this process, or make the kernel an operator with torch.library.triton_op"
    original = node.meta.get("fxwrap_kernel")
    try:
        kernel = triton_kernel_at(index)
    except (AssertionError, KeyError) as error:
        if original is not None:  # torch.compiler.reset() emptied the table
            return str(original)
        raise failure(node, f"torch's table of Triton kernels has no kernel {index}", remedy) from error
    kernel_hash = getattr(kernel, "fxwrap_hash", None)
    if original is not None and original != kernel_hash:
        reason = f"kernel {index} of torch's table of Triton kernels is not the one that the node was emitted for"
        raise failure(node, reason, remedy)
    return str(kernel_hash or "")


def _output_count(importer: GraphImporter, node: Node, kernel: KernelDefinition) -> int:
    line = importer.original_line(node, Launch)
    if line is not None:
        return len(line.outs)
    registered = kernel_table.find_registered_kernel(kernel.hash)
    if registered is None:
        reason = "the tensors that the kernel writes are unknown, since the node lost its metadata"
        raise failure(node, reason, "Emit the program once more in this process with fxwrap.to_fx first")
    return registered.outs


# --- the line ---------------------------------------------------------------------------------------------------------


def emit_launch(
    importer: GraphImporter,
    node: Node,
    kernel: KernelDefinition,
    ins: Sequence[object],
    outs: Sequence[object],
    scalars: Sequence[object],
    grid: Sequence[object],
) -> None:
    """Adds the launch; arguments are in their original order if there are as many."""
    tensors = [item for item in (*ins, *outs) if isinstance(item, Value)]
    if len(tensors) < len(ins) + len(outs):
        raise failure(node, "an operand that is a tensor by the kernel's signature is none", "Pass a tensor")
    _check_dtypes(node, kernel, tensors)
    line = importer.original_line(node, Launch)
    arguments = (*ins, *scalars)
    effects: tuple[Tag, ...] = ()
    if line is not None and sum(isinstance(item, Value) for item in line.arguments) == len(ins):
        next_tensor, next_scalar = iter(ins), iter(scalars)
        if len(line.arguments) == len(arguments):
            arguments = tuple([next(next_tensor if isinstance(i, Value) else next_scalar) for i in line.arguments])
        effects = line.effect_set
    importer.emit(Launch(kernel.name, arguments, tuple(outs), tuple(grid), effects), node)  # type: ignore[arg-type]


def _check_dtypes(node: Node, kernel: KernelDefinition, tensors: Sequence[Value]) -> None:
    entries = [entry.partition(" ")[0][1:] for entry in kernel.signature if entry.startswith("*")]
    if kernel.signature and len(entries) != len(tensors):
        reason = f"the kernel '{kernel.name}' takes {len(entries)} tensors, not {len(tensors)}"
        raise failure(node, reason, "Pass the tensors of its signature")
    for entry, value in zip(entries, tensors, strict=False):
        expected = torch.bool if entry in ("i1", "b8") else DTYPES.get(entry)
        dtype = value.tensor_type.dtype
        if expected is not None and dtype != expected and SIGNATURE_TYPES.get(dtype) != entry:
            reason = f"the kernel '{kernel.name}' takes a tensor of {expected}, but '{value.name}' has {dtype}"
            raise failure(node, reason, "Convert the tensor before the launch, or replace the launch by operators")


KERNELS: NodeImporters = {
    _FXWRAP.register_kernels.default: _register_kernels,
    _FXWRAP.cpp_kernel.default: _cpp_kernel,
    _FXWRAP.cpp_kernel_functional.default: _cpp_kernel_functional,
    triton_launch: _triton_kernel,
    triton_launch_functional: _triton_kernel_functional,
}
