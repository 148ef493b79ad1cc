"""Writes at indirect indices of inputs: a kernel computes the values and stores them, without a copy or a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS, capture
from fxwrap.lines import Alloc, IndexPut, Launch, Mutate, Scatter
from fxwrap.testing import assert_emitters_agree
from tests.lowering.planned_programs import Planned, check_graph, close, printed_launch

BF16 = torch.bfloat16
LENGTH = 16


def planned(function: Callable[..., Any], *inputs: Tensor, options: Options | None = None) -> Planned:
    """Plans a function that writes its inputs, and compares results and inputs with eager's."""
    graph = make_fx(functionalize(function, remove="mutations"))(*[item.clone() for item in inputs])
    graph.graph.eliminate_dead_code()
    return check_graph(graph, inputs, *([] if options is None else [options]))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary position embedding."""
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def update(keys: Tensor, values: Tensor, x: Tensor, y: Tensor, angle: Tensor, position: Tensor) -> Tensor:
    """Decoding's update of both caches."""
    keys.index_copy_(2, position, rotate(x, angle).to(BF16))
    values.index_copy_(2, position, y.to(BF16))
    return (keys.float() @ values.float().transpose(2, 3)).sum(2)


def cache_inputs() -> tuple[Tensor, ...]:
    """Two caches, a key, a value, the angles and the position."""
    caches = [torch.randn(2, 3, LENGTH, 8).to(BF16) for _ in range(2)]
    return *caches, torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 8), torch.randn(8), torch.tensor([5])


def test_rotation_cast_and_both_cache_updates_are_one_kernel() -> None:
    inputs = cache_inputs()
    plan = planned(update, *inputs)
    updated = [line for line in plan.program.lines() if isinstance(line, Launch) and len(line.outs) == 2]
    assert [value.name for value in updated[0].outs] == [item.value.name for item in plan.program.inputs[:2]]
    assert not [name for name in plan.calls if "index" in name or "copy" in name]
    for language in ("triton", "cpp"):
        graph_inputs = [item.clone() for item in inputs]
        expected = [item.clone() for item in inputs]
        (got,), want = plan.run(graph_inputs, printed_launch([plan], language)), update(*expected)
        assert close(got.to(BF16), want.to(BF16))
        assert all(close(one, other) for one, other in zip(graph_inputs, expected, strict=True))
    assert_emitters_agree(update, inputs)


@pytest.mark.parametrize("options", [{"fx_form": "functional"}, {"choose_kernel_form": lambda region: "subgraph"}])
def test_other_forms_of_the_program(options: dict[str, Any]) -> None:
    """A region would copy the cache, so that its operator stays a call."""
    emitters = ["fx"] if "fx_form" in options else ["interpreter", "fx"]
    assert_emitters_agree(update, cache_inputs(), options=options, emitters=emitters)


def _negative(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i - x.shape[0]] = v * 2


