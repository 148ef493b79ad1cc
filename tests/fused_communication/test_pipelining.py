"""The operators around all_reduces are computed in parts; each all_reduce that stays whole has a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxwrap
from fxwrap.fused_communication import CollectivePipelining, PipelinedCollectives
from fxwrap.lines import StartCollective
from fxwrap.options import EMITTERS, Options
from tests.distributed.processes import run_ranks

C10D = torch.ops._c10d_functional
ALWAYS = CollectivePipelining(least_gain=float("-inf"))
BATCH, LENGTH, WIDTH, HEADS = 4, 6, 8, 2


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of four ranks whose all_reduces return their operand."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def reduced(x: Tensor) -> Tensor:
    result: Tensor = C10D.wait_tensor(C10D.all_reduce(x, "sum", "0"))
    return result


def pipelined(
    function: Callable[..., Any], *inputs: Tensor, pass_: CollectivePipelining = ALWAYS
) -> tuple[GraphModule, PipelinedCollectives]:
    """Returns the graph of a function, and the result of the pass."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return graph, pass_.pipeline(graph)


def weight(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def block(x: Tensor, qkv: Tensor, o: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    """A block of a transformer with tensor parallelism; also returns results that a backward would read."""
    normed = F.layer_norm(x, (WIDTH,))
    heads = (normed @ qkv).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)  # (batch, heads, 3, length, width)
    q, k, v = heads.unbind(2)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + reduced(attended.transpose(1, 2).flatten(2) @ o)
    inner = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() @ up
    y = reduced(F.silu(inner) @ down)
    return [x + y, y, inner, q, normed]


def block_inputs() -> list[Tensor]:
    x = weight(BATCH, LENGTH, WIDTH)
    return [x, weight(WIDTH, 3 * WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, 2 * WIDTH), weight(2 * WIDTH, WIDTH)]


def gradients(function: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """Returns a function of the results and the gradients of the sum of their squares."""

    def both(*inputs: Tensor) -> list[Tensor]:
        leaves = [item.detach().requires_grad_() for item in inputs]
        results = function(*leaves)
        loss = sum([item.square().sum() for item in results])
        return [*results, *torch.autograd.grad(loss, leaves, materialize_grads=True)]

    return both


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_block_equals_eager_in_every_emitter(emitter: str) -> None:
    inputs = block_inputs()
    expected = block(*inputs)
    graph = make_fx(block, tracing_mode="fake")(*inputs)
    options = Options.from_mapping({"emitter": emitter, "passes": [ALWAYS], "compile_cache": False}, None)
    compiled = fxwrap.compile_graph(graph, inputs, options=options)
    assert sum(isinstance(line, StartCollective) for line in compiled.program.lines()) == 4
    assert_close(list(compiled(*inputs)), expected)


def test_work_of_the_next_part_is_between_a_start_and_its_wait() -> None:
    _, result = pipelined(block, *block_inputs())
    assert result.split == ("all_reduce", "all_reduce_1") and not result.unsplit
    names = {"aten::mm": "mm", "_c10d_functional::all_reduce_": "start", "_c10d_functional::wait_tensor": "wait"}
    calls = [node for node in result.graph_module.graph.nodes if node.op == "call_function"]
    order = [names[name] for node in calls if (name := getattr(node.target, "_name", "").partition(".")[0]) in names]
    first = "mm mm start mm mm start"  # queries, keys and values in one matmul, and the output projection
    assert " ".join(order) == f"{first} wait mm mm start wait mm mm start wait wait"


def test_gradients_equal_eager() -> None:
    inputs = block_inputs()
    graph, result = pipelined(gradients(block), *inputs)
    assert len(result.split) == 4
    assert_close(result.graph_module(*inputs), graph(*inputs))


# --- reasons ----------------------------------------------------------------------------------------------------------


def test_sizes_that_are_no_equal_parts() -> None:
    _, result = pipelined(lambda x, w: reduced(x @ w), weight(3, 4), weight(4, 4))
    assert [item.reason for item in result.unsplit] == ["3 elements are no 2 equal parts"]


def test_an_operator_that_is_not_known() -> None:
    _, result = pipelined(lambda x: reduced(x.cumsum(0)), weight(4, 4))
    (item,) = result.unsplit
    assert item.reason == "aten.cumsum.default is not known to compute parts of its result from parts of its operands"


def test_other_matmuls_beside_a_collective() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [reduced(x @ a).sin(), (x @ b).sin()]

    _, result = pipelined(function, weight(4, 4), weight(4, 4), weight(4, 4 << 18))
    (item,) = result.unsplit
    assert item.reason.startswith("other matmuls of ")


def test_small_gains() -> None:
    graph, result = pipelined(block, *block_inputs(), pass_=CollectivePipelining())
    assert result.graph_module is graph and result.gain == 0
    assert all(" of the graph's time, and at least 3.0% is expected" in item.reason for item in result.unsplit)
    assert result.report().startswith("0 all_reduces in parts, 2 whole, expected gain 0.0%\nwhole: all_reduce\n")


def test_results_that_are_written() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y.mul_(2)
        return reduced(y)

    _, result = pipelined(function, weight(4, 4), weight(4, 4))
    assert [item.reason for item in result.unsplit] == ["'mul_' is written"]


def test_one_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2 parts, not 1"):
        CollectivePipelining(parts=1)


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_training_on_several_ranks(ranks: int, tmp_path: Path) -> None:
    arguments = ("parts", str(ranks))
    for number, results in enumerate(
        run_ranks("tests.fused_communication.rank", tmp_path, *arguments, world_size=ranks)
    ):
        assert results == {"parts": ""}, f"rank {number}:\n" + results["parts"]


# --- random graphs ----------------------------------------------------------------------------------------------------


class RandomGraph:
    """A function of (batch, length, width) tensors with all_reduces between operators, which a seed determines."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.seed = seed
        self.batch, self.length, self.width = choose.choice((1, 2, 4)), choose.choice((2, 3, 4)), choose.choice((4, 8))
        self.steps = choose.randint(4, 14)

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def new(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=torch.float64, generator=generator)

        square, rows = new(self.width, self.width), new(self.length, 1, self.width)
        return [new(self.batch, self.length, self.width), square, rows, new(self.width)]

    def __call__(self, x: Tensor, square: Tensor, rows: Tensor, bias: Tensor) -> list[Tensor]:
        choose = random.Random(self.seed + 1)
        values = [x]
        for _ in range(self.steps):
            one, other = values[-1], choose.choice(values)
            values.append(self._step(choose, one, other, square, rows, bias))
        return choose.sample(values[1:], max(1, len(values) // 3)) + [reduced(values[-1] @ square)]

    def _step(
        self, choose: random.Random, one: Tensor, other: Tensor, square: Tensor, rows: Tensor, bias: Tensor
    ) -> Tensor:
        half = self.width // 2
        steps: list[Callable[[], Tensor]] = [
            lambda: reduced(one @ square / self.width),
            lambda: reduced(F.linear(one, square, bias)),
            lambda: reduced(one.sin()),
            lambda: one + other,
            lambda: F.layer_norm(one, (self.width,)),
            lambda: F.softmax(one, choose.choice((-1, 1))),
            lambda: torch.cat([-one[..., half:], other[..., :half]], -1),
            lambda: (one.unflatten(-1, (2, half)) * rows.unflatten(-1, (2, half))[:, 0]).flatten(2),
            lambda: one - other.mean((choose.choice((0, 1, 2)),), keepdim=True),
            lambda: self._attention(one, other),
            lambda: torch.bmm(one, torch.bmm(other.transpose(1, 2), one)) / self.length,
            lambda: one.transpose(0, 1).contiguous().transpose(0, 1),
            lambda: one / (1 + one.square().sum(-1)).unsqueeze(-1).expand(-1, -1, self.width),
            lambda: one.reshape(-1, self.width).mm(square).view(one.shape).tanh(),
        ]
        return choose.choices(steps, [3, 2, 1, 3, *[1] * (len(steps) - 4)])[0]()

    @staticmethod
    def _attention(one: Tensor, other: Tensor) -> Tensor:
        query, key = [item.unflatten(-1, (2, -1)).transpose(1, 2) for item in (one, other)]
        return F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_graphs_have_equal_results(first: int) -> None:
    in_parts = 0
    for seed in range(first, first + 20):
        function = RandomGraph(seed)
        inputs = function.inputs()
        graph, result = pipelined(gradients(function) if seed % 3 == 0 else function, *inputs)
        in_parts += len(result.split)
        assert_close(result.graph_module(*inputs), graph(*inputs), msg=lambda text, seed=seed: f"seed {seed}: {text}")
    assert in_parts > 20
