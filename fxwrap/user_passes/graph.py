"""The user's passes over FX graphs, before lowering and after emission.

The result of a pass is linted, and its fake values are checked. Only changed nodes are propagated again: new nodes,
nodes with other targets or arguments, and nodes with changed operands.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.converters.from_fx import from_fx
from fxwrap.errors import FxImportError, GraphError, PassError, RewriteError, VerifyError
from fxwrap.events import EventLog, PassRan
from fxwrap.fx_passes import GraphSource, check_graph, fake_values
from fxwrap.inference import (
    CallInference,
    FakeCallError,
    InferredCall,
    InferredResult,
    UnknownResultError,
    call_on_fakes,
)
from fxwrap.lines import ExternCall, Mutate
from fxwrap.matching import RewriteResult
from fxwrap.options import Pass
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import FakeTensor, FakeTensorMode, fresh_fake_mode, out_argument_names, without_fake_mode
from fxwrap.wrapper_ir import (
    Input,
    LineBase,
    Program,
    Value,
    leaves,
    print_line,
    print_type,
    reads,
    types_agree,
    verify,
    writes,
)


def run_source_passes(
    passes: Sequence[Pass],
    source: GraphSource,
    example_inputs: Sequence[object] | None,
    events: EventLog,
    *,
    check: bool = True,
) -> GraphSource:
    """Returns a graph after passes over it, before lowering, and records the passes. They get a copy.

    Raises PassError, with the pass, the node, the reason and the texts of both graphs.
    """
    if not passes:
        return source
    graph_module = GraphModule(source.graph_module, copy.deepcopy(source.graph_module.graph))
    fakes: Mapping[Node, object] = fake_values(graph_module, example_inputs)
    for item in passes:
        run = _GraphPassRun(item, events, graph_module, fakes)
        graph_module = run.run_pass(graph_module)
        fakes = run.check(graph_module) if check else fake_values(graph_module, example_inputs)
    return replace(source, graph_module=graph_module)


def run_emitted_pass(
    item: Pass, graph_module: GraphModule, events: EventLog, *, check: bool = True
) -> tuple[GraphModule, Program]:
    """Returns an emitted graph after a pass, which may change it in place, and the program imported from it.

    Raises PassError as `run_source_passes` does, also for a graph that cannot be imported.
    """
    run = _GraphPassRun(item, events, graph_module, {node: node.meta.get("val") for node in graph_module.graph.nodes})
    after = run.run_pass(graph_module)
    if check:
        run.check(after)
    if "fxwrap" not in after.meta:  # a new module launches the same kernels
        after.meta["fxwrap"] = graph_module.meta.get("fxwrap", {})
    after.recompile()
    return after, run.import_program(after)


class _PassRun:
    """One run of a pass. `before` is its argument, or the text of that; `after` is its result."""

    def __init__(self, item: Pass, events: EventLog, before: object) -> None:
        self.item = item
        self.events = events
        self.before = before
        self.after: object = None
        self.rewritten: RewriteResult | None = None

    def error(self, reason: str, where: str = "") -> PassError:
        """Returns the error, with both texts."""
        after = self.after.graph if isinstance(self.after, GraphModule) else self.after
        texts = str(self.before), "" if after is None else str(after)
        return PassError(self.item.name, self.item.at, reason, where, *texts)

    def run(self, argument: GraphModule | Program) -> object:
        """Returns the program or graph that the pass returns."""
        try:
            result = self.item.run(argument)
        except Exception as error:  # a user's pass may raise anything
            raise self.error(f"it raised {type(error).__name__}: {error}") from error
        if not isinstance(result, RewriteResult):
            return result
        self.rewritten = result
        if isinstance(argument, Program):
            return result.program
        if result.graph_module is None:
            raise self.error("it returned the rewrite of a program, not of its graph")
        return result.graph_module

    def record(self, changed: bool) -> None:
        """Records the pass. Raises PassError if it must match, and does not."""
        matches, near_misses = None, list[tuple[str, str]]()
        if self.rewritten is not None:
            matches, failures = len(self.rewritten.matches), self.rewritten.match_failures
            near_misses = [(item.line, item.reason) for item in failures[:_MAX_NEAR_MISSES]]
            if len(failures) > _MAX_NEAR_MISSES:
                near_misses.append(("...", f"{len(failures) - _MAX_NEAR_MISSES} more"))
        self.events.record(PassRan(self.item.name, self.item.at, changed, matches, tuple(near_misses)))
        if not self.item.must_match or (matches if matches is not None else changed):
            return
        reason = "it must match, and changed nothing" if matches is None else "it must match, and nothing matches"
        raise self.error(reason, "\n".join([f"> {line}\n  {why}" for line, why in near_misses]))


_MAX_NEAR_MISSES = 20
"""The near misses of a pass that are recorded."""


class _GraphPassRun(_PassRun):
    """One run of a pass: the graph before it, and the checks of its result."""

    def __init__(self, item: Pass, events: EventLog, graph_module: GraphModule, fakes: Mapping[Node, object]) -> None:
        super().__init__(item, events, str(graph_module.graph))
        self.fakes = fakes
        self.calls = {node: (node.target, node.args, node.kwargs) for node in graph_module.graph.nodes}
        self.inputs = [node for node in self.calls if node.op == "placeholder"]
        self.names = [str(node.target) for node in self.inputs]
        self.outputs = _outputs(graph_module)
        self.fake_mode = _fake_mode_of(fakes.values())
        self.has_metadata = all("val" in node.meta for node in self.inputs)

    def _fail(self, node: Node | None, reason: str) -> NoReturn:
        raise self.error(reason, f"> {node.format_node()}" if node is not None else "")

    def run_pass(self, graph_module: GraphModule) -> GraphModule:
        """Runs the pass; returns its result, or the graph if it returns None."""
        result = self.run(graph_module)
        after = graph_module if result is None else result
        if not isinstance(after, GraphModule):
            raise self.error(f"it returned a {type(after).__name__}, not a GraphModule")
        self.record({node: (node.target, node.args, node.kwargs) for node in after.graph.nodes} != self.calls)
        self.after = after
        return after

    def import_program(self, after: GraphModule) -> Program:
        """Returns the program of an emitted graph."""
        try:
            return from_fx(after)
        except FxImportError as error:
            self._fail(_node_named(after, error.node), f"it cannot be imported as a program: {error}")

    def check(self, after: GraphModule) -> dict[Node, Any]:
        """Returns the fake value of each node. Raises PassError for the first error."""
        self._check_structure(after)
        placeholders = after.graph.find_nodes(op="placeholder")
        names = [str(node.target) for node in placeholders]
        if names != self.names:
            raise self.error(f"it changed the graph's inputs: ({', '.join(self.names)}) became ({', '.join(names)})")
        values = dict(zip(placeholders, [self.fakes[node] for node in self.inputs], strict=True))
        changed: set[Node] = set()
        with without_fake_mode():
            for node in after.graph.nodes:
                self._evaluate(node, after, values, changed)
        self._check_outputs(after, values)
        return values

    def _check_structure(self, after: GraphModule) -> None:
        nodes = set(after.graph.nodes)
        for node in after.graph.nodes:
            for operand in node.all_input_nodes:
                if operand not in nodes:
                    self._fail(node, f"node '{node.name}' uses '{operand.name}', which is no longer in the graph")
        try:
            after.graph.lint()
            check_graph(after)
        except GraphError as error:
            self._fail(_node_named(after, error.node), f"node '{error.node}': {error.reason}. {error.remedy}")
        except Exception as error:  # lint raises RuntimeError and others
            raise self.error(f"the graph is not well formed: {error}") from error

    def _evaluate(self, node: Node, after: GraphModule, values: dict[Node, object], changed: set[Node]) -> None:
        """Records a node's fake value: the previous one, or a new one if the node or an operand changed."""
        if node.op in ("placeholder", "output"):
            return
        is_same = self.calls.get(node) == (node.target, node.args, node.kwargs)
        if is_same and not any(operand in changed for operand in node.all_input_nodes):
            values[node] = self.fakes.get(node)
            return
        value = self._attribute(node, after) if node.op == "get_attr" else self._call(node, values)
        values[node] = value
        if self.has_metadata:
            node.meta["val"] = value
        if node not in self.calls or not _same_metadata(value, self.fakes.get(node)):
            changed.add(node)

    def _attribute(self, node: Node, after: GraphModule) -> object:
        value: object = after
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        if value is None:
            self._fail(node, f"node '{node.name}' reads the attribute {node.target}, which the module does not have")
        return self.fake_mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

    def _call(self, node: Node, values: Mapping[Node, Any]) -> object:
        arguments: object
        arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
        try:
            return call_on_fakes(self.fake_mode, node.target, arguments, keywords)  # type: ignore[arg-type]
        except FakeCallError as error:
            self._fail(node, f"node '{node.name}': {error.reason}. {error.remedy}")

    def _check_outputs(self, after: GraphModule, values: Mapping[Node, object]) -> None:
        outputs = _outputs(after)
        if len(self.outputs) != len(outputs):
            raise self.error(f"it returns {len(outputs)} results, and the graph returned {len(self.outputs)}")
        for position, (old, new) in enumerate(zip(self.outputs, outputs)):
            before = self.fakes.get(old) if isinstance(old, Node) else old
            value = values[new] if isinstance(new, Node) else new
            if not _same_metadata(before, value):
                node = new if isinstance(new, Node) else None
                self._fail(node, f"result {position} was {_describe(before)} and is {_describe(value)}")


