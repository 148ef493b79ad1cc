"""GPU tests: matmuls, convolutions and attention in emitted C++, with library plans, are as accurate as eager's.

The error is measured against float64, in any layout, in many sizes, in captured graphs, on threads and streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap

pytestmark = pytest.mark.gpu

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A function of tensors, the shapes and scale of its inputs, and the sizes for which it is called.

    `more_error`: the largest allowed error, as a multiple of eager's. `events`: its names in torch's profiler, the
    least number of events, and how many of these may be operators (for strided columns that are not copied).
    """

    function: Callable[..., list[Tensor]]
    shapes: Callable[[int], Sequence[tuple[int, ...]]]
    size: int
    sizes: Sequence[int]
    more_error: float
    events: tuple[Sequence[str], int, int]
    scale: float = 1.0

    def inputs(
        self, size: int, dtype: torch.dtype, seed: int = 0, order: torch.memory_format = torch.contiguous_format
    ) -> list[Tensor]:
        """Random ones; `order` is that of images and their weights."""
        generator = torch.Generator().manual_seed(seed)
        tensors = [
            (torch.randn(shape, generator=generator) * self.scale).to("cuda", dtype) for shape in self.shapes(size)
        ]
        return [item.contiguous(memory_format=order) if item.dim() == 4 else item for item in tensors]

    def error(self, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
        """The worst result's distance from float64, relative to its norm."""
        exact = self.function(*[item.double() for item in inputs])
        return max(
            ((item.double() - wide).norm() / wide.norm()).item() for item, wide in zip(results, exact, strict=True)
        )

    def check(self, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        assert self.error(results, inputs) <= self.more_error * self.error(self.function(*inputs), inputs)

    def compiled(self, inputs: list[Tensor], **options: Any) -> fxwrap.Compiled:
        graph = make_fx(self.function)(*inputs)
        return fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(emitter="cpp", **options))


def _products(x: Tensor, w: Tensor, v: Tensor, bias: Tensor) -> list[Tensor]:
    """Matmuls of all layouts, with and without a bias, with and without a fused activation."""
    hidden = torch.addmm(bias, x, w.t())
    active = nn.functional.gelu(torch.addmm(bias, x, w.t()), approximate="tanh")
    transposed = [x.t() @ hidden, v.t() @ active.t()]
    return [hidden @ v, active @ v, *transposed, torch.relu(x @ w.t()), x[:, ::2] @ w[:, ::2].t()]


def _convolutions(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> list[Tensor]:
    """Convolutions with strides, paddings and dilations, of one pixel, and of volumes."""
    hidden = nn.functional.conv2d(x, w, stride=2, padding=3)
    dilated = nn.functional.conv2d(x, w, stride=(1, 2), padding=(6, 2), dilation=(2, 1))
    volume = nn.functional.conv3d(hidden.unflatten(1, (8, 4)), u, padding=(1, 0, 1))
    return [hidden, dilated, nn.functional.conv2d(torch.relu(hidden), v), volume]


HEADS, WIDTH = 6, 64


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None = None, causal: bool = False
) -> Tensor:
    if q.dtype == torch.float64:
        scores = q @ k.transpose(-1, -2) * (WIDTH**-0.5 if scale is None else scale)
        scores = scores if bias is None else scores + bias
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0]).tril() == 0, -torch.inf)
        return torch.softmax(scores, -1) @ v
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    result: Tensor = operator(q, k, v, bias, False, 0.0, causal, False, scale=scale)[0]
    return result


def _attention(x: Tensor, y: Tensor, wide: Tensor, narrow: Tensor) -> list[Tensor]:
    """Self- and cross-attention: biased, scaled, causal, with strided and contiguous heads."""
    q, k, v = [part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in x.chunk(3, -1)]
    other, value = [part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2).contiguous() for part in y.chunk(2, -1)]
    return [
        _attend(q, k, v, None),
        _attend(q, k, v, wide[:, :, :, : k.shape[2]]),
        _attend(q.contiguous(), other, value, None, 0.2),
        _attend(q, other, value, narrow[..., : other.shape[2]].unsqueeze(1)),
        _attend(q, k, v, None, causal=True),
    ]


