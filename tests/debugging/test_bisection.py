"""`bisect` and the option `debug`: the first wrong line, and the part of the compiler that is at fault."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.caching import clear_caches
from fxwrap.debugging.memory_order import in_memory_order
from fxwrap.debugging.value_store import ValueStore
from fxwrap.errors import CompareError, DivergenceError, OptionError
from fxwrap.lowering import RULES
from fxwrap.options import Options
from tests.support import seeded_bugs
from tests.support.long_form import LONG, long_only
from tests.support.seeded_bugs import BUGS


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patch after which no printed kernel is cached."""
    yield monkeypatch
    monkeypatch.undo()
    clear_caches()


def chain(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor) -> Tensor:
    """Six matmuls with fused operators between them; `tanh` once, in a kernel with others."""
    x = torch.relu(x @ w1)
    x = torch.sigmoid(x @ w2) * 0.5
    x = torch.relu(x @ w3) + 1
    x = torch.tanh(x.sum(0) / 16 + x)
    x = torch.relu(x @ w4)
    return (torch.softmax(x, -1) @ w1).relu()


def middle(x: Tensor, w: Tensor) -> Tensor:
    """The middle of `chain`, with its third matmul and `tanh`."""
    x = torch.relu(x @ w) + 1
    return torch.tanh(x.sum(0) / 16 + x)


def branched(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor) -> Tensor:
    """`chain` with its middle in a branch."""
    x = torch.sigmoid(torch.relu(x @ w1) @ w2) * 0.5
    x = torch.cond(x.sum() > 0, middle, lambda x, w: torch.sin(x @ w), (x, w3))
    return (torch.softmax(torch.relu(x @ w4), -1) @ w1).relu()


def looped(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor) -> Tensor:
    """`chain` with its middle in a loop."""
    x = torch.sigmoid(torch.relu(x @ w1) @ w2) * 0.5
    steps = torch.zeros((), dtype=torch.int64)
    x = while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, middle(x, w3)), (steps, x))[1]
    return (torch.softmax(torch.relu(x @ w4), -1) @ w1).relu()


def tensors(training: bool = False, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, size, generator=generator).requires_grad_(training) for _ in range(5)]


def bisect(
    emitter: str, function: Any = chain, *, training: bool = False, dynamic: bool = False, **keywords: int
) -> fxwrap.Bisection:
    options = {"emitter": emitter}
    return fxwrap.bisect(function, tensors(training), options=options, training=training, dynamic=dynamic, **keywords)


@pytest.mark.parametrize(
    ("function", "emitter", "training", "dynamic"), [(chain, "cpp", False, False), (branched, "python", True, True)]
)
@pytest.mark.parametrize("part", BUGS)
def test_a_bug_is_found(
    part: str, function: Any, emitter: str, training: bool, dynamic: bool, patch: pytest.MonkeyPatch
) -> None:
    """In a program, and in a branch of the forward of a training step with symbolic sizes."""
    BUGS[part](patch)
    bisection = bisect(emitter, function, training=training, dynamic=dynamic)
    divergence = bisection.divergence
    assert divergence is not None and not bisection.agrees
    assert divergence.part == part
    assert divergence.culprit.startswith({
        "lowering": "of aten.tanh", "kernel printer": "'cpp', kernel @relu_add_sum_", "pass": "'insert_device_guards'",
        "graph pass": "'unfuse_biases'", "converter": f"'{emitter}'",
    }[part])  # fmt: skip
    assert divergence.graph == ("forward" if training else "inference")
    assert divergence.runs + divergence.reference_runs <= 2 * math.log2(divergence.lines)
    if part == "graph pass":
        assert divergence.line is None
        return
    assert divergence.line is not None
    operator = "aten.tanh" if part in ("lowering", "kernel printer") else "aten.mm"
    assert operator in divergence.line.operators
    assert all(location.startswith("test_bisection.py:") for location in divergence.line.locations)
    assert divergence.line.locations
    assert divergence.line.agreement.error > divergence.line.agreement.allowed
    assert divergence.line.actual != divergence.line.eager
    assert f"At fault: {part} {divergence.culprit}" in str(bisection)
    assert json.loads(bisection.to_json())["divergence"]["part"] == part


@pytest.mark.long  # each program without a bug is compared by other tests
@pytest.mark.parametrize("emitter", ["cpp", long_only("fx")])
def test_without_a_bug_everything_agrees(emitter: str) -> None:
    bisection = bisect(emitter, training=True)
    assert bisection.agrees and bisection.graphs == 2
    assert str(bisection) == "chain: all values of 2 graphs agree with eager"


@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_a_bug_of_an_operator_with_several_results_is_found(emitter: str, patch: pytest.MonkeyPatch) -> None:
    """The kernel of the norm is wrong, not the matmul that reads it."""
    seeded_bugs.scale_printed(patch, "rsqrt", "1.01f")
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    divergence = fxwrap.bisect(model, torch.randn(4, 8), options={"emitter": emitter}).divergence
    assert divergence is not None and divergence.line is not None
    assert divergence.part == "kernel printer" and divergence.line.node == "native_layer_norm"
    assert divergence.line.operators == ("aten.native_layer_norm",)


