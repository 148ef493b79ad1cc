"""Launches of kernels as nodes: torch's own operator for Triton kernels, one of ours for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import sympy
import torch

from fxwrap.converters.fx_nodes import GraphWriter
from fxwrap.device_registry import language_facts
from fxwrap.errors import Unsupported
from fxwrap.lines import Launch
from fxwrap.runtime import library
from fxwrap.runtime.triton_table import triton_constants, triton_function, triton_parameters
from fxwrap.runtime.user_triton import load_user_kernel, user_table_kernel
from fxwrap.symbolic import expression_kind
from fxwrap.torch_compat import new_triton_constants, triton_constants_index, triton_kernel_index, triton_launch
from fxwrap.wrapper_ir import KernelDefinition, LineBase, Value


class KernelConverter(Protocol):
    """What a launch needs of the converter."""

    writer: GraphWriter
    kernels: dict[str, KernelDefinition]

    def ours(
        self,
        line: LineBase,
        target: Any,
        arguments: Sequence[Any],
        *,
        keywords: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> torch.fx.Node:
        """Adds a call of an operator of the library `fxwrap::`."""
        ...

    def unsupported(self, line: LineBase, reason: str) -> Unsupported:
        """Returns the error for a line that has no form."""
        ...


def launch(converter: KernelConverter, line: Launch) -> None:
    """Writes the launch of a kernel."""
    kernel = converter.kernels[line.kernel]
    registered = library.RegisteredKernel(
        kernel.language, kernel.source, kernel.signature, kernel.options, kernel.name, len(line.outs)
    )
    library.register_kernel(kernel.hash, registered)
    tensors = [item for item in line.arguments if isinstance(item, Value)]
    numbers = [item for item in line.arguments if not isinstance(item, Value)]
    facts = language_facts(kernel.language)
    if facts.is_triton:
        write = _launch_users if facts.by_user else _launch_triton
        write(converter, line, kernel, [*tensors, *line.outs, *numbers])
        return
    argument = converter.writer.argument
    floats = _are_floats(kernel, numbers)
    arguments = [kernel.hash, [argument(item) for item in tensors]]
    # By name: inside of torch's higher-order operators no list that is written may be an argument by position.
    keywords = {
        "outs": [argument(item) for item in line.outs],
        "sizes": [argument(item) for item, is_float in zip(numbers, floats) if not is_float],
        "numbers": [argument(item) for item, is_float in zip(numbers, floats) if is_float],
        "grid": [argument(size) for size in line.grid],
    }
    converter.ours(line, torch.ops.fxwrap.cpp_kernel.default, arguments, keywords=keywords, name=kernel.name)


def _launch_triton(
    converter: KernelConverter, line: Launch, kernel: KernelDefinition, operands: Sequence[Any]
) -> None:
    constants = dict(kernel.options)
    names = [name for name in triton_parameters(kernel.source) if name not in constants]
    if len(names) != len(operands):
        raise converter.unsupported(line, f"the kernel takes ({', '.join(names)}), not {len(operands)} arguments")
    on_cpu = line.outs[0].tensor_type.device.type == "cpu"  # where nothing but Triton's interpreter runs it
    function = triton_function(kernel.source, kernel.signature, kernel.options, kernel.hash, on_cpu)
    argument = converter.writer.argument
    keywords = {
        "kernel_idx": triton_kernel_index(function),
        "constant_args_idx": triton_constants_index(triton_constants(kernel.options)),
        "grid": [tuple([argument(size) for size in line.grid])],
        "tma_descriptor_metadata": {},
        "kwargs": {name: argument(item) for name, item in zip(names, operands, strict=True)},
    }
    node = converter.writer.call(triton_launch, [], keywords, name=kernel.name)
    node.meta["fxwrap_kernel"] = kernel.hash


def _launch_users(converter: KernelConverter, line: Launch, kernel: KernelDefinition, operands: Sequence[Any]) -> None:
    """Writes the launch of a kernel of the user's, whose object in torch's table is as the user wrote it."""
    text = (kernel.source, kernel.signature, kernel.options)
    loaded = load_user_kernel(*text)
    devices = [item.tensor_type.device for item in operands if isinstance(item, Value)]
    on_cpu = all(device.type == "cpu" for device in devices)  # where nothing but Triton's interpreter runs it
    argument = converter.writer.argument
    count = len(loaded.names)
    grids = [line.grid, *[operands[start : start + 3] for start in range(count, len(operands), 3)]]
    keywords = {
        "kernel_idx": triton_kernel_index(user_table_kernel(*text, kernel.hash, on_cpu)),
        "constant_args_idx": new_triton_constants(loaded.constants, kernel.hash),
        "grid": [tuple([argument(size) for size in grid]) for grid in grids],
        "tma_descriptor_metadata": {name: ("stable", (list(shape),)) for name, shape in loaded.descriptors.items()},
        "kwargs": {name: argument(item) for name, item in zip(loaded.names, operands, strict=False)},
    }
    node = converter.writer.call(triton_launch, [], keywords, name=kernel.name)
    node.meta["fxwrap_kernel"] = kernel.hash


def _are_floats(kernel: KernelDefinition, numbers: Sequence[Any]) -> list[bool]:
    """Returns which numbers a kernel takes as floats: as its signature says, else as they are."""
    kinds = [entry for entry in kernel.signature if not entry.startswith("*")]
    if len(kinds) == len(numbers):
        return [kind.startswith("f") for kind in kinds]
    return [isinstance(n, float) or (isinstance(n, sympy.Basic) and expression_kind(n) == "float") for n in numbers]
