"""Round trips of random programs: to an FX graph in each form, through torch's transforms, and back as a program.

    python -m tests.round_trips --programs 2000 --jobs 2          # `make round-trips`
    python -m tests.round_trips --seconds 600 --jobs 1 --only ir --form in_place
    python -m tests.round_trips --seed 1234 --programs 1

A seed determines a program (drawn as IR, or compiled from a random graph of `tests.fuzz`), a random chain of transforms
for each form, the emitter of the program that is imported at the end, and the inputs. Checked are, bit by bit, the
results of the transformed graph and of the imported program, and the imported program and its memory plan as far as the
transforms preserve them (`tests/support/transforms.py`). Graphs that torch itself rejects are counted. A failure prints
the case, the program and the error, and does not end the run; the exit status is 1 after any.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound

import fxwrap
from benchmarks.results import Report, add_record_option
from fxwrap.compile.steps import plan_program
from fxwrap.converters.emission import emit
from fxwrap.errors import GraphError, UnsupportedError
from fxwrap.lines import Comment, ExternCall, Free, Launch, Let
from fxwrap.memory_planning import BlockPlan, MemoryPlan, apply_plan, plan_memory
from fxwrap.passes.reuse import reuse_memory
from fxwrap.symbolic import Number, evaluate
from fxwrap.wrapper_ir import (
    Block,
    Ownership,
    Program,
    canonicalize_program,
    hints_with_fallback,
    live_bytes,
    symbol_infos,
    used,
    uses_streams,
)
from tests.devices.registration import on_abacus
from tests.fuzz import REFUSED_GRAPHS
from tests.fuzz import Case as GraphCase
from tests.fuzz import Subject as GraphSubject
from tests.support import program_kernels
from tests.support.fuzzing import Failure, Outcome, Task, drawn_example, run_seeds
from tests.support.program_equality import assert_equal
from tests.support.strategies.dynamic_graphs import DynamicGraph
from tests.support.strategies.programs import random_programs
from tests.support.stream_log import StreamLog
from tests.support.transforms import CALLS, TRANSFORMS, Loss
from tests.user_kernels.triton_on_cpu import triton_on_cpu

SOURCES = {"ir": 12, "static": 4, "dynamic": 2, "control": 2}
"""Where programs come from, with their shares: drawn as IR, or compiled from a graph of a kind of `tests.fuzz`."""

CPP_SHARE = 1 / 60
"""How many programs are emitted as C++, which takes a C++ compiler."""

MOST_TRANSFORMS = 4
INPUTS = 2
"""Transforms in a chain, and inputs that each graph and program runs on."""


_REASON = "reason: "
"""The prefix of counts of reasons why torch rejected graphs."""

Symbols: TypeAlias = Mapping[str, Number]
_NO_SYMBOLS: Symbols = {}
"""Those of compiled graphs, whose sizes are hints of the program."""

Key: TypeAlias = tuple[str, str]
"""A form, and where programs come from."""


@dataclass(frozen=True)
class Form:
    """A form of FX graphs: how a program gets it, and how it gets back to a program with a memory plan.

    `kernels` is the option of compiles, `sources` are those of programs that have the form. A graph that `has_no_plan`
    is planned again with the options of the compile; programs that were drawn as IR have other calls than those.
    `losses_when_traced` are those of retracing, which inlines calls of graphs.
    """

    emit: Callable[[Program], GraphModule]
    kernels: str = "text"
    sources: frozenset[str] = frozenset(SOURCES)
    has_no_plan: bool = False
    losses_when_traced: frozenset[Loss] = frozenset()


def _emit(program: Program) -> GraphModule:
    return fxwrap.to_fx(program).graph_module


def _functional(program: Program) -> GraphModule:
    return fxwrap.fx.functional(_emit(program))


FORMS: dict[str, Form] = {
    "in_place": Form(_emit),
    "functional": Form(_functional, has_no_plan=True),
    "subgraph": Form(
        _emit, kernels="subgraph", sources=frozenset({"static", "dynamic", "control"}), losses_when_traced=CALLS
    ),
}


@dataclass(frozen=True)
class Trip:
    """One round trip of a seed's program: its variant is the number of its form."""

    seed: int
    variant: int
    source: str
    form: str
    transforms: tuple[str, ...]
    emitter: str

    @classmethod
    def draw(cls, seed: int, variant: int, form: str, source: str) -> Trip:
        """Returns the trip that a seed determines."""
        choose = random.Random(f"{seed}.{form}")
        usable = [name for name, transform in TRANSFORMS.items() if not transform.forms or form in transform.forms]
        weights = [TRANSFORMS[name].weight for name in usable]
        chain = tuple(choose.choices(usable, weights, k=choose.randint(0, MOST_TRANSFORMS)))
        is_cpp = _is_cpp(seed)
        emitter = "cpp" if is_cpp else choose.choice(["interpreter", "python", "fx"])
        return cls(seed, variant, source, form, chain, emitter)


