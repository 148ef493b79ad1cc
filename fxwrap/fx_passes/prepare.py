"""The FX passes of a compile, and the one entry that runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.events import EventLog
from fxwrap.fx_passes.associative_scans import expand_associative_scans
from fxwrap.fx_passes.attention.decoding import split_decoding_attention
from fxwrap.fx_passes.attention.flex import expand_flex_attention
from fxwrap.fx_passes.attention.recognize import recognize_attention
from fxwrap.fx_passes.convolutions.biases import unfuse_convolution_biases
from fxwrap.fx_passes.convolutions.depthwise import split_depthwise_gradients
from fxwrap.fx_passes.convolutions.frozen import freeze_convolutions
from fxwrap.fx_passes.convolutions.layouts import optimize_layouts
from fxwrap.fx_passes.convolutions.pointwise import rewrite_pointwise_convolutions
from fxwrap.fx_passes.cse import eliminate_common_subexpressions
from fxwrap.fx_passes.decompose import decompose
from fxwrap.fx_passes.dropout_masks import draw_dropout_masks, recognize_dropout
from fxwrap.fx_passes.experts.loops import group_expert_loops
from fxwrap.fx_passes.fake_propagation import fake_values
from fxwrap.fx_passes.in_place_calls import replace_in_place_calls
from fxwrap.fx_passes.layout_changes import replace_layout_changes
from fxwrap.fx_passes.matmuls.accumulated import accumulate_matmuls
from fxwrap.fx_passes.matmuls.concatenated import fill_concatenations
from fxwrap.fx_passes.matmuls.epilogues import fuse_epilogues
from fxwrap.fx_passes.matmuls.packed_weights import dequantise_packed_weights
from fxwrap.fx_passes.matmuls.padded import pad_matmuls
from fxwrap.fx_passes.matmuls.prepacked_int8 import prepack_int8_weights
from fxwrap.fx_passes.matmuls.prepacked_weights import call_biased_linears, prepack_weights
from fxwrap.fx_passes.matmuls.rewrites import pack_matmuls, rewrite_vector_products, unfuse_biases
from fxwrap.fx_passes.matmuls.sliced import slice_matmuls
from fxwrap.fx_passes.negative_views import resolve_negative_views
from fxwrap.fx_passes.prepared_graph import FxPassContext, GraphSource, PreparedGraph
from fxwrap.fx_passes.separable_pools import separate_pools
from fxwrap.fx_passes.sorts import rewrite_sorts
from fxwrap.fx_passes.source import graph_source, inline_subgraph_calls, remove_inert_calls
from fxwrap.fx_passes.split_results import split_before_activations
from fxwrap.fx_passes.sums_of_collectives import reduce_sums_once
from fxwrap.fx_passes.tensor_metadata import check_tensor_metadata, expand_out_dtype
from fxwrap.options import Options, Step, enabled_steps
from fxwrap.torch_compat import tree_flatten

FX_PASSES: tuple[Step[PreparedGraph, FxPassContext], ...] = (
    Step(
        "check_tensor_metadata", "check assertions of dtypes, devices and static sizes, and remove them",
        lambda graph, _context: check_tensor_metadata(graph),
    ),
    Step(
        "resolve_negative_views",
        "negate elements that are read through views with a negative bit, such as `imag` of a conjugate",
        lambda graph, _context: resolve_negative_views(graph),
    ),
    Step(
        "expand_flex_attention", "expand FlexAttention into matmuls and operators that fuse",
        lambda graph, context: expand_flex_attention(graph, context.options),
    ),
    Step(
        "expand_out_dtype", "expand operators with another result dtype into casts and operators",
        lambda graph, _context: expand_out_dtype(graph),
    ),
    Step(
        "expand_associative_scans", "expand associative scans of static length into operators that fuse",
        lambda graph, _context: expand_associative_scans(graph),
    ),
    Step(
        "decompose_inserted", "decompose operators that passes inserted",
        lambda graph, context: decompose_inserted(graph, context), "decompositions",
    ),
    Step(
        "replace_in_place_calls", "let in-place calls on tensors of the graph's own return their results, which fuse",
        replace_in_place_calls, "fuse",
    ),
    Step(
        "eliminate_common_subexpressions", "make equal pure calls once (CSE)",
        lambda graph, _context: eliminate_common_subexpressions(graph), "fuse",
    ),
    Step(
        "recognize_dropout", "turn products with scaled random numbers on CPUs into dropout",
        recognize_dropout, "fuse",
    ),
    Step("recognize_attention", "turn attention written as its formula into one kernel", recognize_attention, "fuse"),
    Step(
        "draw_dropout_masks", "draw the masks of dropouts on CPUs, whose products then fuse",
        draw_dropout_masks, "fuse",
    ),
    Step(
        "split_decoding_attention", "turn attention of few query rows into kernels split over keys",
        split_decoding_attention, "fuse",
    ),
    Step(
        "group_expert_loops", "turn loops over experts into grouped matmuls on sorted rows",
        group_expert_loops, "fuse",
    ),
    Step(
        "reduce_sums_once", "reduce a sum of tensors by one collective instead of adding reduced ones",
        lambda graph, _context: reduce_sums_once(graph), "fuse",
    ),
    Step(
        "split_before_activations", "compute parts of a result that kernels read by themselves",
        split_before_activations, "fuse",
    ),
    Step(
        "rewrite_sorts", "sort few integers by counting, and those of a known small range by keys of few bits",
        rewrite_sorts, "fuse",
    ),
    Step("separate_pools", "take maxima of large windows along each dimension", separate_pools, "fuse"),
    Step(
        "dequantise_packed_weights", "turn matmuls of many rows and packed weights into matmuls of dequantised ones",
        dequantise_packed_weights, "fuse",
    ),
    Step(
        "rewrite_pointwise_convolutions", "turn convolutions of sequences by single elements into batches of matmuls",
        rewrite_pointwise_convolutions, "fuse",
    ),
    Step(
        "rewrite_vector_products", "turn matmuls over one term into multiplications, and of vectors into sums",
        rewrite_vector_products, "fuse",
    ),
    Step("fuse_epilogues", "fuse activations into the matmuls before them", fuse_epilogues, "fuse"),
    Step("pack_matmuls", "pack small matmuls with one left operand into one", pack_matmuls, "fuse"),
    Step(
        "slice_matmuls", "compute the slices of packed matmuls that become kernels by themselves",
        slice_matmuls, "fuse",
    ),
    Step(
        "fill_concatenations", "let matmuls that become kernels store their parts of a concatenation",
        fill_concatenations, "fuse",
    ),
    Step(
        "prepack_weights", "keep frozen weights of matmuls in the layout of the device's library",
        prepack_weights, "freeze",
    ),
    Step(
        "prepack_int8_weights", "multiply quantised rows by frozen int8 weights in the library's layout",
        prepack_int8_weights, "freeze",
    ),
    Step(
        "call_biased_linears", "let the device's library add biases to its accumulators",
        call_biased_linears, "fuse", lambda options: options.fuse and options.matmul_kernels != "generated",
    ),
    Step(
        "accumulate_matmuls", "let matmuls add to the other summand of a sum in its memory",
        accumulate_matmuls, "fuse",
    ),
    Step("unfuse_biases", "let the kernels that read matmuls add their biases", unfuse_biases, "fuse"),
    Step(
        "optimize_layouts", "make tensors around convolutions channels-last; adapt to strides of example inputs",
        optimize_layouts, "layout",
    ),
    Step(
        "freeze_convolutions", "fold batch norms into frozen weights of convolutions, in the library's layout",
        freeze_convolutions, "freeze",
    ),
    Step(
        "unfuse_convolution_biases", "let kernels add the biases of convolutions and sum their gradients",
        unfuse_convolution_biases, "fuse",
    ),
    Step(
        "split_depthwise_gradients", "let kernels compute gradients of images of depthwise convolutions alone",
        split_depthwise_gradients, "fuse",
    ),
    Step("pad_matmuls", "pad large matmuls to aligned row lengths (pad_mm)", pad_matmuls, "fuse"),
)  # fmt: skip
"""The passes over a graph with fake values. None of them reads `symbol_hints` or `autotune`."""


def prepare_graph(
    graph: GraphModule | ExportedProgram | GraphSource,
    example_inputs: Sequence[object] | None,
    options: Options,
    name: str = "program",
    *,
    fused_operators: Collection[str] = frozenset(),
    flexible_stride_outputs: Collection[int] = (),
    static_inputs: Collection[int] = (),
    events: EventLog | None = None,
    on_change: Callable[[str, PreparedGraph], None] | None = None,
) -> PreparedGraph:
    """Imports a graph, propagates fake tensors and runs the FX passes; the result is the input of lowering.

    All attempts of a compile share one result. The graph itself is not changed.

    Args:
        graph: a graph of ATen operators, an exported program, or the result of `graph_source` for one.
        example_inputs: one value for each placeholder; None if the nodes have fake values.
        options: the options of the compile.
        name: the program's name.
        fused_operators: names of the overloads with a lowering rule.
        flexible_stride_outputs: positions of outputs whose strides may change.
        static_inputs: positions of inputs whose address never changes.
        events: the log of the compile.
        on_change: receives the name of each pass that ran, and the graph after it, which later passes may change.

    Raises GraphError for a graph that cannot be compiled.
    """
    events = events or EventLog(name)
    events.begin_step("propagate_fakes")
    source = (
        graph if isinstance(graph, GraphSource) else graph_source(graph, example_inputs, options, name, fused_operators)
    )
    if options.output_strides == "any":
        flexible_stride_outputs = range(len(tree_flatten(source.output.args)[0]))
    prepared = _with_fakes(source, example_inputs, flexible_stride_outputs)
    context = FxPassContext(options, fused_operators, example_inputs, static_inputs)
    events.end_step("propagate_fakes")
    for step in enabled_steps(FX_PASSES, options):
        events.begin_step(step.name)
        prepared = step.run(prepared, context)
        events.end_step(step.name)
        if on_change is not None:
            on_change(step.name, prepared)
    return prepared


def prepare_subgraph(
    module: GraphModule,
    example_inputs: Sequence[object],
    name: str,
    options: Options,
    fused_operators: Collection[str] = frozenset(),
) -> PreparedGraph:
    """Propagates fake tensors through the graph of a higher-order operator, and runs the necessary passes."""
    module = replace_layout_changes(inline_subgraph_calls(remove_inert_calls(module)))
    prepared = _with_fakes(GraphSource(module, name), example_inputs)
    prepared = check_tensor_metadata(resolve_negative_views(prepared))
    prepared = expand_associative_scans(expand_out_dtype(expand_flex_attention(prepared, options)))
    return decompose_inserted(prepared, FxPassContext(options, fused_operators, example_inputs))


def decompose_inserted(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph with the operators decomposed that passes inserted, or that are in a nested graph."""
    module = decompose(graph.graph_module, graph.fakes, context)
    return (
        graph if module is graph.graph_module else replace(graph, graph_module=module, fakes=fake_values(module, None))
    )


def _with_fakes(
    source: GraphSource, example_inputs: Sequence[object] | None, flexible_stride_outputs: Collection[int] = ()
) -> PreparedGraph:
    return PreparedGraph(
        source.graph_module, source.name, source.constants, source.returns_mutated_inputs,
        source.graph_id, source.least_sizes, fake_values(source.graph_module, example_inputs),
        flexible_stride_outputs=flexible_stride_outputs,
    )  # fmt: skip
