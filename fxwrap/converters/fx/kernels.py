"""Kernel launches as nodes: torch's operator for Triton kernels, `fxwrap::cpp_kernel` for all others."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.converters.fx.metadata import kernel_metadata
from fxwrap.devices import language_traits
from fxwrap.lines import Launch
from fxwrap.runtime import library
from fxwrap.runtime.triton.side_table import triton_constants, triton_parameters, triton_side_table_kernel
from fxwrap.runtime.triton.user_kernels import load_user_kernel, user_side_table_kernel
from fxwrap.symbolic import expression_kind
from fxwrap.torch_compat import add_triton_constants, triton_constants_index, triton_kernel_index, triton_launch
from fxwrap.wrapper_ir import KernelDefinition, Value


def launch(emitter: GraphEmitter, line: Launch) -> None:
    """Emits the launch of a kernel."""
    kernel = emitter.kernels[line.kernel]
    registered = library.RegisteredKernel(
        kernel.language, kernel.source, kernel.signature, kernel.options, kernel.name, len(line.outs)
    )
    registered = library.register_kernel(kernel.hash, registered)
    tensors = [item for item in line.arguments if isinstance(item, Value)]
    scalars = [item for item in line.arguments if not isinstance(item, Value)]
    traits = language_traits(kernel.language)
    if traits.is_triton:
        emit = _launch_user_triton if traits.user_defined else _launch_triton
        node = emit(emitter, line, kernel, [*tensors, *line.outs, *scalars])
        node.meta |= {"fxwrap_registered_kernel": registered, **kernel_metadata(line)}
        return
    argument = emitter.writer.argument
    floats = _float_mask(kernel, scalars)
    arguments = [kernel.hash, [argument(item) for item in tensors]]
    # Keywords, since torch's higher-order operators accept no mutated list that is a positional argument.
    keywords = {
        "outs": [argument(item) for item in line.outs],
        "sizes": [argument(item) for item, is_float in zip(scalars, floats) if not is_float],
        "numbers": [argument(item) for item, is_float in zip(scalars, floats) if is_float],
        "grid": [argument(size) for size in line.grid],
    }
    target = torch.ops.fxwrap.cpp_kernel.default
    node = emitter.fxwrap_operator(line, target, arguments, keywords, name=kernel.name)
    # The graph owns its kernels.
    node.meta |= {"fxwrap_registered_kernel": registered, **kernel_metadata(line)}


def _launch_triton(emitter: GraphEmitter, line: Launch, kernel: KernelDefinition, operands: Sequence[object]) -> Node:
    constants = dict(kernel.options)
    names = [name for name in triton_parameters(kernel.source) if name not in constants]
    if len(names) != len(operands):
        raise emitter.unsupported(line, f"the kernel takes ({', '.join(names)}), not {len(operands)} arguments")
    on_cpu = line.outs[0].tensor_type.device.type == "cpu"  # then Triton's interpreter runs the kernel
    function = triton_side_table_kernel(kernel.source, kernel.signature, kernel.options, kernel.hash, on_cpu)
    constants_index = triton_constants_index(triton_constants(kernel.options))
    return _call_triton(
        emitter, kernel, triton_kernel_index(function), constants_index, [line.grid], {}, names, operands
    )


def _launch_user_triton(
    emitter: GraphEmitter, line: Launch, kernel: KernelDefinition, operands: Sequence[object]
) -> Node:
    """Emits the launch of a user's kernel, whose object in torch's table is the one that the user wrote."""
    text = (kernel.source, kernel.signature, kernel.options)
    loaded = load_user_kernel(*text)
    devices = [item.tensor_type.device for item in operands if isinstance(item, Value)]
    on_cpu = all(device.type == "cpu" for device in devices)  # then Triton's interpreter runs the kernel
    count = len(loaded.names)
    grids = [line.grid, *[operands[start : start + 3] for start in range(count, len(operands), 3)]]
    index = triton_kernel_index(user_side_table_kernel(*text, kernel.hash, on_cpu))
    constants_index = add_triton_constants(loaded.constants, kernel.hash)
    descriptors = {name: ("stable", (list(shape),)) for name, shape in loaded.descriptors.items()}
    return _call_triton(emitter, kernel, index, constants_index, grids, descriptors, loaded.names, operands)


def _call_triton(
    emitter: GraphEmitter,
    kernel: KernelDefinition,
    kernel_index: int,
    constants_index: int,
    grids: Sequence[Sequence[object]],
    descriptors: dict[str, tuple[str, tuple[list[int]]]],
    names: Sequence[str],
    operands: Sequence[object],
) -> Node:
    argument = emitter.writer.argument
    keywords = {
        "kernel_idx": kernel_index,
        "constant_args_idx": constants_index,
        "grid": [tuple([argument(size) for size in grid]) for grid in grids],
        "tma_descriptor_metadata": descriptors,
        "kwargs": {name: argument(item) for name, item in zip(names, operands, strict=False)},
    }
    node = emitter.writer.call(triton_launch, [], keywords, name=kernel.name)
    node.meta["fxwrap_kernel"] = kernel.hash
    return node


def _float_mask(kernel: KernelDefinition, scalars: Sequence[object]) -> list[bool]:
    """Returns which scalars a kernel takes as floats: by its signature, else by their kinds."""
    kinds = [entry for entry in kernel.signature if not entry.startswith("*")]
    if len(kinds) == len(scalars):
        return [kind.startswith("f") for kind in kinds]
    return [isinstance(n, float) or (isinstance(n, sympy.Basic) and expression_kind(n) == "float") for n in scalars]
