"""Launches of kernels read back: by the content hash that a node carries, and the definitions that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap.converters.from_fx_reader import Reader, Table, failure, origin_of
from fxwrap.device_registry import language_facts
from fxwrap.errors import FxwrapError
from fxwrap.lines import Alloc, Call, Launch
from fxwrap.runtime import library
from fxwrap.runtime.triton_table import triton_parameters
from fxwrap.runtime.user_triton import load_user_kernel
from fxwrap.torch_compat import triton_kernel_at, triton_launch, triton_launch_on_copies
from fxwrap.user_kernels import KernelCallError, define_user_kernel, sort_arguments, table_arguments, written_names
from fxwrap.wrapper_ir import DTYPES, KernelDefinition, Value

_OURS = torch.ops.fxwrap


def _definition(reader: Reader, node: Node, kernel_hash: str) -> KernelDefinition:
    found = reader.shared.kernels.named(kernel_hash)
    if found is None:
        reason = f"no kernel with the content hash {kernel_hash} is known"
        raise failure(node, reason, "Pass the program's kernel definitions: from_fx(graph, kernels=program.kernels)")
    return found


# --- kernels that an operator of ours launches ------------------------------------------------------------------------


def _cpp_kernel(reader: Reader, node: Node) -> None:
    given = _by_name(reader, node)
    kernel = _definition(reader, node, given["kernel"])
    numbers = _interleaved(kernel.signature, given["sizes"], given["numbers"])
    _launch(reader, node, kernel, given["ins"], given["outs"], numbers, given["grid"])
    reader.env[node] = None


def _cpp_kernel_functional(reader: Reader, node: Node) -> None:
    """Reads the form that functionalisation gives a launch: it writes copies, and gives these."""
    given = _by_name(reader, node)
    kernel = _definition(reader, node, given["kernel"])
    outs = tuple([_copy(reader, node, out) for out in given["outs"]])
    numbers = _interleaved(kernel.signature, given["sizes"], given["numbers"])
    _launch(reader, node, kernel, given["ins"], outs, numbers, given["grid"])
    reader.env[node] = outs


def _by_name(reader: Reader, node: Node) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: reader.argument(node, item) for name, item in given.items()}


def _copy(reader: Reader, node: Node, value: Value) -> Value:
    """Makes memory with a tensor's content, as far as it has any."""
    made = reader.value(f"{node.name}_{value.name}", replace(value.tensor_type, storage_offset=0))
    if reader.root_of[value.name] in reader.unwritten:
        reader.make(Alloc(made, origin=origin_of(node)), node)
        return made
    reader.make(Call((made,), "aten.clone.default", (value,), origin=origin_of(node)), node)
    return made


