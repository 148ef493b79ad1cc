"""Kernel launches as nodes.

Regions are calls of submodules. Triton kernels are launched by torch's operator, all others by `fxwrap::cpp_kernel`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.converters.fx.nodes import CallTarget
from fxwrap.converters.fx.regions import call_functional_region, call_region
from fxwrap.devices import FX, language_traits
from fxwrap.devices.kernel_names import described_parameters
from fxwrap.lines import Launch
from fxwrap.loop_ir import FLOAT8
from fxwrap.runtime import kernel_table
from fxwrap.runtime.triton.side_table import (
    argument_names,
    triton_argument_names,
    triton_constants,
    triton_side_table_kernel,
)
from fxwrap.runtime.triton.user_kernels import load_user_kernel, user_side_table_kernel
from fxwrap.symbolic import expression_kind
from fxwrap.torch_compat import (
    add_triton_constants,
    triton_constants_index,
    triton_kernel_at,
    triton_kernel_index,
    triton_launch,
    triton_launch_functional,
)
from fxwrap.wrapper_ir import KernelDefinition, Value


def launch(emitter: GraphEmitter, line: Launch) -> None:
    """Emits the launch of a kernel."""
    if emitter.kernels[line.kernel].language == FX.name:
        call_region(emitter, line)
        return
    call = _LaunchCall.of(emitter, line)
    if call.is_triton:
        node = call.triton(triton_launch, line.outs)
    else:
        outs = [emitter.writer.argument(item) for item in line.outs]
        # Keywords, since torch's higher-order operators accept no mutated list that is a positional argument.
        node = call.cpp(torch.ops.fxwrap.cpp_kernel.default, {"outs": outs}, None)
    node.meta["fxwrap_registered_kernel"] = call.registered  # the graph owns its kernels


def launch_functional(emitter: GraphEmitter, line: Launch, has_content: Sequence[bool]) -> list[Node]:
    """Emits the launch of a kernel on new results, and returns the node of each.

    Where `has_content`, the result starts as a copy of the line's out, else uninitialised.
    """
    if emitter.kernels[line.kernel].language == FX.name:
        return call_functional_region(emitter, line)
    writer, call = emitter.writer, _LaunchCall.of(emitter, line)
    vals = [emitter.fakes.root(value) for value in line.outs]
    if call.is_triton:
        for value, is_copied in zip(line.outs, has_content, strict=True):
            if not is_copied:  # a template of the result
                type_ = value.tensor_type
                keywords = {"dtype": type_.dtype, "device": type_.device}
                val = emitter.fakes.fake(type_)
                writer.define(value, torch.ops.aten.empty_strided.default, writer.layout(type_), keywords, val=val)
        kernel = call.kernel
        arguments = argument_names(kernel.language, kernel.source, kernel.signature, kernel.options)
        names = arguments[call.input_count :][: len(line.outs)]
        results = dict(zip(names, vals, strict=True))
        node = call.triton(triton_launch_functional, line.outs, {"tensors_to_clone": names}, results)
        keys: Sequence[object] = names
    else:
        new = [value.tensor_type for value, is_copied in zip(line.outs, has_content, strict=True) if not is_copied]
        layouts = [number for type_ in new for number in (len(type_.sizes), *type_.sizes, *type_.strides)]
        keywords = {
            "outs": [writer.argument(v) if copied else None for v, copied in zip(line.outs, has_content, strict=True)],
            "layouts": [writer.argument(number) for number in layouts],
            "dtypes": [str(type_.dtype).removeprefix("torch.") for type_ in new],
            "device": line.outs[0].tensor_type.device,
        }
        node = call.cpp(torch.ops.fxwrap.cpp_kernel_functional.default, keywords, vals)
        keys = range(len(vals))
    node.meta["fxwrap_registered_kernel"] = call.registered
    items = zip(line.outs, keys, vals, strict=True)
    return [writer.call(operator.getitem, [node, key], name=value.name, val=val) for value, key, val in items]


@dataclass(frozen=True)
class _LaunchCall:
    """A launch with its kernel, and its operands by kind."""

    emitter: GraphEmitter
    line: Launch
    kernel: KernelDefinition
    registered: kernel_table.RegisteredKernel
    tensors: list[Value]
    scalars: list[object]

    @classmethod
    def of(cls, emitter: GraphEmitter, line: Launch) -> _LaunchCall:
        kernel = emitter.kernels[line.kernel]
        registered = kernel_table.RegisteredKernel(
            kernel.language, kernel.source, kernel.signature, kernel.options, kernel.name, len(line.outs)
        )
        tensors = [item for item in line.arguments if isinstance(item, Value)]
        scalars = [item for item in line.arguments if not isinstance(item, Value)]
        return cls(emitter, line, kernel, kernel_table.register_kernel(kernel.hash, registered), tensors, scalars)

    @property
    def is_triton(self) -> bool:
        """Whether torch's operator launches the kernel.

        It passes float8 as such to kernels that access bytes, and allocates no scratch memory.
        """
        traits = language_traits(self.kernel.language)
        operands = [*self.tensors, *self.line.outs]
        has_bytes = not traits.user_defined and any(item.tensor_type.dtype in FLOAT8 for item in operands)
        needs_scratch = not traits.user_defined and bool(described_parameters(self.kernel.source))
        return traits.is_triton and not (self.emitter.launches_by_hash or has_bytes or needs_scratch)

    @property
    def input_count(self) -> int:
        return len(self.tensors)

    def cpp(self, target: CallTarget, keywords: Mapping[str, object], val: object) -> Node:
        """Emits the call of fxwrap's operator; `keywords` are those of the results."""
        argument, line = self.emitter.writer.argument, self.line
        floats = _float_mask(self.kernel, self.scalars)
        numbers = {
            "sizes": [argument(item) for item, is_float in zip(self.scalars, floats) if not is_float],
            "numbers": [argument(item) for item, is_float in zip(self.scalars, floats) if is_float],
            "grid": [argument(size) for size in line.grid],
        }
        arguments = [self.kernel.hash, [argument(item) for item in self.tensors]]
        return self.emitter.fxwrap_operator(
            line, target, arguments, {**keywords, **numbers}, name=self.kernel.name, val=val
        )

    def triton(
        self,
        target: CallTarget,
        outs: Sequence[Value],
        keywords: Mapping[str, object] | None = None,
        val: object = None,
    ) -> Node:
        """Emits the call of torch's operator for Triton kernels."""
        operands = [*self.tensors, *outs, *self.scalars]
        emit = _launch_user_triton if language_traits(self.kernel.language).user_defined else _launch_triton
        call = emit(self.emitter, self.line, self.kernel, operands)
        entry: Any = triton_kernel_at(call.kernel_index)
        entry.fxwrap_registered_kernel = self.registered  # for graphs traced from this one, which may outlive it
        return call.emit(self.emitter, target, keywords or {}, val)


