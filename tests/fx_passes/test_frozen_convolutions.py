"""With `freeze`, convolutions keep weights in the library's layout, with batch norms, residuals and activations."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.lines import ExternCall
from fxwrap.runtime import library, native, prepacked_weights
from fxwrap.torch_compat import ConvolutionGeometry, fused_convolution
from tests.support.agreement import assert_as_exact
from tests.support.child_processes import child_environment, run_python
from tests.support.frozen_operators import compiled_programs, count_conversions, extern_targets, use_python_operators
from tests.support.garbage import freeze_heap
from tests.support.versions import fails_before

CONVOLUTION, ACCUMULATING = "fxwrap.frozen_convolution.default", "fxwrap.frozen_convolution_.default"


class Block(nn.Module):
    """Convolutions with batch norms, a residual that is one of them, a bias, groups, and one that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.short, self.short_norm = nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 16, 3, dilation=2, padding=2, groups=4)
        for norm in (self.norm, self.short_norm):
            nn.init.normal_(norm.weight, 1, 0.3)
            nn.init.normal_(norm.bias)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)) + self.short_norm(self.short(x)))
        last = self.last(hidden)
        return last * torch.sigmoid(last)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_frozen_convolutions_follow_writes_into_statistics(emitter: str, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(2, 8, 12, 12).contiguous(memory_format=memory_format)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        programs, compiled = compiled_programs(model, x, emitter=emitter)
        assert extern_targets(programs[0]) == [CONVOLUTION] * 3
        assert len(programs[0].kernels) <= 2  # the sigmoid, and its layout
        for _ in range(2):
            expected = exact(x.double())
            error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
            assert error <= 3 * eager
            model.norm.running_var.mul_(4)
            exact.norm.running_var.mul_(4)


@pytest.mark.parametrize(
    ("emitter", "varies_lengths"), [("python", False), ("cpp", False), ("fx", True), ("python", True), ("cpp", True)]
)
def test_any_number_of_images_has_frozen_convolutions(emitter: str, varies_lengths: bool) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    exact = copy.deepcopy(model).double()
    dims: Any = ({0: torch.export.Dim("images", max=100)},)
    if varies_lengths:
        dims[0].update({2: torch.export.Dim("height", min=4, max=99), 3: torch.export.Dim("width", min=4, max=99)})
    program = torch.export.export(model, (torch.randn(2, 8, 24, 24),), dynamic_shapes=dims)
    compiled = fxwrap.compile_graph(program, options=Options(freeze=True, emitter=emitter))
    assert sorted(extern_targets(compiled.program)) == [CONVOLUTION, CONVOLUTION, ACCUMULATING]
    conversions = []
    with torch.no_grad():
        for images, height, width in ((2, 24, 24), (1, 30, 19), (40, 22, 39)):
            x = torch.randn(images, 8, *((height, width) if varies_lengths else (24, 24)))
            conversions.append(count_conversions(lambda x=x: compiled(x)))  # type: ignore[misc]
            expected = exact(x.double())
            error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
            assert error <= 3 * eager
    assert conversions == [3, 0, 0]


def test_frozen_convolutions_of_no_images() -> None:
    image, weight = torch.randn(0, 8, 12, 12), torch.randn(16, 8, 1, 1)
    for batch in (image, torch.randn(3, 8, 12, 12)):
        arguments = ([1, 1], [0, 0], [1, 1], 1, None, "relu", [2304, 144, 12, 1])
        result = torch.ops.fxwrap.frozen_convolution(batch, weight, None, [], 0.0, *arguments)
        torch.testing.assert_close(result, torch.relu(torch.conv2d(batch, weight)))


def test_frozen_convolutions_of_bfloat16() -> None:
    """Weights are folded in float64 and rounded once."""
    torch.manual_seed(0)
    model, x = Block().eval().bfloat16(), torch.randn(2, 8, 12, 12, dtype=torch.bfloat16)
    with torch.no_grad():
        programs, compiled = compiled_programs(model, x)
        assert extern_targets(programs[0]) == [CONVOLUTION] * 3
        assert_as_exact(compiled(x), model(x), copy.deepcopy(model).double()(x.double()))


@pytest.mark.parametrize("has_residual", [False, True])
def test_folded_batch_norms_of_bfloat16_are_as_exact_as_eager(has_residual: bool) -> None:
    """Also where the norm's shift is large, which bfloat16 rounds to 8 bits."""
    torch.manual_seed(0)
    image, weight = torch.randn(4, 8, 12, 12).bfloat16(), (torch.randn(64, 8, 3, 3) / 9).bfloat16()
    scale, offset, mean = 1 + torch.rand(64), 3 * torch.randn(64), torch.randn(64)
    norm = [item.bfloat16() for item in (scale, offset, mean, 0.5 + torch.rand(64))]
    residual = torch.randn(4, 64, 12, 12).bfloat16() if has_residual else None

    def computed(dtype: torch.dtype) -> Tensor:
        parameters = [item.to(dtype) for item in norm]
        result = torch.conv2d(image.to(dtype), weight.to(dtype), None, 1, 1)
        result = nn.functional.batch_norm(result, parameters[2], parameters[3], parameters[0], parameters[1])
        return result if residual is None else result + residual.to(dtype)

    exact, eager = computed(torch.float64), computed(torch.bfloat16)
    arguments = ([1, 1], [1, 1], [1, 1], 1, residual, "none", list(eager.stride()))
    result = torch.ops.fxwrap.frozen_convolution(image, weight, None, norm, 1e-5, *arguments)
    assert result.dtype is torch.bfloat16
    assert_as_exact(result, eager, exact)


def test_a_call_of_the_library_computes_what_follows_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's do on GPUs: bias, residual and positive part."""
    calls: list[bool] = []

    def fused(image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, residual: Tensor | None) -> Tensor:
        calls.append(residual is not None)
        numbers = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        result = torch.conv2d(image, weight, bias, *numbers)
        return torch.relu(result if residual is None else result + residual)

    use_python_operators(monkeypatch)
    monkeypatch.setattr(prepacked_weights, "prepack_convolution_weight", lambda *_: None)
    monkeypatch.setattr(prepacked_weights, "fused_convolution", fused)
    model, x = Block().eval(), torch.randn(2, 8, 12, 12)
    with torch.no_grad():
        _, compiled = compiled_programs(model, x)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert calls and all(calls)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cudnn_computes_what_follows_a_convolution(dtype: torch.dtype) -> None:
    geometry = ConvolutionGeometry((2, 2), (1, 1), (1, 1), 1)
    image = torch.randn(4, 16, 20, 20, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    weight = (torch.randn(32, 16, 3, 3, device="cuda", dtype=dtype) / 12).to(memory_format=torch.channels_last)
    bias = torch.randn(32, device="cuda", dtype=dtype)
    exact = torch.conv2d(image.double(), weight.double(), bias.double(), 2, 1)
    for residual in (None, torch.randn(exact.shape, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)):
        result = fused_convolution(image, weight, bias, geometry, residual)
        assert result is not None and result.is_contiguous(memory_format=torch.channels_last)
        expected = torch.relu(exact if residual is None else exact + residual.double())
        assert (result.double() - expected).norm() <= 1e-2 * expected.norm()


def test_batch_norms_in_train_mode_and_shared_convolutions_are_not_folded() -> None:
    torch.manual_seed(0)
    model, x = Block().train(), torch.randn(2, 8, 12, 12)
    with torch.no_grad():
        programs, compiled = compiled_programs(copy.deepcopy(model), x)
        targets = extern_targets(programs[0])
        assert targets.count(CONVOLUTION) == 3  # weights are frozen, statistics are not

        def twice(image: Tensor) -> Tensor:
            convolved = model.first(image)
            return model.norm.eval()(convolved) + convolved

        programs, compiled = compiled_programs(twice, x)
        torch.testing.assert_close(compiled(x), twice(x))


@pytest.mark.parametrize("declared", [torch.contiguous_format, torch.channels_last], ids=str)
def test_results_of_frozen_convolutions_have_the_declared_strides(declared: torch.memory_format) -> None:
    """oneDNN chooses a layout for images of three channels that depends on their size."""
    weight = torch.randn(64, 3, 7, 7)
    for size in (8, 224):
        for image in (
            torch.randn(1, 3, size, size),
            torch.randn(1, 3, size, size).to(memory_format=torch.channels_last),
        ):
            expected = torch.conv2d(image, weight, None, 2, 3)
            strides = expected.contiguous(memory_format=declared).stride()
            arguments = ([2, 2], [3, 3], [1, 1], 1, None, "none", strides)
            result = torch.ops.fxwrap.frozen_convolution(image, weight, None, [], 0.0, *arguments)
            assert result.stride() == strides
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            with torch._subclasses.FakeTensorMode() as mode:
                fakes = [mode.from_tensor(item) for item in (image, weight)]
                fake = torch.ops.fxwrap.frozen_convolution(*fakes, None, [], 0.0, *arguments)
            assert (fake.shape, fake.stride()) == (result.shape, result.stride())


@pytest.mark.parametrize("has_library", [True, False])
def test_weights_of_convolutions_without_batch_norm_are_freed(
    has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_python_operators(monkeypatch)
    if not has_library:
        monkeypatch.setattr(prepacked_weights, "prepack_convolution_weight", lambda *_: None)
    freeze_heap()
    image, weight, before = torch.randn(2, 8, 12, 12), torch.randn(16, 8, 1, 1), len(prepacked_weights._cache)
    arguments = ([1, 1], [0, 0], [1, 1], 1, None, "none", [2304, 144, 12, 1])
    result = torch.ops.fxwrap.frozen_convolution(image, weight, None, [], 0.0, *arguments)
    torch.testing.assert_close(result, torch.conv2d(image, weight))
    assert len(prepacked_weights._cache) == before + 1
    del weight
    gc.collect()
    assert len(prepacked_weights._cache) == before


def test_threads_share_converted_weights() -> None:
    torch.manual_seed(0)
    image, weight = torch.randn(1, 32, 10, 10), torch.randn(64, 32, 3, 3)
    arguments = (None, [], 0.0, [1, 1], [1, 1], [1, 1], 1, None, "none", [6400, 100, 10, 1])
    expected = torch.conv2d(image, weight, None, 1, 1)

    def run_in_threads() -> None:
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(torch.ops.fxwrap.frozen_convolution, image, weight, *arguments) for _ in range(64)]
            for call in calls:
                torch.testing.assert_close(call.result(), expected, rtol=1e-4, atol=1e-4)

    run_in_threads()
    weight.mul_(2)
    expected = expected * 2
    run_in_threads()


def test_a_weight_for_images_of_many_lengths_is_converted_twice() -> None:
    """Once for small ones: detectors apply one head to images of several lengths."""
    weight, images = torch.randn(16, 8, 3, 3), [torch.randn(1, 8, length, length) for length in (3, 5, 9, 17, 33, 40)]

    def run(image: Tensor) -> None:
        arguments = (
            [1, 1],
            [1, 1],
            [1, 1],
            1,
            None,
            "none",
            [16 * image[0, 0].numel(), image[0, 0].numel(), len(image[0, 0]), 1],
        )
        result = torch.ops.fxwrap.frozen_convolution(image, weight, None, [], 0.0, *arguments)
        torch.testing.assert_close(result, torch.conv2d(image, weight, padding=1), rtol=1e-4, atol=1e-4)

    assert [count_conversions(lambda image=image: run(image)) for image in images] == [1, 0, 1, 0, 0, 0]  # type: ignore[misc]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "relu6": nn.functional.relu6, "hardswish": nn.functional.hardswish,
    "silu": nn.functional.silu, "sigmoid": torch.sigmoid,
}  # fmt: skip


class Activations(nn.Module):
    """Activations of a convolution, of one of single pixels, and of sums of a convolution and another tensor."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.pixels, self.last = nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 16, 3, padding=1)
        nn.init.normal_(self.norm.weight, 1, 0.3)
        nn.init.normal_(self.norm.bias, 0, 2)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        first = self.activation(self.norm(self.wide(x)))
        second = self.activation(self.pixels(first))
        return self.activation(self.last(second) + first) + x.sum()


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_library_computes_activations(
    name: str, dtype: torch.dtype, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        use_python_operators(monkeypatch)
    torch.manual_seed(0)
    model, x = Activations(ACTIVATIONS[name]).eval().to(dtype), torch.randn(2, 8, 9, 9).to(dtype)
    with torch.no_grad():
        programs, compiled = compiled_programs(model, x)
        calls = [line for line in programs[0].body.lines if isinstance(line, ExternCall) and line.target == CONVOLUTION]
        assert [line.arguments[10] for line in calls] == [name] * 3
        expected = copy.deepcopy(model).double()(x.double())
        error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
        assert error <= 1.5 * eager


def test_other_activations_stay() -> None:
    model, x = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Hardtanh(-1, 6)).eval(), torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        for options in ({}, {"preserve_ops": ("aten.hardtanh.default",)}):
            programs, compiled = compiled_programs(model, x, **options)
            calls = [line for line in programs[0].body.lines if isinstance(line, ExternCall)]
            assert calls[0].target == CONVOLUTION and calls[0].arguments[10] == "none"
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="fxwrap::frozen_convolution has no activation 'softsign'"):
        weight, sizes = torch.randn(16, 8, 1, 1), ([1, 1], [0, 0], [1, 1], 1)
        torch.ops.fxwrap.frozen_convolution(x, weight, None, [], 0.0, *sizes, None, "softsign", [1296, 81, 9, 1])


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_add_to_residuals_in_their_memory(
    memory_format: torch.memory_format, activation: str, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another layout than the image's, and where functionalisation makes a new tensor of the sum."""
    if not is_native:
        use_python_operators(monkeypatch)
    image, weight, bias = torch.randn(2, 8, 9, 9), torch.randn(16, 8, 3, 3), torch.randn(16)
    residual = torch.randn(2, 16, 9, 9).contiguous(memory_format=memory_format)
    total = torch.conv2d(image, weight, bias, padding=1) + residual
    expected = total if activation == "none" else ACTIVATIONS[activation](total)

    def accumulated(residual: Tensor, image: Tensor) -> Tensor:
        numbers = (bias, [], 0.0, [1, 1], [1, 1], [1, 1], 1, activation)
        memory = residual.clone()
        torch.ops.fxwrap.frozen_convolution_(memory, image, weight, *numbers)
        return memory

    result = accumulated(residual, image)
    assert result.stride() == residual.stride()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    graph = make_fx(functionalize(accumulated))(residual, image)
    assert "frozen_convolution_." not in str(graph.graph)
    torch.testing.assert_close(graph(residual, image), expected, rtol=1e-4, atol=1e-4)


@fails_before("2.13", "torch's metadata of reflection_pad2d are contiguous", AssertionError)
def test_convolutions_of_any_geometry_are_frozen() -> None:
    """Strides, dilations, groups, depthwise, padding "same" and other modes than zeros; channels-last images, too."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(8, 16, 3, stride=(2, 1), padding=(0, 2)), nn.Conv2d(8, 16, (3, 1), dilation=(1, 2), padding="same"),
        nn.Conv2d(8, 8, 5, groups=8, padding=2), nn.Conv2d(8, 32, 1, groups=4), nn.Conv2d(8, 16, 1, stride=2),
        nn.Conv2d(8, 16, 1, padding=1), nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(8, 8, (2, 4), padding="same", padding_mode="circular"), nn.Conv2d(8, 1, 1),
    )  # fmt: skip
    model = nn.ModuleList(layers).eval()

    def forward(x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in model]

    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(3, 8, 10, 11).contiguous(memory_format=memory_format)
        with torch.no_grad():
            programs, compiled = compiled_programs(forward, x)
            assert extern_targets(programs[0]).count(CONVOLUTION) == len(layers)
            for result, expected in zip(compiled(x), forward(x), strict=True):
                assert result.stride() == expected.stride()
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_operators_switch_to_the_bridge_when_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = [item for item in library._OPERATORS if item.name == "prepacked_linear"]
    actions: list[Callable[[], object]] = []
    monkeypatch.setattr(native, "find_bridge", lambda: None)
    monkeypatch.setattr(native, "after_bridge", actions.append)
    operator, left, weight = library._NativeFirst(before), torch.randn(20, 64), torch.randn(32, 64)
    for calls in (1, 2):
        assert torch.equal(operator(left, weight, None, True), before.run(left, weight, None, True)), calls
        assert len(actions) == 1 and weight in prepacked_weights._cache
    monkeypatch.undo()
    actions[0]()
    assert weight not in prepacked_weights._cache
    torch.testing.assert_close(operator(left, weight, None, True), left @ weight.t())
    assert weight not in prepacked_weights._cache


_WITHOUT_COMPILER = """
import logging, torch, fxwrap
from fxwrap.runtime.native import join_background
from tests.support.agreement import assert_as_exact
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
left, weight = torch.randn(20, 64), torch.randn(32, 64)
for _ in range(2):
    result = torch.ops.fxwrap.prepacked_linear(left, weight, None, True)
    torch.testing.assert_close(result, left @ weight.t())
    join_background()
"""


def test_a_process_without_a_compiler_runs_operators_in_python(tmp_path: Path) -> None:
    environment = child_environment(CXX="/nonexistent/compiler", FXWRAP_CACHE_DIR=str(tmp_path))
    log = run_python(["-c", _WITHOUT_COMPILER], environment).stderr
    assert [line.partition(":")[0] for line in log.splitlines() if line.startswith("fxwrap.native")] == [
        "fxwrap.native the C++ bridge does not compile, and programs run without it"
    ]