def _is_cpp(seed: int) -> bool:
    return random.Random(f"C++ {seed}").random() < CPP_SHARE


@dataclass
class Journey:
    """A graph on its way: the transforms that it took, those that torch rejected with the reasons, and the losses."""

    module: GraphModule
    applied: list[str] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    losses: set[Loss] = field(default_factory=set)
    is_specialised: bool = False
    is_restrided: bool = False


@dataclass(frozen=True)
class Drawn:
    """A program, functions that return fresh inputs, the values of its symbols, and the options of its compile; for
    each of the inputs the results by the interpreter and the inputs after the run."""

    program: Program
    make_inputs: list[Callable[[], list[Any]]]
    symbols: Symbols
    options: fxwrap.Options | None
    wanted: list[list[Any]]


class NoProgramError(Exception):
    """The graph of a seed raises for each of its inputs: torch's tracer assumes that a size is not 0, for example."""


_Parts: TypeAlias = tuple[Program, list[Callable[[], list[Any]]], Symbols, fxwrap.Options | None]


class Subject:
    """The program of a seed, which its trips share; computed when first used."""

    def __init__(self, seed: int, sources: Sequence[str], forms: Sequence[str]) -> None:
        self.seed = seed
        self.source = random.Random(seed).choices(sources, [SOURCES[name] for name in sources])[0]
        forms = [form for form in forms if self.source in FORMS[form].sources]
        self.cases = tuple([Trip.draw(seed, number, form, self.source) for number, form in enumerate(forms)])
        self._drawn: dict[str, Drawn] = {}

    @property
    def text(self) -> str:
        """The programs that were drawn so far."""
        return "\n".join([str(item.program) for item in self._drawn.values()])

    def drawn(self, form: str) -> Drawn:
        """Returns the program in a form, with its inputs and results."""
        kernels = FORMS[form].kernels
        if kernels not in self._drawn:
            program, make_inputs, symbols, options = (
                self._from_ir() if self.source == "ir" else self._from_graph(kernels)
            )
            wanted = [_run(partial(fxwrap.run, program), program, make) for make in make_inputs]
            self._drawn[kernels] = Drawn(program, make_inputs, symbols, options, wanted)
        return self._drawn[kernels]

    def _from_ir(self) -> _Parts:
        with_triton = not _is_cpp(self.seed) and self.seed % 2 == 0
        kernels = (*program_kernels.CPP, *(program_kernels.TRITON if with_triton else ()))
        case = drawn_example(random_programs(kernels=kernels, streams=True), self.seed).example
        program = case.program
        choose = random.Random(f"{self.seed}.passes")
        if choose.random() < 0.3:
            program = reuse_memory(program)
        if choose.random() < 0.3:
            program = apply_plan(program, _plan(program, case.symbols))
        program = fxwrap.verify(_without_unused_definitions(program))
        return program, [partial(case.inputs, number) for number in range(INPUTS)], case.symbols, None

    def _from_graph(self, kernels: str) -> _Parts:
        subject = GraphSubject(self.seed, [self.source])
        options = GraphCase.draw(self.source, self.seed, 0).options
        dynamic = isinstance(subject.graph, DynamicGraph)
        sample = None if dynamic else tuple([item.clone() for item in subject.graph.inputs])
        options = fxwrap.Options(
            emitter="interpreter", compile_cache=False, fallback="error", kernels=kernels, **options
        )
        program = fxwrap.compile_graph(subject.graph.module, sample, options=options).program
        program = program.replace(header=())  # which `split_module` and tracing leave out
        accepted = [item for item, wanted in zip(subject.inputs, subject.wanted) if not isinstance(wanted, Exception)]
        if not accepted:
            raise NoProgramError
        inputs = [partial(_copies, item) for item in accepted[:INPUTS]]
        return program, inputs, _NO_SYMBOLS, options.resolve_devices()


