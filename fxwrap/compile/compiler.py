"""Compiling a graph: the FX passes once, then the steps of `steps.py`, again where kernels fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import NoneType

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from fxwrap.compile import steps
from fxwrap.compile.compiled import Compiled, CompileResult, Stage
from fxwrap.compile.confirmation import is_timed_beside, is_tuning_faster
from fxwrap.compile.context import CompileContext, CompileState
from fxwrap.compile.device_limits import with_device_limits
from fxwrap.compile.group_speeds import with_group_speeds
from fxwrap.compile.inspection import record_compile, write_compile
from fxwrap.compile.kernels import (
    KernelFailure,
    compile_program_kernels,
    warm_up_kernel_compilers,
    warn_kernel_failures,
)
from fxwrap.compile.lowering_step import lower_graph
from fxwrap.compile.progress import show_progress
from fxwrap.compile_cache import CacheSlot, CompileRequest, check_ranks_compile_alike, find_slot, shared_compile
from fxwrap.converters.emission import emit, emit_interpreter
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.exported import ExportedSignature, is_emitted
from fxwrap.converters.from_fx import from_fx
from fxwrap.converters.fx import placeholder_fakes
from fxwrap.converters.interpreter import CheckedInterpreter
from fxwrap.debugging import (
    GraphCase,
    GraphHistory,
    attach_failure,
    bisecting_program,
    compile_failure,
    with_repro_environment,
)
from fxwrap.errors import ArgumentError, GraphError, VerifyError
from fxwrap.events import EventLog, GraphCompiled, GraphLowered, OperatorDeclined, Recompiled, passes_of, step_seconds
from fxwrap.fx_passes import PreparedGraph, check_example_inputs, graph_source, prepare_graph
from fxwrap.garbage_collection import gc_paused
from fxwrap.lines import Launch
from fxwrap.lowering import RULES
from fxwrap.options import FIRST_CALL, FX_BEFORE_LOWERING, MatmulKernels, Options
from fxwrap.report import dump_folder, graph_text
from fxwrap.signature.exported import check_examples
from fxwrap.torch_compat import FakeTensor, one_compile_at_a_time, without_fake_mode
from fxwrap.tuning import gpu_tuner
from fxwrap.user_passes import run_source_passes
from fxwrap.wrapper_ir import Ownership, Program, program_key, symbol_infos, verify


@one_compile_at_a_time
def compile_graph(
    graph: GraphModule | ExportedProgram | torch.nn.Module,
    example_inputs: Sequence[object] | None = None,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    options: Options | None = None,
    ownership: Mapping[int, Ownership] | None = None,
    name: str = "program",
    flexible_stride_outputs: Collection[int] = (),
    static_inputs: Collection[int] = (),
    compiled_by_key: MutableMapping[str, Compiled] | None = None,
) -> Compiled:
    """Compiles a graph of ATen operators and its kernels; usable inside and outside of Dynamo.

    The operators of a kernel that fails to compile are called instead, with a FusionWarning that names them, unless the
    option `fallback` is "error".

    Args:
        graph: a GraphModule of ATen overloads (hand-written, from make_fx or AOTAutograd), an exported program, or a
            module, which is exported with the example inputs. It is not changed.
        example_inputs: of a GraphModule, one value for each placeholder, needed only if the nodes have no fake values;
            of a module, its positional arguments; of an exported program, if any, those of the module.
        example_kwargs: the keyword arguments of a module or exported program.
        options: see `Options`.
        ownership: the ownership of inputs, by position; see `Ownership`.
        name: the program's name, also of its files in the cache.
        flexible_stride_outputs: positions of outputs whose strides may change; the program's types have their strides.
        static_inputs: positions of inputs whose address never changes (parameters and buffers): captured CUDA graphs
            read and write them in place.
        compiled_by_key: earlier results by `Compiled.key`. An equal program without constants is returned from it, with
            its own names and provenance; other results are added. Not used for exported programs and modules, whose
            results have signatures of their own.

    Raises GraphError for a graph that cannot be compiled and for examples that are not of its inputs, ArgumentError for
    options and names of other types, PassError for a user's pass that fails or breaks the program, and the error of a
    kernel that no operator can replace.
    """
    ArgumentError.check("fxwrap.compile_graph", "options", options, (Options, NoneType), _OPTIONS_REMEDY)
    ArgumentError.check("fxwrap.compile_graph", "name", name, (str,), "Pass a name for the program")
    if not isinstance(graph, GraphModule | ExportedProgram):
        graph, example_inputs, example_kwargs = _export(graph, example_inputs, example_kwargs), None, None
    if isinstance(graph, ExportedProgram):
        check_examples(graph, example_inputs, example_kwargs)
        example_inputs, compiled_by_key = None, None  # it has examples, and equal programs may have other signatures
    else:
        _check_inputs(graph, example_inputs, example_kwargs)
        _check_positions(graph, ownership or {}, flexible_stride_outputs, static_inputs)
    # AOTAutograd compiles with its fake mode active, in which passes cannot compute with tensors.
    with without_fake_mode(), collection_paused(options or Options()):
        options = _resolved(options or Options(), graph, example_inputs)
        return _observed_compile(
            CompileRequest(
                graph, example_inputs, options, ownership or {}, name, flexible_stride_outputs, static_inputs,
                EventLog(name), compiled_by_key,
            )
        )  # fmt: skip


def _resolved(
    options: Options, graph: GraphModule | ExportedProgram, example_inputs: Sequence[object] | None
) -> Options:
    """Returns the options with what they leave to the environment, the devices and the groups of ranks."""
    options = with_device_limits(with_repro_environment(options), graph, example_inputs)
    return with_group_speeds(options, graph)


def collection_paused(options: Options) -> AbstractContextManager[None]:
    """Pauses garbage collection during a compile, unless it times kernels: tensors in cycles would keep memory."""
    return nullcontext() if options.autotune is True else gc_paused()


def _observed_compile(request: CompileRequest) -> Compiled:
    """Returns the result of a request; shows the progress, records the compile, and attaches the graph to an error."""
    text = graph_text(request.graph)
    try:
        with show_progress(request.events):
            compiled = _load_or_compile(request, find_slot(request))
    except Exception as error:
        failure = compile_failure(request.graph, request.example_inputs, request.options, error)
        attach_failure(error, failure)
        raise
    record_compile(compiled, request.name, text, request.events)
    write_compile(compiled, request.options.dump)
    if request.compiled_by_key is not None:
        request.compiled_by_key.setdefault(compiled.key, compiled)
    return compiled


def _load_or_compile(request: CompileRequest, slot: CacheSlot | None) -> Compiled:
    """Returns the cached result, or that of another process that compiles the graph now, or compiles it."""
    if slot is None:
        return _compile_request(request)
    check_ranks_compile_alike(slot)
    reads_cache = dump_folder(request.options.dump) is None  # a dump shows every step of the compile
    compiled = _load_from_cache(slot) if reads_cache else None
    if compiled is not None:
        return compiled
    with shared_compile(slot) as has_entry:
        if has_entry and reads_cache:
            compiled = _load_from_cache(slot)
        return compiled or _compile_request(request, slot)


def _compile_request(request: CompileRequest, slot: CacheSlot | None = None, *, is_region: bool = False) -> Compiled:
    """Compiles a graph, and stores the result in its slot if it can be cached.

    `is_region` is whether it is a part of a graph that is compiled for timing.
    """
    graph, options, compiled_by_key = request.graph, request.options, request.compiled_by_key
    graph_module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    request.events.record(GraphLowered(sum([node.op == "call_function" for node in graph_module.graph.nodes])))
    warm_up_kernel_compilers(graph_module, options)
    history = None if options.debug is None else GraphHistory()
    prepared = _prepare(request, history)
    context = CompileContext(
        prepared, options, request.ownership, frozenset(request.static_inputs), _fake_inputs(graph), compiled_by_key,
        gpu_tuner() if options.autotune else None, graphs=() if history is None else history.graphs,
        signature=_signature(graph), events=request.events, compile_region=partial(_compile_region, options),
        is_region=is_region,
    )  # fmt: skip
    compiled, is_reproducible = _compile(_confirmed(context))
    compiled.is_reproducible = is_reproducible
    is_new = compiled_by_key is None or compiled_by_key.get(compiled.key) is not compiled
    if slot is not None and is_new and is_reproducible:
        slot.store(compiled.program, compiled.emitted, compiled.coverage, compiled.plan)
    return compiled


def _confirmed(context: CompileContext) -> CompileContext:
    """Returns the context with its tuned program if that, as a whole, is as fast as the one without tuning.

    Else returns it without the tuner. Both programs are compiled to be timed only where no record has the choice.
    """
    tuner, source = context.tuner, context.prepared
    if tuner is None or isinstance(source, Program) or not context.chooses_matmuls or not context.tuned_devices:
        return context
    tuned = _with_lowered(context)
    if not tuner.has_selected:
        return tuned

    @cache
    def untuned() -> CompileContext:
        return _with_lowered(replace(context, tuner=None))

    def programs() -> list[Callable[..., object]] | None:
        if not is_timed_beside(_lowered_program(tuned), _lowered_program(untuned())):
            return None
        log, options = EventLog("timing"), _timing_options(context.options)  # the log of the compile has its steps once
        timed = [replace(item, options=options, compiled_by_key=None, events=log) for item in (tuned, untuned())]
        return [_compile(item)[0].flat for item in timed]

    program = _lowered_program(tuned)
    is_faster = is_tuning_faster(tuner, program, source, _timing_options(context.options), programs, context.events)
    return tuned if is_faster else untuned()


def _with_lowered(context: CompileContext) -> CompileContext:
    """Returns the context with its lowered graph, so that the graph is lowered, and its kernels are tuned, once."""
    context.events.begin_step("lower")
    lowered = lower_graph(context)
    context.events.end_step("lower", True)
    return replace(context, lowered=lowered)


def _lowered_program(context: CompileContext) -> Program:
    assert context.lowered is not None, "a context from _with_lowered"
    return context.lowered.program


def _compile_region(options: Options, part: GraphModule, matmul_kernels: MatmulKernels) -> Callable[..., object]:
    """Compiles a part of a graph for timing: as emitted Python, without the user's passes."""
    options = _timing_options(options).replace(matmul_kernels=matmul_kernels, fallback="error")
    request = CompileRequest(part, None, options, {}, "region", (), (), EventLog("region"))
    return _compile_request(request, is_region=True).flat