CASES = {
    "products": Case(
        _products, lambda size: [(size, 96), (160, 96), (160, 64), (160,)], 64, (*range(16, 160, 12), 1, 17, 28), 1.5,
        (("aten::mm", "aten::addmm", "aten::_addmm_activation"), 6, 1), scale=1 / 8,
    ),
    "convolutions": Case(
        _convolutions, lambda size: [(4, 16, size, size), (32, 16, 7, 7), (48, 32, 1, 1), (8, 8, 3, 3, 3)], 24,
        (*range(20, 80, 5), 20, 32), 1.5, (("aten::convolution",), 4, 0), scale=1 / 8,
    ),
    "attention": Case(
        _attention,
        lambda size: [(2, size, 3 * HEADS * WIDTH), (2, 40, 2 * HEADS * WIDTH), (2, 1, size, -(-size // 8) * 8),
                      (2, 1, 40)],
        64, (*range(16, 112, 8), 16, 64), 1.1,
        (("aten::_scaled_dot_product_cudnn_attention",), 5, 0),
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    selected: Case = CASES[request.param]
    return selected


_KINDS: list[tuple[str, int, torch.memory_format, dict[str, Any]]] = [
    ("products", 200, torch.contiguous_format, {"memory_planning": "none"}),
    ("products", 200, torch.contiguous_format, {"memory_planning": "auto"}),
    *[("convolutions", 40, order, {"layout": layout})
      for order in (torch.contiguous_format, torch.channels_last) for layout in ("auto", "preserve")],
    ("attention", 128, torch.contiguous_format, {}),
    ("attention", 72, torch.contiguous_format, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "order", "options"), _KINDS)
@pytest.mark.parametrize("dtype", HALF)
def test_accuracy_matches_eager(
    name: str, size: int, order: torch.memory_format, options: dict[str, Any], dtype: torch.dtype
) -> None:
    case = CASES[name]
    run = case.compiled(case.inputs(size, dtype, order=order), **options).flat
    for seed in range(3):
        inputs = case.inputs(size, dtype, seed, order)
        results = run(*inputs)
        case.check(results, inputs)
        assert [item.stride() for item in results] == [item.stride() for item in case.function(*inputs)]


def test_many_sizes(case: Case) -> None:
    """More sizes than a call caches plans for, and sizes that fall back to the operator."""
    function = torch.compile(case.function, backend="fxwrap", dynamic=True, options={"emitter": "cpp"})
    for size in case.sizes:
        inputs = case.inputs(size, torch.bfloat16)
        case.check(function(*inputs), inputs)


def test_captured_and_replayed(case: Case) -> None:
    options = {"emitter": "cpp", "cuda_graphs": True}
    function = torch.compile(case.function, backend="fxwrap", options=options)
    for seed in range(5):
        inputs = case.inputs(case.size, torch.bfloat16, seed)
        case.check(function(*inputs), inputs)


def test_manual_capture(case: Case) -> None:
    inputs = case.inputs(case.size, torch.float16)
    run = case.compiled(inputs).flat
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(*inputs)
    for seed in range(3):
        for item, new in zip(inputs, case.inputs(case.size, torch.float16, seed), strict=True):
            item.copy_(new)
        graph.replay()
        case.check(results, inputs)


def test_threads_and_streams(case: Case) -> None:
    """One program on several threads at once, each with its own stream."""
    run = case.compiled(case.inputs(case.size, torch.bfloat16)).flat
    errors: list[float] = []

    def work(seed: int) -> None:
        inputs = case.inputs(case.size, torch.bfloat16, seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                results = run(*inputs)
            torch.cuda.current_stream().synchronize()
        errors.append(case.error(results, inputs))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4 and max(errors) < 0.01


def test_the_operator_is_not_called(case: Case) -> None:
    """torch's profiler records both by name; only operators have input shapes."""
    inputs = case.inputs(case.size, torch.bfloat16)
    run = case.compiled(inputs, layout="preserve").flat
    run(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run(*inputs)
    names, count, by_operator = case.events
    events = [event for event in profile.events() if event.name in names]
    assert len(events) >= count and sum(any(event.input_shapes) for event in events) <= by_operator


def test_nothing_leaks(case: Case) -> None:
    inputs = case.inputs(case.size, torch.bfloat16)
    run = case.compiled(inputs).flat
    run(*inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        run(*inputs)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_workspaces_are_per_stream() -> None:
    """A matmul with few results and many terms needs a workspace, which later calls reuse."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in ((16, 65536), (65536, 16))
    ]
    run = fxwrap.compile_graph(make_fx(torch.mm)(*inputs), inputs, options=fxwrap.Options(emitter="cpp")).flat
    exact = inputs[0].double() @ inputs[1].double()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    results = {}
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for stream in streams:
            with torch.cuda.stream(stream):
                results[stream] = [run(*inputs)[0] for _ in range(20)]
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 20 * len(streams)  # of the second turn: results alone
    for tensors in results.values():
        for item in tensors:
            assert ((item.double() - exact).norm() / exact.norm()).item() < 0.01
