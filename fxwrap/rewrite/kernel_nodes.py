"""Launches of kernels in emitted FX graphs: which kernel a node launches, on what, and for which operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy

from fxwrap.errors import FxwrapError, RewriteError
from fxwrap.runtime import library
from fxwrap.torch_compat import triton_kernel_at, triton_launch
from fxwrap.wrapper_ir import KernelDefinition


@dataclass(frozen=True)
class KernelNode:
    """A node that launches a kernel.

    `operators` are the ATen operators that the kernel computes, in order ("aten.add.Tensor", "aten.gelu"); `ins` and
    `outs` the nodes of the tensors that it reads and writes.
    """

    node: Node
    kernel: KernelDefinition
    operators: tuple[str, ...]
    ins: tuple[Node, ...]
    outs: tuple[Node, ...]


def kernel_of(node: Node) -> KernelNode | None:
    """Returns what a node of an emitted graph launches; None for a node that launches no kernel of fxwrap's."""
    if node.target is torch.ops.fxwrap.cpp_kernel.default:
        names = [item.name for item in torch.ops.fxwrap.cpp_kernel.default._schema.arguments]
        given = {**dict(zip(names, node.args)), **node.kwargs}
        kernel = _definition(node, str(given["kernel"]))
        return None if kernel is None else _kernel_node(node, kernel, given["ins"], given["outs"])
    if node.target is triton_launch:
        return _triton(node)
    return None


def _kernel_node(node: Node, kernel: KernelDefinition, ins: Any, outs: Any) -> KernelNode:
    origin = node.meta.get("fxwrap_origin")
    operators = tuple(origin.operators) if origin is not None else ()
    return KernelNode(node, kernel, operators, tuple(ins), tuple(outs))


def _triton(node: Node) -> KernelNode | None:
    try:
        found = getattr(triton_kernel_at(node.kwargs["kernel_idx"]), "fxwrap_hash", None)  # type: ignore[arg-type]
    except (AssertionError, KeyError):
        found = node.meta.get("fxwrap_kernel")
    kernel = None if found is None else _definition(node, str(found))
    if kernel is None:
        return None
    given: Any = node.kwargs["kwargs"]
    tensors = [item for item in given.values() if isinstance(item, Node) and _is_tensor(item)]
    split = len(tensors) - library.registered_kernel(kernel.hash).outs
    return _kernel_node(node, kernel, tensors[:split], tensors[split:])


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _definition(node: Node, kernel_hash: str) -> KernelDefinition | None:
    """Returns the definition that a graph, or else the process, has for a content hash."""
    module = node.graph.owning_module
    known = (getattr(module, "meta", None) or {}).get("fxwrap", {}).get("kernels", {})
    if kernel_hash in known:
        found: KernelDefinition = known[kernel_hash]
        return found
    try:
        other = library.registered_kernel(kernel_hash)
    except FxwrapError:
        return None
    return KernelDefinition(other.name, other.language, other.source, other.signature, other.options)


def kernel_nodes(graph_module: GraphModule, *operators: str, exactly: bool = True) -> Iterator[KernelNode]:
    """Yields the launches of an emitted graph, in order: all, or those that compute these ATen operators.

    With `exactly`, these and no others, in this order; else these among others.
    """
    wanted = _plain(operators)
    for node in graph_module.graph.nodes:
        found = kernel_of(node)
        if found is None:
            continue
        if not wanted or (found.operators == wanted if exactly else set(wanted) <= set(found.operators)):
            yield found


def _plain(operators: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([name.removesuffix(".default") for name in operators])


@dataclass(frozen=True)
class KernelTarget:
    """Stands in patterns, and in the graphs that they are matched with, for the launch of a kernel.

    Two are equal that compute the same operators. Called on the proxies of a pattern, it gives what the kernel writes:
    the tensor, or one `[i]` for each.
    """

    operators: tuple[str, ...]

    def __call__(self, *operands: Any) -> Any:
        """Adds the launch to a pattern that is traced, on what the kernel reads: its inputs, then what it updates."""
        proxy = next((item for item in operands if isinstance(item, Proxy)), None)
        if proxy is None:
            raise RewriteError("kernel_node(...) is for functions that are patterns: call it on their arguments")
        return proxy.tracer.create_proxy("call_function", self, operands, {})

    @property
    def __name__(self) -> str:
        return "kernel_node"


def kernel_node(*operators: str) -> KernelTarget:
    """Returns what stands, in a pattern function, for a kernel that computes these ATen operators, in this order.

    It is called on the tensors that the kernel reads, in the order of the launch, then on those that it updates in
    place; see `kernel_nodes` for what is there.
    """
    return KernelTarget(_plain(operators))