def test_a_bug_of_the_backward_is_found(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(RULES, "aten.neg.default", RULES["aten.abs.default"])
    divergence = bisect("python", training=True).divergence
    assert divergence is not None and divergence.line is not None
    assert (divergence.graph, divergence.part, divergence.culprit) == ("backward", "lowering", "of aten.neg")
    assert divergence.runs + divergence.reference_runs <= 2 * math.log2(divergence.lines)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["lowering", "kernel printer", "pass", "converter"])
def test_a_bug_of_a_loop_is_found_with_reference_values_in_a_file(part: str, patch: pytest.MonkeyPatch) -> None:
    BUGS[part](patch)
    divergence = bisect("python", looped, memory_bytes=1).divergence
    assert divergence is not None and divergence.line is not None
    assert divergence.part == part
    assert ("aten.tanh" if part in ("lowering", "kernel printer") else "aten.mm") in divergence.line.operators
    assert divergence.line.node.startswith("while_loop_body_graph_0.") and divergence.line.occurrence == 0
    assert divergence.runs + divergence.reference_runs <= 2 * math.log2(divergence.lines)


def test_the_iteration_of_a_loop_is_named(patch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        """Whose `tanh` is that of a zero, which `sinh` shares, until the third iteration."""
        steps = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda n, x: n < 4, lambda n, x: (n + 1, torch.tanh(x) + (n > 0)), (steps, x))[1]

    patch.setitem(RULES, "aten.tanh.default", RULES["aten.sinh.default"])
    bisection = fxwrap.bisect(function, torch.zeros(4), memory_bytes=1)
    assert bisection.divergence is not None and bisection.divergence.line is not None
    assert bisection.divergence.line.occurrence == 2
    assert "in run 3 of its block" in str(bisection)
    assert (bisection.divergence.part, bisection.divergence.culprit) == ("lowering", "of aten.tanh")


@pytest.mark.long  # a bug of a scan and one of a loop have tests of their own
@pytest.mark.parametrize("training", [long_only(False), True])
def test_bugs_of_scans_maps_and_shared_functions_are_found(training: bool, patch: pytest.MonkeyPatch) -> None:
    """The gradient of `last.sum()` is an expanded tensor, which the backward of the scan carries first.

    The backwards of maps and shared functions have blocks like those of their forwards: the long form trains them.
    """

    def scanned(x: Tensor, w: Tensor) -> Tensor:
        last, rows = scan(lambda carry, row: (torch.tanh(carry @ w + row), row * 2), x[0], x)
        return last.sum() + rows

    @torch.compiler.nested_compile_region
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) + x

    functions = {
        "scan_combine_graph_0.": scanned,
        "body_graph_0.": lambda x, w: map_(lambda row, w: torch.tanh(row @ w) + row, x, w),
        "subgraph": lambda x, w: layer(layer(x, w), w).relu(),
    }
    original = RULES["aten.tanh.default"]
    for prefix, function in [*functions.items()][: 1 if training and not LONG else None]:
        for rule in (original, RULES["aten.sigmoid.default"]):
            patch.setitem(RULES, "aten.tanh.default", rule)
            bisection = fxwrap.bisect(function, tensors(training)[:2], training=training)
            if rule is original:
                assert bisection.agrees, str(bisection)
                continue
            assert bisection.divergence is not None and bisection.divergence.line is not None
            assert prefix in bisection.divergence.line.node
            assert "aten.tanh" in bisection.divergence.culprit


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bug_of_an_associative_scan_is_found(dynamic: bool, patch: pytest.MonkeyPatch) -> None:
    """Of a scan that is expanded into operators, and of one of symbolic length, whose loop runs element by element."""

    def combine(left: Tensor, state: Tensor, right: Tensor, x: Tensor) -> list[Tensor]:
        return [left * right, torch.asinh(torch.sinh(state * right + x))]

    def recurrence(gate: Tensor, x: Tensor) -> Tensor:
        return torch.ops.higher_order.associative_scan(combine, [gate.sigmoid(), x], ())[1].relu() + 1

    inputs = (torch.randn(7, 4), torch.randn(7, 4))
    options = {"emitter": "python"}
    assert fxwrap.bisect(recurrence, inputs, options=options, dynamic=dynamic).agrees
    patch.setitem(RULES, "aten.asinh.default", RULES["aten.tanh.default"])
    divergence = fxwrap.bisect(recurrence, inputs, options=options, dynamic=dynamic).divergence
    assert divergence is not None and divergence.line is not None
    assert (divergence.part, divergence.culprit) == ("lowering", "of aten.asinh")
    assert divergence.line.node.startswith("associative_scan_combine_graph_0.") == dynamic
    assert divergence.runs + divergence.reference_runs <= 2 * math.log2(divergence.lines)
    assert all(location.startswith("test_bisection.py:") for location in divergence.line.locations)


