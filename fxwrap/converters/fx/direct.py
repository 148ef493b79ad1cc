"""Direct forms of nodes: launches of kernels, allocations, numbers and blocks without operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap.converters.fx.direct_writer import (
    FUNCTIONAL_LAUNCHES,
    DirectForm,
    DirectWriter,
    NoDirectForm,
    kind_of_node,
    named_arguments,
)
from fxwrap.converters.torch_calls import ArgumentKind
from fxwrap.devices import language_traits
from fxwrap.runtime import checks, device_operators, direct, kernel_operators, kernel_table, ranges, tensors
from fxwrap.runtime.triton.side_table import triton_argument_names, triton_constants
from fxwrap.runtime.triton.user_kernels import load_user_kernel
from fxwrap.torch_compat import (
    PROFILER_FLAG,
    OpOverload,
    triton_constants_at,
    triton_kernel_at,
    triton_launch,
    triton_launch_functional,
    while_loop_stack_output,
)
from fxwrap.wrapper_ir.operators import operator_schema

_ATEN = torch.ops.aten
_FXWRAP = torch.ops.fxwrap
_HIGHER = torch.ops.higher_order
_ENTER_RANGE = torch.ops.profiler._record_function_enter_new.default
_EXIT_RANGE = torch.ops.profiler._record_function_exit._RecordFunction

# --- launches -------------------------------------------------------------------------------------------------------


def _cpp_kernel(writer: DirectWriter, node: Node) -> str:
    kernel_hash, *lists = named_arguments(node, "kernel", "ins", "outs", "sizes", "numbers", "grid")
    if not all(isinstance(item, list | tuple) for item in lists):
        raise NoDirectForm
    ins, outs, sizes, floats, grid = lists
    tensors = [writer.text(item) for item in (*ins, *outs)]
    return _launch_cpp(writer, node, kernel_hash, tensors, sizes, floats, grid)


def _launch_cpp(
    writer: DirectWriter, node: Node, kernel_hash: Any, tensors: list[str], sizes: Any, floats: Any, grid: Any
) -> str:
    kernel = kernel_table.find_registered_kernel(kernel_hash)
    if kernel is None:
        raise NoDirectForm
    texts = [writer.text(item) for item in sizes], [writer.text(item) for item in floats]

    def to_bool(text: str) -> str:
        return f"{writer.builtin('bool')}({text})"

    try:
        scalars = kernel_operators.order_scalar_arguments(kernel.signature, *texts, to_bool)
    except ValueError:
        raise NoDirectForm from None
    return writer.launch(node, kernel_hash, kernel, grid, [*tensors, *scalars])


def _cpp_kernel_functional(writer: DirectWriter, node: Node) -> str:
    """The results, then the launch that writes them."""
    kernel_hash, ins, outs, layouts, dtypes, device, sizes, floats, grid = named_arguments(
        node, "kernel", "ins", "outs", "layouts", "dtypes", "device", "sizes", "numbers", "grid"
    )
    if not node.users or not all(isinstance(item, list | tuple) for item in (ins, outs, layouts, dtypes, grid)):
        raise NoDirectForm
    try:
        new = iter(kernel_operators.result_layouts(layouts, dtypes))
        texts = [_new_result(writer, device, *next(new)) if out is None else _copy(writer, out) for out in outs]
    except (ValueError, TypeError, AttributeError, StopIteration):
        raise NoDirectForm from None
    if len({out for out in outs if out is not None}) < len(outs) - outs.count(None):
        raise NoDirectForm  # copies of one tensor

    def launch(names: Sequence[str]) -> str:
        result_of = {out: name for out, name in zip(outs, names, strict=True) if out is not None}
        inputs = [result_of.get(item) or writer.text(item) for item in ins]
        return _launch_cpp(writer, node, kernel_hash, [*inputs, *names], sizes, floats, grid)

    return _functional_launch(writer, node, range(len(outs)), outs, texts, launch)


def _functional_launch(
    writer: DirectWriter,
    node: Node,
    keys: Sequence[object],
    outs: Sequence[object],
    texts: Sequence[str],
    launch: Callable[[Sequence[str]], str],
) -> str:
    """Returns the definitions of a launch's results, then the launch on their names.

    `outs` are the tensors that they overwrite, None for new ones; `texts` are their definitions.
    """
    launch(texts)  # raises NoDirectForm
    results = writer.results(node, keys)
    if results is None:
        names = [f"{node!r}[{key!r}]" for key in keys]
        pairs = [f"{key!r}: {text}" for key, text in zip(keys, texts, strict=True)]
        packed = f"({', '.join(texts)},)" if isinstance(keys, range) else f"{{{', '.join(pairs)}}}"
        return f"{packed}\n{launch(names)}"
    writer.unpacked.add(node)
    owned = [out if isinstance(out, Node) and _is_last_use(out) else None for out in outs]
    definitions = [writer.define_result(*item) for item in zip(results, texts, owned, strict=True)]
    return "".join(definitions) + launch([writer.text(result) for result in results])


def _new_result(writer: DirectWriter, device: object, sizes: Any, strides: Any, dtype: object) -> str:
    return f"{writer.allocator(device)}({writer.tuple(sizes)}, {writer.tuple(strides)}, {writer.text(dtype)})"


def _copy(writer: DirectWriter, tensor: object) -> str:
    """Returns a copy of a tensor, or the tensor itself if nothing else uses its memory."""
    if isinstance(tensor, Node) and _is_last_use(tensor):
        return writer.text(tensor)
    return writer.runtime(tensors, "copy_with_strides", [writer.text(tensor)])


def _is_last_use(node: Node) -> bool:
    """Whether nothing but the one user of a tensor uses its memory."""
    return len(node.users) == 1 and _is_new(node)


def _is_new(node: Node) -> bool:
    """Whether a node is a tensor in new memory: no view."""
    target: Any = node.target
    if target is operator.getitem:
        source, index = node.args
        is_result = isinstance(source, Node) and source.target in FUNCTIONAL_LAUNCHES
        return is_result and not any(
            user is not node and user.args[1:] in ((), (index,))
            for user in source.users  # type: ignore[union-attr]
        )
    if not isinstance(target, OpOverload):
        return False
    schema = operator_schema(target)
    return (
        schema.return_count == 1
        and schema.aliased_argument is None
        and not (schema.may_alias or schema.mutated_arguments)
    )


def _triton_kernel(writer: DirectWriter, node: Node) -> str:
    *call, arguments = named_arguments(
        node, "kernel_idx", "constant_args_idx", "grid", "tma_descriptor_metadata", "kwargs"
    )
    if not isinstance(arguments, Mapping):
        raise NoDirectForm
    return _launch_triton(writer, node, call, {name: writer.text(item) for name, item in arguments.items()})


def _triton_kernel_functional(writer: DirectWriter, node: Node) -> str:
    """The results, then the launch that writes them."""
    *call, arguments, names = named_arguments(
        node, "kernel_idx", "constant_args_idx", "grid", "tma_descriptor_metadata", "kwargs", "tensors_to_clone"
    )
    if not node.users or not isinstance(arguments, Mapping) or not set(names) <= set(arguments):
        raise NoDirectForm
    if len({arguments[name] for name in names}) < len(names):
        raise NoDirectForm  # copies of one tensor
    outs = [arguments[name] for name in names]

    def launch(results: Sequence[str]) -> str:
        result_of = dict(zip(names, results, strict=True))
        texts = {name: result_of.get(name) or writer.text(item) for name, item in arguments.items()}
        return _launch_triton(writer, node, call, texts)

    return _functional_launch(writer, node, list(names), outs, [_copy(writer, out) for out in outs], launch)


def _launch_triton(writer: DirectWriter, node: Node, call: Sequence[Any], texts: Mapping[str, str]) -> str:
    index, constants_index, grids, descriptors = call
    try:
        kernel_hash = getattr(triton_kernel_at(index), "fxwrap_hash", None)
        constants = triton_constants_at(constants_index)
    except (AssertionError, KeyError):  # torch.compiler.reset() emptied the table
        raise NoDirectForm from None
    kernel = kernel_table.find_registered_kernel(kernel_hash)
    if kernel is None or kernel_hash is None or kernel_hash != node.meta.get("fxwrap_kernel", kernel_hash):
        raise NoDirectForm
    names, expected = _triton_interface(kernel)
    if set(texts) != set(names) or not _same_constants(constants, expected):
        raise NoDirectForm
    user_defined = language_traits(kernel.language).user_defined
    shapes = load_user_kernel(*kernel.text).descriptors if user_defined else {}
    if set(descriptors) != set(shapes) or (len(grids) > 1 and not user_defined):
        raise NoDirectForm
    operands = [*[texts[name] for name in names], *[writer.text(size) for grid in grids[1:] for size in grid]]
    return writer.launch(node, kernel_hash, kernel, grids[0], operands)


def _same_constants(constants: Mapping[str, object], expected: Mapping[str, object]) -> bool:
    return constants.keys() == expected.keys() and all(
        type(item) is type(expected[name]) and item == expected[name] for name, item in constants.items()
    )


def _triton_interface(kernel: kernel_table.RegisteredKernel) -> tuple[list[str], Mapping[str, object]]:
    """Returns the names of a Triton kernel's arguments in the order of its launcher, and its constant arguments."""
    if language_traits(kernel.language).user_defined:
        loaded = load_user_kernel(*kernel.text)
        return loaded.names, loaded.constants
    return triton_argument_names(kernel.source, kernel.options), dict(triton_constants(kernel.options))


