"""The steps of a compile after the FX passes: one table row each. A new default pass is one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from fxwrap.compile.context import CompileContext, CompileState
from fxwrap.compile.kernels import compile_kernels_ahead, compile_program_kernels
from fxwrap.compile.lowering_step import lower_step
from fxwrap.converters.emission import emit, emit_interpreter
from fxwrap.converters.fx import EmittedGraph, to_fx
from fxwrap.converters.interpreter import CheckedInterpreter
from fxwrap.debugging import insert_observations
from fxwrap.lines import Return
from fxwrap.memory_planning import MemoryPlan, apply_plan, plan_memory
from fxwrap.options import (
    FX_EMITTED,
    IR_BEFORE_EMISSION,
    IR_BEFORE_PLANNING,
    PASS_POINTS,
    PLANNERS,
    Options,
    Pass,
    Step,
    enabled_steps,
)
from fxwrap.passes import fold_views
from fxwrap.passes.accumulate import accumulate_in_place
from fxwrap.passes.bucket_collectives import bucket_collectives
from fxwrap.passes.coalesce_copies import coalesce_program_copies
from fxwrap.passes.combo_kernels import combine_kernels
from fxwrap.passes.dependent_launches import insert_dependent_launches
from fxwrap.passes.device_guards import insert_device_guards
from fxwrap.passes.graph_capture import CaptureChecker
from fxwrap.passes.out_variants import run_collectives_in_place, use_out_variants
from fxwrap.passes.overlap_collectives import overlap_collectives
from fxwrap.passes.partition import partition
from fxwrap.passes.profile_ranges import insert_profile_ranges
from fxwrap.passes.provenance import assign_call_handles
from fxwrap.passes.reorder import reorder_for_peak_memory
from fxwrap.passes.result_checks import check_results
from fxwrap.passes.reuse import reuse_memory
from fxwrap.passes.symmetric_buffers import allocate_symmetric_buffers
from fxwrap.torch_compat import DisablePythonDispatcher
from fxwrap.user_passes import run_emitted_pass, run_program_pass
from fxwrap.wrapper_ir import Block, Ownership, Program, TensorType, Value, verify


@dataclass(frozen=True)
class _PlanContext:
    """The part of a compile's context that planning steps use."""

    options: Options


NOT_LOWERED = CompileState(Program("<not lowered>", (), Block((), (Return(()),))))
"""The state before the first step."""

CompileStep: TypeAlias = Step[CompileState, CompileContext]


def _combine_kernels(state: CompileState, context: CompileContext) -> CompileState:
    program = combine_kernels(state.program, context.options.device_specs())
    return state if program is state.program else replace(state, program=assign_call_handles(program))


def _bucket_collectives(state: CompileState, context: CompileContext) -> CompileState:
    options = context.options
    program = bucket_collectives(state.program, options.device_specs(), options.collective_speeds or {})
    return state if program is state.program else replace(state, program=assign_call_handles(program))


def _overlap_collectives(state: CompileState, context: CompileContext) -> CompileState:
    return replace(state, program=overlap_collectives(state.program, slack=context.options.overlap_memory_slack))


def _compile_ahead(state: CompileState, context: CompileContext) -> CompileState:
    compile_kernels_ahead(state.program, context.options)
    return state


def _allocate_symmetric_buffers(state: CompileState, context: CompileContext) -> CompileState:
    return replace(state, program=allocate_symmetric_buffers(state.program, context.options.device_specs()))


def _partition(state: CompileState, context: CompileContext) -> CompileState:
    options, program = context.options, state.program
    specs = [spec for spec in options.device_specs().values() if spec.supports_graph_capture]
    can_capture = CaptureChecker(
        program, [spec.device_type for spec in specs], options.cuda_graph_exclude,
        [spec.device_type for spec in specs if spec.collectives.captured],
    )  # fmt: skip
    static_inputs = [item.name for position, item in enumerate(program.inputs) if position in context.static_inputs]
    partitioned = partition(program, can_capture, max_captures=options.cuda_graph_limit, static_inputs=static_inputs)
    return replace(state, program=partitioned)


def _insert_dependent_launches(state: CompileState, context: CompileContext) -> CompileState:
    specs = context.options.device_specs()
    dependent = {name: spec for name, spec in specs.items() if spec.supports_dependent_launch}
    return replace(state, program=insert_dependent_launches(state.program, dependent))


def _transform(function: Callable[[Program], Program]) -> Callable[[CompileState, CompileContext], CompileState]:
    return lambda state, _context: replace(state, program=function(state.program))


