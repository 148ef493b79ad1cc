"""The models' graphs, for inference, training and any size of batch, as programs with fused kernels: read back from
emitted graphs, saved and loaded, and rewritten. On a GPU all models with Triton kernels, on the CPU one of them."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Compiled, Options
from fxwrap.comparison import GRADIENT_NORM_FLOOR, tensor_error
from fxwrap.debugging import copy_inputs
from fxwrap.lines import Launch, View
from fxwrap.wrapper_ir import Program, symbol_infos
from tests.artifact.fresh_process import run_in_fresh_process
from tests.rewrite.test_models import (
    SIX,
    assert_program_is_rebuilt,
    compile_with_out_variants,
    compile_with_rewritten_matmuls,
    traced,
)
from tests.support.capture import capture_graphs
from tests.support.long_form import long_only
from tests.support.models import SHALLOW
from tests.support.program_equality import assert_equal

pytestmark = pytest.mark.usefixtures("exact_convolutions")

LANGUAGES = {"cpu": "cpp", "cuda": "triton"}
TOLERANCES = {"cpu": 1e-5, "cuda": 1e-4}  # a GPU's libraries take another algorithm for another layout
ON_GPU = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in SIX]
cases = pytest.mark.parametrize(("device", "name"), [("cpu", "gpt2"), *ON_GPU])

Runs = Callable[..., Any]


class Case:
    """A graph of a model, its inputs, its results and its compiled program."""

    def __init__(self, kind: str, graph: GraphModule, inputs: Sequence[Any], device: str) -> None:
        self.graph, self.inputs = graph, list(inputs)
        self.options = Options(emitter="fx", fallback="error", check_inputs=False)
        self.tolerance = TOLERANCES[device]
        self.wanted = results(graph, inputs)
        gradients = self.wanted[: len(self.outputs)] if kind == "backward" else []
        self.floor = GRADIENT_NORM_FLOOR * math.hypot(*[norm(item) for item in gradients])
        self.exact = (kind, device) != ("backward", "cuda")
        self.compiled: Compiled = fxwrap.compile_graph(graph, options=self.options)
        assert {kernel.language for kernel in self.compiled.program.kernels} == {LANGUAGES[device]}
        assert any(isinstance(line, Launch) for line in self.compiled.program.lines())
        self.results = results(self.compiled, inputs)
        self.assert_right(self.results)

    @property
    def outputs(self) -> Sequence[Any]:
        """The graph's outputs: nodes, and None."""
        (outputs,) = self.graph.graph.output_node().args
        return outputs  # type: ignore[return-value]

    def assert_right(self, actual: Sequence[Any]) -> None:
        """Asserts that these are eager's results, up to rounding."""
        for place, (item, expected) in enumerate(zip(actual, self.wanted, strict=True)):
            if not isinstance(expected, torch.Tensor):
                assert item == expected
            elif place not in self.unwritten:
                assert (item.dtype, item.shape) == (expected.dtype, expected.shape)
                assert tensor_error(item, expected, self.floor).relative < self.tolerance, f"result {place}"

    def assert_same(self, actual: Sequence[Any]) -> None:
        """Asserts that these are the compiled graph's results to the bit: but for gradients on a GPU, of which some,
        such as those of embeddings, are summed in any order."""
        if not self.exact:
            self.assert_right(actual)
            return
        for place, (item, expected) in enumerate(zip(actual, self.results, strict=True)):
            if place not in self.unwritten:
                torch.testing.assert_close(item, expected, rtol=0, atol=0, equal_nan=True)

    @property
    def unwritten(self) -> set[int]:
        """Positions of results that libraries save for their own backward, and may leave partly unwritten."""
        return {place for place, item in enumerate(self.outputs) if isinstance(item, Node) and _is_private(item)}


