"""How the Python of an emitted graph says each node: launches of kernels, cheap allocations, calls as by hand.

All of it is read off a node's target and arguments, never off what the emitter once knew of it, so that it stays right
whatever is done to the graph. The metadata `val` says only whether an argument is a tensor or a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.fx import Node

from fxwrap.converters.fx_types import known_types, unseen_views
from fxwrap.converters.torch_calls import Kind, kind_of, torch_call
from fxwrap.device_registry import language_facts
from fxwrap.runtime import checks, direct, library, tensors
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton_table import triton_constants, triton_parameters
from fxwrap.runtime.user_triton import load_user_kernel
from fxwrap.torch_compat import (
    OpOverload,
    triton_constants_at,
    triton_kernel_at,
    triton_launch,
)

_ATEN = torch.ops.aten
_OURS = torch.ops.fxwrap
_HIGHER = torch.ops.higher_order
_ONCE = (1, 1, 1)


class NotDirect(Exception):
    """A node has no direct form: what torch.fx writes for it stays."""


class DirectWriter:
    """Writes the direct forms of a graph's nodes.

    `globals` are the objects that the text refers to by names of `new_name`'s; `kernels` is one of them. `parameters`
    are the names of the function's parameters, which hide builtins.
    """

    def __init__(self, nodes: Sequence[Node], new_name: Callable[[str], str], parameters: frozenset[str]) -> None:
        self.new_name = new_name
        self.parameters = parameters
        self.kernels = direct.Kernels()
        self.globals: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._kernel_names: dict[tuple[str, bool], str] = {}
        self._unseen = unseen_views(nodes)
        self._types = known_types(nodes)

    def call(self, node: Node) -> str | None:
        """Returns a call_function node as an expression; None where it has no direct form."""
        try:
            return self._call(node)
        except NotDirect:
            return None

    def _call(self, node: Node) -> str:
        target: Any = node.target
        window = self.window(node) if node in self._unseen else None
        if window is not None:
            return window
        special = _SPECIAL.get(target)
        if special is not None:
            return special(self, node)
        if not isinstance(target, OpOverload):
            raise NotDirect
        if target.namespace == "fxwrap":
            return self.ours(node)
        return self.operator(node)

    # --- names ------------------------------------------------------------------------------------------------------

    def named(self, wish: str, found: Any, key: Any = None) -> str:
        """Returns the name of an object that the text refers to; one object, or one key, has one name."""
        key = found if key is None else key
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self.new_name(wish)
            self.globals[name] = found
        return name

    def kernel(self, name: str, kernel_hash: str, text: KernelText, once: bool) -> str:
        """Returns the text of a kernel's launcher."""
        known = self._kernel_names.get((kernel_hash, once))
        if known is None:
            wish = "".join([letter if letter.isalnum() else "_" for letter in name or "kernel"])
            known, count = wish, 0
            while known in self._kernel_names.values() or known.startswith("__") or not known.isidentifier():
                known, count = f"{wish if wish[:1].isalpha() else 'kernel'}_{count}", count + 1
            self._kernel_names[kernel_hash, once] = known
            self.kernels.add(known, text, once)
        return f"{self.named('kernels', self.kernels.module, 'kernels')}.{known}"

    def builtin(self, name: str) -> str:
        """Returns the name of a builtin function, where no parameter hides it."""
        if name in self.parameters:
            raise NotDirect
        return name

    # --- arguments --------------------------------------------------------------------------------------------------

    def text(self, item: Any) -> str:
        """Returns an argument's text."""
        match item:
            case Node():
                return repr(item)
            case torch.device():
                return self.named("device_" + str(item).replace(":", "_"), item)
            case tuple() if not hasattr(item, "_fields"):
                return f"({', '.join([self.text(part) for part in item])}{',' if len(item) == 1 else ''})"
            case list():
                return f"[{', '.join([self.text(part) for part in item])}]"
            case bool() | int() | float() | str() | None:
                return repr(item)  # torch.fx defines inf and nan
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(item)
            case _:
                raise NotDirect

    def tuple(self, items: Any) -> str:
        """Returns a list argument as a tuple's text."""
        if not isinstance(items, list | tuple):
            raise NotDirect
        return self.text(tuple(items))

    def runtime(self, module: ModuleType, function: str, arguments: Sequence[str]) -> str:
        """Returns a call of a function of a module of `fxwrap.runtime`."""
        return f"{self.named(module.__name__.rpartition('.')[2], module)}.{function}({', '.join(arguments)})"

    # --- operators --------------------------------------------------------------------------------------------------

    def operator(self, node: Node) -> str:
        """Returns a call of an operator as one writes it by hand, where that is known to be the same; else by name."""
        target: Any = node.target
        name, overload = target._schema.name.partition("::")[2], target._overloadname
        texts = [self.text(item) for item in node.args]
        keywords = {key: self.text(item) for key, item in node.kwargs.items()}
        kinds = [_kind(item) for item in node.args]
        if target.namespace == "aten" and Kind.TENSOR in kinds:  # factories obey torch.set_default_device
            named = {key: _kind(item) for key, item in node.kwargs.items()}
            spelling = torch_call(name, overload or "default", kinds, named)
            if spelling is not None and (not spelling.method or isinstance(node.args[0], Node)):
                return spelling.write(_spread(spelling.function, texts, node.args), keywords)
        texts += [f"{key}={text}" for key, text in keywords.items()]
        short = name if overload in ("", "default") else f"{name}_{overload}"
        return f"{self.named(f'{target.namespace}_{short}', target)}({', '.join(texts)})"

    def ours(self, node: Node) -> str:
        """Returns a call of what an operator of the library `fxwrap::` does."""
        target: Any = node.target
        arguments = [self.text(item) for item in node.args]
        arguments += [f"{key}={self.text(item)}" for key, item in node.kwargs.items()]
        return self.implementation(target, arguments)

    def implementation(self, target: Any, arguments: Sequence[str]) -> str:
        """Returns a call of what an operator of the library `fxwrap::` does."""
        name = f"fxwrap_{target._schema.name.partition('::')[2]}"
        return f"{self.named(name, library.implementation(target))}({', '.join(arguments)})"

    def allocator(self, device: Any) -> str:
        """Returns the name of the function that allocates on a device."""
        if not isinstance(device, torch.device):
            raise NotDirect
        name = "allocate_" + str(device).replace(":", "_")
        return self.named(name, tensors.allocator(str(device)), name)

    def window(self, node: Node) -> str | None:
        """Returns a view as a tensor on the same memory, if its place there is known."""
        base: Any = node.args[0] if node.args else None
        old, new = self._types.get(base), self._types.get(node)
        if old is None or new is None or old.dtype.is_complex:  # windows know no conjugate bit
            return None
        arguments = [self.text(base), self.tuple(new.sizes), self.tuple(new.strides)]
        distance = new.storage_offset - old.storage_offset
        arguments += [self.text(distance)] if distance else []
        return self.runtime(tensors, "window", arguments)

    # --- kernels ----------------------------------------------------------------------------------------------------

    def launch(self, name: str, kernel_hash: str, found: library.RegisteredKernel, grid: Any, given: list[str]) -> str:
        """Returns the launch of a kernel."""
        once = language_facts(found.language).called_once and tuple(grid) == _ONCE
        text = KernelText(found.language, found.source, found.signature, found.options)
        launcher = self.kernel(found.name or name, kernel_hash, text, once)
        return f"{launcher}({', '.join(given if once else [self.tuple(grid), *given])})"


