"""`compare`: one function, run in eager mode and by every emitter on copies of the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxwrap.comparison.backends import Backend, ComparedBackend, compared_backends
from fxwrap.comparison.measure import device_activity, peak_bytes, run_times
from fxwrap.comparison.observe import (
    Arguments,
    Comparator,
    Function,
    Observation,
    RunConfig,
    largest_error,
    normalize_arguments,
)
from fxwrap.comparison.report import Report, RunOutcome
from fxwrap.comparison.subjects import CapturedGraph, Subject, is_graph, make_subject
from fxwrap.debugging import (
    CorrectedEager,
    Float64Mode,
    OpaqueState,
    TensorState,
    copy_inputs,
    infer_random_dtype,
    widen_module,
)
from fxwrap.errors import CompareError, OptionError
from fxwrap.lines import Launch
from fxwrap.options import EMITTERS, Options

COMPARED_EMITTERS = ("interpreter", *[emitter for emitter in EMITTERS if emitter != "interpreter"])
"""The emitters in the order in which they are compared."""


def compare(
    fn: object,
    inputs: object,
    *,
    options: Options | Mapping[str, object] | None = None,
    training: bool = False,
    emitters: Sequence[str] = COMPARED_EMITTERS,
    backends: Sequence[Backend] = (),
    tolerance: float | None = None,
    repeats: int = 20,
    seed: int = 0,
    dynamic: bool | None = False,
) -> Report:
    """Runs a function in eager mode, in float64 and by each emitter, and reports differences and costs.

    `torch.compile` captures a function or module once; its caches are cleared before and after. A graph of ATen
    operators or an exported program is lowered directly; a `Program` is compared with the interpreter. Every run starts
    from the same seed, on copies of the inputs with equal strides, offsets and storage sharing, and on the opaque
    inputs themselves (process groups, meshes, generators), whose attributes and states are restored. Mutations of
    inputs, parameters and buffers are compared and then undone. A function must not mutate other tensors that it
    captures.

    Args:
        fn: a function, nn.Module, GraphModule, ExportedProgram or Program.
        inputs: the positional arguments in a tuple or list, the keyword arguments in a mapping, or one tensor.
        options: as for `compile_graph`; `emitter` has no effect.
        training: whether to run the backward with fixed random cotangents, and compare gradients.
        emitters: the emitters to run.
        backends: backends of torch.compile to run beside them: names ("inductor"), functions of a graph and its inputs,
            or pairs of one of these and options, as `("inductor", {"cpp_wrapper": True})`.
        tolerance: the relative error by norm that counts as equal, for every dtype; None means `TOLERANCES`.
        repeats: the most timed runs, within about a second; 0 omits time and memory.
        seed: the seed of all random numbers.
        dynamic: as for `torch.compile`.

    Raises CompareError if `fn` cannot be compared or fails in eager mode, and OptionError for an unknown emitter. The
    report has the errors of emitters, and names the operators that eager computes wrongly, whose results were corrected
    before the comparison.
    """
    for emitter in emitters:
        if emitter not in EMITTERS:
            raise OptionError(f"unknown emitter {emitter!r}; known emitters: {', '.join(EMITTERS)}")
    if training and is_graph(fn):
        raise CompareError("a graph or program has no gradients; compare the function or module itself")
    arguments = normalize_arguments(inputs)
    objects = OpaqueState((arguments.positional, arguments.keywords))
    with preserve_rng_state(), reset_compiler_caches(fn):
        subject = make_subject(fn, arguments, as_options(options), dynamic)
        try:
            config = RunConfig(seed, training, subject.nested_outputs, subject.donated_inputs)
            others = compared_backends(backends)
            return _Comparison(subject, arguments, objects, config, tolerance, repeats, dynamic, others).report(
                emitters
            )
        finally:
            subject.state.restore_all()
            objects.restore()


def capture(
    fn: object,
    inputs: object,
    *,
    options: Options | Mapping[str, object] | None = None,
    training: bool = False,
    dynamic: bool | None = False,
) -> tuple[CapturedGraph, ...]:
    """Returns the compiled graphs of a function, in the order of capture.

    Takes the arguments of `compare`. Runs the function once, on copies of the inputs, with its backward if `training`.
    """
    arguments = normalize_arguments(inputs)
    with preserve_rng_state(), reset_compiler_caches(fn):
        subject = make_subject(fn, arguments, as_options(options), dynamic)
        if subject.nested_outputs:
            try:
                RunConfig(0, training).run(subject.call("interpreter"), _copy(arguments))
            finally:
                subject.state.restore_all()
        return tuple(subject.graphs)


def as_options(options: Options | Mapping[str, object] | None) -> Options:
    """Returns options that are a mapping as `Options`."""
    return options if isinstance(options, Options) else Options.from_mapping(options)


@dataclass(frozen=True)
class _Comparison:
    subject: Subject
    arguments: Arguments
    objects: OpaqueState
    config: RunConfig
    tolerance: float | None
    repeats: int
    dynamic: bool | None
    backends: Sequence[ComparedBackend]

    def report(self, emitters: Sequence[str]) -> Report:
        """Runs eager, the reference and the emitters, and returns the report."""
        corrected = CorrectedEager()
        try:
            with corrected:
                eager = self._observe(self.subject.eager)
        except Exception as error:
            raise CompareError(f"the function fails in eager mode: {type(error).__name__}: {error}") from error
        with corrected:
            reference, failure = self._reference()
        judge = Comparator(eager, reference, self.tolerance)
        outcomes = [
            RunOutcome("eager", float64_error=None if reference is None else largest_error(eager, reference)),
            RunOutcome("float64", failure),
            *[self._outcome(emitter, judge) for emitter in emitters],
            *[self._backend_outcome(backend, judge) for backend in self.backends],
        ]
        if self.repeats:
            outcomes = self._measure(outcomes)
        programs = [graph.compiled.program for graph in self.subject.graphs]
        lines = sum(1 for program in programs for _ in program.lines())
        return Report(self.subject.title, tuple(outcomes), len(programs), lines, tuple(corrected.defects))

    def _outcome(self, emitter: str, judge: Comparator) -> RunOutcome:
        call = self.subject.call(emitter)
        try:
            run = self._observe(call)
        except Exception as error:  # noqa: BLE001  any error is an outcome
            return RunOutcome(emitter, f"{type(error).__name__}: {error}")
        graphs = [graph for graph in self.subject.graphs if emitter in graph.emitted_programs]
        if not graphs:
            return RunOutcome(emitter, "torch.compile captured no graph, so nothing was compiled")
        return replace(
            _judged(emitter, run, judge),
            compile_seconds=sum(graph.lower_seconds + graph.build_seconds[emitter] for graph in graphs),
            lines=sum(graph.emitted_programs[emitter].source.count("\n") for graph in graphs),
            kernels=sum(len(graph.compiled.program.kernels) for graph in graphs),
            launches=sum(isinstance(line, Launch) for graph in graphs for line in graph.compiled.program.lines()),
        )

    def _backend_outcome(self, backend: ComparedBackend, judge: Comparator) -> RunOutcome:
        call = backend.call(self.subject.eager, self.dynamic)
        try:
            run = backend.time_first(lambda: self._observe(call))
        except Exception as error:  # noqa: BLE001  any error is an outcome
            return RunOutcome(backend.label, f"{type(error).__name__}: {error}")
        return replace(
            _judged(backend.label, run, judge), compile_seconds=backend.first_seconds, kernels=backend.kernels
        )

    def _observe(self, call: Function) -> Observation:
        return self.config.observe(call, self._prepare(), self.subject.state)

    def _reference(self) -> tuple[Observation | None, str]:
        """Returns the observation of the float64 run, or None and the reason."""
        if self.subject.reference is None:
            return None, "a program has fixed dtypes"
        self._restore()
        tensors = [leaf for leaf in self.arguments.named().values() if isinstance(leaf, Tensor)]
        mode = Float64Mode(infer_random_dtype([*tensors, *self.subject.state.tensors.values()]))
        try:
            function = widen_module(self.subject.reference)
            arguments, state = _copy(self.arguments, to_float64=True), _state_like(self.subject.state, function)
            with mode:
                return self.config.observe(function, arguments, state), ""
        except Exception as error:  # noqa: BLE001  float64 may not work in any function
            return None, f"{type(error).__name__}: {error}"

    def _measure(self, outcomes: Sequence[RunOutcome]) -> list[RunOutcome]:
        running = [outcome for outcome in outcomes if outcome.name != "float64" and not outcome.failure]
        runs = [self._run(outcome.name) for outcome in running]
        measured: dict[str, RunOutcome] = {}
        for outcome, times, run in zip(running, run_times(self._prepare, runs, self.repeats), runs, strict=True):
            launches, device_seconds = device_activity(self._prepare, run) or (outcome.launches, None)
            measured[outcome.name] = replace(
                outcome, run_seconds=times.seconds, host_seconds=times.host_seconds, device_seconds=device_seconds,
                launches=launches, peak_bytes=peak_bytes(self._prepare, run),
            )  # fmt: skip
        return [measured.get(outcome.name, outcome) for outcome in outcomes]

    def _prepare(self) -> Arguments:
        self._restore()
        torch.manual_seed(self.config.seed)
        return _copy(self.arguments)

    def _restore(self) -> None:
        self.subject.state.restore()
        self.objects.restore()

    def _run(self, name: str) -> Callable[[Arguments], object]:
        call = self._call(name)
        return lambda arguments: self.config.run(call, arguments)

    def _call(self, name: str) -> Function:
        """Returns the function of a row of the report."""
        if name == "eager":
            return self.subject.eager
        for backend in self.backends:
            if backend.label == name:
                return backend.call(self.subject.eager, self.dynamic)
        return self.subject.call(name)


def _judged(name: str, run: Observation, judge: Comparator) -> RunOutcome:
    """Returns the outcome of a run, without its costs."""
    return RunOutcome(
        name, "", largest_error(run, judge.eager),
        None if judge.reference is None else largest_error(run, judge.reference), judge.disagreements(run),
    )  # fmt: skip


def _copy(arguments: Arguments, to_float64: bool = False) -> Arguments:
    return Arguments(*copy_inputs((arguments.positional, dict(arguments.keywords or {})), to_float64=to_float64))


def _state_like(state: TensorState, function: object) -> TensorState:
    """Returns the state of a widened module under the original's names; other tensors are the original's."""
    if not isinstance(function, torch.nn.Module):
        return state
    own = {**dict(function.named_parameters()), **dict(function.named_buffers())}
    return TensorState({name: own.get(name, tensor) for name, tensor in state.tensors.items()})


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restores the states of the default generators at the end of the block."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def reset_compiler_caches(fn: object) -> Iterator[None]:
    """Resets torch.compile, so that comparisons do not count toward its recompile limit."""
    if is_graph(fn):
        yield
        return
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()