def _without_unused_definitions(program: Program) -> Program:
    """Returns a program without constants and kernels that nothing uses, and comments at the end.

    Transforms may leave them out.
    """
    lines = list(program.body.lines)
    last = max([at for at, line in enumerate(lines[:-1]) if not isinstance(line, Comment | Free)], default=-1)
    lines = [line for at, line in enumerate(lines) if at < last or not isinstance(line, Comment)]
    program = program.replace(body=Block((), tuple(lines)))
    names = {value.name for line in program.lines() for value in used(line)}
    launched = {line.kernel for line in program.lines() if isinstance(line, Launch)}
    return program.replace(
        constants=tuple([item for item in program.constants if item.value.name in names]),
        kernels=tuple([kernel for kernel in program.kernels if kernel.name in launched]),
    )


def _copies(inputs: Sequence[torch.Tensor]) -> list[Any]:
    return [torch.empty_strided(item.shape, item.stride(), dtype=item.dtype).copy_(item) for item in inputs]


def _run(function: Callable[[list[Any]], Any], declared: Program, make_inputs: Callable[[], list[Any]]) -> list[Any]:
    """Returns the results of a function and the inputs after it, except those that it owns."""
    inputs = make_inputs()
    with torch.no_grad():
        results = function(list(inputs))
    items = list(results) if isinstance(results, tuple | list) else [results]
    after = [item for item, one in zip(inputs, declared.inputs, strict=True) if one.ownership is not Ownership.OWNED]
    return [*items, *after]


@contextmanager
def device_of(trip: Trip) -> Iterator[None]:
    """The device on which a trip's program runs: for graphs one without a compiler, for IR one with streams."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        if trip.source != "ir" and not _is_cpp(trip.seed):
            stack.enter_context(on_abacus())
        else:
            stack.enter_context(StreamLog().registered())
            stack.enter_context(triton_on_cpu())
        yield


def run_trip(trip: Trip, subject: Subject) -> Counter[str]:
    """Returns the numbers of transforms by outcome, e.g. "make_fx applied", and of the reasons of rejections.

    Raises AssertionError for a difference.
    """
    try:
        with device_of(trip):
            return _run_trip(trip, subject)
    except Exception as error:
        raise AssertionError(f"{trip}\n{subject.text}") from error


def _run_trip(trip: Trip, subject: Subject) -> Counter[str]:
    try:
        drawn = subject.drawn(trip.form)
    except (GraphError, NoProgramError, PendingUnbackedSymbolNotFound) as error:
        if isinstance(error, GraphError) and not any(text in str(error) for text in REFUSED_GRAPHS):
            raise
        return Counter({"no program": 1})
    form, program = FORMS[trip.form], drawn.program
    try:
        module = form.emit(program)
    except UnsupportedError:
        return Counter({"no form": 1})
    journey = _transformed(trip, Journey(module), drawn)
    # What was traced with the first inputs is for their sizes and numbers.
    makers = drawn.make_inputs[: 1 if journey.is_specialised else None]
    results = [_run(lambda inputs: journey.module(*inputs), program, make) for make in makers]
    other_loops = journey.is_restrided or (form.has_no_plan and _writes_other_layouts(program))
    same = partial(assert_same, tolerance=_LAST_BITS if other_loops else 0.0)
    for of_graph, wanted in zip(results, drawn.wanted):
        same("the graph", of_graph, wanted, strides=not journey.is_restrided)
    imported = _imported(journey.module, program)
    if form.has_no_plan and drawn.options is not None:
        imported = plan_program(imported, drawn.options)
    _check_program(journey, form, drawn, imported)
    entry = emit(imported, trip.emitter)
    for make, of_graph in zip(makers, results, strict=True):
        same("the imported program", _run(lambda inputs: entry(*inputs), program, make), of_graph)
    counts = Counter([f"{name} applied" for name in journey.applied])
    counts.update([f"{name} rejected" for name, _ in journey.rejected])
    counts.update([f"{_REASON}{reason}" for _, reason in journey.rejected])
    return counts


def _transformed(trip: Trip, journey: Journey, drawn: Drawn) -> Journey:
    languages = {kernel.language for kernel in drawn.program.kernels}
    has_streams = uses_streams(drawn.program)
    for name in trip.transforms:
        transform = TRANSFORMS[name]
        if not transform.accepts(journey.module, languages) or (transform.single_stream and has_streams):
            continue
        restrides = transform.restrides(journey.module)
        try:
            with torch.no_grad():
                journey.module = transform.apply(journey.module, drawn.make_inputs[0]())
        except Exception as error:
            rejection = transform.rejection(error, journey.module)
            if rejection is None:
                raise
            journey.rejected.append((name, rejection.reason))
        else:
            journey.applied.append(name)
            journey.losses |= transform.losses
            journey.is_specialised |= transform.specialises
            journey.is_restrided |= restrides
            if transform.specialises:
                journey.losses |= FORMS[trip.form].losses_when_traced
    return journey


# --- comparisons ------------------------------------------------------------------------------------------------------


_LAST_BITS = 1e-6
"""The relative difference of results of one operator in two layouts; see `Transform.restrides`."""


def _writes_other_layouts(program: Program) -> bool:
    """Whether a program calls an out variant, which may write another layout than the operator without it returns."""
    return any(isinstance(line, ExternCall) and line.outs for line in program.lines())


def assert_same(
    what: str, results: Sequence[Any], wanted: Sequence[Any], strides: bool = True, tolerance: float = 0.0
) -> None:
    """Raises AssertionError if results differ by more than the tolerance, in a type, or in strides."""
    assert len(results) == len(wanted), f"{what} returns {len(results)} values, not {len(wanted)}"
    for position, (result, want) in enumerate(zip(results, wanted)):
        assert type(result) is type(want), f"{what}, value {position}: {result!r} is not {want!r}"
        if isinstance(want, torch.Tensor):
            message = partial("{}, value {}: {}".format, what, position)
            torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=message)
            same = not strides or _strides(result) == _strides(want)
            assert same, f"{what}, value {position}: strides {result.stride()}"
        else:
            assert result == want or result != result != want != want, (
                f"{what}, value {position}: {result} is not {want}"
            )


def _strides(tensor: torch.Tensor) -> list[int]:
    """Returns the strides that say where elements are."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1] if tensor.numel() else []