def _kind(item: Any) -> Kind:
    """Returns the kind of a node's argument."""
    if isinstance(item, Node):
        return _kind_of_val(item.meta.get("val"))
    if not isinstance(item, list | tuple) or not any(isinstance(part, Node) for part in item):
        return kind_of(item)
    kinds = {_kind(part) for part in item}
    if kinds == {Kind.TENSOR}:
        return Kind.TENSORS
    if kinds == {Kind.TENSOR, Kind.NONE}:
        return Kind.OPTIONAL_TENSORS
    return Kind.INTS if kinds == {Kind.INT} else Kind.OTHER


def _kind_of_val(val: Any) -> Kind:
    if isinstance(val, torch.Tensor):
        return Kind.TENSOR
    if isinstance(val, bool | torch.SymBool):
        return Kind.BOOL
    if isinstance(val, int | torch.SymInt):
        return Kind.INT
    return Kind.FLOAT if isinstance(val, float | torch.SymFloat) else Kind.OTHER


_SPREAD = ("view", "expand")


def _spread(function: str, texts: list[str], arguments: Sequence[Any]) -> list[str]:
    """Returns the arguments of a call; sizes one by one where that is cheaper."""
    if function in _SPREAD and len(arguments) == 2 and isinstance(arguments[1], list | tuple) and arguments[1]:
        return [texts[0], texts[1][1:-1].rstrip(",")]
    return texts


def _only(node: Node, *keywords: str) -> None:
    """Leaves a node alone that has other keyword arguments."""
    if set(node.kwargs) - set(keywords):
        raise NotDirect


def _arguments(node: Node, *names: str) -> list[Any]:
    """Returns a node's arguments by these names, in order; leaves a node alone that lacks one or has others."""
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if len(node.args) > len(names) or set(given) != set(names):
        raise NotDirect
    return [given[name] for name in names]


# --- launches -------------------------------------------------------------------------------------------------------


