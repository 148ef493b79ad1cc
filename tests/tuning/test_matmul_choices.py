"""The choice between kernels of matmuls and library calls, with a timer that times nothing."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.compile import compiler, lowering_step, steps
from fxwrap.compile.confirmation import can_time_program
from fxwrap.devices import CPU, GemmPaddingCosts
from fxwrap.errors import TuningWarning
from fxwrap.fx_passes import prepare_graph
from fxwrap.lines import CheckLayout, ExternCall, Launch, Mutate
from fxwrap.lowering import RULES, lower_prepared
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.tuning import Tuner, TuningRecords, is_faster, matmul_regions, region_graph, time_alternatives

INPUTS = [torch.randn(3, 40), torch.randn(24, 40), torch.randn(10, 24)]


def two_layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(torch.relu(x @ w.t()).view(3, 24) @ v.t())


class RegionTimer:
    """Reports the given seconds of kernels and of the library, for each region in order; then those of the program."""

    def __init__(self, *seconds: tuple[float, float], program: tuple[float, float] = (1.0, 1.0)) -> None:
        self.seconds = list(seconds)
        self.program = program
        self.regions = 0
        self.confirmations = 0
        self.inputs: Sequence[torch.Tensor] = ()

    def __call__(self, programs: Sequence[Callable[..., Any]], inputs: Sequence[Sequence[torch.Tensor]]) -> Any:
        self.inputs = inputs[0]
        results = [program(*inputs[0])[0] for program in programs]
        torch.testing.assert_close(*results)
        self.regions += bool(self.seconds)
        self.confirmations += not self.seconds
        return [[seconds] * 3 for seconds in (self.seconds.pop(0) if self.seconds else self.program)]


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    timer: RegionTimer,
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]] = two_layers,
    inputs: Sequence[torch.Tensor] = INPUTS,
    **options: Any,
) -> fxwrap.Compiled:
    tuner = Tuner(lambda tasks: [], lambda _: None, TuningRecords(folder), time_regions=timer)
    monkeypatch.setattr(compiler, "gpu_tuner", lambda: tuner)
    graph = make_fx(function)(*inputs)
    result = fxwrap.compile_graph(
        graph, inputs, options=Options(**{"autotune": True, "compile_cache": False, **options})
    )
    expected = function(*inputs)
    torch.testing.assert_close(tuple(result(*inputs)), expected if isinstance(expected, tuple) else (expected,))
    return result


def called(program: fxwrap.Program) -> list[str]:
    return [line.target for line in program.lines() if isinstance(line, ExternCall)]


def test_each_region_is_timed_once_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timer = RegionTimer((1.0, 2.0), (1.0, 1.01))
    first = compiled(monkeypatch, tmp_path, timer)
    assert called(first.program) == ["aten.mm.default"]
    reasons = [(item.node, item.reason) for item in first.coverage if item.kind == "call"]
    assert reasons == [("mm_1", "a library call: it was measured to be faster than a kernel")]
    other = RegionTimer()
    again = compiled(monkeypatch, tmp_path, other)
    assert str(again.program) == str(first.program)
    assert "tuning" in dict(first.program.header)
    assert (timer.regions, timer.confirmations, other.confirmations) == (2, 1, 0)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_program_that_is_slower_as_a_whole_is_not_tuned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda_graphs: bool
) -> None:
    timer = RegionTimer((1.0, 2.0), (1.0, 2.0), program=(1.02, 1.0))
    result = compiled(monkeypatch, tmp_path, timer, cuda_graphs=cuda_graphs)
    plain = fxwrap.compile_graph(make_fx(two_layers)(*INPUTS), INPUTS, options=Options(compile_cache=False))
    assert called(result.program) == called(plain.program) == ["aten.mm.default"] * 2
    assert result.program.replace(header=()) == plain.program.replace(header=())
    again = RegionTimer()
    assert called(compiled(monkeypatch, tmp_path, again).program) == ["aten.mm.default"] * 2
    assert (timer.regions, timer.confirmations, again.confirmations) == (2, 1, 0)


@pytest.mark.parametrize(
    ("timer", "lowered"),
    [
        (RegionTimer((1.0, 2.0), (1.0, 2.0)), 1),
        (RegionTimer((1.0, 2.0), (1.0, 2.0), program=(1.02, 1.0)), 2),  # the tuned program names the record
        (RegionTimer((1.0, 1.0), (1.0, 1.0)), 1),  # tuning changes nothing
    ],
)
def test_a_program_with_records_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timer: RegionTimer, lowered: int
) -> None:
    first = compiled(monkeypatch, tmp_path, timer)
    counts: collections.Counter[str] = collections.Counter()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: counts.update([name]) or function(*args))

    counted(compiler, "lower_graph")
    counted(lowering_step, "lower_graph")
    counted(steps, "compile_program_kernels")
    again = compiled(monkeypatch, tmp_path, RegionTimer())
    assert str(again.program) == str(first.program)
    assert counts == {"lower_graph": lowered, "compile_program_kernels": 1}


def test_programs_with_checked_inputs_are_timed_as_a_whole() -> None:
    with FakeTensorMode():
        inputs = [torch.randn(item.shape, device="cuda") for item in INPUTS]
        graph = make_fx(two_layers)(*inputs)
    program = fxwrap.lower(graph, inputs, options=Options(check_inputs=True))
    assert any(isinstance(line, CheckLayout) for line in program.lines())
    assert can_time_program(program, torch.device("cuda"))


def test_timing_consumes_no_random_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    compiled(monkeypatch, tmp_path, RegionTimer((1.0, 2.0), (1.0, 2.0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_programs_that_fail_when_they_are_timed_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(programs: object, inputs: object) -> Any:
        raise RuntimeError("no random inputs")

    with pytest.warns(TuningWarning, match="is not timed: no random inputs"):
        result = compiled(monkeypatch, tmp_path, fail)  # type: ignore[arg-type]
    assert called(result.program) == ["aten.mm.default"] * 2


def test_programs_that_cannot_be_timed_as_a_whole_are_not_confirmed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A loop may never end for the inputs that it is timed with."""

    def looped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.while_loop(lambda y: y.sum() < 10, lambda y: (y + 1,), (torch.relu(x @ w.t()),))[0]

    timer = RegionTimer((1.0, 2.0), program=(2.0, 1.0))
    assert called(compiled(monkeypatch, tmp_path, timer, looped, INPUTS[:2]).program) == []
    assert (timer.regions, timer.confirmations) == (1, 0)


