"""The search for the first wrong line of a compiled graph, and for the part of the compiler that is at fault.

All parts have a reference: the float64 run of the imported graph for FX passes; the graph that was lowered, operator by
operator, for lines; the loop IR evaluator for printed kernels; the interpreter for converters; and each stage for the
pass after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from fxwrap.converters.emission import emit
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram
from fxwrap.debugging.agreement import compare_results
from fxwrap.debugging.copies import WIDENED_DTYPES, OpaqueState, TensorState, copy_inputs
from fxwrap.debugging.divergence import Divergence, DivergingLine, Part
from fxwrap.debugging.evaluating_interpreter import EvaluatingInterpreter
from fxwrap.debugging.points import ObservationPoint, insert_observations, observation_points
from fxwrap.debugging.references import GraphRun, flat_outputs, reduced_elements, run_graph
from fxwrap.debugging.repro import Failure
from fxwrap.debugging.single_operators import is_lowered_wrong
from fxwrap.debugging.statistics import tensor_statistics
from fxwrap.devices import line_handlers
from fxwrap.errors import ExpressionError
from fxwrap.fx_passes import GraphSource, PreparedGraph
from fxwrap.fx_passes.source import source_of
from fxwrap.lines import Launch
from fxwrap.options import Options
from fxwrap.passes.communication import size_values
from fxwrap.runtime.operators import Observer, observing
from fxwrap.symbolic import evaluate
from fxwrap.torch_compat import FakeTensor, OpOverload
from fxwrap.wrapper_ir import Origin, Ownership, Program, line_text, operator_schema


@dataclass(frozen=True)
class GraphCase:
    """A compiled graph with all of its forms.

    Fields:
        name: the graph's name.
        graphs: the imported graph, and the graph after each FX pass that changed it, by the pass's name, in order.
        prepared: the graph that was lowered.
        stages: the program after each step that changed it, by the step's name, in order.
        emitted: the emitted program.
        options: the options of the compile.
        emitter: the emitter, or the interpreter that takes its place.
        fake_inputs: the metadata of emitted FX graphs.
    """

    name: str
    graphs: Sequence[tuple[str, GraphSource]]
    prepared: PreparedGraph
    stages: Sequence[tuple[str, Program]]
    emitted: EmittedProgram
    options: Options
    emitter: str
    fake_inputs: Mapping[str, FakeTensor]

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.stages[-1][1]


def find_divergence(case: GraphCase, inputs: Sequence[object], memory_bytes: int | None = None) -> Divergence | None:
    """Returns the first wrong line of a graph on flat inputs, which are not changed; None if it agrees.

    Raises the error of the graph or program that fails.

    Args:
        case: the compiled graph.
        inputs: the flat inputs.
        memory_bytes: how much memory reference values may have; more runs need less. By default a fourth of the free
            memory.
    """
    return _Bisector(case, inputs, _default_memory() if memory_bytes is None else memory_bytes).find()


def _default_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


@dataclass(frozen=True)
class _Wrong:
    """A wrong value: the point, or None for an output, its line, its node and its description."""

    point: ObservationPoint | None
    line: DivergingLine


class _Bisector:
    def __init__(self, case: GraphCase, inputs: Sequence[object], memory_bytes: int) -> None:
        self.case = case
        self.inputs = list(inputs)
        self.memory_bytes = memory_bytes
        self.runs = self.reference_runs = 0
        self._objects = OpaqueState(self.inputs)
        self._random = _RandomState()
        self._uninitialised = {
            node.name for node in case.prepared.nodes
            if isinstance(node.target, OpOverload) and operator_schema(node.target).name.startswith(_UNINITIALISED)
        }  # fmt: skip
        self._references: tuple[GraphRun, GraphRun] | None = None
        sizes = self._reference_bytes(case.program, self._points(case.program))
        self._holds_all = _HIDDEN_NODES * sum(sizes.values()) <= memory_bytes

    def find(self) -> Divergence | None:
        program = self.case.program
        wrong = self.first_wrong(program, self._emitted)
        if wrong is not None:
            part, culprit, wrong = self._part_at_fault(wrong)
            return self._divergence(part, culprit, wrong.line)
        line = self._wrong_output(program, self._run(program, self.case.emitted.boxed, _ignore))
        if line is not None:  # right only while its lines are observed
            return self._divergence("converter", f"'{self.case.emitter}'", line)
        return self._graph_pass()

    def _divergence(self, part: Part, culprit: str, line: DivergingLine | None) -> Divergence:
        lines = sum(1 for _ in self.case.program.lines())
        divergence = Divergence(
            self.case.name, part, culprit, line, self.case.emitter, lines, self.runs, self.reference_runs
        )
        options = self.case.options.replace(debug=None)
        module = self.case.graphs[0][1].graph_module
        failure = Failure(module, copy_inputs(self.inputs), options, "accuracy", str(divergence))
        return replace(divergence, failure=failure)

    # --- runs -------------------------------------------------------------------------------------------------------

    def _emitted(self, program: Program) -> BoxedCallable:
        case = self.case
        return emit(program, case.emitter, case.fake_inputs, case.options.fx_form).boxed

    def _interpreted(self, program: Program) -> BoxedCallable:
        return emit(program, "interpreter").boxed

    def _run(self, program: Program, entry: BoxedCallable, observer: Observer) -> tuple[object, ...]:
        """Runs a program once on copies of the inputs, and restores what it wrote besides."""
        self.runs += 1
        names = {item.value.name for item in program.constants if item.mutable}
        constants = TensorState({name: item for name, item in program.store.tensors.items() if name in names})
        self._objects.restore()
        self._random.restore()
        try:
            with torch.no_grad(), observing(observer):
                return tuple(entry(self._copies(program)))
        finally:
            constants.restore_all()
            self._objects.restore()
            self._random.restore()

    def _copies(self, program: Program) -> list[object]:
        """Returns the inputs; those that the program may write or release are copies."""
        copies = copy_inputs(self.inputs)
        borrowed = [item.ownership is Ownership.BORROWED for item in program.inputs]
        return [item if keep else copy for item, copy, keep in zip(self.inputs, copies, borrowed, strict=True)]

    def _reference(self, nodes: frozenset[str]) -> tuple[GraphRun, GraphRun]:
        """Returns the results of nodes, in the graph's own dtypes and in float64."""
        if self._references is None or not nodes <= self._references[0].results.keys():
            self.reference_runs += 2
            recorded = None if self._holds_all else nodes
            self._random.restore()
            eager = run_graph(self.case.prepared, self.inputs, nodes=recorded)
            self._random.restore()
            exact = run_graph(self.case.prepared, self.inputs, nodes=recorded, in_float64=True)
            self._random.restore()
            self._references = eager, exact
        return self._references

    # --- the first wrong value --------------------------------------------------------------------------------------

    def first_wrong(self, program: Program, emit_program: Callable[[Program], BoxedCallable]) -> _Wrong | None:
        """Returns the first value of a program that differs from the graph's, or a wrong output; None without one.

        If memory cannot hold all reference values at once, samples of the points narrow the search.
        """
        points = self._points(program)
        entry = emit_program(insert_observations(program, {point.number for point in points}))
        sizes = self._reference_bytes(program, points)
        sample = _sample(points, sizes, self.memory_bytes, with_last=True)
        wrong = self._first_wrong_of(program, entry, sample)
        if len(sample) == len(points) or wrong is None or wrong.point is None:
            return wrong
        low, high = _bounds(points, sample, wrong.point)
        while low < high:
            sample = _sample(points[low:high], sizes, self.memory_bytes)
            earlier = self._first_wrong_of(program, entry, sample)
            if earlier is None or earlier.point is None:
                low = points.index(sample[-1]) + 1
            else:
                wrong = earlier
                start, high = _bounds(points, sample, earlier.point)
                low = max(low, start)
        return wrong

    def _points(self, program: Program) -> list[ObservationPoint]:
        """Returns the points whose values the graph has too, but for memory that nothing was written into."""
        return [
            point for point in observation_points(program)
            if point.node and not point.nested and point.node not in self._uninitialised
        ]  # fmt: skip

    def _reference_bytes(self, program: Program, points: Sequence[ObservationPoint]) -> dict[int, int]:
        """Returns the bytes of both references of each point, by its number."""
        values = size_values(program, self.inputs)
        sizes: dict[int, int] = {}
        for point in points:
            type_ = point.value.tensor_type
            with suppress(ExpressionError, ArithmeticError, KeyError):
                own = type_.storage_bytes
                own = own if isinstance(own, int) else int(evaluate(own, values))
                wide = WIDENED_DTYPES.get(type_.dtype, type_.dtype).itemsize
                sizes[point.number] = own + own * wide // type_.dtype.itemsize
        return sizes

    def _first_wrong_of(
        self, program: Program, entry: BoxedCallable, points: Sequence[ObservationPoint]
    ) -> _Wrong | None:
        """Runs a program once and returns the first of these points that is wrong, or a wrong output."""
        eager, exact = self._reference(frozenset([point.node for point in points]))
        by_number = {point.number: point for point in points}
        wrong: list[_Wrong] = []

        def observe(number: int, value: Tensor) -> None:
            if not wrong and (point := by_number.get(number)) is not None:
                line = self._compare(point, value, eager, exact)
                if line is not None:
                    wrong.append(_Wrong(point, line))

        outputs = self._run(program, entry, observe)
        if wrong:
            return wrong[0]
        line = self._wrong_output(program, outputs)
        return None if line is None else _Wrong(None, line)

    def _compare(
        self, point: ObservationPoint, value: Tensor, eager: GraphRun, exact: GraphRun
    ) -> DivergingLine | None:
        """Returns the description of a wrong value; None for one that agrees or has no reference of its size."""
        expected, truth = eager.tensor(point.node, point.position), exact.tensor(point.node, point.position)
        if expected is None or truth is None or not expected.numel() == truth.numel() == value.numel():
            return None
        agreement = compare_results(value, expected, truth, reduced_elements(eager, point.node))
        if agreement.holds:
            return None
        origin, line = point.origin, point.line
        return DivergingLine(
            point.line_number, point.text, origin.handle, line.kernel if isinstance(line, Launch) else "",
            origin.nodes, origin.operators, origin.locations, origin.modules, point.node,
            tensor_statistics(value), tensor_statistics(expected), tensor_statistics(truth), agreement,
        )  # fmt: skip

    def _wrong_output(self, program: Program, outputs: Sequence[object]) -> DivergingLine | None:
        """Returns the line that returns the outputs of a program if one of them is wrong."""
        eager, exact = self._reference(frozenset())
        last = program.body.lines[-1]
        number = len(program.body.lines) - 1
        output = self.case.prepared.output
        nodes = flat_outputs(output.args[0])
        for position, (value, expected, truth) in enumerate(zip(outputs, eager.outputs, exact.outputs)):
            if not (isinstance(value, Tensor) and isinstance(expected, Tensor) and isinstance(truth, Tensor)):
                continue
            source = nodes[position]
            node = source.name if isinstance(source, Node) else ""
            agreement = compare_results(value, expected, truth, reduced_elements(eager, node))
            if not agreement.holds:
                origin = Origin((source_of(source),) if isinstance(source, Node) else ())
                return DivergingLine(
                    number, line_text(last), "", "", (node,), origin.operators, origin.locations, origin.modules, node,
                    tensor_statistics(value), tensor_statistics(expected), tensor_statistics(truth), agreement,
                )  # fmt: skip
        return None

    # --- the part at fault ------------------------------------------------------------------------------------------

    def _part_at_fault(self, wrong: _Wrong) -> tuple[Part, str, _Wrong]:
        """Returns the part that is at fault for a wrong value of the emitted program, its name, and the wrong value."""
        program = self.case.program
        if self.case.emitter != "interpreter":
            interpreted, interpreter = self._interpret(program, wrong)
            if interpreted is None:
                return "converter", f"'{self.case.emitter}'", wrong
        else:
            interpreted, interpreter = self._interpret(program, wrong)
            interpreted = interpreted or wrong
        if self._evaluates_right(wrong, interpreter):
            line = wrong.point.line if wrong.point is not None else None
            assert isinstance(line, Launch)
            kernel = program.kernel(line.kernel)
            return "kernel printer", f"'{kernel.language}', kernel @{kernel.name}", wrong
        return self._stage_at_fault(interpreted)

    def _interpret(self, program: Program, wrong: _Wrong) -> tuple[_Wrong | None, EvaluatingInterpreter]:
        """Interprets a program, and evaluates the loop IR of the wrong line."""
        points = [wrong.point] if wrong.point is not None else []
        observed = insert_observations(program, {point.number for point in points})
        line = wrong.point.line if wrong.point is not None else None
        interpreter = EvaluatingInterpreter(observed, line_handlers(EvaluatingInterpreter.name), line)
        return self._first_wrong_of(program, interpreter.run, points), interpreter

    def _evaluates_right(self, wrong: _Wrong, interpreter: EvaluatingInterpreter) -> bool:
        """Whether the loop IR of the wrong line's kernel computes the right value."""
        point, evaluated = wrong.point, interpreter.evaluated
        if point is None or evaluated is None or not isinstance(point.line, Launch):
            return False
        value = evaluated[point.line.outs.index(point.value)]
        eager, exact = self._reference(frozenset([point.node]))
        return self._compare(point, value.to(point.value.tensor_type.device), eager, exact) is None

    def _stage_at_fault(self, wrong: _Wrong) -> tuple[Part, str, _Wrong]:
        """Returns the step after which a program is wrong, by halving; the first step is the lowering."""
        stages = self.case.stages
        low, high = 0, len(stages) - 1  # the last one is wrong
        while low < high:
            middle = (low + high) // 2
            earlier = self.first_wrong(stages[middle][1], self._interpreted)
            if earlier is None:
                low = middle + 1
            else:
                high, wrong = middle, earlier
        name = stages[low][0]
        if low:
            return "pass", f"'{name}'", wrong
        return "lowering", f"of {', '.join(self._operators_at_fault(wrong.line)) or 'the graph'}", wrong

    def _operators_at_fault(self, line: DivergingLine) -> tuple[str, ...]:
        """Returns the operator of a fused kernel that is wrong alone, else all of the line's operators."""
        nodes = {node.name: node for node in self.case.prepared.nodes}
        fused = [nodes[name] for name in line.nodes if name in nodes]
        if len(fused) < 2:
            return line.operators
        names = frozenset([item.name for node in fused for item in (node, *node.all_input_nodes)])
        eager, exact = self._reference(names)
        for node in fused:
            if is_lowered_wrong(node, self.case.options, eager, exact):
                return (str(node.target).removesuffix(".default"),)
        return line.operators

    # --- FX passes --------------------------------------------------------------------------------------------------

    def _graph_pass(self) -> Divergence | None:
        """Returns the FX pass that changed the meaning of the graph, if one did."""
        graphs = self.case.graphs
        if len(graphs) < 2:
            return None
        expected = self._exact_results(graphs[0][1])
        if self._same(expected, self._exact_results(self.case.prepared)):
            return None
        low, high = 1, len(graphs) - 1
        while low < high:
            middle = (low + high) // 2
            if self._same(expected, self._exact_results(graphs[middle][1])):
                low = middle + 1
            else:
                high = middle
        return self._divergence("graph pass", f"'{graphs[low][0]}'", None)

    def _exact_results(self, graph: GraphSource) -> list[object]:
        self.reference_runs += 1
        self._random.restore()
        run = run_graph(graph, self.inputs, nodes=(), in_float64=True)
        self._random.restore()
        return [*run.outputs, *run.inputs]

    @staticmethod
    def _same(expected: Sequence[object], results: Sequence[object]) -> bool:
        pairs = [(a, b) for a, b in zip(expected, results) if isinstance(a, Tensor) and isinstance(b, Tensor)]
        return len(expected) == len(results) and all(
            a.numel() == b.numel() and compare_results(b, a, a, _MANY).holds for a, b in pairs
        )


