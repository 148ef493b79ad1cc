"""With `freeze`, weights stay in the library's layout, batch norms are folded, and writes into weights are seen."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall
from fxwrap.runtime import prepacked_weights
from fxwrap.torch_compat import ConvolutionGeometry, fused_convolution, prepacked_linear
from tests.support.garbage import freeze_heap

PREPACKED = "fxwrap.prepacked_linear.default"
FROZEN = Options(freeze=True)


class Layers(nn.Module):
    """A linear layer, one without bias, and one whose weight is stored as GPT-2's are: rows are terms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 384), nn.Linear(384, 256, bias=False)
        self.third, self.bias = nn.Parameter(torch.randn(256, 320) / 16), nn.Parameter(torch.randn(320))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.second(torch.relu(self.first(x))), self.third)


def extern_targets(program: fxwrap.Program) -> list[str]:
    return [line.target for line in program.body.lines if isinstance(line, ExternCall)]


def compiled_programs(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[list[Any], Any]:
    """Returns the programs of a function through torch.compile, and the compiled function, called once."""
    programs: list[Any] = []

    def record(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    torch.compiler.reset()
    compiled = torch.compile(function, backend="fxwrap", options={"freeze": True, "passes": (record,), **options})
    compiled(*inputs)
    return programs, compiled


@pytest.mark.parametrize(
    ("emitter", "dtype"),
    [("python", torch.float32), ("cpp", torch.float32), ("cpp", torch.bfloat16), ("fx", torch.bfloat16),
     ("interpreter", torch.float32)],
)  # fmt: skip
def test_writes_into_frozen_weights_are_seen(emitter: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(left: Tensor, *rest: Any) -> Tensor:
        calls.append(left.shape[0])
        return prepacked_linear(left, *rest)

    monkeypatch.setattr(prepacked_weights, "library_linear", counted)
    torch.manual_seed(0)
    model, x = Layers().to(dtype), torch.randn(64, 256).to(dtype)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        programs, compiled = compiled_programs(model, x, emitter=emitter)
        assert [extern_targets(program) for program in programs] == [[PREPACKED] * 3]
        for _ in range(2):
            expected = exact(x.double())
            error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
            assert error <= 1.5 * eager
            model.second.weight.mul_(3)
            exact.second.weight.mul_(3)
    assert calls == [64] * 9


def test_weights_that_may_change_are_not_prepacked() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(64, 256)
    programs, _ = compiled_programs(model, x)  # a training step updates its weights
    assert len(programs) >= 1 and PREPACKED not in [
        target for program in programs for target in extern_targets(program)
    ]

    def writes(left: Tensor) -> Tensor:
        model.second.weight.mul_(2)
        return model.second(left)

    with torch.no_grad():
        programs, _ = compiled_programs(writes, torch.randn(64, 384))
        assert PREPACKED not in extern_targets(programs[0])
        programs, _ = compiled_programs(lambda left, right: left @ right, torch.randn(64, 256), torch.randn(256, 256))
        assert PREPACKED not in extern_targets(programs[0])


def test_few_rows_are_not_prepacked() -> None:
    program = fxwrap.lower(torch.export.export(Layers(), (torch.randn(8, 256),)), options=FROZEN)
    assert PREPACKED not in extern_targets(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_weights_are_converted_once_for_all_numbers_of_rows(emitter: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Layers().to(dtype)
    exact = copy.deepcopy(model).double()
    dims = ({0: torch.export.Dim("rows", min=0, max=512)},)
    program = torch.export.export(model, (torch.randn(64, 256).to(dtype),), dynamic_shapes=dims)
    compiled = fxwrap.compile_graph(program, options=Options(freeze=True, emitter=emitter))
    assert extern_targets(compiled.program) == [PREPACKED] * 3
    with torch.no_grad():
        for rows in (64, 1, 0, 500):
            x = torch.randn(rows, 256).to(dtype)
            expected = exact(x.double())
            error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
            assert error <= 1.5 * eager
    weights = [model.first.weight, model.second.weight, model.third]
    assert [len(prepacked_weights._cache[weight]) for weight in weights] == [1, 1, 1]


def test_other_devices_are_not_prepacked() -> None:
    options = Options(
        freeze=True,
        devices=(dataclasses.replace(CPU, matmuls=dataclasses.replace(CPU.matmuls, prepacked_dtypes=frozenset())),),
    )
    program = fxwrap.lower(torch.export.export(Layers(), (torch.randn(64, 256),)), options=options)
    assert PREPACKED not in extern_targets(program)


def test_constants_of_exported_and_saved_programs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(64, 256)
    compiled = fxwrap.compile_graph(torch.export.export(model, (x,)), options=Options(freeze=True, emitter="cpp"))
    assert extern_targets(compiled.program) == [PREPACKED] * 3
    compiled.save(tmp_path / "model.fxw")
    loaded = fxwrap.load(tmp_path / "model.fxw")
    torch.testing.assert_close(loaded(x), model(x))


def test_converted_weights_are_freed_with_the_weight_and_limited_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_heap()
    weight, before = torch.randn(256, 256), len(prepacked_weights._cache)
    most = prepacked_weights._MOST_FORMS
    for packs_for_rows in (False, True) if torch.backends.mkl.is_available() else (False,):
        monkeypatch.setattr(prepacked_weights, "packs_for_rows", lambda _, packs=packs_for_rows: packs)
        for rows in range(16, 16 + most + 3):
            left = torch.randn(rows, 256)
            result = torch.ops.fxwrap.prepacked_linear(left, weight, None, True, rows)
            torch.testing.assert_close(result, left @ weight.t(), atol=1e-4, rtol=1e-4)
        assert len(prepacked_weights._cache) == before + 1
        assert len(prepacked_weights._cache[weight]) == (most if packs_for_rows else 1)
    del weight
    gc.collect()
    assert len(prepacked_weights._cache) == before


@pytest.mark.parametrize("has_library", [True, False])
def test_weights_of_convolutions_without_batch_norm_are_freed(
    has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        monkeypatch.setattr(prepacked_weights, "prepack_convolution_weight", lambda *_: None)
    freeze_heap()
    image, weight, before = torch.randn(2, 8, 12, 12), torch.randn(16, 8, 1, 1), len(prepacked_weights._cache)
    arguments = ([1, 1], [0, 0], [1, 1], 1, None, False, [2304, 144, 12, 1])
    result = torch.ops.fxwrap.frozen_convolution(image, weight, None, [], 0.0, *arguments)
    torch.testing.assert_close(result, torch.conv2d(image, weight))
    assert len(prepacked_weights._cache) == before + 1
    del weight
    gc.collect()
    assert len(prepacked_weights._cache) == before


# --- biases -----------------------------------------------------------------------------------------------------------

BIASED = "fxwrap.biased_linear.default"
BIASED_CPU = dataclasses.replace(
    CPU, matmuls=dataclasses.replace(CPU.matmuls, biased_linear_dtypes=frozenset({torch.bfloat16}))
)


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_the_library_adds_biases_to_its_accumulators(emitter: str) -> None:
    torch.manual_seed(0)
    model, x = Layers().bfloat16(), torch.randn(256, 256).bfloat16()
    options = Options(emitter=emitter, devices=(BIASED_CPU,))
    with torch.no_grad():
        compiled = fxwrap.compile_graph(torch.export.export(model, (x,)), options=options)
        assert extern_targets(compiled.program) == [BIASED, "aten.mm.default", BIASED]
        expected = copy.deepcopy(model).double()(x.double())
        error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
        assert error <= 1.2 * eager


def test_a_library_without_the_dtype_adds_biases_as_eager_does() -> None:
    left, weight, bias = torch.randn(20, 16).double(), torch.randn(24, 16).double(), torch.randn(24).double()
    expected = torch.addmm(bias, left, weight.t())
    torch.testing.assert_close(torch.ops.fxwrap.biased_linear(left, weight, bias, True), expected)
    torch.testing.assert_close(torch.ops.fxwrap.biased_linear(left, weight.t().contiguous(), bias, False), expected)


@pytest.mark.parametrize(
    ("rows", "products", "columns", "options"),
    [
        (64, 320, 1024, {}),  # the weight is rearranged as slowly as the bias is copied
        (256, 256, 128, {}),  # a small result
        (256, 256, 300, {}),  # columns that do not fill blocks
        (256, 256, 320, {"preserve_ops": ("aten.addmm.default",)}),
        (
            256,
            256,
            320,
            {
                "devices": (
                    dataclasses.replace(
                        CPU, matmuls=dataclasses.replace(CPU.matmuls, biased_linear_dtypes=frozenset())
                    ),
                )
            },
        ),
    ],
)
def test_biases_that_stay_in_the_matmul(rows: int, products: int, columns: int, options: dict[str, Any]) -> None:
    model, x = nn.Linear(products, columns).bfloat16(), torch.randn(rows, products).bfloat16()
    program = fxwrap.lower(torch.export.export(model, (x,)), options=Options(**{"devices": (BIASED_CPU,), **options}))
    assert extern_targets(program)[0].startswith("aten.addmm")


# --- convolutions -----------------------------------------------------------------------------------------------------

CONVOLUTION = "fxwrap.frozen_convolution.default"


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


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_any_number_of_images_has_frozen_convolutions(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()
    monkeypatch.setattr(prepacked_weights, "_cache", cache)
    torch.manual_seed(0)
    model = Block().eval()
    exact = copy.deepcopy(model).double()
    dims = ({0: torch.export.Dim("images", max=100)},)
    program = torch.export.export(model, (torch.randn(2, 8, 12, 12),), dynamic_shapes=dims)
    compiled = fxwrap.compile_graph(program, options=Options(freeze=True, emitter=emitter))
    assert extern_targets(compiled.program) == [CONVOLUTION] * 3
    with torch.no_grad():
        for images in (2, 1, 40):
            x = torch.randn(images, 8, 12, 12)
            expected = exact(x.double())
            error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
            assert error <= 3 * eager
    assert [len(forms) for forms in cache.values()] == [1, 1, 1]


def test_frozen_convolutions_of_no_images() -> None:
    image, weight = torch.randn(0, 8, 12, 12), torch.randn(16, 8, 1, 1)
    for batch in (image, torch.randn(3, 8, 12, 12)):
        arguments = ([1, 1], [0, 0], [1, 1], 1, None, True, [2304, 144, 12, 1])
        result = torch.ops.fxwrap.frozen_convolution(batch, weight, None, [], 0.0, *arguments)
        torch.testing.assert_close(result, torch.relu(torch.conv2d(batch, weight)))


def test_frozen_convolutions_of_bfloat16() -> None:
    """Weights are folded in float64 and rounded once."""
    torch.manual_seed(0)
    model, x = Block().eval().bfloat16(), torch.randn(2, 8, 12, 12, dtype=torch.bfloat16)
    with torch.no_grad():
        programs, compiled = compiled_programs(model, x)
        assert extern_targets(programs[0]) == [CONVOLUTION] * 3
        expected = copy.deepcopy(model).double()(x.double())
        error, eager = [float((item.double() - expected).norm()) for item in (compiled(x), model(x))]
        assert error <= 1.2 * eager


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
    arguments = ([1, 1], [1, 1], [1, 1], 1, residual, False, list(eager.stride()))
    result = torch.ops.fxwrap.frozen_convolution(image, weight, None, norm, 1e-5, *arguments)
    assert result.dtype is torch.bfloat16
    assert (result.double() - exact).norm() <= 1.2 * (eager.double() - exact).norm()


def test_a_call_of_the_library_computes_what_follows_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's do on GPUs: bias, residual and positive part."""
    calls: list[bool] = []

    def fused(image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, residual: Tensor | None) -> Tensor:
        calls.append(residual is not None)
        numbers = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        result = torch.conv2d(image, weight, bias, *numbers)
        return torch.relu(result if residual is None else result + residual)

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
            arguments = ([2, 2], [3, 3], [1, 1], 1, None, False, strides)
            result = torch.ops.fxwrap.frozen_convolution(image, weight, None, [], 0.0, *arguments)
            assert result.stride() == strides
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            with torch._subclasses.FakeTensorMode() as mode:
                fakes = [mode.from_tensor(item) for item in (image, weight)]
                fake = torch.ops.fxwrap.frozen_convolution(*fakes, None, [], 0.0, *arguments)
            assert (fake.shape, fake.stride()) == (result.shape, result.stride())