# --- memory ---------------------------------------------------------------------------------------------------------


def _empty_strided(writer: DirectWriter, node: Node) -> str:
    if len(node.args) != 2:
        raise NoDirectForm
    sizes, strides, dtype, device = named_arguments(node, "size", "stride", "dtype", "device")
    return f"{writer.allocator(device)}({writer.tuple(sizes)}, {writer.tuple(strides)}, {writer.text(dtype)})"


def _pool(writer: DirectWriter, node: Node) -> str:
    size, device = named_arguments(node, "size", "device")
    return f"{writer.allocator(device)}(({writer.text(size)},), (1,), torch.uint8)"


def _workspace(writer: DirectWriter, node: Node) -> str:
    size, zeroed, device = named_arguments(node, "size", "zeroed", "device")
    allocation = f"{writer.allocator(device)}(({writer.text(size)},), (1,), torch.uint8)"
    return f"{allocation}.zero_()" if zeroed else allocation


def _enter_device(writer: DirectWriter, node: Node) -> str:
    device, stream = [*node.args, 0][:2]
    if node.kwargs or not isinstance(device, torch.device) or not isinstance(stream, int):
        raise NoDirectForm
    name = "enter_" + str(device).replace(":", "_") + (f"_stream_{stream}" if stream else "")
    return f"{writer.global_name(name, device_operators.make_enter_device(device, stream), name)}()"


