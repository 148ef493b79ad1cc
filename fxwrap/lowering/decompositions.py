"""The operators that fxwrap takes apart before lowering, and why.

The table is explicit: an entry each, and the operators on lists of tensors (`foreach.py`). torch's
`core_aten_decompositions()` is not used: it takes apart operators that have good kernels, and through
`_scaled_dot_product_flash_attention_for_cpu` it gave wrong gradients for attention biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.lowering.effects import submodules
from fxwrap.lowering.foreach import foreach_decompositions
from fxwrap.options import Options
from fxwrap.torch_compat import (
    OpOverload,
    apart_from_pending_symbols,
    composite_decompositions,
    get_decompositions,
    shape_env_in,
)

_aten = torch.ops.aten

_DECOMPOSED: tuple[OpOverload, ...] = (
    _aten.native_dropout_backward.default,  # one product of two, which fuses; the kernel exists on CUDA alone
    _aten.silu_backward.default,  # pointwise
    _aten.rsub.Scalar,  # a subtraction with its operands exchanged
    _aten.rsub.Tensor,
)


def default_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Returns fxwrap's table, overload -> function; a new dict, for the caller to change."""
    return dict(_default_table())


@cache
def _default_table() -> Mapping[OpOverload, Callable[..., Any]]:
    found = get_decompositions(_DECOMPOSED)
    return {overload: found[overload] for overload in _DECOMPOSED} | foreach_decompositions()


def decomposition_table(options: Options) -> Mapping[OpOverload, Callable[..., Any]]:
    """Returns the table that the options ask for, without the operators to keep."""
    table = default_decompositions() if options.decompositions is None else options.decompositions
    return {overload: function for overload, function in table.items() if str(overload) not in options.keep}


def exported_table(options: Options) -> dict[OpOverload, Callable[..., Any]]:
    """Returns the table for exported programs: the options' one, and every composite operator that export kept."""
    composite = {overload: function for overload, function in composite_decompositions().items()
                 if str(overload) not in options.keep}  # fmt: skip
    return composite | dict(decomposition_table(options))


def decompose(graph: GraphModule, example_inputs: Sequence[Any] | None, options: Options) -> GraphModule:
    """Returns the graph with the operators of the options' table taken apart; itself when it has none of them."""
    table = decomposition_table(options)
    if not _holds_any(graph, table):
        return graph
    if example_inputs is None:
        example_inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    traced = make_fx(Interpreter(graph).run, decomposition_table=dict(table), tracing_mode="symbolic")
    with apart_from_pending_symbols(shape_env_in(list(example_inputs))):
        return traced(*example_inputs)


def _holds_any(graph: GraphModule, targets: Mapping[OpOverload, Any]) -> bool:
    """Whether a graph, or one that its nodes hold, calls any of the operators."""
    return any(
        node.target in targets or any(_holds_any(nested, targets) for nested in submodules(node))
        for node in graph.graph.nodes
    )
