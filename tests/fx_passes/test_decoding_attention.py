"""Attention of few query rows to many keys: split over keys on massively parallel devices, else one kernel."""

from __future__ import annotations

import dataclasses
import operator as operator_module
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.compile.backend import make_backend
from fxwrap.devices import CPU
from fxwrap.fx_passes import FxPassContext, prepare_graph
from fxwrap.fx_passes.attention.decoding import split_decoding_attention
from fxwrap.lines import Launch
from fxwrap.testing import assert_emitters_agree
from tests.support.agreement import assert_as_exact

attend = functional.scaled_dot_product_attention
PARALLEL = Options(devices=[dataclasses.replace(CPU, massively_parallel=True)])
"""The form for GPUs, on the CPU."""


def _operands(
    rows: int, keys: int, *, batch: int = 2, heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(batch, rows, heads, width, dtype=dtype).transpose(1, 2)
    key, value = [torch.randn(batch, keys, heads, width, dtype=dtype).transpose(1, 2) for _ in range(2)]
    return query, key, value


def _biases(rows: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns a bias of each batch, whose last row is fully masked, and one that all rows share."""
    bias = torch.randn(2, 1, rows, keys, dtype=dtype).masked_fill(torch.rand(rows, keys) < 0.3, -torch.inf)
    bias[1, :, -1] = -torch.inf
    return bias, torch.randn(keys, dtype=dtype).expand(rows, -1)


def _attend_all(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared: Tensor) -> list[Tensor]:
    return [
        attend(query, key, value),
        attend(query, key, value, attn_mask=bias, scale=0.3),
        attend(query, key, value, attn_mask=bias[:1] > 0),
        attend(query, key, value, attn_mask=shared),
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rows", "keys", "emitters"), [(1, 700, ["cpp"]), (16, 513, ["python"])], ids=["one row", "many rows"]
)
def test_emitters_agree(rows: int, keys: int, emitters: list[str]) -> None:
    torch.manual_seed(rows)
    inputs = (*_operands(rows, keys), *_biases(rows, keys))
    assert_emitters_agree(_attend_all, inputs, options=PARALLEL, emitters=emitters)


@pytest.mark.parametrize("options", [PARALLEL, Options()], ids=["split", "few threads"])
def test_error_is_that_of_eager(options: Options) -> None:
    """Against float64; fully masked rows are zero, and parts or tiles without any key do not count."""
    torch.manual_seed(0)
    inputs = (*_operands(3, 1024, dtype=torch.bfloat16), *_biases(3, 1024, torch.bfloat16))
    inputs[3][0, :, :, 100:] = -torch.inf
    results = torch.compile(_attend_all, backend=make_backend(options), fullgraph=True)(*inputs)
    expected = _attend_all(*[item.double() for item in inputs])
    for result, eager, exact in zip(results, _attend_all(*inputs), expected, strict=True):
        assert result.stride() == eager.stride()
        assert_as_exact(result, eager, exact)
    assert not results[1][1, :, -1].any()


def test_heads_that_share_keys_count_as_rows_on_few_threads() -> None:
    """Tiles of keys that the mask hides are not read: their values do not matter."""
    torch.manual_seed(0)
    query, (_, key, value) = _operands(1, 1, heads=8)[0], _operands(1, 600)
    bias = torch.zeros(600).masked_fill(torch.arange(600) >= 128, -torch.inf)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend(query, key, value, attn_mask=bias.expand(1, 1, 1, -1), enable_gqa=True)

    expected = run(query, key, value, bias)
    key[:, :, 192:], value[:, :, 192:] = torch.nan, torch.nan
    result = torch.compile(run, backend="fxwrap", fullgraph=True)(query, key, value, bias)
    torch.testing.assert_close(result, expected)
    assert "flex_attention" in _targets(run, (query, key, value, bias), Options())


def _attend_to_finite_mask(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
    hidden = torch.arange(key.shape[2]) > position
    bias = query.new_zeros(2, 1, query.shape[2], key.shape[2]).masked_fill(hidden, -1e9)
    return attend(query, key, value, attn_mask=bias)


@pytest.mark.parametrize("position", [9, 699])
def test_rows_of_large_negative_numbers_alone_read_all_keys(position: int) -> None:
    """In C++ too, whose last block of keys is masked: what depends on no key is computed once for a block."""
    torch.manual_seed(0)
    inputs = (*_operands(1, 700), torch.tensor(position))
    compiled = fxwrap.compile_graph(make_fx(_attend_to_finite_mask)(*inputs), inputs, options=PARALLEL)
    for where in (inputs[3], torch.tensor(-1)):
        operands = (*inputs[:3], where)
        torch.testing.assert_close(compiled(*operands)[0], _attend_to_finite_mask(*operands))


def _attend_to_cache(query: Tensor, key: Tensor, value: Tensor, position: Tensor, lengths: Tensor) -> list[Tensor]:
    """Layers of a step: two read a mask of positions, others one of lengths, a finite one, and a number of each key."""
    keys = torch.arange(key.shape[2])
    visible = (keys <= position) & (keys > position - 300)
    ended = query.new_zeros(2, 1, 1, key.shape[2]).masked_fill(keys >= lengths[:, None, None, None], -torch.inf)
    finite = query.new_zeros(1, key.shape[2]).masked_fill(keys > position, torch.finfo(torch.float32).min)
    finite = finite.expand(4, -1)
    first = attend(query, key, value, attn_mask=visible.expand(4, -1))
    second = attend(query + 1, key, value, attn_mask=visible.expand(4, -1))
    numbers = query.new_zeros(key.shape[2]).masked_fill(keys > position, -torch.inf)
    masks = (ended, finite, numbers.expand(4, -1))
    return [first, second, *[attend(query, key, value, attn_mask=mask) for mask in masks]]


@pytest.mark.parametrize("options", [PARALLEL, Options()], ids=["split", "few threads"])
def test_masks_of_positions_bound_the_keys_that_are_read(options: Options) -> None:
    """Kernels compute masks from positions, so no tensor has one; positions may be out of range."""
    torch.manual_seed(0)
    operands = _operands(4, 1024)
    inputs = (*operands, torch.tensor([5]), torch.tensor([700, 3], dtype=torch.int32))
    with torch.no_grad():
        compiled = fxwrap.compile_graph(make_fx(_attend_to_cache)(*inputs), inputs, options=options)
    sizes = [line.outs[0].tensor_type.sizes for line in compiled.program.body.lines if isinstance(line, Launch)]
    assert (1024,) not in [size[-1:] for size in sizes]
    for position, lengths in ((5, [700, 3]), (-1, [0, 1024]), (1023, [-4, 1]), (1200, [1025, 64]), (1 << 40, [9, 9])):
        moved = (*operands, torch.tensor([position]), torch.tensor(lengths, dtype=torch.int32))
        expected = _attend_to_cache(*[item.double() if item.is_floating_point() else item for item in moved])
        for result, exact in zip(compiled(*moved), expected, strict=True):
            torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-5)
    poisoned = [item.clone() for item in operands[1:]]
    for item in poisoned:
        item[:, :, 320:] = torch.nan
    first, *_ = compiled(operands[0], *poisoned, torch.tensor([200]), torch.tensor([1, 1], dtype=torch.int32))
    torch.testing.assert_close(first, _attend_to_cache(*operands, torch.tensor([200]), inputs[4])[0])


def test_a_mask_of_positions_that_are_overwritten_before_the_call_is_read() -> None:
    """The first mask is that of the old position; the second one is computed from the new position in the kernel."""

    def step(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> list[Tensor]:
        old = torch.arange(key.shape[2]) <= position
        position.add_(100)
        new = torch.arange(key.shape[2]) <= position
        results = [attend(query, key, value, attn_mask=mask.expand(4, -1)) for mask in (old, new)]
        position.add_(1)
        return results

    inputs = (*_operands(4, 600), torch.tensor([5]))
    with torch.no_grad():
        graph = make_fx(step)(*[item.clone() for item in inputs])
    position = torch.tensor([5])
    results = fxwrap.compile_graph(graph, inputs)(*inputs[:3], position)
    for result, expected in zip(results, step(*inputs), strict=True):
        torch.testing.assert_close(result, expected)
    assert position.item() == 106


@pytest.mark.parametrize("options", [PARALLEL, Options()], ids=["split", "few threads"])
def test_dynamic_lengths(options: Options) -> None:
    compiled = torch.compile(attend, backend=make_backend(options), fullgraph=True, dynamic=True)
    for keys in (600, 900, 3):
        operands = _operands(4, keys)
        torch.testing.assert_close(compiled(*operands), attend(*operands))


def test_interpreted_triton() -> None:
    torch.manual_seed(0)
    options = dataclasses.replace(PARALLEL, cpu_kernels="triton")
    query, key, value = _operands(3, 512, batch=1)
    bias = torch.randn(3, 512)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend(query, key, value, attn_mask=bias)

    assert_emitters_agree(run, (query, key, value, bias), options=options, emitters=["python"])


@pytest.mark.parametrize("position", [0, 6, 7, 200, 511])
def test_parts_read_as_many_keys_up_to_a_position(position: int) -> None:
    """Each part has every eighth key. Those beyond the position are not read: they are NaN."""
    torch.manual_seed(position)
    query, key, value = _operands(3, 512, batch=1)
    key[:, :, position + 1 :], value[:, :, position + 1 :] = torch.nan, torch.nan

    def run(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        return attend(query, key, value, attn_mask=(torch.arange(key.shape[2]) <= position).expand(3, -1))

    inputs = (query, key, value, torch.tensor([position]))
    with torch.no_grad():
        graph, options = make_fx(run)(*inputs), dataclasses.replace(PARALLEL, cpu_kernels="triton")
    compiled = fxwrap.compile_graph(graph, inputs, options=options)
    launch = next(line for line in compiled.program.body.lines if isinstance(line, Launch))
    assert launch.outs[0].tensor_type.sizes[3] == 8
    (result,) = compiled(*inputs)
    torch.testing.assert_close(result, attend(query, key[:, :, : position + 1], value[:, :, : position + 1]))


def _targets(function: Callable[..., object], inputs: tuple[Tensor, ...], options: Options) -> set[str]:
    """Returns the names of the operators that a function's graph has after the passes."""
    with torch.no_grad():
        prepared = prepare_graph(make_fx(function)(*inputs), inputs, options)
    return {str(node.target) for node in prepared.nodes if node.op == "call_function"}


CPU_CALL = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (_operands(9, 1024), Options()),
        (_operands(1, 1024, dtype=torch.float64), Options()),
        (_operands(1, 1024), dataclasses.replace(PARALLEL, preserve_ops=(CPU_CALL,))),
        (_operands(17, 1024), PARALLEL),
        (_operands(1, 256), PARALLEL),
        (_operands(1, 512, batch=70), PARALLEL),
    ],
    ids=["rows that fill vectors", "unmeasured dtype", "preserved", "many rows", "few keys", "many matrices"],
)
def test_calls_that_stay(inputs: tuple[Tensor, ...], options: Options) -> None:
    assert CPU_CALL in _targets(lambda query, key, value: attend(query, key, value), inputs, options)


