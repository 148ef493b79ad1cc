"""The whole pipeline, in one place: graph -> program -> passes -> emitted form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.artifact import save_program
from fxwrap.compile_cache import Lookup, Request, look_up
from fxwrap.compile_log import StageTimes, log
from fxwrap.converters.emitted import Boxed, Emitted, Flat
from fxwrap.converters.fx import EmittedGraph, to_fx
from fxwrap.emission import checked as checked
from fxwrap.emission import emit as emit
from fxwrap.emission import explained
from fxwrap.emission import interpreted as interpreted
from fxwrap.errors import VerifyError
from fxwrap.lowering import GraphSource, Lowered, Outcome, graph_source, lower_with_coverage
from fxwrap.memory_planning import MemoryPlan, apply_plan, plan_memory
from fxwrap.options import FIRST_CALL, PLANNERS, Options
from fxwrap.pass_spec import FX_BEFORE_LOWERING, FX_EMITTED, IR_BEFORE_EMISSION, IR_BEFORE_PLANNING
from fxwrap.passes import fold_views
from fxwrap.passes.given_memory import fill_given_memory
from fxwrap.passes.join_launches import join_launches
from fxwrap.passes.order import reorder_for_peak_memory
from fxwrap.passes.partition import partition
from fxwrap.passes.place_guards import place_guards
from fxwrap.passes.recordable import Recordable
from fxwrap.passes.reuse import reuse_memory
from fxwrap.preparation import KernelFailure, begin_kernels, compile_program_kernels, warn_of
from fxwrap.printers import print_kernel
from fxwrap.provenance import Provenance, number_calls, provenance
from fxwrap.torch_compat import FakeTensor, without_fake_mode
from fxwrap.tuning import FirstCall, gpu_tuner
from fxwrap.user_passes import run_emitted_pass, run_program_pass, run_source_passes
from fxwrap.wrapper_ir import Ownership, Program, TensorType, Value, program_key, symbol_infos, verify


@dataclass(frozen=True)
class Stage:
    """A program as one step of the pipeline left it; `made_by` names the step."""

    made_by: str
    program: Program


@dataclass(frozen=True)
class _Result:
    """What one run of the pipeline gave."""

    stages: tuple[Stage, ...]
    emitted: Emitted
    coverage: tuple[Outcome, ...]
    plan: MemoryPlan | None
    fake_inputs: Mapping[str, FakeTensor] | None

    @property
    def program(self) -> Program:
        return self.stages[-1].program

    def boxed(self) -> Boxed:
        return explained(self.emitted.boxed, self.plan, self.program)

    def flat(self) -> Flat:
        return explained(self.emitted.flat, self.plan, self.program)

    @cached_property
    def provenance(self) -> Provenance:
        return provenance(self.program)

    @cached_property
    def graph_module(self) -> GraphModule:
        emitted = self.emitted
        if not isinstance(emitted, EmittedGraph):
            emitted = to_fx(self.program, fake_inputs=self.fake_inputs)
        return emitted.graph_module


class Compiled(Emitted):
    """A compiled graph. Call it with the flat inputs; it returns the tuple of flat outputs.

    `boxed` takes the inputs in a list and empties it. `program` is what runs, `stages` every program on the way to it,
    `source` the text of the emitted form, `coverage` what became of each call of the graph: fused, or called, and why,
    `plan` where its memory is, if the options asked for a plan. With `autotune="first_call"` all of these change once,
    at the end of the first call. `cached` says whether it came from the compile cache: then its one stage is "cache".
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        options: Options,
        emitted: Emitted,
        fake_inputs: Mapping[str, FakeTensor] | None = None,
        coverage: Sequence[Outcome] = (),
        plan: MemoryPlan | None = None,
        compile_again: Callable[[Mapping[str, int]], Compiled] | None = None,
        cached: bool = False,
    ) -> None:
        """`compile_again` compiles the graph for the sizes of the first call, after that call; see `FirstCall`."""
        self.options = options
        self.cached = cached
        self._result = _Result(tuple(stages), emitted, tuple(coverage), plan, fake_inputs)
        self._first_call: FirstCall | None = None
        if compile_again is None:
            super().__init__("", self._result.boxed, self._result.flat)
            return

        def replaced(symbols: Mapping[str, int]) -> Compiled:
            after = compile_again(symbols)
            after.boxed, after.flat  # noqa: B018  builds them before anything changes
            self._result = after._result
            return after

        entries = Emitted("", self._result.boxed, self._result.flat)
        first = self._first_call = FirstCall(self.program, entries, replaced)
        super().__init__("", lambda: first.boxed, lambda: first.flat)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Every program on the way to the one that runs."""
        return self._result.stages

    @property
    def emitted(self) -> Emitted:
        """The emitted form."""
        return self._result.emitted

    @property
    def source(self) -> str:
        """The text of the emitted form."""
        return self._result.emitted.source

    @property
    def coverage(self) -> tuple[Outcome, ...]:
        """What became of each call of the graph."""
        return self._result.coverage

    @property
    def plan(self) -> MemoryPlan | None:
        """Where the program's memory is, if the options asked for a plan."""
        return self._result.plan

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self._result.program

    @property
    def provenance(self) -> Provenance:
        """Where each call of a kernel or operator came from, and what each place of the model's source became."""
        return self._result.provenance

    @property
    def graph_module(self) -> GraphModule:
        """The program as an FX graph: what runs with the emitter "fx", made here on first use for the others.

        As what runs may be rewritten once it is asked for, it stays then: the first call compiles nothing again.
        """
        if self._first_call is not None and isinstance(self.emitted, EmittedGraph):
            self._first_call.stay()
        return self._result.graph_module

    def save(self, path: str | Path, *, constants: bool = True) -> None:
        """Saves the program, its compiled code and its constants into a file; see `fxwrap.save`."""
        save_program(
            self.program, path, emitter=self.options.emitter, emitters=(self.options.emitter,),
            options=self.options.text(), plan=self.plan, constants=constants,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """A hash, equal for programs equal up to the names of values and origins, compiled with equal options."""
        return program_key(self.program, self.options.text())


def compile_graph(
    graph: GraphModule | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: Options | None = None,
    ownership: Mapping[int, Ownership] | None = None,
    name: str = "program",
    free_outputs: Collection[int] = (),
    static_inputs: Collection[int] = (),
    known: MutableMapping[str, Compiled] | None = None,
) -> Compiled:
    """Compiles a graph of ATen operators; usable inside and outside of Dynamo.

    Args:
        graph: a GraphModule of ATen overloads (hand-written, from make_fx or AOTAutograd) or an exported program. It is
            not changed.
        example_inputs: one a placeholder; needed only where the graph's nodes carry no fake values.
        options: see `Options`.
        ownership: what the program may do with each input, by position; see `Ownership`.
        name: the program's name, also of files in the cache.
        free_outputs: positions of outputs whose strides are the program's choice; it says them in their types.
        static_inputs: positions of inputs that keep their address from call to call (parameters and buffers): what is
            recorded with the option `cuda_graphs` reads and writes them where they are.
        known: what was compiled before, by `Compiled.key`. Where the program is one of these, and has no constants,
            that is given back, with the names and the provenance it has; else what is compiled is added.

    Its kernels are compiled here. The operators of one that cannot be are called instead, with a FusionWarning that
    names them, unless the option `fallback` is "error".

    Raises GraphError for a graph that cannot be compiled, PassError for a pass of the user's that failed or left
    something wrong, and what a kernel failed with where no operator can take its place.
    """
    # AOTAutograd's fake mode is on when it compiles: the numbers that passes compute with tensors would be fake.
    with without_fake_mode():
        options = (options or Options()).with_devices()
        lookup = look_up(Request(graph, example_inputs, options, ownership or {}, name, free_outputs, static_inputs))
        compiled = None if lookup is None else _from_cache(lookup, graph, known)
        if compiled is None:
            begin_kernels(graph.graph_module if isinstance(graph, ExportedProgram) else graph, options)
            pipeline = _Pipeline(graph, example_inputs, options, ownership, name, free_outputs, static_inputs, known)
            compiled = pipeline.compiled()
            is_new = known is None or known.get(compiled.key) is not compiled
            if lookup is not None and is_new and pipeline.repeatable:
                lookup.keep(compiled.program, compiled.emitted, compiled.coverage, compiled.plan)
    if known is not None:
        known.setdefault(compiled.key, compiled)
    return compiled


def _from_cache(
    lookup: Lookup, graph: GraphModule | ExportedProgram, known: MutableMapping[str, Compiled] | None
) -> Compiled | None:
    """Returns what the cache has of a compile, or what is known of the same program; None where it has nothing."""
    found, options = lookup.take(), lookup.request.options
    if found is None:
        return None
    same = None if known is None else known.get(program_key(found.program, options.text()))
    if same is not None and not found.program.constants:
        return same
    fakes = _fake_inputs(graph)
    emitted = _emitted(found.program, options, fakes)
    if compile_program_kernels(found.program, emitted, _emitter(options)):
        return None
    stages = [Stage("cache", found.program)]
    return Compiled(stages, options, emitted, fakes, found.coverage, found.plan, cached=True)


def _emitter(options: Options) -> str:
    """Returns the name of what runs a program."""
    return "interpreter" if options.check_memory else options.emitter


def _emitted(program: Program, options: Options, fakes: Mapping[str, FakeTensor]) -> Emitted:
    """Returns a program in the form that runs."""
    return checked(program) if options.check_memory else emit(program, options.emitter, fakes)


class _Pipeline:
    """The steps of one compile, which are run again where kernels fail: then operators are called in their place.

    `repeatable` says whether what came out is all that the compile did: it gave no warning, and is not done again.
    """

    def __init__(
        self,
        graph: GraphModule | ExportedProgram,
        example_inputs: Sequence[Any] | None,
        options: Options,
        ownership: Mapping[int, Ownership] | None,
        name: str,
        free_outputs: Collection[int],
        static_inputs: Collection[int],
        known: MutableMapping[str, Compiled] | None,
    ) -> None:
        self.options = options
        self._name = name
        self.static_inputs = frozenset(static_inputs)
        self.known = known
        self.refused: frozenset[str] = frozenset()
        self.repeatable = True
        self._fakes = _fake_inputs(graph)
        self._tuner = gpu_tuner() if options.autotune else None
        self._lower_with = partial(
            lower_with_coverage, _changed_source(graph, example_inputs, options, name), example_inputs,
            options=options, ownership=ownership, name=name, free_outputs=free_outputs,
        )  # fmt: skip

    def compiled(self) -> Compiled:
        """Compiles the graph; operators whose kernels fail are called. Raises what `compile_graph` says."""
        compiled, failures = self._run(frozenset())
        failed = list(failures)
        while failures:
            unexplained = [failure for failure in failures if failure.nodes <= self.refused]
            if unexplained or self.options.fallback == "error":
                raise (unexplained or failures)[0].error
            compiled, failures = self._run(frozenset().union(*[failure.nodes for failure in failures]))
            failed += failures
        if failed:
            self.repeatable = False
            warn_of(failed)
        return compiled

    def _compiled_for(self, symbols: Mapping[str, int]) -> Compiled:
        """Compiles the graph again, with its kernels timed, for these values of its symbols."""
        log.info("'%s' is compiled again for the sizes of its first call: %s", self._name, dict(symbols))
        again = copy.copy(self)
        hints = {**self.options.symbol_hints, **symbols}
        again.options = self.options.replace(autotune=True, symbol_hints=hints)
        again.known = None
        again._tuner = gpu_tuner()
        again._lower_with = partial(self._lower_with, options=again.options)
        with without_fake_mode():
            return again.compiled()

    def _run(self, refused: frozenset[str]) -> tuple[Compiled, list[KernelFailure]]:
        """Compiles with these nodes, and those before, not fused; returns with it the kernels that fail."""
        self.refused |= refused
        times = StageTimes()
        options, lowered = self.options, self._lowered()
        program = lowered.program
        times.end("lowering")
        stages = [Stage("lower", verify(program))]

        def changed(program: Program, made_by: str) -> Program:
            stages.append(Stage(made_by, program))
            if options.verify:
                _verify_after(stages[-1])
            return program

        def by_user(program: Program, point: str) -> Program:
            for item in options.passes_at(point):
                after = run_program_pass(item, program, check=options.verify)
                program = program if after is program else number_calls(after)
                stages.append(Stage(item.name, program))
            return program

        program = by_user(changed(fold_views(program), "fold_views"), IR_BEFORE_PLANNING)
        if options.reorder_for_peak_memory:
            program = changed(reorder_for_peak_memory(program).program, "reorder_for_peak_memory")
        joined = self._joined(program)
        program = program if joined is program else changed(joined, "join_launches")
        if options.cuda_graphs:
            program = changed(self._partitioned(program), "partition")
        plan = None
        planning = _planning(program, options)
        if planning == "reuse":
            program = changed(reuse_memory(program), "reuse_memory")
        elif planning != "none":
            program = changed(fill_given_memory(program), "fill_given_memory")
            plan = plan_program(program, options)
            program = changed(apply_plan(program, plan), "plan_memory")
        program = by_user(program, IR_BEFORE_EMISSION)
        guarded = place_guards(program)
        program = program if guarded is program else changed(guarded, "place_guards")
        same = None if self.known is None else self.known.get(program_key(program, options.text()))
        if same is not None and not program.constants and options.cacheable:
            return same, []
        times.end("passes")
        graph = self._changed_graph(program, stages) if options.passes_at(FX_EMITTED) else None
        program = stages[-1].program
        runs_graph = graph is not None and _emitter(options) == "fx"
        emitted: Emitted = graph if graph is not None and runs_graph else _emitted(program, options, self._fakes)
        times.end("emission")
        failures = compile_program_kernels(program, emitted, _emitter(options))
        times.end("kernels")
        times.tell(program, len(lowered.coverage))
        again = self._compiled_for if self._tunes_later(program) else None
        self.repeatable &= again is None
        return Compiled(stages, options, emitted, self._fakes, lowered.coverage, plan, again), failures

    def _joined(self, program: Program) -> Program:
        """Joins launches of small kernels, after which calls have new numbers."""
        if not self.options.join_launches:
            return program
        specs = self.options.device_specs()
        joined = join_launches(program, {name: spec.joined_launches for name, spec in specs.items()})
        return program if joined is program else number_calls(joined)

    def _partitioned(self, program: Program) -> Program:
        """Cuts what devices can record and replay out into functions; calls in them keep their numbers."""
        replaying = [spec.device_type for spec in self.options.device_specs().values() if spec.replays]
        judge = Recordable(program, replaying, self.options.keep_out_of_graphs)
        fixed = [item.name for position, item in enumerate(program.inputs) if position in self.static_inputs]
        return partition(program, judge, recordings=self.options.cuda_graph_limit, fixed=fixed)

    def _tunes_at_once(self) -> bool:
        """Whether kernels are timed now; a program whose memory is watched runs in no other way than that."""
        return self.options.autotune is True or self.options.check_memory

    def _tunes_later(self, program: Program) -> bool:
        """Whether the first call may say more than the graph did of how kernels are best cut."""
        if self._tuner is None or self._tunes_at_once():
            return False
        return self._tuner.waits or (self._tuner.chooses and bool(symbol_infos(program)))

    def _changed_graph(self, program: Program, stages: list[Stage]) -> EmittedGraph:
        """Returns the emitted graph as the user's passes leave it; it is read back as a program after each."""
        graph: GraphModule = to_fx(program, fake_inputs=self._fakes).graph_module
        for item in self.options.passes_at(FX_EMITTED):
            graph, program = run_emitted_pass(item, graph, check=self.options.verify)
            stages.append(Stage(item.name, program))
        return EmittedGraph(program, graph)

    def _lowered(self) -> Lowered:
        """Lowers the graph; again where timing its kernels has found faster ones."""
        printer = print_kernel if self._tuner is None else self._tuner.print_kernel
        lowered = self._lower_with(refused=self.refused, print_kernel=printer)
        if self._tuner is not None and self._tunes_at_once() and self._tuner.tune():
            lowered = self._lower_with(refused=lowered.refused, print_kernel=printer)
        self.refused = lowered.refused
        self.repeatable &= not lowered.warned
        if self._tuner is None:
            return lowered
        return replace(lowered, program=self._tuner.named(lowered.program))


def _changed_source(
    graph: GraphModule | ExportedProgram, example_inputs: Sequence[Any] | None, options: Options, name: str
) -> GraphModule | ExportedProgram | GraphSource:
    """Returns the graph that is lowered: decomposed, and changed by the user's passes, if there are any for graphs."""
    passes = options.passes_at(FX_BEFORE_LOWERING)
    later = options.autotune == FIRST_CALL
    if not passes and not later:
        return graph
    source = graph_source(graph, example_inputs, options, name)
    if later and source.graph_module is graph:  # its owner may change it before it is compiled again
        source = replace(source, graph_module=GraphModule(graph, copy.deepcopy(graph.graph)))
    return run_source_passes(passes, source, example_inputs, check=options.verify)


def _fake_inputs(graph: GraphModule | ExportedProgram) -> dict[str, FakeTensor]:
    """Returns the fake tensors of a graph's placeholders by name, for the metadata of an emitted graph."""
    graph_module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    found = {node.name: node.meta.get("val") for node in placeholders}
    return {name: val for name, val in found.items() if isinstance(val, FakeTensor)}


def _planning(program: Program, options: Options) -> str:
    """Returns how the allocations of a program share memory: the option, or what its default stands for.

    A pool is there throughout. In a backward, which gives back what it is given, that would be on top of inputs that
    are still there, and of memory that operators take for themselves, at moments when less was needed.
    """
    if options.memory_planning != "default":
        return options.memory_planning
    if _emitter(options) != "cpp" or options.cuda_graphs:
        return "none"
    pooled = {device_type for device_type, spec in options.device_specs().items() if spec.pools}
    types = [item.value.type for item in program.inputs if isinstance(item.value, Value)]
    is_pooled = any(isinstance(type_, TensorType) and type_.device.type in pooled for type_ in types)
    gives_back = any(item.ownership in (Ownership.OWNED, Ownership.SHARED) for item in program.inputs)
    return "auto" if is_pooled and not gives_back else "none"


def plan_program(program: Program, options: Options) -> MemoryPlan:
    """Returns where each allocation of a program goes, by the options' algorithm and devices.

    Raises PlanningError for memory that cannot be planned.
    """
    steps = {device_type: spec.alignment for device_type, spec in options.device_specs().items()}
    algorithm = options.memory_planning if options.memory_planning in PLANNERS else "auto"
    return plan_memory(
        program, alignment=lambda device: steps.get(device.type, 1), algorithm=algorithm, slack=options.memory_slack
    )


def _verify_after(stage: Stage) -> None:
    try:
        verify(stage.program)
    except VerifyError as error:
        raise VerifyError(error.rule, f"after pass '{stage.made_by}': {error.reason}", error.context) from None
