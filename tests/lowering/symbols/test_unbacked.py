"""Sizes that are known only when an operator has run, and numbers that are read from tensors, through every emitter."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap import Options
from fxwrap.comparison.driver import capture
from fxwrap.errors import GraphError
from fxwrap.lines import Bind, ExternCall, Launch, ReadItem
from tests.lowering.control.cases import DEVICES, Case, Cases, random
from tests.lowering.symbols.check_sizes import check_all_sizes

CASES = Cases()
X = random(10, 4)
NUMBERS = torch.tensor([1, 0, 3, 2])
THREE = torch.tensor(3)
HALF = torch.tensor(2.5)
TRUE = torch.tensor(True)


@torch.library.custom_op("dynamic_tests::positives", mutates_args=())
def positives(x: Tensor) -> Tensor:
    return x[x > 0].clone()


@positives.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(),))


@torch.library.custom_op("dynamic_tests::parted", mutates_args=())
def parted(x: Tensor) -> tuple[Tensor, list[Tensor], int]:
    return torch.nonzero(x <= 0), [x[x > 0].clone(), x[x <= 0].clone()], int((x > 0).sum())


@parted.register_fake
def _(x: Tensor) -> Any:
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(3)]
    below = x.new_empty((sizes[1], x.dim()), dtype=torch.int64)
    return below, [x.new_empty((sizes[0],)), x.new_empty((sizes[1],))], sizes[2]


@torch.library.custom_op("dynamic_tests::pairs", mutates_args=())
def pairs(x: Tensor) -> Tensor:
    return torch.cat([x[x > 0], x[x > 0]])


@pairs.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((2 * torch.library.get_ctx().new_dynamic_size(),))


@torch.library.custom_op("dynamic_tests::spread", mutates_args=())
def spread(x: Tensor) -> Tensor:
    step = int((x > 0).sum()) + 4
    return torch.empty_strided((3, 4), (step, 1), device=x.device).copy_(x[:12].reshape(3, 4))


@spread.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty_strided((3, 4), (torch.library.get_ctx().new_dynamic_size(min=4), 1))


@torch.library.custom_op("dynamic_tests::later", mutates_args=())
def later(x: Tensor) -> Tensor:
    return torch.cat([x, x])[int((x > 0).sum()) :][:4]


@later.register_fake
def _(x: Tensor) -> Tensor:
    start = torch.library.get_ctx().new_dynamic_size(min=0)
    return x.new_empty((2 * x.shape[0],)).as_strided((4,), (1,), start)


# --- data-dependent sizes -------------------------------------------------------------------------------------------


@CASES.add((X,))
def selected_rows_and_indices(x: Tensor) -> Any:
    rows = x[x.sum(1) > 0]
    return torch.softmax(rows, -1), rows.sum(0), rows.shape[0], torch.nonzero(x > 0) * 2 + 1


@CASES.add((X,), dynamic=True, long=True)
def selected_elements(x: Tensor) -> Any:
    return torch.masked_select(x, x > 0).exp() + 1, (x[x > 0] * 2).relu().sum() + x.shape[0]


@CASES.add((torch.randint(0, 5, (20,), generator=torch.Generator().manual_seed(0)),))
def distinct_numbers(x: Tensor) -> Any:
    values, positions, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return values + 1, positions, counts, torch.unique(x).sum()


@CASES.add((torch.randint(0, 2, (10, 2), generator=torch.Generator().manual_seed(0)),), long=True)
def distinct_rows(x: Tensor) -> Any:
    return torch.unique(x, dim=0, return_counts=True), torch.unique_consecutive(x[:, 0], return_counts=True)


@CASES.add((random(4, 6), NUMBERS))
def repeated_rows(x: Tensor, repeats: Tensor) -> Any:
    return torch.repeat_interleave(x, repeats, 0) * 2, torch.repeat_interleave(repeats) + 1


@CASES.add((random(40),), (-random(40).abs(),))
def a_custom_operator_with_data_dependent_strides_and_offsets(x: Tensor) -> Any:
    return spread(x).sum(0) + 1, spread(x), later(x) * 2, later(x)[1:]


@CASES.add((random(40),))
def custom_operators_with_data_dependent_lists_and_numbers(x: Tensor) -> Any:
    below, (above, rest), count = parted(x)
    chosen = positives(x) * 2, pairs(x).view(2, -1).sum(0)
    return below.sum(0), above * 2, rest + 1, torch.ones(count) * 2, count, chosen


@CASES.add((random(10, 4, gradient=True), random(4, 3, gradient=True)), training=True)
def gradients_of_selected_rows(x: Tensor, w: Tensor) -> Any:
    return torch.softmax((x[x.detach().sum(1) > 0] @ w).tanh(), -1)


@CASES.add((random(10, 4, gradient=True),), training=True)
def gradients_of_selected_elements(x: Tensor) -> Any:
    return torch.masked_select(x, x > 0).sin() * 3, (x[x.sum(1) > 0] * 2).exp()


@CASES.add((random(4, 6, gradient=True), NUMBERS), training=True, long=True)
def gradients_of_repeated_rows(x: Tensor, repeats: Tensor) -> Any:
    return torch.repeat_interleave(x, repeats, 0).sin()


# --- sizes and positions that are read from tensors -----------------------------------------------------------------


@CASES.add((THREE, random(3)))
def a_size_is_read(n: Tensor, y: Tensor) -> Any:
    ones = torch.ones(n.item(), device=y.device)
    return torch.cat([ones, y]).sin(), torch.arange(n.item()) * 2, torch.tensor(n.item()) + 1


@CASES.add((random(9, 4), THREE))
def slices_at_numbers_that_are_read(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= 6)
    return x[:k].sin(), x.narrow(0, k, 3), x.narrow(0, k, 3).cos() + 1


@CASES.add((random(9, 4), THREE), (random(9, 4), torch.tensor(-2)))
def views_at_numbers_of_any_sign(x: Tensor, n: Tensor) -> Any:
    return x[n.item()], x[n.item()] * 2, x.t().select(1, n.item())[1:] + 1


@CASES.add((random(9, 4), THREE, torch.tensor(7)), (random(9, 4), torch.tensor(-20), torch.tensor(20)), long=True)
def a_slice_between_numbers_of_any_sign(x: Tensor, a: Tensor, b: Tensor) -> Any:
    return x[a.item() : b.item()] * 2


@CASES.add((random(9, 4), torch.tensor([2, 3, 4])))
def chunks_of_data_dependent_sizes(x: Tensor, sizes: Tensor) -> Any:
    a, b, c = sizes.tolist()
    for size in (a, b, c):
        torch._check(size >= 0)
    torch._check(a + b + c == x.shape[0])
    first, second, third = x.split([a, b, c])
    return first.sum(0) + second.sum(0), third * 2


@CASES.add((random(12), THREE))
def a_reshape_to_a_number_that_is_read(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k > 0)
    torch._check(12 % k == 0)
    return x.reshape(k, 12 // k) * 2, x.expand(k, 12).sum(0)


@CASES.add((random(9, 4, gradient=True), THREE, HALF), training=True)
def gradients_at_numbers_that_are_read(x: Tensor, n: Tensor, f: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= 9)
    return x[:k].sin(), (x * k).sin(), (x * f.item()).cos()


# --- numbers --------------------------------------------------------------------------------------------------------


@CASES.add((random(4), HALF, THREE, TRUE))
def numbers_are_returned_and_operands(x: Tensor, f: Tensor, n: Tensor, b: Tensor) -> Any:
    numbers = x + 1, f.item(), n.item(), n.item() + 1, b.item(), f.item() > 2, n.item() / 2
    computed = x * math.sqrt(f.item()) + f.item() ** 2 / (n.item() + 1), f.item() * n.item()
    of_halves = x.half() * f.item(), x * (n.item() // 2) + n.item() % 3
    return numbers, computed, x * f.item() + n.item(), x * b.item() + 1, of_halves


@CASES.add((random(9), HALF, torch.tensor(-0.5)))
def numbers_choose(x: Tensor, f: Tensor, g: Tensor) -> Any:
    high, low = f.item(), g.item()
    return torch.where(x > 0, high, x), torch.where(x > low, high, low), x.clamp(low, high)


@CASES.add((random(4), TRUE), (random(4), torch.tensor(False)), long=True)
def one_of_two_numbers(x: Tensor, b: Tensor) -> Any:
    number = torch.sym_ite(b.item(), 2, 3)
    return x * number, number, torch.ones(number) + 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.parameters)
def test_every_emitter_matches_eager(case: Case, device: str) -> None:
    case.check(device)


def test_one_program_covers_all_counts_including_zero() -> None:
    def function(x: Tensor) -> Any:
        rows = x[x.sum(1) > 0]
        return torch.relu(rows * 2 + 1), rows.sum(0), torch.softmax(rows, 0).sum(1)

    calls = [(x,) for x in (random(6, 4), random(6, 4, seed=1), -torch.ones(6, 4), torch.ones(6, 4))]
    assert len(check_all_sizes(function, calls, dynamic=False)) == 1


# --- lines ----------------------------------------------------------------------------------------------------------


def program_of(function: Any, *inputs: Any, options: Options | None = None) -> fxwrap.Program:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        (graph,) = capture(function, inputs, options=options)
    return graph.compiled.program


def test_symbols_are_bound_by_key_paths() -> None:
    (line,) = [line for line in program_of(lambda x: positives(x) * 2, random(9)).body.lines if isinstance(line, Bind)]
    assert [(step.name, step.arguments) for step in line.path] == [("size", (0,))]
    assert line.symbol.lower == 0
    program = program_of(lambda x: pairs(x) + 1, random(9))
    (line,) = [line for line in program.body.lines if isinstance(line, Bind)]
    assert [(step.name, step.arguments) for step in line.path] == [("size", (0,)), ("divide", (2,))]
    program = program_of(lambda x: spread(x) + 1, random(40))
    (line,) = [line for line in program.body.lines if isinstance(line, Bind)]
    assert [(step.name, step.arguments) for step in line.path] == [("stride", (0,))]


def test_kernels_over_unbacked_sizes_are_fused() -> None:
    program = program_of(lambda x: torch.softmax(x[x.sum(1) > 0] * 2 + 1, -1).exp(), X)
    after = [type(line) for line in program.body.lines][[type(line) for line in program.body.lines].index(Bind) :]
    assert after.count(Launch) == 1 and ExternCall not in after


def test_a_number_that_nothing_uses_is_still_read() -> None:
    program = program_of(lambda x, n: (x + 1, n.item())[0], X, THREE)
    assert sum(isinstance(line, ReadItem) for line in program.body.lines) <= 1  # reading has no effect that can be seen


# --- what cannot be compiled ----------------------------------------------------------------------------------------


def test_a_symbol_used_before_its_definition() -> None:
    """A graph whose metadata contains a size that no earlier node defines."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        seen: list[Any] = []
        torch.compile(lambda n: torch.ones(n.item()) + 1, backend=_capture_programs(seen), fullgraph=True)(THREE)
    graph = seen[0]
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._local_scalar_dense.default:
            with graph.graph.inserting_before(node):
                number = graph.graph.call_function(operator.add, (1, 2))
            number.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(number)
            graph.graph.erase_node(node)
    with pytest.raises(GraphError, match=r"node '\w+'.*: it needs the symbol u\d+, which no earlier node defines"):
        fxwrap.compile_graph(graph)


def _capture_programs(seen: list[Any]) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def keep(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep)


@torch.library.custom_op("dynamic_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x[x > 0].clone()


def test_a_data_dependent_operator_without_a_fake_rule() -> None:
    """torch itself rejects it, and names the missing registration; fxwrap rejects a hand-written graph, by node."""
    with pytest.raises(Exception, match="without_fake"):
        torch.compile(lambda x: without_fake(x) * 2, backend="fxwrap", fullgraph=True)(X)
    graph = torch.fx.Graph()
    call = graph.call_function(torch.ops.dynamic_tests.without_fake.default, (graph.placeholder("x"),))
    graph.output(call)
    with pytest.raises(GraphError, match=r"node 'without_fake_default'.*no fake implementation"):
        fxwrap.compile_graph(torch.fx.GraphModule(torch.nn.Module(), graph), [X])
