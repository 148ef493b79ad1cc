"""Fusion, rule by rule: the members of one kernel, those that must not be in it, and eager's results."""

from __future__ import annotations

import cProfile
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap import Options, compile_graph, lower
from fxwrap.devices import CPU
from fxwrap.lines import Alloc, Launch
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.wrapper_ir import Ownership, leaves, live_bytes, print_program
from tests.lowering.loop_order import evaluate_in_loop_order
from tests.lowering.planned_programs import STRICT, Planned, check, close, plan
from tests.support.capture import capture_graphs
from tests.support.long_form import long_only
from tests.support.models import SHALLOW

ORDERED: dict[str, Callable[[Tensor], Any]] = {
    "scan of the flipped": lambda x: (x.cumsum(1), x.flip(1).cumsum(1)),
    "scan after its flip": lambda x: (x.flip(1).cumsum(1), x.cumsum(1)),
    "position in the flipped": lambda x: (x.argmax(1), x.flip(1).argmax(1)),
    "position after a flipped sum": lambda x: (x.flip(1).sum(1), x.argmax(1)),
    "position before a flipped sum": lambda x: (x.flip(1).argmin(1), x.sum(1)),
    "position after a permuted sum": lambda x: (x.t().sum(), x.argmax()),
    "position before a permuted sum": lambda x: (x.argmax(), x.t().sum()),
    "positions in two orders": lambda x: (x.argmax(), x.t().argmax()),
}


@pytest.mark.parametrize("case", ORDERED)
def test_order_dependent_reductions_keep_their_axis_order(case: str) -> None:
    x = torch.randperm(35, generator=torch.Generator().manual_seed(3)).reshape(5, 7).float()
    check(ORDERED[case], x)