def _in_the_middle(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[:, i] = v.t()[:4] * 2


def _in_two_dimensions(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i, i * 2] = v[:, 0].cos()


def _a_number(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i] = 3.0
    return x.sum(0)


def _filled(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x.index_fill_(1, i, 2.0)


def _scattered(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x.scatter_(0, i[:, None].expand(2, 8), v.sin())
    x.scatter_(1, i[None], 4.0)


def _put(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x.put_(i * 9, v[:, 0] + 1)


def _twice(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i] = v + 1
    x[i + 1] = v * 2
    return x.sum(1)


def _read_before_and_after(x: Tensor, i: Tensor, v: Tensor) -> Any:
    old = x.exp()
    x[i] = v * 2
    return old + x.cos(), x[i] * 3


def _the_source_reads_the_target(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i] = x.cos()[1:3] * v


def _the_index_reads_the_target(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[(x[0, :2] > 9).long() + i] = v + 1


def _read_in_the_same_space(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x.index_copy_(0, torch.arange(4).flip(0), x * 2 + 1)
    return x * 3


def _values_are_returned(x: Tensor, i: Tensor, v: Tensor) -> Any:
    new = v.exp()
    x[i] = new
    return new, new.sum(1)


def _after_a_normalisation(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i] = v * v.pow(2).mean(1, keepdim=True).rsqrt()


def _after_a_scan(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i] = v.cumsum(1)


def _into_a_row(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[1].index_copy_(0, i, v[0, :2] * 2)
    x[2, 1:7][i] = v[1, 2:4].cos()
    return x * 2


def _into_a_strided_slice(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x.t()[1::2, i] = v.t()[:4].sin()
    x[:, ::3].index_fill_(0, i, 7.0)
    return x.sum(0)


def _a_slice_that_reads_another(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[:, 4:][i] = x[:2, :4] * v[:, :4]


def _nothing(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i[:0]] = v[:0] * 2
    return x + 1


def _equal_indices(x: Tensor, i: Tensor, v: Tensor) -> Any:
    x[i * 0] = v[:1].expand(2, 8) * 2


WRITES: dict[str, Callable[..., Any]] = {
    function.__name__.strip("_"): function
    for function in (
        _negative, _in_the_middle, _in_two_dimensions, _a_number, _filled, _scattered, _put, _twice,
        _read_before_and_after, _the_source_reads_the_target, _the_index_reads_the_target, _read_in_the_same_space,
        _values_are_returned, _after_a_normalisation, _after_a_scan, _into_a_row, _into_a_strided_slice,
        _a_slice_that_reads_another, _nothing, _equal_indices,
    )
}  # fmt: skip


RESULTS = {"read_before_and_after": 1, "read_in_the_same_space": 2, "into_a_row": 1, "nothing": 1}
"""The number of tensors of the input's sizes that a function computes."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITES)
def test_a_kernel_writes_an_input_at_indices(name: str) -> None:
    x, i, v = torch.randn(4, 8), torch.tensor([2, 0]), torch.randn(2, 8)
    function = WRITES[name]
    plan = planned(lambda x, i, v: (function(x, i, v), v + 1), x, i, v)
    assert not [line for line in plan.program.lines() if isinstance(line, IndexPut | Mutate | Scatter)]
    sizes = [line.result.tensor_type.sizes for line in plan.program.lines() if isinstance(line, Alloc)]
    assert sizes.count((4, 8)) == RESULTS.get(name, 0)
    got, expected = [x.clone(), i, v], x.clone()
    plan.run(got, printed_launch([plan], "triton"))
    function(expected, i, v)
    assert close(got[0], expected)


def test_a_source_in_the_same_memory_is_copied_by_a_call() -> None:
    def function(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        x[3].index_copy_(0, i, x[2, :2])
        return v + 1

    x, i, v = torch.randn(4, 8), torch.tensor([2, 0]), torch.randn(2, 8)
    for plan in (planned(function, x, i, v), planned(_into_a_row, x, i, v, options=Options(fuse=False))):
        assert "aten.index_copy.default" in plan.calls


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_caches_on_a_gpu(graphs: bool) -> None:
    inputs = [item.cuda() for item in cache_inputs()]
    assert_emitters_agree(update, inputs, options={"cuda_graphs": graphs}, emitters=["python", "cpp"])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    def function(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        x[i] = v.flip(1)
        return v.logical_not()

    x, v = [(torch.randn(*sizes) * 3).to(dtype) for sizes in ((1, 4, 5), (1, 2, 4, 5))]
    assert not planned(function, x[0], torch.tensor([3, 1]), v[0, :, 0]).calls


def test_complex_numbers_and_deterministic_algorithms_stay_calls() -> None:
    def function(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        x.index_copy_(0, i, v * 2)
        return v + 1

    x, i, v = torch.randn(4, 8), torch.tensor([2, 0]), torch.randn(2, 8)
    assert "aten.index_copy_.default" in planned(function, x.to(torch.complex64), i, v.to(torch.complex64)).calls
    torch.use_deterministic_algorithms(True)
    try:
        assert "aten.index_copy_.default" in planned(function, x, i, v).calls
    finally:
        torch.use_deterministic_algorithms(False)


OUTSIDE: dict[str, tuple[Callable[..., Any], tuple[int, ...], type[Exception]]] = {
    "too large": (lambda x, i, v: x.index_copy_(0, i, v), (0, 4), IndexError),
    "negative": (lambda x, i, v: x.index_copy_(0, i, v), (0, -1), IndexError),
    "far from the front": (lambda x, i, v: x.index_put_((i,), v), (0, -5), IndexError),
    "the only row": (lambda x, i, v: x[:1].index_copy_(0, i[1:], v[:1]), (0, 1), IndexError),
    "scattered": (lambda x, i, v: x.scatter_(0, i[:, None].expand(2, 8), v), (0, 2**40), RuntimeError),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_bounds_raises_and_writes_nothing_there(name: str) -> None:
    function, positions, error = OUTSIDE[name]
    x, v = torch.zeros(4, 8), torch.rand(2, 8) + 1
    if name == "the only row":
        x = x[:1]
    graph = make_fx(functionalize(lambda x, i, v: (function(x, i, v * 2), v + 1)[1], remove="mutations"))(
        x, torch.tensor([0, 0]), v
    )
    with pytest.raises(error):
        function(x.clone(), torch.tensor(positions), v)
    for emitter in COMPARED_EMITTERS:
        compiled = fxwrap.compile_graph(graph, [x, torch.tensor([0, 0]), v], options=Options(emitter=emitter))  # type: ignore[arg-type]
        written = x.clone()
        version = written._version
        compiled(written, torch.tensor([0, 0]), v)
        assert written._version > version
        written = x.clone()
        with pytest.raises(error, match="out of bounds for a dimension of size"):
            compiled(written, torch.tensor(positions), v)
        torch.testing.assert_close(written[1:], x[1:])
        if name == "the only row":
            torch.testing.assert_close(written, x)
        else:
            torch.testing.assert_close(written[0], v[0] * 2)


def test_symbolic_sizes_and_positions() -> None:
    def function(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        x[i + v.shape[0]] = v * x.shape[0]
        x[-1, i] = v[:, 0].cos()
        return x.sum(0)

    inputs = (torch.randn(9, 8), torch.tensor([2, 0, 5]), torch.randn(3, 8))
    assert_emitters_agree(function, inputs, dynamic=True)
    (graph,) = capture(function, inputs, dynamic=True)
    assert not [line for line in graph.compiled.program.body.lines if isinstance(line, IndexPut | Mutate | Scatter)]