_HIDDEN_NODES = 4
"""How much more memory the results of all nodes are assumed to need than those that lines store."""

_UNINITIALISED = ("aten.empty", "aten.new_empty", "aten.resize")


def _ignore(_point: int, _value: Tensor) -> None:
    """Observes nothing."""


_MANY = 4096
"""The number of reduced elements that is assumed for whole graphs."""


def _sample(
    points: Sequence[ObservationPoint], sizes: Mapping[int, int], memory_bytes: int, *, with_last: bool = False
) -> list[ObservationPoint]:
    """Returns evenly spaced points whose references fit into memory together, at least one."""
    total = sum([sizes.get(point.number, 0) for point in points])
    if total <= memory_bytes or len(points) < 2:
        return list(points)
    count = max(1, min(len(points) - 1, len(points) * memory_bytes // total))
    if with_last:
        return [points[(index + 1) * len(points) // count - 1] for index in range(count)]
    return [points[(index + 1) * len(points) // (count + 1)] for index in range(count)]


def _bounds(
    points: Sequence[ObservationPoint], sample: Sequence[ObservationPoint], wrong: ObservationPoint
) -> tuple[int, int]:
    """Returns the range of the points between the sampled point before the wrong one, and the wrong one."""
    position = sample.index(wrong)
    low = points.index(sample[position - 1]) + 1 if position else 0
    return low, points.index(wrong)


class _RandomState:
    """The states of the default generators at the beginning."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Restores the states."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
