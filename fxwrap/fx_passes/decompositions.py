"""The operators that are decomposed before lowering.

The table is explicit: `_DECOMPOSED`, and the operators on lists of tensors (`foreach.py`). torch's
`core_aten_decompositions()` is not used: it decomposes operators that have good kernels, and its decomposition of
`_scaled_dot_product_flash_attention_for_cpu` gave wrong gradients for attention biases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

from torch import ops
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.fx_passes.effects import submodules
from fxwrap.fx_passes.foreach import Decomposition, foreach_decompositions
from fxwrap.options import Options
from fxwrap.torch_compat import (
    OpOverload,
    composite_decompositions,
    detect_fake_mode,
    find_shape_env,
    get_decompositions,
    isolate_pending_symbols,
)

_DECOMPOSED: tuple[OpOverload, ...] = (
    ops.aten.native_dropout_backward.default,  # a multiplication, which fuses; the kernel exists on CUDA only
)


def default_decompositions() -> dict[OpOverload, Decomposition]:
    """Returns fxwrap's table, overload -> function; a new dict, which the caller may change."""
    return dict(_default_table())


@cache
def _default_table() -> Mapping[OpOverload, Decomposition]:
    table = get_decompositions(_DECOMPOSED)
    return {overload: table[overload] for overload in _DECOMPOSED} | foreach_decompositions()


def decomposition_table(options: Options) -> dict[OpOverload, Decomposition]:
    """Returns the table of the options, without the operators to preserve."""
    table = default_decompositions() if options.decompositions is None else options.decompositions
    return {overload: function for overload, function in table.items() if str(overload) not in options.preserve_ops}


def export_decomposition_table(options: Options) -> dict[OpOverload, Decomposition]:
    """Returns the table for exported programs, which also decomposes composite operators."""
    composite = {overload: function for overload, function in composite_decompositions().items()
                 if str(overload) not in options.preserve_ops}  # fmt: skip
    return composite | decomposition_table(options)


def decompose(graph: GraphModule, example_inputs: Sequence[object] | None, options: Options) -> GraphModule:
    """Returns the graph with the operators of the options' table decomposed; the graph itself if it has none."""
    table = decomposition_table(options)
    if not _calls_any(graph, table):
        return graph
    if example_inputs is None:
        example_inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # Sizes of real tensors are static; those of fake tensors may be symbolic.
    real = detect_fake_mode(example_inputs) is None
    traced = make_fx(Interpreter(graph).run, decomposition_table=table, tracing_mode="fake" if real else "symbolic")
    with isolate_pending_symbols(find_shape_env(list(example_inputs))):
        return traced(*example_inputs)


def _calls_any(graph: GraphModule, targets: Collection[OpOverload]) -> bool:
    """Whether a graph or a nested graph calls any of the operators."""
    return any(
        node.target in targets or any(_calls_any(nested, targets) for nested in submodules(node))
        for node in graph.graph.nodes
    )
