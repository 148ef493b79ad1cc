"""The search for the first wrong line of a compiled graph, and for the part of the compiler that is at fault.

All parts have a reference: the float64 run of the imported graph for FX passes; the graph that was lowered, operator by
operator, for lines; the loop IR evaluator for printed kernels; the interpreter for converters; and each stage for the
pass after it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from fxwrap.converters.emission import emit
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram
from fxwrap.debugging.agreement import compare_results
from fxwrap.debugging.copies import OpaqueState, TensorState, copy_inputs
from fxwrap.debugging.divergence import Divergence, DivergingLine, Part
from fxwrap.debugging.evaluating_interpreter import EvaluatingInterpreter, LaunchEvaluation
from fxwrap.debugging.memory_order import in_memory_order, strides_of
from fxwrap.debugging.points import ObservationPoint, insert_observations, observation_points, stored_types
from fxwrap.debugging.references import GraphRun, flat_outputs, graph_nodes, reduced_elements, run_graph
from fxwrap.debugging.repro import Failure
from fxwrap.debugging.single_operators import is_lowered_wrong
from fxwrap.debugging.statistics import tensor_statistics
from fxwrap.devices import line_handlers
from fxwrap.fx_passes import GraphSource, PreparedGraph
from fxwrap.fx_passes.model_source import source_of
from fxwrap.lines import CallFunction, Launch
from fxwrap.options import Options
from fxwrap.passes.communication import size_values
from fxwrap.runtime.operators import Observer, observing
from fxwrap.torch_compat import FakeTensor, OpOverload, tree_leaves
from fxwrap.wrapper_ir import Origin, Ownership, Program, blocks, line_text, operator_schema


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
        memory_bytes: how much memory reference values may have; the others are in a temporary file. By default a
            fourth of the free memory of each device.
    """
    return _Bisector(case, inputs, _default_memory(inputs) if memory_bytes is None else memory_bytes).find()


def _default_memory(inputs: Sequence[object]) -> int:
    """Returns a fourth of the least free memory of the host and of the inputs' GPUs."""
    gpus = {leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_cuda}
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return min([*free, *[torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]]) // 4


@dataclass(frozen=True)
class _Wrong:
    """A wrong value: the point, or None for an output, its description, and how often its line had run before."""

    point: ObservationPoint | None
    line: DivergingLine
    occurrence: int = 0