AXES: dict[str, Callable[[Tensor], Any]] = {
    "an element beside a sum": lambda x: (mask := x > 0, mask.sum(), mask[0] * 2),
    "an element beside a position": lambda x: (y := x * 2, y.argmax(), y[0] + 1),
    "an element beside a scan": lambda x: (y := x * 2, y.cumsum(0), y[0] + 1),
    "an element after its sum": lambda x: (y := x + 1, y.sum(), (y[0] * 3).expand(1).sum()),
    "a sum of all dimensions before a scan": lambda x: (x.view(-1, 1).expand(-1, 2).sum(), x.cumsum(0)),
    "a sum of two dimensions before a scan": lambda x: (x.view(x.numel() // 3 or 1, -1).sum(), x.cumsum(0)),
    "a scan before a sum of two dimensions": lambda x: (x.cumsum(0), x.view(x.numel() // 3 or 1, -1).sum()),
    "three in one order": lambda x: (x.view(x.numel() // 3 or 1, -1).sum(), x.argmax(), (x * 2).cumsum(0)),
}


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("case", AXES)
def test_reductions_and_scans_keep_the_axes_they_run_along(case: str, size: int) -> None:
    """A reduction over one element has an axis to run over still, and a scan has only one."""
    check(AXES[case], torch.randn(size, generator=torch.Generator().manual_seed(size)))


MODULO: dict[str, Callable[[Tensor], Any]] = {
    "a whole turn": lambda y: (y.unfold(0, 2, 2).flip(1), y.roll([-2], [0])),
    "a whole turn and a bit": lambda y: (y.unfold(0, 2, 2).flip(1), y.roll([-3], [0])),
    "a row of one": lambda y: (y.view(1, 2).flip(1) + 1, y.roll([2], [0]).roll([2], [0])),
    "two turns": lambda y: (y.repeat(2).view(2, 2)[:1].flip(1), y.roll([4], [0]) * 2),
}


@pytest.mark.parametrize("case", MODULO)
def test_readers_find_an_element_whose_index_has_another_form(case: str) -> None:
    """A kernel takes the axes of a later member, one of size 1 among them, and `% 2` then drops a term."""

    def function(x: Tensor) -> Any:
        rolled = x.roll([-1], [0])
        return rolled, MODULO[case](rolled)[1].add_(1), *MODULO[case](rolled), rolled.unfold(0, 2, 2).flip(1) + 0

    check(function, torch.randn(2, generator=torch.Generator().manual_seed(5)))


def test_long_chains_are_one_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(120):
            x = (x + 1.5).t().clone(memory_format=torch.contiguous_format)
        return x

    assert len(check(function, torch.randn(3, 3)).launches) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_indirect_reads_of_a_kernel_result_need_another_kernel(size: int) -> None:
    def function(x: Tensor, index: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x.exp()
        return z.index_copy(0, index, y), y * z.index_select(0, index)

    launches = check(function, torch.randn(size), torch.arange(size).flip(0), torch.randn(size)).launches
    assert len(launches) == (2 if size == 1 else 4)  # the only element of a tensor is at a known position


def test_a_mutated_and_returned_operand_is_the_operand() -> None:
    def function(x: Tensor) -> Tensor:
        return x.copy_(x.flip(0) + 1) * 2

    planned = check(function, torch.randn(4, 5))
    assert planned.calls == ["aten.copy_.default"]


def test_a_scatter_depends_on_its_base() -> None:
    def function(x: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        product = x @ x
        start = product + 1
        return start.index_put((index,), values) * 2, product.relu(), values * product.sum(0)

    check(function, torch.randn(4, 4), torch.tensor([1, 2]), torch.randn(2, 4))


def test_a_reduction_over_one_element_has_an_axis_to_run_over() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        one = x[:1].tanh()
        return one, one.sum(0)

    check(function, torch.randn(3))


def test_inner_results_of_a_rule_may_be_overwritten_and_viewed() -> None:
    def function(x: Tensor) -> Tensor:
        return x.tanh().mean(0).tanh().view(3, 1)

    check(function, torch.randn(4, 3))


def test_memory_overwritten_later_is_not_reused() -> None:
    def function(x: Tensor, other: Tensor) -> Tensor:
        product = x @ x
        result = product + 1
        product.copy_(other + 1)
        return result

    check(function, torch.randn(4, 4), torch.randn(4, 4))


def test_two_writes_to_one_tensor_keep_their_order() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y - y.sum(1, keepdim=True))
        return x.copy_(y + 1)

    check(function, torch.randn(4, 4), torch.randn(4, 4))


EMPTY: dict[str, Callable[[Tensor], Any]] = {
    "a sum of a reshaped view": lambda x: x.unsqueeze(0).tanh().sum(),
    "a sum over two axes": lambda x: (x.tanh().expand(2, 0) * 2).sum(),
    "rows and their sums": lambda x: (x.new_ones(3, 0) + x, (x.new_ones(3, 0) + x).sum(1)),
    "a scan": lambda x: x.cumsum(0) + x,
}


@pytest.mark.parametrize("case", EMPTY)
def test_empty_tensors_are_not_read(case: str) -> None:
    planned = check(EMPTY[case], torch.randn(0))
    assert not any(buffer.extent == 0 for kernel in planned.kernels.values() for buffer in kernel.inputs)


EMPTY_SLICES: dict[str, Callable[[Tensor], Any]] = {
    "a sum": lambda x: (x[3:].unsqueeze(1) * 2).sum(),
    "a sum for each column": lambda x: (x[3:].unsqueeze(1).expand(0, 4) * 2).sum(0),
    "a mean and its differences": lambda x: x[3:].unsqueeze(1) - x[3:].unsqueeze(1).mean(),
    "an index": lambda x: x[x[3:].long().unsqueeze(1)].sum(0) + x,
    "a scatter": lambda x: x.scatter_add(0, x[3:].long(), x[3:].exp()),
}


@pytest.mark.parametrize("case", EMPTY_SLICES)
def test_an_empty_slice_reads_nothing_behind_the_end(case: str) -> None:
    """Printers move loads out of a loop where the loop does not change them, also out of one that never runs."""
    check(EMPTY_SLICES[case], torch.rand(3))


# --- what is one kernel ----------------------------------------------------------------------------------------------


def _adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    mean = m * 0.9 + g * 0.1
    spread = v * 0.99 + g * g * 0.01
    m.copy_(mean)
    v.copy_(spread)
    p.copy_(p - 0.01 * mean / (spread.sqrt() + 1e-8))


def _interpolated(x: Tensor) -> Tensor:
    position = torch.arange(8, device=x.device) * 0.4
    above = position.to(torch.int64)
    first, second = x[above], x[(above + 1).clamp(max=3)]
    return first + (second - first) * (position - above)[:, None] + second.tanh()


ONE_KERNEL: dict[str, Callable[..., Any]] = {
    "vertical": lambda x: ((x + 1).tanh() * x).relu(),
    "horizontal": lambda x: (x.tanh(), x.sigmoid(), x.t() * 2),
    "reduction with a prologue": lambda x: (x.tanh() * 2).sum(1),
    "reduction with an epilogue": lambda x: x.sum(1).tanh() + 1,
    "reductions of one tensor": lambda x: (x.sum(1), x.amax(1), x.argmin(1)),
    "values and their sum": lambda x: (lambda y: (y, y.sum(1)))(x.tanh()),
    "softmax": lambda x: torch.softmax(x * 0.5, 1),
    "softmax down columns": lambda x: torch.softmax(x, 0),
    "layer norm and what follows": lambda x: torch.nn.functional.layer_norm(x, [6]).relu() + x,
    "root mean square": lambda x: x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6),
    "views between": lambda x: (x.t().reshape(2, 12)[:, 1:] + 1).flip(0),
    "joining": lambda x: torch.cat([x + 1, x * 2], 1).relu(),
    "scan": lambda x: (x * 2).cumsum(1) + 1,
}


@pytest.mark.parametrize("case", [*ONE_KERNEL, "interpolation"])
def test_one_kernel(case: str) -> None:
    """Small kernels share launches; both neighbours of large interpolated rows belong to one kernel as well."""
    is_large = case == "interpolation"
    planned = check(_interpolated if is_large else ONE_KERNEL[case], torch.randn(4, 8200 if is_large else 6))
    assert len(planned.launches) == 1 and not planned.calls


def test_kernel_local_results_are_not_materialised() -> None:
    planned = check(lambda x: (x * 2).softmax(1).sum(1), torch.randn(4, 6))
    assert [line.result.type.sizes for line in planned.program.lines() if isinstance(line, Alloc)] == [(4,)]


# --- what is not ------------------------------------------------------------------------------------------------------


def test_an_extern_call_separates_dependent_kernels() -> None:
    planned = check(lambda x: (x + 1) @ x + (x + 1), torch.randn(4, 4))
    assert [line.opcode for line in planned.program.lines() if line.opcode in ("kernel.launch", "extern.call")] == [
        "kernel.launch", "extern.call", "kernel.launch"
    ]  # fmt: skip


def test_a_kernel_moves_after_an_independent_extern_call() -> None:
    """The sum of `x` and the additions after the matmul are one kernel, which runs after the matmul."""
    planned = check(lambda x: (x.sum(1), x + x @ x), torch.randn(4, 4))
    assert len(planned.launches) == 1


def test_an_expensive_value_with_several_readers_is_materialised() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.erfinv(x).lgamma()
        return row[None] + y, (y @ y) * row[:, None]

    planned = check(function, torch.rand(64) * 0.5, torch.randn(64, 64))
    names = [getattr(item, "name", "") for kernel in planned.kernels.values() for item in kernel.operations]
    assert names.count("lgamma") == 1


def test_a_cheap_value_with_two_readers_is_recomputed() -> None:
    def function(x: Tensor) -> Tensor:
        shifted = x + 1
        return (shifted @ x) * (shifted.t() * 2)

    planned = check(lambda x: function(x).sum(0), torch.randn(8, 8))
    assert len(planned.launches) <= 3


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_dead_input_is_overwritten() -> None:
    def function(x: Tensor) -> Tensor:
        return (x @ x).relu() + x

    planned = check(function, torch.randn(4, 4))
    assert not [line for line in planned.program.lines() if isinstance(line, Alloc)]


def test_a_live_input_is_not_overwritten() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        return product.relu(), (x + product) @ product

    planned = check(function, torch.randn(4, 4))
    assert len([line for line in planned.program.lines() if isinstance(line, Alloc)]) >= 1


def test_a_donated_input_is_overwritten() -> None:
    graph, x = make_fx(lambda x: x.exp() * 2)(torch.randn(4, 4)), torch.randn(4, 4)
    planned = plan(graph, [x], ownership={0: Ownership.OWNED})
    (result,) = planned.run([x])
    assert result.data_ptr() == x.data_ptr()


def test_inputs_reloaded_by_later_stages_are_not_overwritten() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        shifted = product + 1
        return shifted, shifted / product.sum(1, keepdim=True)

    graph = make_fx(function)(torch.randn(4, 4))
    planned = plan(graph, [torch.randn(4, 4)])
    x = torch.randn(4, 4)
    for result, eager in zip(planned.run([x], evaluate_in_loop_order), function(x), strict=True):
        assert close(result, eager)


def test_results_of_long_reductions_do_not_overwrite_operands_of_later_parts() -> None:
    """The gradients of weight and bias have the sizes of the saved statistics, which the last kernel reads too."""
    channels, images = 112, (64, 112, 14, 14)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        mask = [True, True, True]
        arguments = (grad, x, weight, None, None, mean, rstd, True, 1e-5, mask)
        return torch.ops.aten.native_batch_norm_backward(*arguments)

    with FakeTensorMode():
        data = [torch.empty(images, memory_format=torch.channels_last, device="cuda") for _ in range(2)]
        inputs = [*data, *[torch.empty(channels, device="cuda") for _ in range(3)]]
        graph = make_fx(backward)(*inputs)
    owned = dict.fromkeys((0, 1, 3, 4), Ownership.OWNED)
    program = lower(graph, inputs, ownership=owned)
    launches = [line for line in program.lines() if isinstance(line, Launch)]
    assert len(launches) == 3
    assert {value.name for value in launches[-1].outs} <= {"grad_1", "x_1"}, "the gradient overwrites an operand"


def _bias_gradients(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    product = torch.ops.aten.gelu_backward(grad, x)
    return product, product.sum(0, keepdim=True).view(x.shape[1])


@pytest.mark.parametrize(
    ("function", "sizes", "kernels"),
    [
        (lambda x: torch.softmax(x, 1), (14, 21, 66049), 1),
        (lambda x: torch.softmax(x, 1), (2, 21, 100), 2),
        (lambda x: torch.softmax(x, 1), (2, 2000, 66049), 2),
        (_bias_gradients, (8192, 4096), 2),
    ],
    ids=["many short columns", "few", "long", "sums are split"],
)
def test_kernels_of_columns_on_a_gpu(function: Callable[..., Any], sizes: tuple[int, ...], kernels: int) -> None:
    """Those of short columns write elements too if programs are many; results of each column need no other kernel."""
    with FakeTensorMode():
        inputs = [torch.empty(sizes, device="cuda") for _ in range(function.__code__.co_argcount)]
        graph = make_fx(function)(*inputs)
    assert len([line for line in lower(graph, inputs).lines() if isinstance(line, Launch)]) == kernels


def _masked_channels(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    masked = torch.where(y > 0, x, 0)
    return masked, masked.sum((0, 2))


@pytest.mark.parametrize(
    ("function", "sizes", "kernels"),
    [
        (lambda x, y: ((x - y).square().sum(), (x - y) * 2), (8192, 1000), 2),
        (lambda x, y: ((x * y).amax(1), x * y, x + y), (7, 500_003), 2),
        (_masked_channels, (66, 128, 784), 2),
        (_masked_channels, (66, 2048, 784), 2),
        (lambda x, y: (total := (x * y).sum(), x / total), (8192, 1000), 3),
        (lambda x, y: ((x - y).var(), x - y), (8192, 1000), 2),
    ],
    ids=["a loss", "unequal parts", "channels", "many channels", "elements after the sum", "a variance"],
)
def test_parts_of_long_rows_write_elements(function: Callable[..., Any], sizes: tuple[int, ...], kernels: int) -> None:
    """Rows that are split have as many programs as elements by themselves need; many rows are not split."""
    assert _launch_count(function, sizes) == kernels


def test_columns_do_not_write_elements() -> None:
    """Channels-last images have columns of channels: their elements are stored by a kernel of their own."""
    assert _launch_count(lambda x, y: _masked_channels(x.mT, y.mT), (66, 784, 128)) == 3


def test_parts_of_rows_do_not_store_in_a_transposed_layout() -> None:
    """A channels-last copy, as a convolution's backward reads, is stored by a kernel of tiles."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        masked, total = _masked_channels(x, y)
        return torch.ops.aten.clone(masked.view(66, 128, 28, 28), memory_format=torch.channels_last), total

    *parts, copy = _launches(function, (66, 128, 784))
    assert len(parts) == 2 and [out.type.strides[1] for out in copy.outs] == [1]


def test_equal_parts_of_split_reductions_are_one_kernel() -> None:
    """The second parts are named after the sums that they compute, not after what the first parts compute too."""

    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x - y).sum(0), x.sort(0).values.relu().sum(0)

    kernels = [line.kernel for line in _launches(sums, (65536, 256))]
    assert kernels == ["sub_sum_0", "sum_0", "relu_sum_0", "sum_0"]


def _launch_count(function: Callable[..., Any], sizes: tuple[int, ...]) -> int:
    """Returns the number of launches of a function of two tensors on a GPU."""
    return len(_launches(function, sizes))


def _launches(function: Callable[..., Any], sizes: tuple[int, ...]) -> list[Launch]:
    """Returns the launches of a function of two tensors on a GPU."""
    with FakeTensorMode():
        fakes = [torch.empty(sizes, device="cuda") for _ in range(2)]
        graph = make_fx(function)(*fakes)
    return [line for line in lower(graph, fakes).lines() if isinstance(line, Launch)]


@pytest.mark.parametrize(
    ("function", "sizes"),
    [(lambda x, y: ((x * y).amax(1), x * y, x + y), (7, 160_003)), (_masked_channels, (4, 33, 8000))],
    ids=["unequal parts", "channels"],
)
def test_results_of_parts_that_write_elements(function: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    inputs = [torch.randn(sizes) for _ in range(2)]
    gpu = dataclasses.replace(CPU, massively_parallel=True, kernel_language="triton")
    planned = plan(make_fx(function)(*inputs), inputs, STRICT.replace(devices=[gpu]))
    assert len(planned.launches) == 2
    results = planned.run([item.clone() for item in inputs])
    assert all(close(got, want) for got, want in zip(results, leaves(function(*inputs)), strict=True))


def test_an_optimizer_step_is_one_in_place_kernel() -> None:
    planned = check(_adam, *[torch.rand(5, 7) for _ in range(4)])
    assert len(planned.launches) == 1 and not planned.calls
    assert not [line for line in planned.program.lines() if isinstance(line, Alloc)]


def test_reads_before_a_write_see_the_old_value() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        before = x * 2
        x.copy_(y + 1)
        return before + 1, x * 3, before

    check(function, torch.randn(3, 5), torch.randn(3, 5))


def test_two_tensors_swap_values() -> None:
    def function(x: Tensor, y: Tensor) -> None:
        first, second = x + 1, y - 1
        x.copy_(second)
        y.copy_(first)

    planned = check(function, torch.randn(3, 5), torch.randn(3, 5))
    assert len(planned.launches) == 1


def test_a_write_through_a_view_is_seen_by_later_reads() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sum(0)
        x[1:].copy_(x[:-1] * 2)
        return total, x.sum(0)

    check(function, torch.randn(3, 5))


@pytest.mark.parametrize("name", [long_only("gpt2_eager_attention"), "bert"])
def test_fused_programs_need_no_more_memory(name: str) -> None:
    (captured,) = capture_graphs(SHALLOW[name], training=False)
    fused = plan(captured.graph_module, captured.example_inputs).program
    plain = lower(captured.graph_module, captured.example_inputs, options=Options(fuse=False))
    peaks = [live_bytes(program, include_inputs=False, include_constants=False).peak for program in (fused, plain)]
    if "peak" in dict(fused.header):
        assert peaks[1] < peaks[0] < 1.1 * peaks[1]
    else:
        assert peaks[0] <= peaks[1]


# --- identity and cost ------------------------------------------------------------------------------------------------


def _layers(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        hidden = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, [16]) @ weight, approximate="tanh")
        x = x + hidden @ weight.t()
    return x


def test_equal_layers_share_their_kernels() -> None:
    counts = []
    for layers in (3, 12):
        weights = [torch.randn(16, 32) * 0.1 for _ in range(layers)]
        counts.append(check(_layers, torch.randn(8, 16), *weights))
    assert len(counts[0].launches) * 4 == pytest.approx(len(counts[1].launches), abs=4)
    assert counts[1].kernels.keys() == counts[0].kernels.keys()
    assert len(counts[1].program.kernels) <= 5  # the first and the last layer have one of their own


def test_node_names_do_not_change_hashes() -> None:
    def planned(prefix: str) -> Planned:
        graph = make_fx(lambda x: (x + 1).softmax(1).sum(0))(torch.randn(3, 4))
        for number, node in enumerate(graph.graph.nodes):
            node.name = f"{prefix}{number}" if node.op == "call_function" else node.name
        return plan(graph, [torch.randn(3, 4)])

    one, two = planned("first"), planned("other")
    assert [item.hash for item in one.program.kernels] == [item.hash for item in two.program.kernels]


EVERY_SECOND = torch.ops.aten.slice_backward.default


@pytest.mark.parametrize("reduces", [False, True])
def test_strided_and_full_row_readers(reduces: bool) -> None:
    """Rows 1, 3, 5... are read at 2 * (row // 2) + 1, which is no way to walk all of them."""

    def graph(x: Tensor, rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        apart = EVERY_SECOND(x * rows[1::2], [8, 4], 0, 0, -1, 2)
        return (apart.sum(1) if reduces else apart), (y * rows).sum(1)

    check(graph, torch.randn(4, 4), torch.randn(8, 4), torch.randn(8, 4))


def test_window_sums_are_fused_with_the_image_kernel() -> None:
    def graph(x: Tensor) -> tuple[Tensor, Tensor]:
        windows = x.view(2, 2, 3, 2, 3, 5).permute(0, 1, 3, 2, 4, 5).reshape(8, 9, 5)
        return x * 2, windows.sum(2)

    assert len(check(graph, torch.randn(2, 6, 6, 5)).launches) == 1


BACKGROUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "inlined": Tensor.tanh,
    "reduced": lambda x: x.log_softmax(0),
    "a view of an input": lambda x: x.flip(0),
}


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("size", [1, 3])
def test_backgrounds_that_nothing_shows_are_not_read(size: int, background: str) -> None:
    """A slice that covers all hides its background, but through a shifted index the body cannot tell."""

    def function(x: Tensor) -> Any:
        y = torch.ops.aten.slice_scatter.default(BACKGROUNDS[background](x), x, 0, 0, size)
        padded = torch.constant_pad_nd(y, [1, 1], 2.0)
        return padded, padded.tanh(), torch.constant_pad_nd(y.tanh().tanh(), [0, 1], 2.0).tanh(), x.sum(), x.sum([0])

    check(function, torch.randn(size, generator=torch.Generator().manual_seed(7)))


def test_values_read_many_times_per_iteration_are_materialised() -> None:
    """A maximum over windows reads nine elements: dear ones get memory, cheap ones are computed again."""

    def pooled(function: Callable[[Tensor], Tensor]) -> list[str]:
        def graph(x: Tensor) -> Tensor:
            return torch.ops.aten.max_pool2d_with_indices(function(x), [3, 3], [2, 2], [1, 1])[0]

        return plan(make_fx(graph)(torch.randn(1, 2, 8, 8)), [torch.randn(1, 2, 8, 8)]).launches

    assert len(pooled(lambda x: x.exp().tanh().sigmoid())) == 2
    assert len(pooled(lambda x: x.relu())) == 1


def test_rows_of_a_batch_of_one_are_reduced_once() -> None:
    """The mean is stored and the deviation is not: their indices differ by the axis of size 1."""

    def function(x: Tensor, weight: Tensor) -> Any:
        return torch.ops.aten._native_batch_norm_legit_functional(x, weight, weight, weight, weight, True, 0.1, 1e-5)

    def loops(batch: int) -> int:
        planned = check(function, torch.randn(batch, 3, 8, 8), torch.rand(3))
        (kernel,) = planned.kernels.values()
        return [type(item).__name__ for item in kernel.operations].count("Reduce")

    assert loops(1) == loops(2) == 1


def test_text_is_the_same_each_time() -> None:
    graph = make_fx(_layers)(torch.randn(8, 16), *[torch.randn(16, 32) for _ in range(3)])
    inputs = [torch.randn(8, 16), *[torch.randn(16, 32) for _ in range(3)]]
    assert print_program(plan(graph, inputs).program) == print_program(plan(graph, inputs).program)


@pytest.mark.long  # of the time of large graphs
def test_fusion_time_is_linear_in_the_number_of_nodes() -> None:
    """Function calls of an unrolled GRU's lowering, which are the same on every machine."""
    calls = [_count_calls(_gru(steps)) / steps for steps in (10, 40)]
    assert calls[1] <= 1.15 * calls[0]


def _count_calls(graph: GraphModule) -> int:
    profile = cProfile.Profile()
    profile.enable()
    plan(graph, None)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def _gru(steps: int) -> GraphModule:
    """A GRU unrolled over `steps`, its nodes with fake values."""

    def function(x: Tensor, h: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        gates = (x @ inner).unbind(0)
        for gate in gates:
            i_reset, i_update, i_new = gate.chunk(3, -1)
            h_reset, h_update, h_new = (h @ outer).chunk(3, -1)
            reset, update = (i_reset + h_reset).sigmoid(), (i_update + h_update).sigmoid()
            new = (i_new + reset * h_new).tanh()
            h = new + update * (h - new)
        return h

    shapes = [(steps, 2, 8), (2, 8), (8, 24), (8, 24)]
    return make_fx(function, tracing_mode="fake")(*[torch.empty(shape) for shape in shapes])


def test_nothing_is_launched_for_unread_parts_of_a_concatenation() -> None:
    """The mean of the unread part is a kernel of its own, of which nothing is left."""

    def function(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.cat([z, x - x.mean(0, keepdim=True)])[: z.shape[0]] * 0.5

    inputs = [torch.randn(5, 4), torch.randn(7, 4)]
    graph = make_fx(function, tracing_mode="symbolic")(*inputs)
    compiled = compile_graph(graph, inputs, options=Options(compile_cache=False, fallback="error"))
    torch.testing.assert_close(compiled(*inputs)[0], function(*inputs))
    assert [line.kernel for line in compiled.program.lines() if isinstance(line, Launch)] == ["cat_mul_0"]