def _use_out_variants(state: CompileState, context: CompileContext) -> CompileState:
    if not _uses_pools(state.program, context.options):
        return state
    return replace(state, program=use_out_variants(state.program))


def _plan_memory(state: CompileState, context: CompileContext) -> CompileState:
    if not _uses_pools(state.program, context.options):
        return state
    plan = plan_program_memory(state.program, context.options)
    return replace(state, program=apply_plan(state.program, plan), plan=plan)


def _emit(state: CompileState, context: CompileContext) -> CompileState:
    options = context.options
    if options.check_memory:
        return replace(state, emitted=emit_interpreter(state.program, CheckedInterpreter))
    if state.graph is not None and options.emitter == "fx":
        return replace(state, emitted=state.graph)
    return replace(state, emitted=emit(state.program, options.emitter, context.fake_inputs, options.fx_form))


def _compile_kernels(state: CompileState, context: CompileContext) -> CompileState:
    assert state.emitted is not None, "kernels are compiled after emission"
    failures = compile_program_kernels(state.program, state.emitted, effective_emitter(context.options), context.events)
    return replace(state, failures=tuple(failures))


def _run_user_pass(item: Pass, state: CompileState, context: CompileContext) -> CompileState:
    check = context.options.verify
    if item.at != FX_EMITTED:
        program = run_program_pass(item, state.program, context.events, check=check)
        return state if program is state.program else replace(state, program=assign_call_handles(program))
    graph = state.graph or to_fx(state.program, fake_inputs=context.fake_inputs, form=context.options.fx_form)
    graph_module, program = run_emitted_pass(item, graph.graph_module, context.events, check=check)
    return replace(state, program=program, graph=EmittedGraph(program, graph_module))


def _plans_pools(options: Options) -> bool:
    """Whether the options allow memory pools; with "default", the program decides: see `_uses_pools`."""
    return options.memory_planning not in ("none", "reuse") and not _is_functional(options)


def _is_functional(options: Options) -> bool:
    """Whether the emitted graph has no memory: its plan is made when it is imported."""
    return effective_emitter(options) == "fx" and options.fx_form == "functional"


def _emits_graph(options: Options) -> bool:
    """Whether there is an emitted graph, in which passes find functional collectives as in a graph of ATen."""
    return effective_emitter(options) == "fx" or bool(options.passes_at(FX_EMITTED))


def _pass_point(point: str, description: str) -> CompileStep:
    """Returns the row of a pass point, in whose place the user's passes run."""
    return Step(point, description, lambda state, _context: state, "passes")


PROGRAM_STEPS: tuple[CompileStep, ...] = (
    Step("lower", "lower the prepared graph to a program, and fuse operators into kernels", lower_step),
    Step(
        "coalesce_copies", "compute tensors that are only copied into others there",
        _transform(coalesce_program_copies),
    ),
    Step("fold_views", "fold views of views, and remove views that have no effect", _transform(fold_views)),
    _pass_point(IR_BEFORE_PLANNING, "the user's passes over the program, before memory planning"),
    Step(
        "bucket_collectives", "let small collectives of one kind that can run together be one", _bucket_collectives,
        "bucket_collectives",
    ),
    Step(
        "reorder_for_peak_memory", "run some lines earlier to lower the peak memory",
        _transform(lambda program: reorder_for_peak_memory(program).program),
        "reorder_for_peak_memory",
    ),
    Step(
        "overlap_collectives", "start collectives earlier and await them later", _overlap_collectives,
        "overlap_collectives",
    ),
    Step(
        "combo_kernels", "combine small independent launches into combo kernels (horizontal fusion)", _combine_kernels,
        "combo_kernels",
    ),
    Step("compile_ahead", "start to compile the kernels, whose texts are final", _compile_ahead),
    Step(
        "symmetric_buffers", "allocate the buffers of all_reduces over symmetric memory", _allocate_symmetric_buffers,
        enabled=lambda options: not _is_functional(options),
    ),
    Step(
        "partition", "move lines that CUDA graphs can capture into functions", _partition,
        "cuda_graphs", lambda options: options.cuda_graphs and options.check_values is None,
    ),
    Step(
        "accumulate_in_place", "let matmuls add in place to tensors that nothing reads later",
        _transform(accumulate_in_place), enabled=lambda options: not _is_functional(options),
    ),
    Step(
        "collectives_in_place", "let all_reduces and broadcasts run in operands that nothing reads later",
        _transform(run_collectives_in_place), enabled=lambda options: not _emits_graph(options),
    ),
    Step(
        "reuse_memory", "let later allocations reuse freed memory", _transform(reuse_memory),
        "memory_planning='reuse'", lambda options: options.memory_planning == "reuse" and not _is_functional(options),
    ),
    Step(
        "use_out_variants", "call out variants of operators, so that their results can be in pools", _use_out_variants,
        "memory_planning", _plans_pools,
    ),
    Step("plan_memory", "assign offsets in memory pools to allocations", _plan_memory, "memory_planning", _plans_pools),
    _pass_point(IR_BEFORE_EMISSION, "the user's passes over the program, after memory planning"),
    Step(
        "check_results", "check the results of operators from outside torch, whose layout a fake implementation states",
        _transform(check_results),
    ),
    Step(
        "insert_device_guards", "make the device of each call current, where it is not",
        _transform(insert_device_guards),
    ),
    Step(
        "insert_profile_ranges", "put each line that computes in a range for profilers",
        _transform(insert_profile_ranges), "profile_ranges",
    ),
    Step(
        "insert_observations", "call the observer of values after each line that computes a tensor",
        _transform(insert_observations), "check_values", lambda options: options.check_values is not None,
    ),
)  # fmt: skip
"""The steps up to the final program."""