def _timing_options(options: Options) -> Options:
    """Returns the options of programs that are compiled to be timed."""
    return options.replace(
        emitter="python", passes=(), on_graph=None, dump=None, debug=None, check_values=None, check_memory=False,
        check_inputs=False, cuda_graphs=False, compile_cache=False, profile_ranges=False,
    )  # fmt: skip


_OPTIONS_REMEDY = "Pass fxwrap.Options(...), or Options.from_mapping for a dict"


def _check_inputs(
    graph: GraphModule, example_inputs: Sequence[object] | None, example_kwargs: Mapping[str, object] | None
) -> None:
    """Raises GraphError for example inputs that are not of a graph's inputs."""
    if example_kwargs:
        remedy = "Pass one example input for each placeholder"
        raise GraphError("", "a GraphModule has no keyword arguments", remedy)
    check_example_inputs(graph, example_inputs)


def _check_positions(
    graph: GraphModule, ownership: Mapping[int, Ownership], outputs: Collection[int], static_inputs: Collection[int]
) -> None:
    """Raises GraphError for positions of inputs or outputs that a graph does not have."""
    count = len(graph.graph.find_nodes(op="placeholder"))
    for name, positions in (("ownership", ownership), ("static_inputs", static_inputs)):
        other = next((item for item in positions if item not in range(count)), None)
        if other is not None:
            remedy = f"Pass positions of the graph's {count} inputs"
            raise GraphError("", f"{name} has {other!r}, which is no position of an input", remedy)
    results = graph.graph.output_node().args[0]
    count = len(results) if isinstance(results, tuple | list) else 1
    other = next((item for item in outputs if item not in range(count)), None)
    if other is not None:
        reason = f"flexible_stride_outputs has {other!r}, which is no position of an output"
        raise GraphError("", reason, f"Pass positions of the graph's {count} outputs")