def _node_named(graph_module: GraphModule, name: str) -> Node | None:
    return next((node for node in graph_module.graph.nodes if node.name == name), None)


def _outputs(graph_module: GraphModule) -> list[object]:
    outputs = graph_module.graph.output_node().args[0]
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _fake_mode_of(values: Iterable[object]) -> FakeTensorMode:
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    return mode if mode is not None else fresh_fake_mode()


def _same_metadata(first: object, second: object) -> bool:
    """Whether two fake values have equal dtypes, devices, sizes and strides; symbolic numbers are not compared."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (
            first.dtype == second.dtype and first.device == second.device and first.dim() == second.dim()
            and all(map(_same_number, first.shape, second.shape))
            and all(map(_same_stride, first.shape, first.stride(), second.stride()))
        )  # fmt: skip
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_same_metadata, first, second))
    return isinstance(first, torch.Tensor) == isinstance(second, torch.Tensor)


def _same_number(first: object, second: object) -> bool:
    return not (type(first) is int and type(second) is int) or first == second


def _same_stride(size: object, first: object, second: object) -> bool:
    return (type(size) is int and size < 2) or _same_number(first, second)


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes, strides = ", ".join(map(str, value.shape)), ", ".join(map(str, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes} | {strides}] on {value.device}"


def run_program_pass(item: Pass, program: Program, events: EventLog, *, check: bool = True) -> Program:
    """Returns a program after a pass, verified unless `check` is false, and records the pass.

    Raises PassError, with the pass, the line, the reason and the texts of both programs.
    """
    run = _ProgramPassRun(item, events, program)
    after = run.run(program)
    if not isinstance(after, Program):
        raise run.error(f"it returned a {type(after).__name__}, not a program")
    run.record(after is not program and after != program)
    if check and after is not program:
        run.check(after)
    return after


class _ProgramPassRun(_PassRun):
    """One run of a pass: the program before it, and the checks of its result."""

    def __init__(self, item: Pass, events: EventLog, before: Program) -> None:
        super().__init__(item, events, before)
        self.program = before

    def _fail(self, line: LineBase, reason: str) -> NoReturn:
        raise self.error(reason, f"> {print_line(line).partition(chr(10))[0].strip()}")

    def check(self, after: Program) -> None:
        """Raises PassError for the first error in the result."""
        self.after = after
        try:
            verify(after)
        except VerifyError as error:
            raise self.error(f"[{error.rule}] {error.reason}", error.context) from error
        self._check_interface(after)
        inference = CallInference.for_program(after)
        for line in _new_calls(self.program, after):
            self._check_call(line, inference)

    def _check_interface(self, after: Program) -> None:
        """Checks that the types and ownership of inputs, and the types of results, are unchanged."""
        if len(after.inputs) != len(self.program.inputs) or not all(
            map(_same_input, self.program.inputs, after.inputs)
        ):
            raise self.error("it changed the program's inputs or their ownership")
        old, new = _returned(self.program.body.lines[-1]), _returned(after.body.lines[-1])
        last = after.body.lines[-1]
        if len(old) != len(new):
            self._fail(last, f"it returns {len(new)} results, and the program returned {len(old)}")
        for position, (first, second) in enumerate(zip(old, new)):
            if isinstance(first, Value) != isinstance(second, Value):
                self._fail(last, f"result {position} was {first} and is {second}")
            if isinstance(first, Value) and not types_agree(first.type, second.type):
                self._fail(last, f"result {position} was {print_type(first.type)} and is {print_type(second.type)}")

    def _check_call(self, line: ExternCall | Mutate, inference: CallInference) -> None:
        keywords = line.keywords
        try:
            if isinstance(line, ExternCall) and line.outs:
                keywords = (*keywords, *zip(out_argument_names(line.target), line.outs, strict=True))
            inferred = inference.call(line.target, line.arguments, keywords)
        except UnknownResultError:
            return  # the interpreter checks the results at run time
        except RewriteError as error:
            self._fail(line, error.reason)
        except (LookupError, ValueError) as error:
            self._fail(line, str(error))
        mutated = inferred.operator.mutated_operands(line.arguments, keywords)
        undeclared = [value.name for value in mutated if value not in writes(line)]
        if undeclared:
            self._fail(line, f"{line.target} writes %{undeclared[0]}, and the line does not declare it")
        missing = set(inferred.effects) - set(line.effects())
        if missing:
            effect = next(iter(missing)).name
            self._fail(line, f"{line.target} has the effect {effect}, and the line does not declare it")
        if line.results:
            self._check_results(line, inferred)

    def _check_results(self, line: ExternCall | Mutate, inferred: InferredCall) -> None:
        count = len(inferred.results)
        if len(line.results) != count:
            self._fail(line, f"{line.target} returns {count} results, and the line has {len(line.results)}")
        operands = [leaf for leaf in leaves((line.arguments, line.keywords)) if isinstance(leaf, Value)]
        for value, result in _pairs(line.results, inferred.results):
            if not isinstance(value, Value):
                continue
            if not isinstance(result, InferredResult) or not types_agree(value.type, result.type):
                returned = print_type(result.type) if isinstance(result, InferredResult) else "nothing"
                declared = print_type(value.type)
                self._fail(
                    line, f"{line.target} returns {returned} for %{value.name}, and the line declares {declared}"
                )
            if result.base is not None and line.alias_of(value) is None:
                base = operands[result.base].name
                self._fail(line, f"%{value.name} aliases %{base}, and the line declares it as a new storage")


def _new_calls(before: Program, after: Program) -> Iterator[ExternCall | Mutate]:
    """Yields the operator calls that the program before did not have."""
    existing = {line for line in before.lines() if isinstance(line, ExternCall | Mutate)}
    for line in after.lines():
        if isinstance(line, ExternCall | Mutate) and line not in existing:
            yield line


def _pairs(values: Any, results: Any) -> Iterator[tuple[object, Any]]:
    for value, result in zip(values, results):
        if isinstance(value, tuple) and isinstance(result, tuple):
            yield from _pairs(value, result)
        else:
            yield value, result


def _returned(line: LineBase) -> tuple[Any, ...]:
    values: tuple[object, ...] = getattr(line, "values", tuple(reads(line)))
    return values


def _same_input(first: Input, second: Input) -> bool:
    """Whether two inputs have equal types and ownership; names may differ."""
    if isinstance(first.value, Value) and isinstance(second.value, Value):
        return first.ownership is second.ownership and types_agree(first.value.type, second.value.type)
    return type(first.value) is type(second.value) and symbol_kind(first.name) == symbol_kind(second.name)
