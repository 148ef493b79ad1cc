"""Kernel launches in emitted FX graphs: the kernel, operands and operators of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy

from fxwrap.converters.from_fx.graph_importer import registered_definition
from fxwrap.errors import RewriteError
from fxwrap.runtime import library
from fxwrap.torch_compat import torch_schema, triton_kernel_at, triton_launch
from fxwrap.wrapper_ir import KernelDefinition


@dataclass(frozen=True)
class KernelNode:
    """A node that launches a kernel.

    `operators` are the ATen operators that the kernel computes, in order ("aten.add.Tensor", "aten.gelu"); `ins` and
    `outs` are the nodes of the tensors that it reads and writes.
    """

    node: Node
    kernel: KernelDefinition
    operators: tuple[str, ...]
    ins: tuple[Node, ...]
    outs: tuple[Node, ...]


def kernel_of(node: Node) -> KernelNode | None:
    """Returns the launch of a node of an emitted graph; None for a node that launches no kernel of fxwrap."""
    if node.target is torch.ops.fxwrap.cpp_kernel.default:
        names = [item.name for item in torch_schema(torch.ops.fxwrap.cpp_kernel.default).arguments]
        arguments: dict[str, Any] = {**dict(zip(names, node.args)), **node.kwargs}
        kernel = _definition(node, str(arguments["kernel"]))
        return None if kernel is None else _kernel_node(node, kernel, arguments["ins"], arguments["outs"])
    if node.target is triton_launch:
        return _triton(node)
    return None


def _kernel_node(node: Node, kernel: KernelDefinition, ins: Sequence[Node], outs: Sequence[Node]) -> KernelNode:
    origin = node.meta.get("fxwrap_origin")
    operators = tuple(origin.operators) if origin is not None else ()
    return KernelNode(node, kernel, operators, tuple(ins), tuple(outs))


def _triton(node: Node) -> KernelNode | None:
    try:
        kernel_hash = getattr(triton_kernel_at(node.kwargs["kernel_idx"]), "fxwrap_hash", None)  # type: ignore[arg-type]
    except (AssertionError, KeyError):
        kernel_hash = node.meta.get("fxwrap_kernel")
    kernel = None if kernel_hash is None else _definition(node, str(kernel_hash))
    if kernel is None:
        return None
    arguments: Any = node.kwargs["kwargs"]
    nodes = [item for item in arguments.values() if isinstance(item, Node)]
    tensors = [item for item in nodes if isinstance(item.meta.get("val"), torch.Tensor)]
    split = len(tensors) - library.get_registered_kernel(kernel.hash).outs
    return _kernel_node(node, kernel, tensors[:split], tensors[split:])


def _definition(node: Node, kernel_hash: str) -> KernelDefinition | None:
    """Returns the definition with a content hash: that of the graph, or else of the process."""
    metadata = getattr(node.graph.owning_module, "meta", None) or {}
    kernels: dict[str, KernelDefinition] = metadata.get("fxwrap", {}).get("kernels", {})
    return kernels.get(kernel_hash) or registered_definition(kernel_hash)


def kernel_nodes(graph_module: GraphModule, *operators: str, exactly: bool = True) -> Iterator[KernelNode]:
    """Yields the launches of an emitted graph, in order: all, or those that compute these ATen operators.

    With `exactly`, these and no others, in this order; otherwise at least these.
    """
    selected = _without_default(operators)
    for node in graph_module.graph.nodes:
        kernel = kernel_of(node)
        if kernel is None:
            continue
        if not selected or (kernel.operators == selected if exactly else set(selected) <= set(kernel.operators)):
            yield kernel


def _without_default(operators: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([name.removesuffix(".default") for name in operators])


@dataclass(frozen=True)
class KernelTarget:
    """The target of a kernel launch in patterns and in the graphs that they are matched with.

    Targets with the same operators are equal. A call on the proxies of a pattern returns the tensor that the kernel
    writes, or one `[i]` for each.
    """

    operators: tuple[str, ...]

    def __call__(self, *operands: object) -> Proxy:
        """Adds the launch to a traced pattern; operands are the kernel's inputs, then the tensors that it updates."""
        proxy = next((item for item in operands if isinstance(item, Proxy)), None)
        if proxy is None:
            raise RewriteError("kernel_node(...) is for functions that are patterns: call it on their arguments")
        launch: Proxy = proxy.tracer.create_proxy("call_function", self, operands, {})
        return launch

    @property
    def __name__(self) -> str:
        return "kernel_node"


def kernel_node(*operators: str) -> KernelTarget:
    """Returns the pattern of a kernel that computes these ATen operators, in this order.

    Call it on the tensors that the kernel reads, in the order of the launch, then on those that it updates in place.
    `kernel_nodes` lists the launches of a graph.
    """
    return KernelTarget(_without_default(operators))
