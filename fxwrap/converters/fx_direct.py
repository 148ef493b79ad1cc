"""How the Python of an emitted graph says launches of kernels, allocations, numbers and blocks: without operators.

Each form is read off a node's target and arguments, as `fx_direct_writer` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.converters.fx_direct_writer import (
    DirectWriter,
    Form,
    NotDirect,
    kind_of_node,
    named_arguments,
    only_keywords,
)
from fxwrap.converters.torch_calls import Kind
from fxwrap.device_registry import language_facts
from fxwrap.runtime import checks, direct, library, tensors
from fxwrap.runtime.triton_table import triton_constants, triton_parameters
from fxwrap.runtime.user_triton import load_user_kernel
from fxwrap.torch_compat import triton_constants_at, triton_kernel_at, triton_launch, while_loop_stack_output

_ATEN = torch.ops.aten
_OURS = torch.ops.fxwrap
_HIGHER = torch.ops.higher_order
_ONCE = (1, 1, 1)

# --- launches -------------------------------------------------------------------------------------------------------


def _cpp_kernel(writer: DirectWriter, node: Node) -> str:
    kernel_hash, ins, outs, sizes, numbers, grid = named_arguments(
        node, "kernel", "ins", "outs", "sizes", "numbers", "grid"
    )
    if not all(isinstance(item, list | tuple) for item in (ins, outs, sizes, numbers, grid)):
        raise NotDirect
    found = library.known_kernel(kernel_hash)
    if found is None:
        raise NotDirect
    try:
        ordered = library.interleave(found.signature, sizes, numbers, _Truth)
    except ValueError:
        raise NotDirect from None
    texts = [item.text(writer) if isinstance(item, _Truth) else writer.text(item) for item in (*ins, *outs, *ordered)]
    return writer.launch(node.name, kernel_hash, found, grid, texts)


class _Truth:
    """A number that a kernel takes as a truth value."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def text(self, writer: DirectWriter) -> str:
        """Returns the text of the truth value."""
        return f"{writer.builtin('bool')}({writer.text(self.number)})"


def _triton_kernel(writer: DirectWriter, node: Node) -> str:
    index, constants, grids, descriptors, given = named_arguments(
        node, "kernel_idx", "constant_args_idx", "grid", "tma_descriptor_metadata", "kwargs"
    )
    try:
        kernel_hash = getattr(triton_kernel_at(index), "fxwrap_hash", None)
        found_constants = triton_constants_at(constants)
    except (AssertionError, KeyError):  # torch.compiler.reset() has emptied the table
        raise NotDirect from None
    if kernel_hash is None or kernel_hash != node.meta.get("fxwrap_kernel", kernel_hash):
        raise NotDirect
    found = library.known_kernel(kernel_hash)
    if found is None or not isinstance(given, Mapping):
        raise NotDirect
    names, wanted = _triton_interface(found)
    if set(given) != set(names) or not _same(found_constants, wanted):
        raise NotDirect
    by_user = language_facts(found.language).by_user
    described = load_user_kernel(*found.text).descriptors if by_user else {}
    if set(descriptors) != set(described) or (len(grids) > 1 and not by_user):
        raise NotDirect
    operands = [writer.text(given[name]) for name in names]
    operands += [writer.text(size) for grid in grids[1:] for size in grid]
    return writer.launch(node.name, kernel_hash, found, grids[0], operands)


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        type(item) is type(wanted[name]) and item == wanted[name] for name, item in found.items()
    )


def _triton_interface(found: library.RegisteredKernel) -> tuple[list[str], Mapping[str, Any]]:
    """Returns the names of a Triton kernel's arguments in the order of its launcher, and its constant arguments."""
    if language_facts(found.language).by_user:
        loaded = load_user_kernel(*found.text)
        return loaded.names, loaded.constants
    constants = dict(found.options)
    names = [name for name in triton_parameters(found.source) if name not in constants]
    return names, dict(triton_constants(found.options))


# --- memory ---------------------------------------------------------------------------------------------------------


def _empty_strided(writer: DirectWriter, node: Node) -> str:
    only_keywords(node, "dtype", "device")
    if len(node.args) != 2 or len(node.kwargs) != 2:
        raise NotDirect
    sizes, strides = node.args
    layout = f"{writer.tuple(sizes)}, {writer.tuple(strides)}, {writer.text(node.kwargs['dtype'])}"
    return f"{writer.allocator(node.kwargs['device'])}({layout})"


def _pool(writer: DirectWriter, node: Node) -> str:
    size, device = named_arguments(node, "size", "device")
    return f"{writer.allocator(device)}(({writer.text(size)},), (1,), torch.uint8)"


