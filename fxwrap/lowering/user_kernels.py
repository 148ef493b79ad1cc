"""Calls of Triton kernels of the user's: each becomes a launch of a kernel of the program."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lines import Launch
from fxwrap.live_kernels import LiveKernel, keep_kernel
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.copies import writable
from fxwrap.lowering.effects import written_operands
from fxwrap.lowering.kernel_source import NotCarried, kernel_text
from fxwrap.lowering.nodes import literal
from fxwrap.lowering.source import location_of
from fxwrap.symbolic import expression_kind
from fxwrap.torch_compat import triton_constants_at, triton_kernel_at
from fxwrap.wrapper_ir import DTYPE_NAMES, KernelDefinition, TensorType, Value

_EMPTY = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
)  # fmt: skip
"""Operators whose results hold nothing yet."""

_NUMBERS = {"int": "i64", "float": "f64", "bool": "i1"}


@dataclass
class _Arguments:
    """A call's arguments by name: tensors, numbers that may differ from launch to launch, and what is part of a kernel.

    `descriptors` are the block shapes of tensors that the kernel gets as tensor descriptors.
    """

    tensors: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    descriptors: dict[str, Any] = field(default_factory=dict)


def lower_user_kernel(builder: Builder, node: Node, dying: Collection[str]) -> None:
    """Lowers the launch of a Triton kernel of the user's, on copies of what it writes, or on its operands themselves.

    No copy is made of an operand that the program owns and nothing reads later. `dying` are the roots, by name, of
    such operands.
    """
    call: dict[str, Any] = dict(node.kwargs)
    kernel = triton_kernel_at(call["kernel_idx"])
    given = _arguments(builder, node, kernel)
    written: dict[str, Value] = {}
    restored = []
    if "tensors_to_clone" in call:
        names = [name for name in call["tensors_to_clone"] if name in given.tensors]
        kept = [value for name, value in given.tensors.items() if name not in names]
        others = {builder.root_of[value.name].name for value in kept}
        for name in names:
            operand = call["kwargs"][name]
            is_read = operand.target not in _EMPTY
            value = given.tensors[name]
            fake = builder.fakes[node][name]
            written[name] = writable(builder, node, value, fake, dying, others, is_read=is_read)
            others.add(builder.root_of[written[name].name].name)
            restored += [name] if is_read else []
        builder.env[node] = dict(written)
    else:
        operands = written_operands(node, builder.fakes)
        written = {name: given.tensors[name] for name, item in call["kwargs"].items() if item in operands}
        restored = list(written)
        builder.mutated |= {builder.root_of[value.name].name for value in written.values()}
        builder.env[node] = None
    reads = {name: value for name, value in given.tensors.items() if name not in written}
    _launch(builder, node, kernel, given, reads, written, restored)


def _arguments(builder: Builder, node: Node, kernel: Any) -> _Arguments:
    """Sorts the arguments of a call."""
    call: dict[str, Any] = dict(node.kwargs)
    found = _Arguments()
    parameters = {parameter.name: parameter.is_constexpr for parameter in _function(node, kernel).params}
    items = {**triton_constants_at(call["constant_args_idx"]), **call["kwargs"]}
    order = {name: position for position, name in enumerate(parameters)}
    for name in sorted(items, key=lambda name: order.get(name, len(order))):
        item = items[name]
        is_part = parameters.get(name, True)
        if isinstance(item, Node | torch.SymInt | torch.SymFloat | torch.SymBool):
            item = literal(builder, item, node)
        if isinstance(item, Value) and isinstance(item.type, TensorType):
            found.tensors[name] = item
        elif isinstance(item, sympy.Basic) and is_part:
            reason = f"the constant argument '{name}' of its kernel is {item}, which is known when it runs only"
            raise _error(node, reason, "Pass a number, or declare the parameter without tl.constexpr")
        elif isinstance(item, sympy.Basic) or (not is_part and type(item) in (int, float, bool)):
            found.numbers[name] = item
        else:
            found.constants[name] = item
    for name, metadata in (call["tma_descriptor_metadata"] or {}).items():
        found.descriptors[name] = _block_shape(node, name, metadata)
    return found


def _function(node: Node, kernel: Any) -> Any:
    """Returns the function with parameters that is under a kernel, however it is wrapped."""
    found = kernel
    while not hasattr(found, "params"):
        if not hasattr(found, "fn"):
            reason = f"its kernel is a {type(kernel).__name__}, not a function of @triton.jit"
            raise _error(node, reason, "Decorate the kernel with @triton.jit, or with @triton.autotune above it")
        found = found.fn
    return found


def _block_shape(node: Node, name: str, metadata: Any) -> list[int]:
    kind, rest = metadata
    shape: list[Any] = list(rest[0]) if kind == "stable" else [None]
    if not all(type(size) is int for size in shape):
        reason = f"the tensor descriptor '{name}' of its kernel has no block shape of plain numbers"
        raise _error(node, reason, "Make it with TensorDescriptor.from_tensor and a constant block shape")
    return shape


def _launch(
    builder: Builder,
    node: Node,
    kernel: Any,
    given: _Arguments,
    reads: Mapping[str, Value],
    written: Mapping[str, Value],
    restored: Sequence[str],
) -> None:
    """Emits the launch, with the grid of the first configuration; grids of others that differ are numbers of it."""
    sizes = [tuple([literal(builder, size, node) for size in grid]) for grid in node.kwargs["grid"]]  # type: ignore[union-attr]
    more = [] if all(grid == sizes[0] for grid in sizes) else [size for grid in sizes[1:] for size in grid]
    signature = [
        *[f"*{DTYPE_NAMES[value.tensor_type.dtype]} {name}" for name, value in (*reads.items(), *written.items())],
        *[f"{_NUMBERS[_kind(number)]} {name}" for name, number in given.numbers.items()],
        *["i64 grid"] * len(more),
    ]
    definition = _definition(kernel, given, tuple(signature), restored, _function(node, kernel).__name__)
    name = builder.state.add_kernel(definition)
    arguments = (*reads.values(), *given.numbers.values(), *more)
    builder.emit(Launch(name, arguments, tuple(written.values()), sizes[0], origin=builder.origin(node)))


def _kind(number: Any) -> str:
    return expression_kind(number) if isinstance(number, sympy.Basic) else type(number).__name__


def _definition(
    kernel: Any, given: _Arguments, signature: tuple[str, ...], restored: Sequence[str], name: str
) -> KernelDefinition:
    """Returns the kernel as a text, or where that cannot be, as an object that this process keeps."""
    try:
        source = kernel_text(kernel, given.constants, given.descriptors, restored)
    except NotCarried as reason:
        return _live_definition(kernel, given, signature, str(reason), name)
    return KernelDefinition(name, "user_triton", source, signature)


def _live_definition(
    kernel: Any, given: _Arguments, signature: tuple[str, ...], reason: str, name: str
) -> KernelDefinition:
    function = kernel
    while not hasattr(function, "src"):
        function = function.fn
    content = (function.cache_key, type(kernel).__name__, given.constants, given.descriptors,
               [str(config) for config in getattr(kernel, "configs", ())])  # fmt: skip
    key = hashlib.sha256(repr(content).encode()).hexdigest()
    keep_kernel(key, LiveKernel(kernel, given.constants, given.descriptors))
    options = (("live", key), ("reason", reason))
    return KernelDefinition(name, "user_triton", function.src, signature, options)


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))