def _plan(program: Program, symbols: Symbols) -> MemoryPlan:
    known = _values(program, symbols)
    return plan_memory(program, alignment=lambda _device: 64, algorithm="greedy_by_size", hints=known)


def _values(program: Program, symbols: Symbols) -> dict[str, Number]:
    """Returns the values of a program's symbols, as far as they follow from those that are known."""
    known = {name: number for name, number in symbols.items() if name in symbol_infos(program)}
    for line in program.lines():
        if isinstance(line, Let):
            known[line.symbol.name] = evaluate(line.expr, {**hints_with_fallback(program), **known})
    return known


def _memory(block: BlockPlan) -> tuple[Any, ...]:
    """Returns a plan without names and positions."""
    pools = [(str(pool.device), pool.memory_space, len(pool.allocations)) for pool in block.pools]
    return block.peak, block.lower_bound, sorted(pools)


def _imported(module: GraphModule, program: Program) -> Program:
    """Returns the program of a graph. Graphs that were traced have no ownership of inputs."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    ownership = {name: item.ownership for name, item in zip(names, program.inputs, strict=True)}
    return fxwrap.from_fx(module, ownership=ownership)


def _check_program(journey: Journey, form: Form, drawn: Drawn, imported: Program) -> None:
    """Checks an imported program and its memory plan, up to the losses of the transforms.

    Symbols that became numbers change neither peaks nor lower bounds, which are those of the example's sizes, but the
    pools that buffers of symbolic sizes cannot share. Tracing leaves out results that nothing uses. A program that was
    drawn as IR has other calls after the functional form, but no higher peak of memory.
    """
    losses, program, symbols = journey.losses, drawn.program, drawn.symbols
    if form.has_no_plan and drawn.options is None and not losses and not uses_streams(program):
        peak, before = (_peak(item, symbols) for item in (imported, program))
        assert peak <= before, f"the peak memory grows from {before} to {peak} bytes"
    if Loss.CALLS in losses or (form.has_no_plan and (losses or drawn.options is None)):
        return
    original = program
    if not losses:
        assert_equal(program, imported, copied=True)  # `deepcopy` copies constants
    else:
        original, imported = _without_unused(form, program), _without_unused(form, imported)
    if Loss.SYMBOLS not in losses:
        planned, wanted = (_plan(canonicalize_program(item), symbols).blocks for item in (imported, original))
        assert list(map(_memory, planned)) == list(map(_memory, wanted)), "the memory plan differs"
        return
    peaks, expected = (_peaks(_plan(item, symbols)) for item in (imported, original))
    assert peaks == expected, f"the plan has the peaks and lower bounds {peaks}, not {expected}"


def _peak(program: Program, symbols: Symbols) -> int:
    """Returns the most live bytes, without memory plan, for the values of the symbols."""
    return live_bytes(program, hints_with_fallback(program, _values(program, symbols))).peak


def _peaks(plan: MemoryPlan) -> tuple[object, ...]:
    """Returns the peaks and lower bounds of the body and of other blocks; tracing copies functions that are shared."""
    body, *others = [(block.peak, block.lower_bound) for block in plan.blocks]
    return body, sorted(set(others))


def _without_unused(form: Form, program: Program) -> Program:
    """Returns a program without calls and results that nothing uses."""
    module = form.emit(program)
    for part in module.modules():
        if isinstance(part, GraphModule):
            part.graph.eliminate_dead_code()
            for node in part.graph.nodes:
                node.meta.pop("fxwrap_line", None)  # which has results without nodes
    return _imported(module, program)


# --- the command ------------------------------------------------------------------------------------------------------


def round_trips(
    first: int, count: int, jobs: int, seconds: float, sources: Sequence[str], forms: Sequence[str]
) -> Iterator[Outcome]:
    """Yields each trip with its counts, or with its failure."""
    return run_seeds(Task(partial(Subject, sources=sources, forms=forms), run_trip), first, count, jobs, seconds)


def main() -> int:
    """Prints failures while they happen, and counts at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000, help="the first program's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default=",".join(SOURCES), help="sources of programs")
    parser.add_argument("--form", default=",".join(FORMS), help="forms of graphs")
    add_record_option(parser)
    chosen = parser.parse_args()
    trips, failures, forms_missing = Counter[Key](), Counter[Key](), Counter[Key]()
    counts, seeds, failed = Counter[str](), set[int](), list[str]()
    start = time.monotonic()
    sources, forms = chosen.only.split(","), chosen.form.split(",")
    with suppress(KeyboardInterrupt):  # an interrupted run prints its counts
        for trip, result in round_trips(chosen.seed, chosen.programs, chosen.jobs, chosen.seconds, sources, forms):
            key = (trip.form, trip.source)
            trips[key] += 1
            seeds.add(trip.seed)
            if isinstance(result, Failure):
                failures[key] += 1
                failed.append(f"{trip.seed} ({trip.form})")
                print(f"seed {trip.seed} ({trip.form}, {trip.source})\n{result.text}\n", flush=True)
            else:
                counts.update(result)
                forms_missing[key] += result["no form"]
    note = f"seeds from {chosen.seed} on, {time.monotonic() - start:.0f} s with {chosen.jobs} processes"
    report = Report("round_trips", chosen, note=note)
    for key in sorted(trips):
        row: dict[str, Any] = dict(zip(("form", "programs from"), key))
        report.add({**row, "programs": trips[key], "without the form": forms_missing[key], "failures": failures[key]})
    steps = Report("round_trips-transforms", chosen, note=note)
    for name in TRANSFORMS:
        applied, rejected = counts[f"{name} applied"], counts[f"{name} rejected"]
        steps.add({"transform": name, "graphs": applied + rejected, "rejected by torch": rejected})
    reasons = Report("round_trips-rejections", chosen, note=note)
    for key, count in sorted(counts.items()):
        if key.startswith(_REASON):
            reasons.add({"why torch rejects graphs": key.removeprefix(_REASON), "graphs": count})
    if failed:
        print(f"seeds that failed: {', '.join(failed)}")
    total = f"{len(seeds)} programs, {trips.total()} round trips, {failures.total()} failures"
    print(f"{total}, {counts['no program']} that torch cannot trace; {note}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