_PLANNING_STEPS = frozenset({
    "coalesce_copies", "fold_views", "collectives_in_place", "reuse_memory", "use_out_variants", "plan_memory",
    "insert_device_guards",
})  # fmt: skip
"""The steps after which an imported program has views, memory and guards as a compiled one."""

EMISSION_STEPS: tuple[CompileStep, ...] = (
    _pass_point(FX_EMITTED, "the user's passes over the program as an FX graph, which is imported again"),
    Step(
        "insert_dependent_launches", "let kernels start before the kernel launched before them has ended",
        _insert_dependent_launches, "dependent_launch",
        lambda options: options.dependent_launch and effective_emitter(options) in ("cpp", "python"),
    ),
    Step("emit", "emit Python, C++ or an FX graph", _emit, "emitter"),
    Step("compile_kernels", "compile the kernels", _compile_kernels),
)  # fmt: skip
"""The steps from the last program of all emitters to code."""


def steps_for(steps: Sequence[CompileStep], options: Options) -> Iterator[CompileStep]:
    """Yields the steps that the options turn on, with the user's passes in place of their pass points."""
    for step in enabled_steps(steps, options):
        if step.name not in PASS_POINTS:
            yield step
        for item in options.passes_at(step.name):
            yield Step(item.name, f"the user's pass at '{step.name}'", partial(_run_user_pass, item), "passes")


def plan_program(program: Program, options: Options) -> Program:
    """Returns a program that was imported without a memory plan with the plan of a compile with these options."""
    options = options.replace(fx_form="in_place")
    state, context = CompileState(program), _PlanContext(options)
    for step in enabled_steps(PROGRAM_STEPS, options):
        if step.name in _PLANNING_STEPS:
            state = step.run(state, context)  # type: ignore[arg-type]
    return verify(state.program) if options.verify else state.program


def effective_emitter(options: Options) -> str:
    """Returns the name of the emitter whose output runs."""
    return "interpreter" if options.check_memory else options.emitter


def _uses_pools(program: Program, options: Options) -> bool:
    """Whether allocations of a program share pools.

    By default only inference programs do. A pool is allocated for the whole call. A backward frees its inputs, so the
    pool would come on top of inputs and of the workspaces of operators, and raise the peak memory.
    """
    if options.memory_planning != "default":
        return True
    if effective_emitter(options) != "cpp" or options.cuda_graphs:
        return False
    pooled = {device_type for device_type, spec in options.device_specs().items() if spec.prefers_memory_pools}
    types = [item.value.type for item in program.inputs if isinstance(item.value, Value)]
    is_pooled = any(isinstance(type_, TensorType) and type_.device.type in pooled for type_ in types)
    frees_inputs = any(item.ownership in (Ownership.OWNED, Ownership.SHARED) for item in program.inputs)
    return is_pooled and not frees_inputs


def plan_program_memory(program: Program, options: Options) -> MemoryPlan:
    """Returns the offset of each allocation in its pool, by the options' algorithm and devices.

    Raises PlanningError for memory that cannot be planned.
    """
    alignments = {device_type: spec.alignment for device_type, spec in options.device_specs().items()}
    algorithm = options.memory_planning if options.memory_planning in PLANNERS else "auto"
    with DisablePythonDispatcher():  # the plan computes with tensors of integers
        return plan_memory(
            program,
            alignment=lambda device: alignments.get(device.type, 1),
            algorithm=algorithm,
            slack=options.memory_slack,
        )