def _reuse(writer: DirectWriter, node: Node) -> str:
    memory, sizes, strides, dtype = named_arguments(node, "memory", "sizes", "strides", "dtype")
    if _dtype_of(memory) != dtype:
        return _reinterpret(writer, memory, sizes, strides, dtype, 0)
    return writer.runtime(tensors, "strided_view", [writer.text(memory), writer.tuple(sizes), writer.tuple(strides)])


def _pool_slice(writer: DirectWriter, node: Node) -> str:
    pool, offset, sizes, strides, dtype = named_arguments(node, "pool", "offset", "sizes", "strides", "dtype")
    pool_bytes = _static_pool_bytes(pool)
    if pool_bytes is None or not isinstance(offset, int) or pool_bytes % dtype.itemsize or offset % dtype.itemsize:
        return _reinterpret(writer, pool, sizes, strides, dtype, offset)
    memory = writer.text(pool) if dtype == torch.uint8 else f"{writer.text(pool)}.view({dtype!r})"
    arguments = [memory, writer.tuple(sizes), writer.tuple(strides)]
    return writer.runtime(tensors, "strided_view", [*arguments, *([str(offset // dtype.itemsize)] if offset else [])])


def _reinterpret(
    writer: DirectWriter, memory: object, sizes: object, strides: object, dtype: object, offset: object
) -> str:
    arguments = [writer.text(memory), writer.tuple(sizes), writer.tuple(strides), writer.text(dtype)]
    return writer.runtime(tensors, "reinterpret", [*arguments, *([] if offset == 0 else [writer.text(offset)])])


def _dtype_of(memory: object) -> object:
    """Returns the dtype of memory that a node of an emitted graph allocates; None for any other."""
    if not isinstance(memory, Node):
        return None
    if memory.target is _ATEN.empty_strided.default:
        return memory.kwargs.get("dtype")
    if memory.target is _FXWRAP.reuse.default or memory.target is _FXWRAP.pool_slice.default:
        return memory.args[-1]
    return None


def _static_pool_bytes(pool: object) -> int | None:
    size = pool.args[0] if isinstance(pool, Node) and pool.target is _FXWRAP.pool.default else None
    return size if isinstance(size, int) else None


def _slice(writer: DirectWriter, node: Node) -> str:
    """`x[:, 2:5]`, which clamps as the operator does."""
    arguments: list[object] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    base, dim, start, end, step = arguments
    if node.kwargs or not isinstance(dim, int) or dim < 0 or step != 1 or not isinstance(base, Node):
        return writer.operator(node)
    limits = ["" if limit is None else writer.text(limit) for limit in (start, end)]
    return f"{writer.text(base)}[{':, ' * dim}{limits[0]}:{limits[1]}]"


# --- numbers and blocks ---------------------------------------------------------------------------------------------


def _method(name: str) -> DirectForm:
    """Returns the form of an operator that is a tensor's method."""

    def write(writer: DirectWriter, node: Node) -> str:
        if node.kwargs or not node.args or not isinstance(node.args[0], Node):
            raise NoDirectForm
        return f"{writer.text(node.args[0])}.{name}({writer.texts(node.args[1:])})"

    return write


def _min_or_max(name: str) -> DirectForm:
    """Returns the form of the minimum or maximum of two ints."""

    def write(writer: DirectWriter, node: Node) -> str:
        operands = named_arguments(node, "a", "b")
        if any(kind_of_node(item) is not ArgumentKind.INT for item in operands):
            raise NoDirectForm
        return f"{writer.builtin(name)}({writer.texts(operands)})"

    return write


def _conditional(writer: DirectWriter, node: Node) -> str:
    condition, then, otherwise = named_arguments(node, "b", "t", "f")
    if kind_of_node(condition) is not ArgumentKind.BOOL:
        raise NoDirectForm
    return f"{writer.text(then)} if {writer.text(condition)} else {writer.text(otherwise)}"


def _assert_scalar(writer: DirectWriter, node: Node) -> str:
    condition, message = named_arguments(node, "self", "assert_msg")
    arguments = [writer.text(condition), writer.text(message), "'RuntimeError'", "None"]
    return writer.implementation(_FXWRAP.require.default, arguments)


def _check_layout(writer: DirectWriter, node: Node) -> str:
    tensor, name, dtype, sizes, strides, device, alignment = named_arguments(
        node, "tensor", "name", "dtype", "sizes", "strides", "device", "alignment"
    )
    if alignment != 1:
        return writer.fxwrap_operator(node)
    arguments = [writer.text(tensor), writer.text(name), writer.text(dtype), writer.tuple(sizes), writer.tuple(strides)]
    return writer.runtime(checks, "check_layout", [*arguments, writer.text(device)])


def _cond(writer: DirectWriter, node: Node) -> str:
    predicate, then, otherwise, operands = named_arguments(node, "pred", "true_fn", "false_fn", "operands")
    blocks = f"{_block(then)} if {writer.text(predicate)} else {_block(otherwise)}"
    return f"({blocks})({writer.texts(operands)})"


def _while_loop(writer: DirectWriter, node: Node) -> str:
    condition, body, carried, extra = named_arguments(node, "cond_fn", "body_fn", "carried_inputs", "additional_inputs")
    arguments = [_block(condition), _block(body), writer.tuple(carried), writer.tuple(extra)]
    stacked = ["stacked=True"] if node.target is while_loop_stack_output else []
    return writer.runtime(direct, "while_loop", [*arguments, *stacked])


def _scan(writer: DirectWriter, node: Node) -> str:
    return _slice_loop(writer, node, *named_arguments(node, "combine_fn", "init", "xs", "additional_inputs"))


def _map(writer: DirectWriter, node: Node) -> str:
    body, over, extra = named_arguments(node, "f", "xs", "pos_args")
    return _slice_loop(writer, node, body, (), over, extra)


def _slice_loop(writer: DirectWriter, node: Node, body: Any, carried: Any, over: Any, extra: Any) -> str:
    """Returns a loop over slices. There must be a slice, and stacked results must be contiguous."""
    vals = [user.meta.get("val") for user in node.users]
    if not over or _slice_count(over[0]) < 1:
        raise NoDirectForm
    if not all(isinstance(val, torch.Tensor) and val.is_contiguous() for val in vals):
        raise NoDirectForm
    operands = [writer.tuple(items) for items in (carried, over, extra)]
    return writer.runtime(direct, "scan", [_block(body), *operands])


def _slice_count(item: object) -> int:
    """Returns the number of a tensor's slices, 0 if it is not static."""
    val = item.meta.get("val") if isinstance(item, Node) else None
    size = val.shape[0] if isinstance(val, torch.Tensor) and val.dim() else 0
    return size if type(size) is int else 0


def _call_function(writer: DirectWriter, node: Node) -> str:
    if node.kwargs or len(node.args) < 2:
        raise NoDirectForm
    body, _name, *operands = node.args
    return f"{_block(body)}({writer.texts(operands)})"


def _enter_range(writer: DirectWriter, node: Node) -> str:
    """A range of the profiler, None if none runs."""
    if not _is_range(node):
        raise NoDirectForm
    profiler = writer.global_name("range_profiler", ranges.profiler_module)
    return (
        f"{writer.runtime(ranges, 'enter_range', [writer.text(node.args[0])])} if {profiler}.{PROFILER_FLAG} else None"
    )


def _exit_range(writer: DirectWriter, node: Node) -> str:
    range_ = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    if not isinstance(range_, Node) or not _is_range(range_):
        raise NoDirectForm
    return f"{range_!r}.__exit__(None, None, None) if {range_!r} else None"


def _is_range(node: Node) -> bool:
    """Whether a node opens a range that nothing but nodes of this form uses."""
    return (
        node.target is _ENTER_RANGE
        and len(node.args) == 1
        and isinstance(node.args[0], str)
        and not node.kwargs
        and all(user.target is _EXIT_RANGE and user.args == (node,) and not user.kwargs for user in node.users)
    )


def _block(item: object) -> str:
    if not isinstance(item, Node) or item.op != "get_attr":
        raise NoDirectForm
    return repr(item)


DIRECT_FORMS: Mapping[Any, DirectForm] = {
    _FXWRAP.cpp_kernel.default: _cpp_kernel,
    _FXWRAP.cpp_kernel_functional.default: _cpp_kernel_functional,
    triton_launch: _triton_kernel,
    triton_launch_functional: _triton_kernel_functional,
    _ATEN.empty_strided.default: _empty_strided,
    _FXWRAP.pool.default: _pool,
    _FXWRAP.workspace.default: _workspace,
    _FXWRAP.enter_device.default: _enter_device,
    _FXWRAP.reuse.default: _reuse,
    _FXWRAP.pool_slice.default: _pool_slice,
    _FXWRAP.check_layout.default: _check_layout,
    _ENTER_RANGE: _enter_range,
    _EXIT_RANGE: _exit_range,
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _method("select"),
    _ATEN.sym_size.int: _method("size"),
    _ATEN.sym_stride.int: _method("stride"),
    _ATEN.sym_storage_offset.default: _method("storage_offset"),
    _ATEN._local_scalar_dense.default: _method("item"),
    _ATEN._assert_scalar.default: _assert_scalar,
    torch.sym_max: _min_or_max("max"),
    torch.sym_min: _min_or_max("min"),
    torch.sym_ite: _conditional,
    _HIGHER.cond: _cond,
    _HIGHER.while_loop: _while_loop,
    while_loop_stack_output: _while_loop,
    _HIGHER.scan: _scan,
    _HIGHER.map_impl: _map,
    _HIGHER.invoke_subgraph: _call_function,
}