@pytest.mark.parametrize("sizes", [(2, 3, 4), (2, 3, 6)])
def test_values_into_which_views_are_folded_are_compared_in_the_order_of_memory(
    sizes: tuple[int, ...], patch: pytest.MonkeyPatch
) -> None:
    """`sin` is stored as the transposed matrix, of other sizes or of the same number in each dimension."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x).view(6, -1).t() @ y

    inputs = [torch.randn(sizes), torch.randn(6, 6)]
    assert fxwrap.bisect(function, inputs).agrees
    patch.setitem(RULES, "aten.sin.default", RULES["aten.tan.default"])
    divergence = fxwrap.bisect(function, inputs).divergence
    assert divergence is not None and divergence.line is not None
    assert (divergence.part, divergence.line.node) == ("lowering", "sin")
    assert "%sin" in divergence.line.text


def test_the_order_of_memory() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    for order in itertools.permutations(range(3)):
        stored = x.permute(order)
        assert torch.equal(in_memory_order(stored), torch.arange(24))
        assert torch.equal(in_memory_order(stored.contiguous(), stored.stride()), torch.arange(24))
    assert torch.equal(in_memory_order(torch.arange(6).as_strided((1, 6, 1), (1, 1, 99))), torch.arange(6))
    assert in_memory_order(x[:, :, :2]) is None and in_memory_order(torch.ones(1).expand(3)) is None
    assert torch.equal(in_memory_order(torch.empty(0, 3)), torch.empty(0)) and in_memory_order(x[1, 1, 1]) is not None


def test_values_beyond_the_memory_of_a_store_are_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ValueStore(16)
    values = [torch.arange(4.0), torch.arange(24.0).reshape(4, 6).t(), torch.tensor(True), torch.empty(0, 2),
              torch.randn(3, dtype=torch.complex64).conj(), torch.randn(5).bfloat16(),
              (torch.ones(2), 3, None)]  # fmt: skip
    stored = [store.add(value) for value in values]
    assert stored[0] is values[0] and store.file_bytes == 96 + 1 + 0 + 24 + 10 + 8
    assert [str(store.load(item)) for item in stored] == [str(value) for value in values]
    with open("/dev/full", "wb") as full, pytest.raises(CompareError, match=r"139 bytes .* fit into .*set TMPDIR"):
        monkeypatch.setattr(store, "_file", full)
        store.add(torch.ones(4096))


def test_the_option_debug_raises_at_the_call(patch: pytest.MonkeyPatch) -> None:
    seeded_bugs.lowering(patch)
    compiled = torch.compile(chain, backend="fxwrap", options={"debug": "bisect"})
    with pytest.raises(DivergenceError, match=r"At fault: lowering of aten\.tanh") as caught:
        compiled(*tensors())
    assert caught.value.part == "lowering" and caught.value.location.startswith("test_bisection.py:")


def test_a_call_that_agrees_returns_the_result_and_mutates_once() -> None:
    def step(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return torch.rand_like(x) + x * count

    x, count = torch.ones(4), torch.zeros(1)
    torch.manual_seed(3)
    result = torch.compile(step, backend="fxwrap", options={"debug": "bisect"})(x, count)
    torch.manual_seed(3)
    assert torch.equal(result, torch.rand(4) + 1) and count.item() == 1


def test_graphs_and_exported_programs_are_bisected(patch: pytest.MonkeyPatch) -> None:
    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight)

    x = torch.randn(4, 4)
    seeded_bugs.lowering(patch)
    for graph in (make_fx(lambda x: torch.tanh(x @ x))(x), torch.export.export(Chain(), (x,))):
        divergence = fxwrap.bisect(graph, x).divergence
        assert divergence is not None and divergence.part == "lowering"


def test_a_difference_before_the_graphs_is_reported() -> None:
    def wrong_decomposition(x: Tensor) -> Tensor:
        return x * 2

    options = Options(decompositions={torch.ops.aten.square.default: wrong_decomposition,
                                      torch.ops.aten.pow.Tensor_Scalar: lambda x, _: x * 2})  # fmt: skip
    bisection = fxwrap.bisect(lambda x: x.pow(2), torch.full((4,), 3.0), options=options)
    assert bisection.divergence is None and not bisection.agrees
    assert "the difference arises before fxwrap lowers the graphs" in str(bisection)


@pytest.mark.parametrize(("subject", "training", "message"), [
    (fxwrap.parse("program @p() {\n  control.return()\n}\n"), False, "a program has no graph to compare with"),
    (3, False, "an object of type int cannot be bisected"),
    (make_fx(lambda x: x + 1)(torch.ones(1)), True, "a graph has no gradients"),
])  # fmt: skip
def test_other_objects_are_refused(subject: object, training: bool, message: str) -> None:
    with pytest.raises(CompareError, match=message):
        fxwrap.bisect(subject, torch.ones(1), training=training)


def test_debug_and_on_graph_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="option 'debug' checks compiled graphs"):
        Options(debug="bisect", on_graph=lambda graph, info: graph)