def test_causal_calls_stay() -> None:
    """The library aligns them at the first row and key."""
    causal = _targets(lambda query, key, value: attend(query, key, value, is_causal=True), _operands(2, 1024), PARALLEL)
    assert CPU_CALL in causal


def test_calls_whose_log_sum_exp_is_used_stay() -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert CPU_CALL in _targets(lambda query, key, value: operator(query, key, value)[1], _operands(1, 1024), PARALLEL)


_aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "flags"),
    [
        (_aten._scaled_dot_product_cudnn_attention.default, (None, False)),
        (_aten._scaled_dot_product_efficient_attention.default, (None, False)),
        (_aten._scaled_dot_product_flash_attention.default, ()),
    ],
    ids=str,
)
def test_calls_of_gpu_libraries(operator: Any, flags: tuple[object, ...]) -> None:
    """On fake CUDA tensors; a bias that batches, heads and rows share is read once."""
    graph = Graph()
    with FakeTensorMode():
        fakes = [torch.empty(1, 8, rows, 128, dtype=torch.bfloat16, device="cuda") for rows in (4, 1024, 1024)]
        bias = torch.empty(1024, dtype=torch.bfloat16, device="cuda").expand(1, 8, 4, 1024)
        output = torch.empty(1, 4, 8, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    nodes = [graph.placeholder(name) for name in ("query", "key", "value", "bias")]
    arguments = (*nodes[:3], *([nodes[3], *flags[1:]] if flags else []))
    call = graph.call_function(operator, arguments)
    result = graph.call_function(operator_module.getitem, (call, 0))
    graph.output((result,))
    values = [*fakes, bias]
    for node, value in zip([*nodes, call, result], [*values, (output, *[None] * 8), output], strict=True):
        node.meta["val"] = value
    prepared = prepare_graph(GraphModule({}, graph), None, Options())
    (split,) = [node for node in prepared.nodes if node.op == "call_function" and "flex_attention" in str(node.target)]
    assert prepared.fakes[split][0].stride() == output.stride()
    buffers: Any = split.args[7]
    assert [tuple(prepared.fakes[item].shape) for item in buffers] == ([(1024,)] if flags else [])
    assert split_decoding_attention(prepared, FxPassContext(Options())) is prepared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boolean_masks_of_cudnn_hide_keys(dtype: torch.dtype) -> None:
    """Some versions of torch add a number where such a mask is False: keys beyond the position are not read.

    A model may mask by that number in float16, where fully masked rows attend to all keys, as cuDNN's do.
    """

    def run(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        mask = (torch.arange(key.shape[2]) <= position).expand(3, -1)
        bias = torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype), -65504.0).expand(1, 2, 3, -1)
        output: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, attn_mask=bias)[0]
        return output

    operands = _operands(3, 512, batch=1, dtype=dtype)
    inputs = (*operands, torch.tensor([100]))
    graph = make_fx(run)(*inputs)
    (call,) = [node for node in graph.graph.nodes if str(node.target) == CPU_CALL]
    call.target, call.args = (
        _aten._scaled_dot_product_cudnn_attention.default,
        (*call.args, call.kwargs["attn_mask"], False),
    )
    call.kwargs = {}
    with torch.no_grad():
        compiled = fxwrap.compile_graph(graph, inputs, options=dataclasses.replace(PARALLEL, cpu_kernels="triton"))
    poisoned = [item.clone() for item in operands[1:]]
    for item in poisoned:
        item[:, :, 101:] = torch.nan
    (result,) = compiled(operands[0], *poisoned, inputs[3])
    expected = attend(operands[0], *[item[:, :, :101] for item in operands[1:]])
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    (masked,) = compiled(*operands, torch.tensor([-1]))
    if dtype is torch.bfloat16:
        assert not masked.any()
    else:
        torch.testing.assert_close(masked, attend(*operands), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("options", [PARALLEL, Options()], ids=["split", "few threads"])
def test_large_negative_numbers_hide_keys_from_rows_that_have_others(options: Options) -> None:
    """Each batch has its own length. Rows of one have no key, and attend to all of them."""

    def run(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.arange(key.shape[2]) >= lengths[:, None, None, None]
        bias = query.new_zeros(2, 1, 1, key.shape[2]).masked_fill(hidden, torch.finfo(torch.float16).min)
        return attend(query, key, value, attn_mask=bias)

    operands = _operands(4, 1024)
    inputs = (*operands, torch.tensor([90, 0]))
    with torch.no_grad():
        compiled = fxwrap.compile_graph(make_fx(run)(*inputs), inputs, options=options)
    torch.testing.assert_close(compiled(*inputs)[0], run(*inputs), rtol=1e-4, atol=1e-5)
    poisoned = [item.clone() for item in operands[1:]]
    for item in poisoned:
        item[:, :, 300:] = torch.nan
    (result,) = compiled(operands[0], *poisoned, torch.tensor([90, 200]))
    torch.testing.assert_close(result, run(*operands, torch.tensor([90, 200])), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "keys", "parts"), [(1, 1024, 16), (3, 700, 8), (4, 8192, 32)])
def test_parts(batch: int, keys: int, parts: int) -> None:
    """A power of two, so that parts of most lengths have whole blocks of keys; at least 64 keys are a part."""
    inputs = _operands(1, keys, batch=batch)
    with torch.no_grad():
        graph = make_fx(lambda query, key, value: attend(query, key, value))(*inputs)
    program = fxwrap.compile_graph(graph, inputs, options=PARALLEL).program
    launch = next(line for line in program.body.lines if isinstance(line, Launch))
    assert launch.outs[0].tensor_type.sizes[3] == parts


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "rows", "keys", "width"), [(1, 4, 1024, 128), (8, 1, 777, 64), (2, 16, 4096, 128)])
def test_gpu(batch: int, rows: int, keys: int, width: int) -> None:
    torch.manual_seed(0)
    inputs = [item.cuda() for item in _operands(rows, keys, batch=batch, heads=8, width=width, dtype=torch.bfloat16)]
    mask = torch.rand(rows, keys, device="cuda") < 0.7

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, attn_mask=mask)

    with torch.no_grad():
        result = torch.compile(run, backend="fxwrap", fullgraph=True, dynamic=False)(*inputs)
        eager, exact = run(*inputs), run(*[item.double() for item in inputs])
    assert_as_exact(result, eager, exact)
