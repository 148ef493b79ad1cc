"""`compare`: one function, run in every way on copies of the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxwrap.compare.copies import State, copied, widened
from fxwrap.compare.measure import median_seconds, peak_bytes
from fxwrap.compare.observe import Arguments, Judge, Observation, Way, largest_error
from fxwrap.compare.reference import Float64Mode, drawn_dtype
from fxwrap.compare.report import Outcome, Report
from fxwrap.compare.subjects import CapturedGraph, Subject, is_graph, subject_of
from fxwrap.errors import CompareError, OptionError
from fxwrap.options import EMITTERS, Options

COMPARED = ("interpreter", *[emitter for emitter in EMITTERS if emitter != "interpreter"])
"""The emitters in the order in which they are compared."""


def compare(
    fn: Any,
    inputs: Any,
    *,
    options: Options | Mapping[str, Any] | None = None,
    training: bool = False,
    emitters: Sequence[str] = COMPARED,
    tolerance: float | None = None,
    repeats: int = 20,
    seed: int = 0,
    dynamic: bool | None = False,
) -> Report:
    """Runs a function in every way on the same inputs, and reports how the ways differ and what they cost.

    The ways are eager PyTorch, a float64 reference, and each emitter. A function or module is captured once by
    `torch.compile` (whose caches are emptied before and after), a graph of ATen operators or an exported program is
    lowered as it is, a `Program` is compared with the interpreter. Every run starts from the same seed and gets
    inputs of its own, copied with their strides, offsets and shared memory; what a run does to inputs, parameters and
    buffers is compared and then undone. A function that keeps tensors of its own is compared rightly only when it
    leaves them alone.

    Args:
        fn: a function, nn.Module, GraphModule, ExportedProgram or Program.
        inputs: the positional arguments in a tuple or list, the keyword arguments in a mapping, or one tensor.
        options: as for `compile_graph`; the emitter they name does not matter.
        training: also pull fixed random cotangents back through the outputs, and compare gradients.
        emitters: which of `fxwrap.options.EMITTERS` to run.
        tolerance: relative error by norm that counts as equal, for every dtype; None means `TOLERANCES`.
        repeats: at most so many runs are timed, for about a second; 0 leaves out time and memory.
        seed: of all random numbers.
        dynamic: as for `torch.compile`.

    Raises CompareError when `fn` cannot be compared or fails in eager mode, OptionError for an unknown emitter. What an
    emitter raises is in the report.
    """
    chosen = options if isinstance(options, Options) else Options.from_mapping(options)
    for emitter in emitters:
        if emitter not in EMITTERS:
            raise OptionError(f"there is no emitter {emitter!r}; the known ones are {', '.join(EMITTERS)}")
    if training and is_graph(fn):
        raise CompareError("a graph or program has no gradients; compare the function or module it was made from")
    arguments = arguments_of(inputs)
    with _random_state_kept(), _compiler_caches_emptied(fn):
        subject = subject_of(fn, arguments, chosen, dynamic)
        try:
            way = Way(seed, training, subject.nested, subject.given_away)
            return _Comparison(subject, arguments, way, tolerance, repeats).report(emitters)
        finally:
            subject.state.give_back()


def capture(
    fn: Any,
    inputs: Any,
    *,
    options: Options | Mapping[str, Any] | None = None,
    training: bool = False,
    dynamic: bool | None = False,
) -> tuple[CapturedGraph, ...]:
    """Returns the compiled graphs that a function is made of, in the order in which they were captured.

    Takes what `compare` takes. A function runs once, on copies of the inputs; with `training`, forward and backward.
    """
    chosen = options if isinstance(options, Options) else Options.from_mapping(options)
    arguments = arguments_of(inputs)
    with _random_state_kept(), _compiler_caches_emptied(fn):
        subject = subject_of(fn, arguments, chosen, dynamic)
        if subject.nested:
            try:
                Way(0, training).run(subject.call("interpreter"), _copy(arguments))
            finally:
                subject.state.give_back()
        return tuple(subject.graphs)


def arguments_of(inputs: Any) -> Arguments:
    """Returns what a caller gave as inputs: a tuple or list, a mapping of keywords, or one value."""
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    return Arguments(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


@dataclass(frozen=True)
class _Comparison:
    """One comparison under way: what is run, on what, and how."""

    subject: Subject
    arguments: Arguments
    way: Way
    tolerance: float | None
    repeats: int

    def report(self, emitters: Sequence[str]) -> Report:
        """Runs all ways and returns what they did."""
        try:
            eager = self._observe(self.subject.eager)
        except Exception as error:
            raise CompareError(f"the function fails in eager mode: {type(error).__name__}: {error}") from error
        reference, failure = self._reference()
        judge = Judge(eager, reference, self.tolerance)
        outcomes = [
            Outcome("eager", against_float64=None if reference is None else largest_error(eager, reference)),
            Outcome("float64", failure),
            *[self._outcome(emitter, judge) for emitter in emitters],
        ]
        if self.repeats:
            outcomes = self._measured(outcomes)
        programs = [graph.compiled.program for graph in self.subject.graphs]
        lines = sum(1 for program in programs for _ in program.lines())
        return Report(self.subject.title, tuple(outcomes), len(programs), lines)

    def _outcome(self, emitter: str, judge: Judge) -> Outcome:
        call = self.subject.call(emitter)
        try:
            run = self._observe(call)
        except Exception as error:  # noqa: BLE001  whatever it is, it is the outcome
            return Outcome(emitter, f"{type(error).__name__}: {error}")
        graphs = [graph for graph in self.subject.graphs if emitter in graph.forms]
        if not graphs:
            return Outcome(emitter, "torch.compile captured no graph, so nothing was compiled")
        return Outcome(
            emitter,
            "",
            largest_error(run, judge.eager),
            None if judge.reference is None else largest_error(run, judge.reference),
            judge.disagreements(run),
            sum(graph.lower_seconds + graph.build_seconds[emitter] for graph in graphs),
            lines=sum(graph.forms[emitter].source.count("\n") for graph in graphs),
        )

    def _observe(self, call: Callable[..., Any]) -> Observation:
        return self.way.observe(call, self._prepare(), self.subject.state)

    def _reference(self) -> tuple[Observation | None, str]:
        """Returns what a float64 run leaves, or None and why there is none."""
        if self.subject.reference is None:
            return None, "a program computes in the dtypes that it names"
        self.subject.state.restore()
        tensors = [leaf for leaf in self.arguments.named().values() if isinstance(leaf, Tensor)]
        mode = Float64Mode(drawn_dtype([*tensors, *self.subject.state.tensors.values()]))
        try:
            function = widened(self.subject.reference)
            arguments, state = _copy(self.arguments, wide=True), _state_like(self.subject.state, function)
            with mode:
                return self.way.observe(function, arguments, state), ""
        except Exception as error:  # noqa: BLE001  a function may hold what float64 does not go with
            return None, f"{type(error).__name__}: {error}"

    def _measured(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Returns the outcomes with the time and the memory of a run, of those that run."""
        running = [outcome for outcome in outcomes if outcome.name != "float64" and not outcome.failure]
        runs = [self._run(outcome.name) for outcome in running]
        seconds = median_seconds(self._prepare, runs, self.repeats)
        measured = {
            outcome.name: replace(outcome, run_seconds=taken, peak_bytes=peak_bytes(self._prepare, run))
            for outcome, taken, run in zip(running, seconds, runs)
        }
        return [measured.get(outcome.name, outcome) for outcome in outcomes]

    def _prepare(self) -> Arguments:
        self.subject.state.restore()
        torch.manual_seed(self.way.seed)
        return _copy(self.arguments)

    def _run(self, name: str) -> Callable[[Arguments], Any]:
        call = self.subject.eager if name == "eager" else self.subject.call(name)
        return lambda arguments: self.way.run(call, arguments)


def _copy(arguments: Arguments, wide: bool = False) -> Arguments:
    return Arguments(*copied((arguments.positional, dict(arguments.keywords or {})), wide=wide))


def _state_like(state: State, function: Any) -> State:
    """Returns the state of a widened copy under the names of the original's; of what is not copied, the original's."""
    if not isinstance(function, torch.nn.Module):
        return state
    own = {**dict(function.named_parameters()), **dict(function.named_buffers())}
    return State({name: own.get(name, tensor) for name, tensor in state.tensors.items()})


@contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def _compiler_caches_emptied(fn: Any) -> Iterator[None]:
    """torch.compile gives up on a function that it has compiled too often; comparisons do not count against that."""
    if is_graph(fn):
        yield
        return
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()
