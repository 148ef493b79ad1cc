"""What needs a GPU: products in emitted C++ equal eager's in float64, in any layout, for many sizes, in recordings."""

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


def products(x: Tensor, w: Tensor, v: Tensor, bias: Tensor) -> list[Tensor]:
    """Products of all layouts, with a bias and without, activated by the library and by nobody."""
    hidden = torch.addmm(bias, x, w.t())
    active = nn.functional.gelu(torch.addmm(bias, x, w.t()), approximate="tanh")
    turned = [x.t() @ hidden, v.t() @ active.t()]
    return [hidden @ v, active @ v, *turned, torch.relu(x @ w.t()), x[:, ::2] @ w[:, ::2].t()]


def inputs(rows: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: Sequence[tuple[int, ...]] = ((rows, 96), (160, 96), (160, 64), (160,))
    return [(torch.randn(shape, generator=generator) / 8).to("cuda", dtype) for shape in shapes]


def error_of(found: Sequence[Tensor], given: Sequence[Tensor]) -> float:
    exact = products(*[item.double() for item in given])
    return max(
        ((item.double() - wide).norm() / wide.norm()).item() for item, wide in zip(found, exact, strict=True)
    )


def compiled(given: list[Tensor], **options: object) -> fxwrap.Compiled:
    graph = make_fx(products)(*given)
    return fxwrap.compile_graph(graph, given, options=fxwrap.Options(emitter="cpp", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("planning", ["none", "auto"])
@pytest.mark.parametrize("dtype", HALF)
def test_as_exact_as_eager(dtype: torch.dtype, planning: str) -> None:
    given = inputs(200, dtype)
    run = compiled(given, memory_planning=planning).flat
    for seed in range(3):
        given = inputs(200, dtype, seed)
        assert error_of(run(*given), given) <= 1.5 * error_of(products(*given), given)


def test_many_sizes(fresh_dynamo: None) -> None:
    """More than a call keeps plans for, and those of one row and one column, which are left to the operator."""
    function = torch.compile(products, backend="fxwrap", dynamic=True, options={"emitter": "cpp"})
    for rows in (*range(16, 160, 12), 1, 17, 28):
        given = inputs(rows, torch.bfloat16)
        assert error_of(function(*given), given) <= 1.5 * error_of(products(*given), given)


def test_recorded_and_replayed(fresh_dynamo: None) -> None:
    options = {"emitter": "cpp", "cuda_graphs": True}
    function = torch.compile(products, backend="fxwrap", options=options)
    for seed in range(5):
        given = inputs(64, torch.bfloat16, seed)
        assert error_of(function(*given), given) <= 1.5 * error_of(products(*given), given)


def test_captured_by_hand() -> None:
    given = inputs(64, torch.float16)
    run = compiled(given).flat
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*given)
    for seed in range(3):
        for item, new in zip(given, inputs(64, torch.float16, seed), strict=True):
            item.copy_(new)
        graph.replay()
        assert error_of(found, given) <= 1.5 * error_of(products(*given), given)


def test_threads_and_streams() -> None:
    """One program from several threads at a time, each with a stream of its own."""
    run = compiled(inputs(64, torch.bfloat16)).flat
    errors: list[float] = []

    def work(seed: int) -> None:
        given = inputs(64, torch.bfloat16, seed)
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
    """torch's profiler sees products by name either way; an operator says on which tensors."""
    given = inputs(64, torch.bfloat16)
    run = compiled(given).flat
    run(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run(*given)
    names = ("aten::mm", "aten::addmm", "aten::_addmm_activation")
    events = [event for event in profile.events() if event.name in names]
    with_shapes = [event.name for event in events if any(event.input_shapes)]
    assert len(events) >= 6 and len(with_shapes) <= 1  # of columns that lie apart, where they are not copied


def test_nothing_is_left_behind() -> None:
    given = inputs(64, torch.bfloat16)
    run = compiled(given).flat
    run(*given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        run(*given)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_workspaces_are_kept_for_each_stream() -> None:
    """A product of few numbers of many terms is added up in memory of its own, which later calls find again."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in ((16, 65536), (65536, 16))]
    run = fxwrap.compile_graph(make_fx(torch.mm)(*given), given, options=fxwrap.Options(emitter="cpp")).flat
    exact = given[0].double() @ given[1].double()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    results = {}
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for stream in streams:
            with torch.cuda.stream(stream):
                results[stream] = [run(*given)[0] for _ in range(20)]
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 20 * len(streams)  # of the second turn: results alone
    for found in results.values():
        for item in found:
            assert ((item.double() - exact).norm() / exact.norm()).item() < 0.01