class _Bisector:
    def __init__(self, case: GraphCase, inputs: Sequence[object], memory_bytes: int) -> None:
        self.case = case
        self.inputs = list(inputs)
        self.memory_bytes = memory_bytes
        self.runs = self.reference_runs = 0
        self._objects = OpaqueState(self.inputs)
        self._random = _RandomState()
        self._nodes = graph_nodes(case.prepared.graph_module)
        self._order = {name: number for number, name in enumerate(self._nodes)}
        self._references: tuple[GraphRun, GraphRun] | None = None
        lowered = case.stages[0][1]
        self._symbols = size_values(lowered, self.inputs)
        self._stored_types = stored_types(observation_points(lowered))

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
        """Runs a program once on copies of the inputs, and restores all other memory that it wrote."""
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

    def _reference(self, nodes: Collection[str] | None = None) -> tuple[GraphRun, GraphRun]:
        """Returns the results of nodes, in the graph's own dtypes and in float64.

        The first run records all results that fit into memory, and those of lines' values. `nodes` names more that are
        needed.
        """
        if self._references is None:
            stages = {id(program): program for _, program in self.case.stages}
            needed = {point.node for program in stages.values() for point in self._points(program)}
            self._references = self._run_graph(None, needed)
        runs = self._references
        missing = [
            name for name in nodes or () if any(run.shapes.get(name) and name not in run.results for run in runs)
        ]
        return self._run_graph(nodes, ()) if missing else runs

    def _run_graph(self, nodes: Collection[str] | None, needed: Collection[str]) -> tuple[GraphRun, GraphRun]:
        """Runs the graph twice: in its own dtypes and in float64; the memory of reference values is for both."""
        runs = []
        for in_float64 in (False, True):
            self.reference_runs += 1
            share = self.memory_bytes // (2 if in_float64 else 4)
            self._random.restore()
            runs.append(run_graph(
                self.case.prepared, self.inputs, nodes=nodes, needed=needed, memory_bytes=share, in_float64=in_float64,
            ))  # fmt: skip
            self._random.restore()
        return runs[0], runs[1]

    # --- the first wrong value --------------------------------------------------------------------------------------

    def first_wrong(self, program: Program, emit_program: Callable[[Program], BoxedCallable]) -> _Wrong | None:
        """Returns the first value of a program that differs from the graph's, or a wrong output; None without one."""
        points = self._points(program)
        entry = emit_program(insert_observations(program, {point.number for point in points}))
        return self._first_wrong_of(program, entry, points)

    def _points(self, program: Program) -> list[ObservationPoint]:
        """Returns the points whose values the graph has too, but for memory that nothing was written into.

        Those of functions count only if the program calls functions in the graph's order.
        """
        points = [item for item in observation_points(program) if item.node and not self._is_uninitialised(item.node)]
        places: dict[tuple[str, int], set[int]] = {}
        for point in points:
            places.setdefault((point.node, point.position), set()).add(point.place[0])
        calls = [self._order.get(line.origin.nodes[0], -1) for line in program.body.lines
                 if isinstance(line, CallFunction) and line.origin is not None and line.origin.nodes]  # fmt: skip
        shared = set() if calls == sorted(calls) else _function_blocks(program)
        return [
            point for point in points
            if not point.nested or (len(places[point.node, point.position]) == 1 and point.place[0] not in shared)
        ]  # fmt: skip

    def _is_uninitialised(self, name: str) -> bool:
        """Whether a node allocates memory, whose contents are unknown."""
        target = self._nodes[name].node.target if name in self._nodes else None
        return isinstance(target, OpOverload) and operator_schema(target).name.startswith(_UNINITIALISED)

    def _first_wrong_of(
        self, program: Program, entry: BoxedCallable, points: Sequence[ObservationPoint]
    ) -> _Wrong | None:
        """Runs a program once and returns the first of these points that is wrong, or a wrong output."""
        eager, exact = self._reference([point.node for point in points])
        by_number = {point.number: point for point in points}
        runs: Counter[int] = Counter()
        wrong: list[_Wrong] = []

        def observe(number: int, value: Tensor) -> None:
            if not wrong and (point := by_number.get(number)) is not None:
                occurrence = runs[number]
                runs[number] += 1
                line = self._compare(point, value, eager, exact, occurrence)
                if line is not None:
                    wrong.append(_Wrong(point, line, occurrence))

        outputs = self._run(program, entry, observe)
        if wrong:
            return wrong[0]
        line = self._wrong_output(program, outputs)
        return None if line is None else _Wrong(None, line)

    def _compare(
        self, point: ObservationPoint, value: Tensor, eager: GraphRun, exact: GraphRun, occurrence: int
    ) -> DivergingLine | None:
        """Returns the description of a wrong value; None for one that agrees or has no reference of its size.

        `occurrence` is how often the line had run before.
        """
        expected, truth = (run.tensor(point.node, point.position, occurrence) for run in (eager, exact))
        if expected is None or truth is None or not expected.numel() == truth.numel() == value.numel():
            return None
        compared = self._in_one_order(point, value, expected, truth)
        if compared is None:
            return None
        agreement = compare_results(*compared, reduced_elements(eager, point.node))
        if agreement.holds:
            return None
        origin, line = point.origin, point.line
        return DivergingLine(
            point.line_number, point.text, origin.handle, line.kernel if isinstance(line, Launch) else "",
            origin.nodes, origin.operators, origin.locations, origin.modules, point.node, occurrence,
            tensor_statistics(value), tensor_statistics(expected), tensor_statistics(truth), agreement,
        )  # fmt: skip

    def _in_one_order(
        self, point: ObservationPoint, value: Tensor, expected: Tensor, truth: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns tensors whose elements have one order; None if it is unknown.

        That is the order of the memory, as the first program stores it, if a pass folded views into the value.
        """
        first, type_ = self._stored_types.get((point.node, point.position)), point.value.tensor_type
        if first is None or (first.sizes, first.strides) == (type_.sizes, type_.strides):
            return (value, expected, truth) if first is not None or value.shape == expected.shape else None
        strides = strides_of(first, self._symbols) if len(first.sizes) == expected.dim() else None
        if strides is None:
            return None
        ordered = in_memory_order(value), in_memory_order(expected, strides), in_memory_order(truth, strides)
        actual, eager, exact = ordered
        return None if actual is None or eager is None or exact is None else (actual, eager, exact)

    def _wrong_output(self, program: Program, outputs: Sequence[object]) -> DivergingLine | None:
        """Returns the line that returns the outputs of a program if one of them is wrong."""
        eager, exact = self._reference()
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
                    number, line_text(last), "", "", (node,), origin.operators, origin.locations, origin.modules,
                    node, 0, tensor_statistics(value), tensor_statistics(expected), tensor_statistics(truth),
                    agreement,
                )  # fmt: skip
        return None

    # --- the part at fault ------------------------------------------------------------------------------------------

    def _part_at_fault(self, wrong: _Wrong) -> tuple[Part, str, _Wrong]:
        """Returns the part that is at fault for a wrong value of the emitted program, its name, and the wrong value."""
        program = self.case.program
        if self.case.emitter != "interpreter":
            interpreted, evaluation = self._interpret(program, wrong)
            if interpreted is None:
                return "converter", f"'{self.case.emitter}'", wrong
        else:
            interpreted, evaluation = self._interpret(program, wrong)
            interpreted = interpreted or wrong
        if self._evaluates_right(wrong, evaluation.outs):
            line = wrong.point.line if wrong.point is not None else None
            assert isinstance(line, Launch)
            kernel = program.kernel(line.kernel)
            return "kernel printer", f"'{kernel.language}', kernel @{kernel.name}", wrong
        return self._stage_at_fault(interpreted)

    def _interpret(self, program: Program, wrong: _Wrong) -> tuple[_Wrong | None, LaunchEvaluation]:
        """Interprets a program, and evaluates the loop IR of the wrong line."""
        points = [wrong.point] if wrong.point is not None else []
        observed = insert_observations(program, {point.number for point in points})
        line = wrong.point.line if wrong.point is not None else None
        handlers = line_handlers(EvaluatingInterpreter.name)
        evaluation = LaunchEvaluation(line, wrong.occurrence)
        interpreter = EvaluatingInterpreter(observed, handlers, evaluation)
        return self._first_wrong_of(program, interpreter.run, points), evaluation

    def _evaluates_right(self, wrong: _Wrong, evaluated: Sequence[Tensor] | None) -> bool:
        """Whether the loop IR of the wrong line's kernel computes the right value."""
        point = wrong.point
        if point is None or evaluated is None or not isinstance(point.line, Launch):
            return False
        value = evaluated[point.line.outs.index(point.value)]
        eager, exact = self._reference([point.node])
        value = value.to(point.value.tensor_type.device)
        return self._compare(point, value, eager, exact, wrong.occurrence) is None

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
        return "lowering", f"of {', '.join(self._operators_at_fault(wrong)) or 'the graph'}", wrong

    def _operators_at_fault(self, wrong: _Wrong) -> tuple[str, ...]:
        """Returns the operator of a fused kernel that is wrong alone, else all of the line's operators."""
        line = wrong.line
        fused = [self._nodes[name] for name in line.nodes if name in self._nodes]
        if len(fused) < 2:
            return line.operators
        eager, exact = self._reference([name for item in fused for name in (item.name, *item.operands)])
        for item in fused:
            if is_lowered_wrong(item, self.case.options, eager, exact, wrong.occurrence):
                return (str(item.node.target).removesuffix(".default"),)
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


_UNINITIALISED = ("aten.empty", "aten.new_empty", "aten.resize")


def _ignore(_point: int, _value: Tensor) -> None:
    """Observes nothing."""


_MANY = 4096
"""The number of reduced elements that is assumed for whole graphs."""


def _function_blocks(program: Program) -> set[int]:
    """Returns the `id` of each block of a program's functions, nested ones included."""
    identities: set[int] = set()
    pending = [block for _, block in program.functions]
    while pending:
        block = pending.pop()
        identities.add(id(block))
        pending += [inner for line in block.lines for _, inner in blocks(line)]
    return identities


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