def _is_private(node: Node) -> bool:
    """Whether a result is private to a library: state that attention saves (a random number state or row sums,
    which it may not have computed), or cuDNN's reserve space."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    target, place = str(node.args[0].target), int(node.args[1])  # type: ignore[arg-type]
    return ("attention" in target and place > 0) or ("cudnn_batch_norm" in target and place == 3)


def norm(item: Any) -> float:
    """The norm of a result with floating point numbers, 0 of others."""
    is_real = isinstance(item, torch.Tensor) and item.is_floating_point()
    return float(torch.where(item.isfinite(), item, 0.0).double().norm()) if is_real else 0.0


def results(run: Runs, inputs: Sequence[Any]) -> list[Any]:
    """The results of a graph or program for copies of inputs, followed by the copies, which it may have mutated."""
    arguments = copy_inputs(list(inputs))
    with torch.no_grad():
        return [*run(*arguments), *arguments]


@cache
def cases_of(device: str, name: str) -> dict[str, Case]:
    """The graphs of a model with one layer; each is captured and compiled once."""
    shallow = SHALLOW[name]
    (dynamic,) = capture_graphs(shallow, training=False, device=device, dynamic=True)
    forward, backward = capture_graphs(shallow, training=True, device=device)
    graphs = {
        "inference": traced(shallow, "inference", device),
        "dynamic": (dynamic.graph_module, dynamic.inputs),
        "forward": (forward.graph_module, forward.inputs),
        "backward": (backward.graph_module, backward.inputs),
    }
    return {kind: Case(kind, graph, inputs, device) for kind, (graph, inputs) in graphs.items()}


def larger(case: Case) -> list[Any]:
    """Inputs with one more row in each batch."""
    fakes = [node.meta["val"] for node in case.graph.graph.find_nodes(op="placeholder")]
    assert any(isinstance(fake, torch.SymInt) for fake in fakes)
    return [_larger(item, fake) for item, fake in zip(case.inputs, fakes, strict=True)]


def _larger(item: Any, fake: Any) -> Any:
    if isinstance(fake, torch.SymInt):
        return item + 1
    has_batch = isinstance(fake, torch.Tensor) and fake.dim() and isinstance(fake.shape[0], torch.SymInt)
    return torch.cat([item, item[-1:]]) if has_batch else item


@cases
def test_round_trip(device: str, name: str) -> None:
    """As emitted, copied and cleaned by torch.fx, and traced again under fake tensors."""
    for case in cases_of(device, name).values():
        program = case.compiled.program
        module = fxwrap.to_fx(program).graph_module
        read = fxwrap.from_fx(module)
        assert_equal(program, read)
        assert origins(read) == origins(program)
        cleaned = copy.deepcopy(module)
        cleaned.graph.eliminate_dead_code()
        cleaned.recompile()
        assert_equal(program, fxwrap.from_fx(cleaned), copied=True)
        retraced = make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(*on_declared_devices(case))
        assert not any("fxwrap_line" in node.meta for node in retraced.graph.nodes)
        read = fxwrap.from_fx(retraced, name=program.name).replace(header=program.header)
        assert [kernel.hash for kernel in read.kernels] == [kernel.hash for kernel in program.kernels]
        if symbol_infos(program):  # sizes and values read from constants are literals now
            case.assert_right(results(fxwrap.to_fx(read).graph_module, case.inputs))
        else:
            assert_equal(program, read)


def on_declared_devices(case: Case) -> list[Any]:
    """A graph's inputs on the devices that it declares: the random number states that attention saves for its backward
    are on the CPU unless a CUDA graph is captured, which is unknown while tracing."""
    fakes = [node.meta["val"] for node in case.graph.graph.find_nodes(op="placeholder")]
    pairs = zip(case.inputs, fakes, strict=True)
    return [item.to(fake.device) if isinstance(fake, torch.Tensor) else item for item, fake in pairs]


def origins(program: Program) -> list[Any]:
    """Where each launch came from."""
    return [line.origin for line in program.lines() if isinstance(line, Launch)]


@cases
def test_any_size_of_batch(device: str, name: str) -> None:
    case = cases_of(device, name)["dynamic"]
    inputs = larger(case)
    expected, actual = results(case.graph, inputs), results(case.compiled, inputs)
    for item, other in zip(actual, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert tensor_error(item, other).relative < case.tolerance


@cases
def test_saved_and_loaded(device: str, name: str, tmp_path: Path) -> None:
    for kind, case in cases_of(device, name).items():
        path = tmp_path / f"{kind}.fxw"
        case.compiled.save(path)
        for emitter in ("fx", "python"):
            loaded = fxwrap.load(path, emitter=emitter)
            assert loaded.emitter == emitter
            assert loaded.program == case.compiled.program and loaded.key == case.compiled.key
            case.assert_same(results(loaded, case.inputs))


@cases
def test_rewritten(device: str, name: str) -> None:
    for case in cases_of(device, name).values():
        assert_program_is_rebuilt(case.compiled.program)
        for rewritten in (compile_with_out_variants, compile_with_rewritten_matmuls):
            compiled = rewritten(case.graph, None, case.options)
            assert {kernel.language for kernel in compiled.program.kernels} == {LANGUAGES[device]}
            case.assert_right(results(compiled, case.inputs))


EMITTER = dict(zip(SIX, ("fx", "python", "cpp", "fx", "python", "fx"), strict=True))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_runs_all_models(device: str, tmp_path: Path) -> None:
    """By each emitter, without tracing and without a kernel compiled; `tests/artifact` does so on the CPU."""
    actual = {name: cases_of(device, name)["inference"] for name in SIX}
    for name, case in actual.items():
        fxwrap.save(case.compiled.program, tmp_path / f"{name}.fxw", emitters=[EMITTER[name]])
    apart = run_in_fresh_process(
        tmp_path, {name: case.inputs for name, case in actual.items()}, compiler=device == "cuda"
    )
    assert apart.by_triton == [] and apart.tracing == {name: [] for name in SIX}
    for name, case in actual.items():
        case.assert_same([*apart.results[name], *case.inputs])


@pytest.mark.parametrize("name", [name if name == "gpt2" else long_only(name) for name in SIX])
def test_views_need_no_as_strided(name: str) -> None:
    """Views are chains of operators on their bases, for constant and symbolic sizes, forward and backward."""
    shallow = SHALLOW[name]
    captured = [*capture_graphs(shallow, training=True), *capture_graphs(shallow, training=False, dynamic=True)]
    views = 0
    for item in captured:
        assert not _by_storage(item.graph_module)
        program = fxwrap.compile_graph(item.graph_module, options=Options(emitter="interpreter")).program
        module = fxwrap.to_fx(program).graph_module
        assert not _by_storage(module)
        views += sum(isinstance(node.meta.get("fxwrap_line"), View) for node in module.graph.nodes)
    assert views > 5


def _by_storage(module: GraphModule) -> list[Node]:
    """Returns the nodes that view or measure the storage of a tensor."""
    targets = (torch.ops.aten.as_strided.default, torch.ops.aten.sym_storage_offset.default)
    return [node for target in targets for node in module.graph.find_nodes(op="call_function", target=target)]