def test_grouped_matmuls_are_timed_with_groups_of_random_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def experts(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch._grouped_mm(x, w.transpose(1, 2), ends))

    inputs = [torch.randn(12, 32), torch.randn(4, 24, 32), torch.tensor([1, 1, 5, 12], dtype=torch.int32)]
    device = dataclasses.replace(
        CPU, matmuls=dataclasses.replace(CPU.matmuls, generated_grouped_rows=((torch.float32, 3),))
    )
    timer = RegionTimer((2.0, 1.0))
    program = compiled(monkeypatch, tmp_path, timer, experts, inputs, devices=[device]).program
    assert (timer.regions, called(program)) == (1, ["aten._grouped_mm.default"])
    (ends,) = [item.tolist() for item in timer.inputs if item.dtype is torch.int32]
    assert ends == sorted(ends) and ends[-1] == 12 and ends != [3, 6, 9, 12]


def test_records_of_another_device_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled(monkeypatch, tmp_path, RegionTimer((1.0, 2.0), (1.0, 2.0)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        timer = RegionTimer((3.0, 2.0), (3.0, 2.0))
        other = compiled(monkeypatch, tmp_path, timer)
    finally:
        torch.set_num_threads(threads)
    assert (timer.regions, called(other.program)) == (2, ["aten.mm.default"] * 2)


def test_the_options_that_say_it_are_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert called(compiled(monkeypatch, tmp_path, RegionTimer(), matmul_kernels="generated").program) == []
    library = compiled(monkeypatch, tmp_path, RegionTimer(), matmul_kernels="library")
    assert called(library.program) == ["aten.mm.default"] * 2


def test_a_kernel_is_faster_by_three_percent() -> None:
    assert is_faster([0.96, 0.97, 0.95], [1.0, 1.0, 1.0])
    assert not is_faster([0.98, 0.98, 0.5], [1.0, 1.0, 1.0])
    assert not is_faster([0.9, 0.9, 0.99, 1.1], [1.0] * 4)
    assert not is_faster([], [])


def test_the_programs_are_run_in_turn() -> None:
    order: list[str] = []
    samples = time_alternatives(
        [lambda *_: order.append("a"), lambda *_: order.append("b")], [[torch.ones(1)], [torch.ones(1)]]
    )
    assert [len(item) for item in samples] == [9, 9]
    assert "abba" in "".join(order)


def test_a_region_has_the_views_between_its_nodes() -> None:
    graph: GraphModule = make_fx(two_layers)(*INPUTS)
    by_name = {node.name: node for node in graph.graph.nodes}
    part = region_graph(graph.graph, lambda node: node.meta.get("val"), ["mm", "relu", "mm_1"])
    assert part is not None
    names = [node.name for node in part.graph.nodes if node.op == "call_function"]
    assert names == ["mm", "relu", "view", "mm_1"]
    assert {node.name for node in part.graph.find_nodes(op="placeholder")} < set(by_name)
    assert region_graph(graph.graph, lambda node: node.meta.get("val"), ["absent"]) is None


def test_a_region_returns_what_its_launches_store() -> None:
    """Both kernels compute the tanh, as in the program, and none stores it."""

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(x)
        return torch.relu(y @ w.t()), torch.sigmoid(y @ v.t())

    inputs = [torch.randn(1, 40), torch.randn(24, 40), torch.randn(10, 40)]
    graph = make_fx(function)(*inputs)
    program = fxwrap.lower(graph, inputs, options=Options(matmul_kernels="generated"))
    regions = matmul_regions(program, graph.graph)
    parts = [
        region_graph(graph.graph, lambda node: node.meta.get("val"), item.nodes, item.internal) for item in regions
    ]
    results = [[] if part is None else part.graph.output_node().all_input_nodes for part in parts]
    assert [[node.name for node in nodes] for nodes in results] == [["relu"], ["sigmoid"]]
    assert all("tanh" in item.nodes for item in regions)


def test_a_matmul_is_timed_once_with_the_reductions_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ weight.t(), target, reduction="none")

    inputs = [torch.randn(20, 40), torch.randn(300, 40), torch.randint(0, 300, (20,))]
    options = Options(devices=[dataclasses.replace(CPU, massively_parallel=True)], autotune=True, compile_cache=False)
    for seconds, calls in (((1.0, 2.0), 0), ((1.0, 1.0), 1)):
        timer = RegionTimer(seconds)
        tuner = Tuner(lambda tasks: [], lambda _: None, TuningRecords(tmp_path / str(calls)), time_regions=timer)
        monkeypatch.setattr(compiler, "gpu_tuner", lambda tuner=tuner: tuner)
        result = fxwrap.compile_graph(make_fx(loss)(*inputs), inputs, options=options)
        assert (timer.regions, len(called(result.program))) == (1, calls)
        torch.testing.assert_close(result(*inputs)[0], loss(*inputs))


def test_a_region_has_all_that_a_choice_changes() -> None:
    """Where the matmul is a call, one kernel adds and normalises; where it is a kernel, that one adds."""

    def normalised(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x @ weight.t() + residual
        return hidden, torch.tanh(hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1))

    inputs = [torch.randn(3, 40), torch.randn(24, 40), torch.randn(3, 24)]
    prepared = prepare_graph(make_fx(normalised)(*inputs), inputs, Options(), fused_operators=RULES)
    graph = prepared.graph_module.graph
    kernels = lower_prepared(prepared, Options(), tuned_devices=frozenset({"cpu"})).program
    calls = lower_prepared(
        prepared, Options(), tuned_devices=frozenset({"cpu"}), library_calls=frozenset({"mm"})
    ).program
    (alone,), (region,) = matmul_regions(kernels, graph), matmul_regions(kernels, graph, calls)
    assert set(alone.nodes) == {"mm", "add"} and {"mm", "add", "mean", "rsqrt", "tanh"} <= set(region.nodes)
    assert region.matmuls == {"mm"}


def test_regions_have_the_kernels_of_their_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Halves of packed columns are slices of one matmul unless all matmuls are kernels, by the options."""

    def swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ weight.t()).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    kernels: list[set[str]] = []

    original = compiler._compile_request

    def compile_request(*arguments: Any, **keywords: Any) -> fxwrap.Compiled:
        result = original(*arguments, **keywords)
        kernels.append({kernel.hash for kernel in result.program.kernels})
        return result

    monkeypatch.setattr(compiler, "_compile_request", compile_request)
    compiled(monkeypatch, tmp_path, RegionTimer((1.0, 2.0)), swiglu, [torch.randn(3, 40), torch.randn(24, 40)])
    assert kernels[0] and kernels[0] <= kernels[-1] and len(kernels) == 3


@pytest.mark.parametrize("kernel_seconds", [1.0, 2.0])
def test_a_kernel_is_timed_beside_the_padded_matmul(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_seconds: float
) -> None:
    """A library wants aligned rows, so that its result is copied; a kernel stores rows of any length."""
    costs = GemmPaddingCosts(saved_bytes_per_operation=1e3, copy_overhead_bytes=0, min_saved_bytes=1)
    device = dataclasses.replace(
        CPU, matmuls=dataclasses.replace(CPU.matmuls, padding_dtypes=frozenset({torch.float32}), padding_costs=costs)
    )
    inputs = [torch.randn(3, 40), torch.randn(23, 40)]
    timer = RegionTimer(*[(kernel_seconds, 1.5)] * 2)
    program = compiled(monkeypatch, tmp_path, timer, lambda x, w: x @ w.t(), inputs, devices=[device]).program
    launches = [line for line in program.lines() if isinstance(line, Launch)]
    if kernel_seconds < 1.5:
        assert (called(program), len(launches)) == ([], 1)
    else:
        assert called(program) == ["aten.mm.default"] and len(launches) == 2  # the weight is padded, the result copied


def test_kernels_are_not_padded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = GemmPaddingCosts(saved_bytes_per_operation=1e3, copy_overhead_bytes=0, min_saved_bytes=1)
    device = dataclasses.replace(
        CPU, matmuls=dataclasses.replace(CPU.matmuls, padding_dtypes=frozenset({torch.float32}), padding_costs=costs)
    )
    inputs = [torch.randn(30, 40), torch.randn(23, 40)]
    options = {"devices": [device], "matmul_kernels": "generated"}
    program = compiled(monkeypatch, tmp_path, RegionTimer(), lambda x, w: x @ w.t(), inputs, **options).program
    assert called(program) == [] and len([line for line in program.lines() if isinstance(line, Launch)]) == 1


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient of what queries, keys and values are computed from."""
    first, second, third = weights.unbind(0)
    return torch.tanh(q @ first + k @ second + v @ third)


@pytest.mark.parametrize("accumulates", [True, False])
def test_sums_of_matmuls_are_timed_with_matmuls_that_add_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accumulates: bool
) -> None:
    inputs = [*[torch.randn(30, 40) for _ in range(3)], torch.randn(3, 40, 24)]
    timer = RegionTimer(*[(1.0, 2.0) if accumulates else (2.0, 1.0)] * 2)
    program = compiled(monkeypatch, tmp_path, timer, gradients, inputs).program
    added = [line.target for line in program.lines() if isinstance(line, Mutate)]
    assert timer.regions == 2
    assert (added, len(called(program))) == ((["aten.addmm_.default"] * 2, 1) if accumulates else ([], 3))
    again = compiled(monkeypatch, tmp_path, RegionTimer(), gradients, inputs)
    assert str(again.program) == str(program)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A layer with GELU, whose input the same kernel reads for another result."""
    hidden = torch.addmm(bias, x, weight)
    return torch.nn.functional.gelu(hidden, approximate="tanh"), hidden, hidden.sin()


@pytest.mark.parametrize("fuses", [True, False])
def test_matmuls_that_store_the_input_of_gelu_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fuses: bool
) -> None:
    device = dataclasses.replace(
        CPU, matmuls=dataclasses.replace(CPU.matmuls, epilogue_dtypes=frozenset({torch.float32}))
    )
    inputs = [torch.randn(32, 64), torch.randn(64, 24), torch.randn(24)]
    timer = RegionTimer((1.0, 2.0) if fuses else (2.0, 1.0))
    program = compiled(monkeypatch, tmp_path, timer, layer, inputs, devices=[device]).program
    assert timer.regions == 1
    assert called(program) == ["fxwrap.gelu_matmul.default" if fuses else "aten.addmm.default"]
    again = compiled(monkeypatch, tmp_path, RegionTimer(), layer, inputs, devices=[device])
    assert str(again.program) == str(program)


@pytest.mark.parametrize("kernel_seconds", [1.0, 3.0])
def test_scaled_float8_matmuls_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_seconds: float
) -> None:
    """On CPUs, torch multiplies float8 matrices with a scale for each."""
    x, weight = [(torch.arange(count) % 7 - 3).float().to(torch.float8_e4m3fn) for count in (3 * 64, 48 * 64)]
    inputs = [x.view(3, 64), weight.view(48, 64), torch.tensor(0.5), torch.tensor(2.0)]

    def scaled(x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch._scaled_mm(x, weight.t(), *scales, out_dtype=torch.bfloat16))

    timer = RegionTimer((kernel_seconds, 2.0))
    program = compiled(monkeypatch, tmp_path, timer, scaled, inputs).program
    assert timer.regions == 1
    assert called(program) == ([] if kernel_seconds < 2 else ["aten._scaled_mm.default"])