def _export(
    module: object, example_inputs: Sequence[object] | None, example_kwargs: Mapping[str, object] | None
) -> ExportedProgram:
    """Exports a module. Raises GraphError for any other object, and without example inputs."""
    reason = f"it is an object of type {type(module).__name__}, not a GraphModule or an exported program"
    if not isinstance(module, torch.nn.Module):
        raise GraphError("", reason, "Trace a function with make_fx, or call torch.compile(function, backend='fxwrap')")
    if example_inputs is None and example_kwargs is None:
        raise GraphError("", reason, "Pass example_inputs, with which the module is exported")
    return torch.export.export(module, tuple(example_inputs or ()), dict(example_kwargs or {}))


def _prepare(request: CompileRequest, history: GraphHistory | None) -> PreparedGraph | Program:
    """Returns the graph after the user's passes at FX_BEFORE_LOWERING and the FX passes, which `history` records.

    An exported program that fxwrap emitted is imported: its graph launches kernels that cannot be lowered again.
    """
    graph, example_inputs, options, name = request.graph, request.example_inputs, request.options, request.name
    if isinstance(graph, ExportedProgram) and is_emitted(graph):
        names = [spec.arg.name for spec in graph.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        return from_fx(
            graph, ownership={names[position]: item for position, item in request.ownership.items()}, name=name
        )
    request.events.begin_step("import_graph")
    source = graph_source(graph, example_inputs, options, name, RULES)
    if (options.autotune == FIRST_CALL or history is not None) and source.graph_module is graph:
        # The caller may change its graph before the first call compiles it again; a wrong pass may change it now.
        source = replace(source, graph_module=GraphModule(graph, copy.deepcopy(graph.graph)))
    passes = options.passes_at(FX_BEFORE_LOWERING)
    source = run_source_passes(passes, source, example_inputs, request.events, check=options.verify)
    request.events.end_step("import_graph")
    if history is not None:
        history.add("import_graph", source)
    return prepare_graph(
        source, example_inputs, options, fused_operators=RULES,
        flexible_stride_outputs=request.flexible_stride_outputs, static_inputs=request.static_inputs,
        events=request.events, on_change=None if history is None else history.add,
    )  # fmt: skip


def _fake_inputs(graph: GraphModule | ExportedProgram) -> dict[str, FakeTensor]:
    return placeholder_fakes(graph.graph_module if isinstance(graph, ExportedProgram) else graph)


def _signature(graph: GraphModule | ExportedProgram) -> ExportedSignature | None:
    return ExportedSignature.of(graph) if isinstance(graph, ExportedProgram) else None


def _load_from_cache(slot: CacheSlot) -> Compiled | None:
    """Returns the cached result of a compile, or the earlier result for an equal program; None if there is none."""
    entry, request, options = slot.load(), slot.request, slot.request.options
    if entry is None:
        return None
    same = _same_program(entry.program, options, request.compiled_by_key)
    if same is not None:
        return same
    fake_inputs = _fake_inputs(request.graph)
    if options.check_memory:
        emitted = emit_interpreter(entry.program, CheckedInterpreter)
    else:
        emitted = emit(entry.program, options.emitter, fake_inputs, options.fx_form)
    if compile_program_kernels(entry.program, emitted, steps.effective_emitter(options), request.events):
        return None
    stages = (Stage("cache", entry.program),)
    result = CompileResult(stages, options, emitted, entry.coverage, entry.plan, fake_inputs)
    return Compiled(result, signature=_signature(request.graph), cached=True)


def _same_program(
    program: Program, options: Options, compiled_by_key: Mapping[str, Compiled] | None
) -> Compiled | None:
    if compiled_by_key is None or program.constants:
        return None
    return compiled_by_key.get(program_key(program, options.text()))


@dataclass(frozen=True)
class _Attempt:
    """The result of running all steps once.

    `is_cacheable` is whether the result is reproducible from the cache: no warning was emitted, and the first call does
    not compile again.
    """

    compiled: Compiled
    declined_nodes: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[KernelFailure, ...] = ()
    is_cacheable: bool = True


def _compile(context: CompileContext) -> tuple[Compiled, bool]:
    """Runs the steps until all kernels compile; operators whose kernels fail become extern calls.

    Returns the result, and whether it may be cached. Raises the errors that `compile_graph` documents.
    """
    attempt = _attempt(context)
    failures = list(attempt.failures)
    while attempt.failures:
        unresolved = [failure for failure in attempt.failures if failure.nodes <= attempt.declined_nodes.keys()]
        if unresolved or context.options.fallback == "error":
            raise (unresolved or attempt.failures)[0].error
        declined = {node: str(failure.error) for failure in attempt.failures for node in sorted(failure.nodes)}
        context = replace(context, declined_nodes={**attempt.declined_nodes, **declined}, lowered=None)
        attempt = _attempt(context)
        failures += attempt.failures
    if failures:
        warn_kernel_failures(failures, context.events)
    return attempt.compiled, attempt.is_cacheable and not failures


def _attempt(context: CompileContext) -> _Attempt:
    options, events, stages = context.options, context.events, list[Stage]()
    state = _run_steps(steps.PROGRAM_STEPS, steps.NOT_LOWERED, context, stages)
    shares = options.cacheable and options.debug is None
    same = _same_program(state.program, options, context.compiled_by_key) if shares else None
    if same is not None:
        return _Attempt(same)
    state = _run_steps(steps.EMISSION_STEPS, state, context, stages)
    assert state.emitted is not None
    _record_result(state, events)
    recompile = None
    if _autotunes_on_first_call(state.program, context):
        recompile = partial(_recompile_for, replace(context, declined_nodes=state.declined_nodes))
    case = _graph_case(state.emitted, stages, context)
    emitted = state.emitted if case is None else bisecting_program(case)
    passes = passes_of(events.events)
    result = CompileResult(tuple(stages), options, emitted, state.coverage, state.plan, context.fake_inputs, passes)
    compiled = Compiled(result, signature=context.signature, recompile=recompile, case=case)
    return _Attempt(compiled, state.declined_nodes, state.failures, recompile is None and not state.warnings)


def _graph_case(emitted: EmittedProgram, stages: Sequence[Stage], context: CompileContext) -> GraphCase | None:
    """Returns all forms of the graph for the option `debug`."""
    options, prepared = context.options, context.prepared
    if options.debug is None or isinstance(prepared, Program):
        return None
    return GraphCase(
        prepared.name, context.graphs, prepared, [(stage.pass_name, stage.program) for stage in stages],
        emitted, options, steps.effective_emitter(options), context.fake_inputs,
    )  # fmt: skip


def _autotunes_on_first_call(program: Program, context: CompileContext) -> bool:
    """Whether the sizes of the first call may select other configurations than the graph's hints."""
    tuner = context.tuner
    if tuner is None or context.autotunes_now:
        return False
    return tuner.has_pending or (tuner.has_alternatives and bool(symbol_infos(program)))


@one_compile_at_a_time
def _recompile_for(context: CompileContext, symbols: Mapping[str, int]) -> Compiled:
    """Compiles the prepared graph again, with autotuning, for these values of its symbols."""
    context.events.record(Recompiled(tuple(symbols.items())))
    options = context.options.replace(autotune=True, symbol_hints={**context.options.symbol_hints, **symbols})
    tuned = replace(context, options=options, compiled_by_key=None, tuner=gpu_tuner())
    with without_fake_mode():
        compiled, _ = _compile(_confirmed(tuned))
    return compiled


def _run_steps(
    table: Sequence[steps.CompileStep], state: CompileState, context: CompileContext, stages: list[Stage]
) -> CompileState:
    """Runs the enabled steps and the user's passes; times them, and records each changed program.

    The first and the last program are verified, and all of them if the last is wrong or a step fails: the error names
    the first step after which the program is wrong.
    """
    verifies, new = context.options.verify, list[Stage]()
    try:
        for step in steps.steps_for(table, context.options):
            context.events.begin_step(step.name)
            before, state = state.program, step.run(state, context)
            changed = state.program is not before and state.program != before
            if changed:
                new.append(Stage(step.name, state.program))
            if changed and verifies and len(new) == 1:
                verify(state.program)
            context.events.end_step(step.name, changed)
        if verifies and len(new) > 1:
            verify(new[-1].program)
    except Exception:
        for stage in new if verifies else ():
            _verify_after(stage)
        raise
    stages += new
    return state


def _verify_after(stage: Stage) -> None:
    try:
        verify(stage.program)
    except VerifyError as error:
        raise VerifyError(error.rule, f"after pass '{stage.pass_name}': {error.reason}", error.context) from None


def _record_result(state: CompileState, events: EventLog) -> None:
    """Records the operators that are called for a reason, and the size of the program."""
    for item in state.coverage:
        if item.kind == "call" and item.reason:
            events.record(OperatorDeclined(item.node, item.operator, item.reason, item.location))
    lines = list(state.program.lines())
    seconds = step_seconds(events.events)
    events.record(
        GraphCompiled(
            calls=len(state.coverage), lines=len(lines), launches=sum([isinstance(line, Launch) for line in lines]),
            kernels=len(state.program.kernels), seconds=sum(seconds.values()), steps=tuple(seconds.items()),
        )
    )  # fmt: skip
