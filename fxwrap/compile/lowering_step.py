"""The first step of a compile: the lowering of the prepared graph, with the choices that autotuning makes by timing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fxwrap.compile.context import CompileContext, CompileState
from fxwrap.compile.kernels import print_and_compile_ahead
from fxwrap.errors import FusionWarning
from fxwrap.events import WarningIssued
from fxwrap.fx_passes import TIMED_REWRITES, FxPassContext, PreparedGraph, TimedRewrite, pad_matmuls
from fxwrap.lines import Launch
from fxwrap.lowering import RULES, Lowered, lower_prepared
from fxwrap.printers import KernelPrinter, print_kernel
from fxwrap.tuning import Tuner, matmul_regions, region_device, region_graph
from fxwrap.wrapper_ir import Program, verify


def lower_step(_state: CompileState, context: CompileContext) -> CompileState:
    """Returns the lowered graph, and records its warnings."""
    state = lower_graph(context) if context.lowered is None else context.lowered
    for text in state.warnings:
        context.events.record(WarningIssued(FusionWarning.__name__, text))
    return state


def lower_graph(context: CompileContext) -> CompileState:
    """Lowers the graph, a second time if autotuning changes configurations; a program is lowered already."""
    tuner, prepared = context.tuner, context.prepared
    if isinstance(prepared, Program):
        return CompileState(prepared)
    if tuner is not None and context.chooses_matmuls:
        prepared = _choose_padding(prepared, tuner, context)
    elif context.is_region and context.options.matmul_kernels == "auto":
        prepared = prepared.unpadded or prepared  # the graph that it is a part of was padded
    lower = _lowering(prepared, context)
    lowered = lower(declined_nodes=context.declined_nodes)
    if tuner is not None and context.autotunes_now:
        for rewrite in TIMED_REWRITES:
            rewritten = _choose_matches(rewrite, prepared, lowered.program, tuner, context)
            if rewritten is not prepared:
                prepared, lower = rewritten, _lowering(rewritten, context)
                lowered = lower(declined_nodes=context.declined_nodes)
        lowered = _tune(lowered, prepared, lower, tuner, context)
    program = lowered.program if tuner is None else tuner.add_tuning_header(lowered.program)
    if not context.options.verify:
        verify(program)  # the passes rely on the rules of the IR, so the first program is verified in any case
    return CompileState(program, lowered.coverage, lowered.declined_nodes, tuple(lowered.warnings))


def _kernel_printer(context: CompileContext) -> KernelPrinter:
    """Returns the tuner's printer, whose kernels are final after tuning, or one whose kernels compile at once."""
    if context.tuner is not None:
        return context.tuner.print_kernel
    return print_and_compile_ahead(print_kernel, context.options)


def _lowering(prepared: PreparedGraph, context: CompileContext) -> Callable[..., Lowered]:
    """Returns the function that lowers a graph with the printer and the devices of a compile."""
    return partial(
        lower_prepared, prepared, context.options, context.ownership,
        print_kernel=_kernel_printer(context), tuned_devices=context.tuned_devices,
    )  # fmt: skip


def _choose_padding(prepared: PreparedGraph, tuner: Tuner, context: CompileContext) -> PreparedGraph:
    """Returns the graph in which matmuls that are faster as kernels than padded and copied stay as they were."""
    unpadded = prepared.unpadded
    if unpadded is None:
        return prepared
    lower = _lowering(unpadded, context)
    lowered, library = _choose_library_calls(
        lower(declined_nodes=context.declined_nodes), unpadded, lower, tuner, context
    )
    regions = matmul_regions(lowered.program, unpadded.graph_module.graph)
    kernels = frozenset([name for region in regions for name in region.matmuls]) - library
    return pad_matmuls(unpadded, FxPassContext(context.options, RULES), kernels) if kernels else prepared


def _choose_matches(
    rewrite: TimedRewrite, prepared: PreparedGraph, program: Program, tuner: Tuner, context: CompileContext
) -> PreparedGraph:
    """Returns the graph with the matches of a rewrite that are measured to be faster.

    A match is timed with all that the kernels compute which compute a part of it in `program`.
    """
    if not context.chooses_matmuls or context.compile_region is None:
        return prepared
    passes = FxPassContext(context.options, RULES)
    launched: dict[str, set[str]] = {}
    for line in program.lines():
        if isinstance(line, Launch) and line.origin is not None:
            for name in line.origin.nodes:
                launched.setdefault(name, set()).update(line.origin.nodes)
    chosen = []
    for match in rewrite.matches(prepared, passes):
        names = frozenset(match.names).union(*[launched.get(name, ()) for name in match.names])
        part = region_graph(prepared.graph_module.graph, prepared.fakes.get, names)
        if part is None or region_device(part).type not in context.tuned_devices:
            continue
        fakes = {node: node.meta["val"] for node in part.graph.nodes if "val" in node.meta}
        rewritten = rewrite.rewrite(PreparedGraph(part, "region", fakes=fakes), passes, [match.name]).graph_module
        if rewritten is not part and tuner.is_rewrite_faster(
            part, rewritten, rewrite.name, context.compile_region, context.events
        ):
            chosen.append(match.name)
    return rewrite.rewrite(prepared, passes, chosen) if chosen else prepared


def _choose_library_calls(
    lowered: Lowered, prepared: PreparedGraph, lower: Callable[..., Lowered], tuner: Tuner, context: CompileContext
) -> tuple[Lowered, frozenset[str]]:
    """Times configurations of kernels, then kernels with matmuls beside library calls.

    Returns the program with the best configurations, and the matmuls, by node, for which the library is faster. None
    is timed if the options or `is_region` say so.
    """
    if tuner.tune(context.events):
        lowered = lower(declined_nodes=lowered.declined_nodes)
    graph = prepared.graph_module.graph
    matmuls = frozenset([name for region in matmul_regions(lowered.program, graph) for name in region.matmuls])
    if not matmuls or not context.chooses_matmuls or context.compile_region is None:
        return lowered, frozenset()
    library = lower(declined_nodes=lowered.declined_nodes, library_calls=matmuls, print_kernel=print_kernel)
    regions = matmul_regions(lowered.program, graph, library.program)
    return lowered, tuner.choose_matmuls(regions, graph, prepared.fakes.get, context.compile_region, context.events)


def _tune(
    lowered: Lowered, prepared: PreparedGraph, lower: Callable[..., Lowered], tuner: Tuner, context: CompileContext
) -> Lowered:
    """Times configurations of kernels, then kernels with matmuls beside library calls; lowers again after changes."""
    lowered, library_calls = _choose_library_calls(lowered, prepared, lower, tuner, context)
    if not library_calls:
        return lowered
    lowered = lower(declined_nodes=lowered.declined_nodes, library_calls=library_calls)
    if tuner.tune(context.events):
        lowered = lower(declined_nodes=lowered.declined_nodes, library_calls=library_calls)
    return lowered