def _interleaved(signature: Sequence[str], sizes: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a kernel's numbers in the order of its signature, in which floats are "f..."."""
    kinds = [entry for entry in signature if not entry.startswith("*")]
    if len(kinds) != len(sizes) + len(numbers):
        return (*sizes, *numbers)
    left_sizes, left_numbers = iter(sizes), iter(numbers)
    floats = sum(kind.startswith("f") for kind in kinds)
    if floats != len(numbers):
        return (*sizes, *numbers)
    return tuple([next(left_numbers) if kind.startswith("f") else next(left_sizes) for kind in kinds])


# --- kernels of Triton's ----------------------------------------------------------------------------------------------


def _triton_kernel(reader: Reader, node: Node) -> None:
    _triton(reader, node, {})
    reader.env[node] = None


def _triton_kernel_functional(reader: Reader, node: Node) -> None:
    """Reads the form that functionalisation gives a launch: it writes copies, and gives these by name."""
    items: Any = node.kwargs["kwargs"]
    names: Any = node.kwargs["tensors_to_clone"]
    copies = {name: _copy(reader, node, reader.tensor(node, items[name])) for name in names}
    _triton(reader, node, copies)
    reader.env[node] = copies


def _triton(reader: Reader, node: Node, copies: Mapping[str, Value]) -> None:
    kernel_hash = _triton_hash(node)
    if not kernel_hash:
        _users(reader, node, copies)
        return
    kernel = _definition(reader, node, kernel_hash)
    given: Any = node.kwargs["kwargs"]
    operands = {name: reader.argument(node, item) for name, item in given.items()} | dict(copies)
    grids: list[Any] = [reader.argument(node, grid) for grid in node.kwargs["grid"]]  # type: ignore[union-attr]
    try:
        names = _parameters(kernel)
    except FxwrapError as error:
        raise failure(node, str(error), "Read the graph in a process where the kernel can be loaded") from error
    if set(names) != set(operands):
        reason = f"the kernel takes ({', '.join(names)}), not ({', '.join(operands)})"
        raise failure(node, reason, "Pass the arguments that it takes, by name")
    ordered = [operands[name] for name in names]
    tensors = [item for item in ordered if isinstance(item, Value)]
    numbers = [item for item in ordered if not isinstance(item, Value)] + [size for grid in grids[1:] for size in grid]
    split = len(tensors) - _outs(reader, node, kernel)
    _launch(reader, node, kernel, tensors[:split], tensors[split:], tuple(numbers), grids[0])


def _users(reader: Reader, node: Node, copies: Mapping[str, Value]) -> None:
    """Reads the launch of a kernel that fxwrap did not emit: the user put it into the graph."""
    call: dict[str, Any] = dict(node.kwargs)
    kernel = triton_kernel_at(call["kernel_idx"])
    grids = [reader.argument(node, grid) for grid in call["grid"]]
    try:
        given = sort_arguments(
            kernel, table_arguments(call), lambda item: _read(reader, node, item), call["tma_descriptor_metadata"]
        )
        written = {name: copies.get(name, given.tensors[name]) for name in _written(node, given.tensors)}
        restored = [name for name, value in written.items() if reader.root_of[value.name] not in reader.unwritten]
        definition, numbers = define_user_kernel(kernel, given, written, restored, grids)
    except KernelCallError as error:
        raise failure(node, error.reason, error.remedy) from error
    reads = [value for name, value in given.tensors.items() if name not in written]
    kernel_of_ours = reader.shared.kernels.added(definition)
    _launch(reader, node, kernel_of_ours, reads, list(written.values()), tuple(numbers), grids[0])


def _read(reader: Reader, node: Node, item: Any) -> Any:
    is_made = isinstance(item, Node | torch.SymInt | torch.SymFloat | torch.SymBool)
    return reader.argument(node, item) if is_made else item


def _written(node: Node, tensors: Mapping[str, Value]) -> list[str]:
    """Returns the names of the tensors that a kernel of the user's writes."""
    call: dict[str, Any] = dict(node.kwargs)
    vals = {name: item.meta.get("val") if isinstance(item, Node) else item for name, item in call["kwargs"].items()}
    unknown = [name for name in tensors if not isinstance(vals.get(name), torch.Tensor)]
    if unknown and "tensors_to_clone" not in call:
        reason = f"its argument '{unknown[0]}' has no meta['val'], and without nothing says what the kernel writes"
        raise failure(node, reason, "Set it to a fake tensor, for example with torch.fx.passes.fake_tensor_prop")
    return written_names(call, vals)


def _triton_hash(node: Node) -> str:
    """Returns the content hash of the kernel that a node launches, "" for one that fxwrap did not emit.

    Raises ReadBackError for a kernel that is not in torch's table, or another one than the node was made for.
    """
    index: Any = node.kwargs["kernel_idx"]
    remedy = "Emit the graph again in this process, or make the kernel an operator with torch.library.triton_op"
    try:
        kernel = triton_kernel_at(index)
    except (AssertionError, KeyError) as error:
        if "fxwrap_kernel" in node.meta:  # torch.compiler.reset() emptied the table
            return str(node.meta["fxwrap_kernel"])
        raise failure(node, f"torch's table of Triton kernels has no kernel {index}", remedy) from error
    found = getattr(kernel, "fxwrap_hash", None)
    known = node.meta.get("fxwrap_kernel")
    if known is not None and known != found:
        reason = f"kernel {index} of torch's table of Triton kernels is another one than the node was made for"
        raise failure(node, reason, remedy)
    return str(found or "")


def _parameters(kernel: KernelDefinition) -> list[str]:
    """Returns the names of a kernel's parameters, tensors first, constants left out."""
    if language_facts(kernel.language).by_user:
        return load_user_kernel(kernel.source, kernel.signature, kernel.options).names
    constants = dict(kernel.options)
    return [name for name in triton_parameters(kernel.source) if name not in constants]


def _outs(reader: Reader, node: Node, kernel: KernelDefinition) -> int:
    """Returns how many of a kernel's tensors it writes."""
    line = reader.hint(node, Launch)
    if line is not None:
        return len(line.outs)
    try:
        return library.registered_kernel(kernel.hash).outs
    except FxwrapError:
        reason = "nothing says which of its tensors the kernel writes, since the node lost its metadata"
        raise failure(node, reason, "Emit the program once more in this process with fxwrap.to_fx first") from None


# --- the line ---------------------------------------------------------------------------------------------------------


def _launch(
    reader: Reader,
    node: Node,
    kernel: KernelDefinition,
    ins: Sequence[Any],
    outs: Sequence[Any],
    numbers: tuple[Any, ...],
    grid: tuple[Any, ...],
) -> None:
    """Adds the launch; arguments stand in the order that they had where they are as many."""
    for item in (*ins, *outs):
        if not isinstance(item, Value):
            raise failure(node, "an operand that is a tensor of the kernel's signature is none", "Pass a tensor")
    _check_dtypes(node, kernel, (*ins, *outs))
    line = reader.hint(node, Launch)
    arguments: tuple[Any, ...] = (*ins, *numbers)
    effects = ()
    if line is not None and sum(isinstance(item, Value) for item in line.arguments) == len(ins):
        tensors, others = iter(ins), iter(numbers)
        if len(line.arguments) == len(arguments):
            arguments = tuple([next(tensors if isinstance(item, Value) else others) for item in line.arguments])
        effects = line.effect_set
    reader.emit(Launch(kernel.name, arguments, tuple(outs), tuple(grid), effects, origin=origin_of(node)), node)


def _check_dtypes(node: Node, kernel: KernelDefinition, tensors: Sequence[Value]) -> None:
    """Raises ReadBackError where a tensor has another dtype than the kernel was made for."""
    entries = [entry.partition(" ")[0][1:] for entry in kernel.signature if entry.startswith("*")]
    if kernel.signature and len(entries) != len(tensors):
        reason = f"the kernel '{kernel.name}' takes {len(entries)} tensors, not {len(tensors)}"
        raise failure(node, reason, "Pass what its signature takes")
    for entry, value in zip(entries, tensors, strict=False):
        wanted = torch.bool if entry in ("i1", "b8") else DTYPES.get(entry)
        have = value.tensor_type.dtype
        if wanted is not None and have != wanted:
            reason = f"the kernel '{kernel.name}' takes a tensor of {wanted} where '{value.name}' has {have}"
            remedy = "Convert the tensor before the launch, or replace the launch by operators"
            raise failure(node, reason, remedy)


KERNELS: Table = {
    _OURS.cpp_kernel.default: _cpp_kernel,
    _OURS.cpp_kernel_functional.default: _cpp_kernel_functional,
    triton_launch: _triton_kernel,
    triton_launch_on_copies: _triton_kernel_functional,
}
