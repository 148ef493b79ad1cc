"""What needs a GPU: convolutions in emitted C++ are as exact as eager's, in both orders, many sizes, in recordings."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap

pytestmark = pytest.mark.gpu

HALF = (torch.bfloat16, torch.float16)


def convolutions(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> list[Tensor]:
    """Convolutions with strides, paddings and dilations, of one pixel, and of volumes."""
    hidden = nn.functional.conv2d(x, w, stride=2, padding=3)
    dilated = nn.functional.conv2d(x, w, stride=(1, 2), padding=(6, 2), dilation=(2, 1))
    volume = nn.functional.conv3d(hidden.unflatten(1, (8, 4)), u, padding=(1, 0, 1))
    return [hidden, dilated, nn.functional.conv2d(torch.relu(hidden), v), volume]


def inputs(
    size: int, dtype: torch.dtype, seed: int = 0, order: torch.memory_format = torch.contiguous_format
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: Sequence[tuple[int, ...]] = ((4, 16, size, size), (32, 16, 7, 7), (48, 32, 1, 1), (8, 8, 3, 3, 3))
    made = [(torch.randn(shape, generator=generator) / 8).to("cuda", dtype) for shape in shapes]
    return [item.contiguous(memory_format=order) if item.dim() == 4 else item for item in made]


def error_of(found: Sequence[Tensor], given: Sequence[Tensor]) -> float:
    exact = convolutions(*[item.double() for item in given])
    return max(
        ((item.double() - wide).norm() / wide.norm()).item() for item, wide in zip(found, exact, strict=True)
    )


def compiled(given: list[Tensor], **options: object) -> fxwrap.Compiled:
    graph = make_fx(convolutions)(*given)
    return fxwrap.compile_graph(graph, given, options=fxwrap.Options(emitter="cpp", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["auto", "keep"])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_as_exact_as_eager(dtype: torch.dtype, order: torch.memory_format, layout: str) -> None:
    given = inputs(40, dtype, order=order)
    run = compiled(given, layout=layout).flat
    for seed in range(3):
        given = inputs(40, dtype, seed, order)
        found, eager = run(*given), convolutions(*given)
        assert error_of(found, given) <= 1.5 * error_of(eager, given)
        assert [item.stride() for item in found] == [item.stride() for item in eager]


def test_many_sizes(fresh_dynamo: None) -> None:
    """More than a call keeps plans for."""
    function = torch.compile(convolutions, backend="fxwrap", dynamic=True, options={"emitter": "cpp"})
    for size in (*range(20, 80, 5), 20, 32):
        given = inputs(size, torch.bfloat16)
        assert error_of(function(*given), given) <= 1.5 * error_of(convolutions(*given), given)


def test_recorded_and_replayed(fresh_dynamo: None) -> None:
    function = torch.compile(convolutions, backend="fxwrap", options={"emitter": "cpp", "cuda_graphs": True})
    for seed in range(5):
        given = inputs(24, torch.bfloat16, seed)
        assert error_of(function(*given), given) <= 1.5 * error_of(convolutions(*given), given)


def test_captured_by_hand() -> None:
    given = inputs(24, torch.float16)
    run = compiled(given).flat
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*given)
    for seed in range(3):
        for item, new in zip(given, inputs(24, torch.float16, seed), strict=True):
            item.copy_(new)
        graph.replay()
        assert error_of(found, given) <= 1.5 * error_of(convolutions(*given), given)


def test_threads_and_streams() -> None:
    """One program from several threads at a time, each with a stream of its own."""
    run = compiled(inputs(24, torch.bfloat16)).flat
    errors: list[float] = []

    def work(seed: int) -> None:
        given = inputs(24, torch.bfloat16, seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found = run(*given)
            torch.cuda.current_stream().synchronize()
        errors.append(error_of(found, given))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4 and max(errors) < 0.01


def test_the_operator_is_not_asked() -> None:
    """torch's profiler sees convolutions by name either way; the operator calls others."""
    given = inputs(24, torch.bfloat16)
    run = compiled(given, layout="keep").flat
    run(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(*given)
    names = [event.name for event in profile.events()]
    assert names.count("aten::convolution") == 4 and "aten::cudnn_convolution" not in names


def test_nothing_is_left_behind() -> None:
    given = inputs(24, torch.bfloat16)
    run = compiled(given).flat
    run(*given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        run(*given)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