def _cpp_kernel(writer: DirectWriter, node: Node) -> str:
    kernel_hash, ins, outs, sizes, numbers, grid = _arguments(
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
    index, constants, grids, descriptors, given = _arguments(
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
    _only(node, "dtype", "device")
    if len(node.args) != 2 or len(node.kwargs) != 2:
        raise NotDirect
    sizes, strides = node.args
    layout = f"{writer.tuple(sizes)}, {writer.tuple(strides)}, {writer.text(node.kwargs['dtype'])}"
    return f"{writer.allocator(node.kwargs['device'])}({layout})"


def _pool(writer: DirectWriter, node: Node) -> str:
    size, device = _arguments(node, "size", "device")
    return f"{writer.allocator(device)}(({writer.text(size)},), (1,), torch.uint8)"


def _workspace(writer: DirectWriter, node: Node) -> str:
    size, zeroed, device = _arguments(node, "size", "zeroed", "device")
    allocated = f"{writer.allocator(device)}(({writer.text(size)},), (1,), torch.uint8)"
    return f"{allocated}.zero_()" if zeroed else allocated


def _reuse(writer: DirectWriter, node: Node) -> str:
    memory, sizes, strides, dtype = _arguments(node, "memory", "sizes", "strides", "dtype")
    if _dtype_of(memory) == dtype:
        return writer.runtime(tensors, "window", [writer.text(memory), writer.tuple(sizes), writer.tuple(strides)])
    return _reinterpret(writer, memory, sizes, strides, dtype, 0)


def _pool_slice(writer: DirectWriter, node: Node) -> str:
    pool, offset, sizes, strides, dtype = _arguments(node, "pool", "offset", "sizes", "strides", "dtype")
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


def _method(name: str) -> Callable[[DirectWriter, Node], str]:
    """Returns the form of an operator that is a tensor's method."""

    def write(writer: DirectWriter, node: Node) -> str:
        if node.kwargs or not node.args or not isinstance(node.args[0], Node):
            raise NotDirect
        return f"{writer.text(node.args[0])}.{name}({', '.join([writer.text(item) for item in node.args[1:]])})"

    return write


def _extreme(name: str) -> Callable[[DirectWriter, Node], str]:
    """Returns the form of the larger or smaller of two whole numbers."""

    def write(writer: DirectWriter, node: Node) -> str:
        left, right = _arguments(node, "a", "b")
        if _kind(left) is not Kind.INT or _kind(right) is not Kind.INT:
            raise NotDirect
        return f"{writer.builtin(name)}({writer.text(left)}, {writer.text(right)})"

    return write


def _choice(writer: DirectWriter, node: Node) -> str:
    condition, then, otherwise = _arguments(node, "b", "t", "f")
    if _kind(condition) is not Kind.BOOL:
        raise NotDirect
    return f"{writer.text(then)} if {writer.text(condition)} else {writer.text(otherwise)}"


def _assert_scalar(writer: DirectWriter, node: Node) -> str:
    condition, message = _arguments(node, "self", "assert_msg")
    arguments = [writer.text(condition), writer.text(message), "'RuntimeError'", "None"]
    return writer.implementation(_OURS.require.default, arguments)


def _check_layout(writer: DirectWriter, node: Node) -> str:
    tensor, name, dtype, sizes, strides, device, alignment = _arguments(
        node, "tensor", "name", "dtype", "sizes", "strides", "device", "alignment"
    )
    if alignment != 1:
        return writer.ours(node)
    arguments = [writer.text(tensor), writer.text(name), writer.text(dtype), writer.tuple(sizes), writer.tuple(strides)]
    return writer.runtime(checks, "check_layout", [*arguments, writer.text(device)])


def _cond(writer: DirectWriter, node: Node) -> str:
    predicate, then, otherwise, operands = _arguments(node, "pred", "true_fn", "false_fn", "operands")
    blocks = f"{_block(then)} if {writer.text(predicate)} else {_block(otherwise)}"
    return f"({blocks})({', '.join([writer.text(item) for item in operands])})"


def _while_loop(writer: DirectWriter, node: Node) -> str:
    condition, body, carried, extra = _arguments(
        node, "cond_fn", "body_fn", "carried_inputs", "additional_inputs"
    )
    arguments = [_block(condition), _block(body), writer.tuple(carried), writer.tuple(extra)]
    return writer.runtime(direct, "while_loop", arguments)


def _call_function(writer: DirectWriter, node: Node) -> str:
    if node.kwargs or len(node.args) < 2:
        raise NotDirect
    body, _name, *operands = node.args
    return f"{_block(body)}({', '.join([writer.text(item) for item in operands])})"


def _block(item: Any) -> str:
    if not isinstance(item, Node) or item.op != "get_attr":
        raise NotDirect
    return repr(item)


_SPECIAL: Mapping[Any, Callable[[DirectWriter, Node], str]] = {
    _OURS.cpp_kernel.default: _cpp_kernel,
    triton_launch: _triton_kernel,
    _ATEN.empty_strided.default: _empty_strided,
    _OURS.pool.default: _pool,
    _OURS.workspace.default: _workspace,
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
    _HIGHER.invoke_subgraph: _call_function,
}