def _workspace(writer: DirectWriter, node: Node) -> str:
    size, zeroed, device = named_arguments(node, "size", "zeroed", "device")
    allocated = f"{writer.allocator(device)}(({writer.text(size)},), (1,), torch.uint8)"
    return f"{allocated}.zero_()" if zeroed else allocated


def _enter_device(writer: DirectWriter, node: Node) -> str:
    device, stream = [*node.args, 0][:2]
    if node.kwargs or not isinstance(device, torch.device) or not isinstance(stream, int):
        raise NotDirect
    name = "enter_" + str(device).replace(":", "_") + (f"_stream_{stream}" if stream else "")
    return f"{writer.named(name, library.entering(device, stream), name)}()"


def _reuse(writer: DirectWriter, node: Node) -> str:
    memory, sizes, strides, dtype = named_arguments(node, "memory", "sizes", "strides", "dtype")
    if _dtype_of(memory) == dtype:
        return writer.runtime(tensors, "window", [writer.text(memory), writer.tuple(sizes), writer.tuple(strides)])
    return _reinterpret(writer, memory, sizes, strides, dtype, 0)


def _pool_slice(writer: DirectWriter, node: Node) -> str:
    pool, offset, sizes, strides, dtype = named_arguments(node, "pool", "offset", "sizes", "strides", "dtype")
    whole = _literal_bytes(pool)
    if whole is None or not isinstance(offset, int) or whole % dtype.itemsize or offset % dtype.itemsize:
        return _reinterpret(writer, pool, sizes, strides, dtype, offset)
    memory = writer.text(pool) if dtype == torch.uint8 else f"{writer.text(pool)}.view({dtype!r})"
    arguments = [memory, writer.tuple(sizes), writer.tuple(strides)]
    arguments += [str(offset // dtype.itemsize)] if offset else []
    return writer.runtime(tensors, "window", arguments)


def _reinterpret(writer: DirectWriter, memory: Any, sizes: Any, strides: Any, dtype: Any, offset: Any) -> str:
    arguments = [writer.text(memory), writer.tuple(sizes), writer.tuple(strides), writer.text(dtype)]
    arguments += [] if offset == 0 else [writer.text(offset)]
    return writer.runtime(tensors, "reinterpret", arguments)


def _dtype_of(memory: Any) -> Any:
    """Returns the dtype of memory that a node of ours makes; None for any other."""
    if not isinstance(memory, Node):
        return None
    if memory.target is _ATEN.empty_strided.default:
        return memory.kwargs.get("dtype")
    if memory.target is _OURS.reuse.default or memory.target is _OURS.pool_slice.default:
        return memory.args[-1]
    return None


def _literal_bytes(pool: Any) -> int | None:
    known = isinstance(pool, Node) and pool.target is _OURS.pool.default
    return pool.args[0] if known and isinstance(pool.args[0], int) else None


def _slice(writer: DirectWriter, node: Node) -> str:
    """`x[:, 2:5]`, which clamps as the operator does."""
    given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    base, dim, start, end, step = given
    if node.kwargs or not isinstance(dim, int) or dim < 0 or step != 1 or not isinstance(base, Node):
        return writer.operator(node)
    limits = ["" if limit is None else writer.text(limit) for limit in (start, end)]
    return f"{writer.text(base)}[{':, ' * dim}{limits[0]}:{limits[1]}]"


# --- numbers and blocks ---------------------------------------------------------------------------------------------


def _method(name: str) -> Form:
    """Returns the form of an operator that is a tensor's method."""

    def write(writer: DirectWriter, node: Node) -> str:
        if node.kwargs or not node.args or not isinstance(node.args[0], Node):
            raise NotDirect
        return f"{writer.text(node.args[0])}.{name}({', '.join([writer.text(item) for item in node.args[1:]])})"

    return write


def _extreme(name: str) -> Form:
    """Returns the form of the larger or smaller of two whole numbers."""

    def write(writer: DirectWriter, node: Node) -> str:
        left, right = named_arguments(node, "a", "b")
        if kind_of_node(left) is not Kind.INT or kind_of_node(right) is not Kind.INT:
            raise NotDirect
        return f"{writer.builtin(name)}({writer.text(left)}, {writer.text(right)})"

    return write


def _choice(writer: DirectWriter, node: Node) -> str:
    condition, then, otherwise = named_arguments(node, "b", "t", "f")
    if kind_of_node(condition) is not Kind.BOOL:
        raise NotDirect
    return f"{writer.text(then)} if {writer.text(condition)} else {writer.text(otherwise)}"


def _assert_scalar(writer: DirectWriter, node: Node) -> str:
    condition, message = named_arguments(node, "self", "assert_msg")
    arguments = [writer.text(condition), writer.text(message), "'RuntimeError'", "None"]
    return writer.implementation(_OURS.require.default, arguments)


def _check_layout(writer: DirectWriter, node: Node) -> str:
    tensor, name, dtype, sizes, strides, device, alignment = named_arguments(
        node, "tensor", "name", "dtype", "sizes", "strides", "device", "alignment"
    )
    if alignment != 1:
        return writer.ours(node)
    arguments = [writer.text(tensor), writer.text(name), writer.text(dtype), writer.tuple(sizes), writer.tuple(strides)]
    return writer.runtime(checks, "check_layout", [*arguments, writer.text(device)])


def _cond(writer: DirectWriter, node: Node) -> str:
    predicate, then, otherwise, operands = named_arguments(node, "pred", "true_fn", "false_fn", "operands")
    blocks = f"{_block(then)} if {writer.text(predicate)} else {_block(otherwise)}"
    return f"({blocks})({', '.join([writer.text(item) for item in operands])})"


def _while_loop(writer: DirectWriter, node: Node) -> str:
    condition, body, carried, extra = named_arguments(
        node, "cond_fn", "body_fn", "carried_inputs", "additional_inputs"
    )
    arguments = [_block(condition), _block(body), writer.tuple(carried), writer.tuple(extra)]
    stacked = ["stacked=True"] if node.target is while_loop_stack_output else []
    return writer.runtime(direct, "while_loop", [*arguments, *stacked])


def _scan(writer: DirectWriter, node: Node) -> str:
    body, carried, over, extra = named_arguments(node, "combine_fn", "init", "xs", "additional_inputs")
    return _over_slices(writer, node, body, carried, over, extra)


def _map(writer: DirectWriter, node: Node) -> str:
    body, over, extra = named_arguments(node, "f", "xs", "pos_args")
    return _over_slices(writer, node, body, (), over, extra)


def _over_slices(writer: DirectWriter, node: Node, body: Any, carried: Any, over: Any, extra: Any) -> str:
    """Returns a loop over slices; stacked results are contiguous, and there is a slice."""
    count = _slices(over[0]) if over else 0
    whole = [user.meta.get("val") for user in node.users]
    if count < 1 or not all(isinstance(val, torch.Tensor) and val.is_contiguous() for val in whole):
        raise NotDirect
    return writer.runtime(
        direct, "scan", [_block(body), writer.tuple(carried), writer.tuple(over), writer.tuple(extra)]
    )


def _slices(item: Any) -> int:
    """Returns how many slices a tensor has, 0 where that is not known before it runs."""
    val = item.meta.get("val") if isinstance(item, Node) else None
    size: Any = val.shape[0] if isinstance(val, torch.Tensor) and val.dim() else 0
    return size if type(size) is int else 0


def _call_function(writer: DirectWriter, node: Node) -> str:
    if node.kwargs or len(node.args) < 2:
        raise NotDirect
    body, _name, *operands = node.args
    return f"{_block(body)}({', '.join([writer.text(item) for item in operands])})"


def _block(item: Any) -> str:
    if not isinstance(item, Node) or item.op != "get_attr":
        raise NotDirect
    return repr(item)


DIRECT_FORMS: Mapping[Any, Form] = {
    _OURS.cpp_kernel.default: _cpp_kernel,
    triton_launch: _triton_kernel,
    _ATEN.empty_strided.default: _empty_strided,
    _OURS.pool.default: _pool,
    _OURS.workspace.default: _workspace,
    _OURS.enter_device.default: _enter_device,
    _OURS.reuse.default: _reuse,
    _OURS.pool_slice.default: _pool_slice,
    _OURS.check_layout.default: _check_layout,
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _method("select"),
    _ATEN.sym_size.int: _method("size"),
    _ATEN.sym_stride.int: _method("stride"),
    _ATEN.sym_storage_offset.default: _method("storage_offset"),
    _ATEN._local_scalar_dense.default: _method("item"),
    _ATEN._assert_scalar.default: _assert_scalar,
    torch.sym_max: _extreme("max"),
    torch.sym_min: _extreme("min"),
    torch.sym_ite: _choice,
    _HIGHER.cond: _cond,
    _HIGHER.while_loop: _while_loop,
    while_loop_stack_output: _while_loop,
    _HIGHER.scan: _scan,
    _HIGHER.map_impl: _map,
    _HIGHER.invoke_subgraph: _call_function,
}