@dataclass(frozen=True)
class _TritonCall:
    """The arguments of torch's operator for Triton kernels."""

    kernel: KernelDefinition
    kernel_index: int
    constants_index: int
    grids: Sequence[Sequence[object]]
    descriptors: dict[str, tuple[str, tuple[list[int]]]]
    names: Sequence[str]
    operands: Sequence[object]

    def emit(self, emitter: GraphEmitter, target: CallTarget, more: Mapping[str, object], val: object) -> Node:
        argument = emitter.writer.argument
        keywords = {
            "kernel_idx": self.kernel_index,
            "constant_args_idx": self.constants_index,
            "grid": [tuple([argument(size) for size in grid]) for grid in self.grids],
            "tma_descriptor_metadata": self.descriptors,
            "kwargs": {name: argument(item) for name, item in zip(self.names, self.operands, strict=False)},
            **more,
        }
        node = emitter.writer.call(target, [], keywords, name=self.kernel.name, val=val)
        node.meta["fxwrap_kernel"] = self.kernel.hash
        return node


def _launch_triton(
    emitter: GraphEmitter, line: Launch, kernel: KernelDefinition, operands: Sequence[object]
) -> _TritonCall:
    names = triton_argument_names(kernel.source, kernel.options)
    if len(names) != len(operands):
        raise emitter.unsupported(line, f"the kernel takes ({', '.join(names)}), not {len(operands)} arguments")
    on_cpu = line.outs[0].tensor_type.device.type == "cpu"  # then Triton's interpreter runs the kernel
    function = triton_side_table_kernel(kernel.source, kernel.signature, kernel.options, kernel.hash, on_cpu)
    constants_index = triton_constants_index(triton_constants(kernel.options))
    return _TritonCall(kernel, triton_kernel_index(function), constants_index, [line.grid], {}, names, operands)


def _launch_user_triton(
    emitter: GraphEmitter, line: Launch, kernel: KernelDefinition, operands: Sequence[object]
) -> _TritonCall:
    """Returns the launch of a user's kernel, whose object in torch's table is the one that the user wrote."""
    text = (kernel.source, kernel.signature, kernel.options)
    loaded = load_user_kernel(*text)
    devices = [item.tensor_type.device for item in operands if isinstance(item, Value)]
    on_cpu = all(device.type == "cpu" for device in devices)  # then Triton's interpreter runs the kernel
    count = len(loaded.names)
    grids = [line.grid, *[operands[start : start + 3] for start in range(count, len(operands), 3)]]
    index = triton_kernel_index(user_side_table_kernel(*text, kernel.hash, on_cpu))
    constants_index = add_triton_constants(loaded.constants, kernel.hash)
    descriptors = {name: ("stable", (list(shape),)) for name, shape in loaded.descriptors.items()}
    return _TritonCall(kernel, index, constants_index, grids, descriptors, loaded.names, operands)


def _float_mask(kernel: KernelDefinition, scalars: Sequence[object]) -> list[bool]:
    """Returns which scalars a kernel takes as floats: by its signature, else by their kinds."""
    kinds = [entry for entry in kernel.signature if not entry.startswith("*")]
    if len(kinds) == len(scalars):
        return [kind.startswith("f") for kind in kinds]
    return [isinstance(n, float) or (isinstance(n, sympy.Basic) and expression_kind(n) == "float") for n in scalars]
