"""Linear layers and convolutions of libraries without Python: weights of `freeze` follow replaced constants."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Mutate
from fxwrap.torch_compat import multiplies_bytes_exactly
from tests.artifact.native_host import described, drive, read_result, tensor_commands
from tests.fx_passes.test_gelu_matmuls import with_gelu_matmuls
from tests.support.agreement import assert_as_exact
from tests.support.int8_layers import Int8Layers

GELU = "fxwrap.gelu_matmul.default"
BIASED = "fxwrap.biased_linear.default"
INT8 = f"{'fxwrap.prepacked_int8_linear' if multiplies_bytes_exactly() else 'aten._int_mm'}.default"
FROZEN = [
    "fxwrap.frozen_convolution.default", "fxwrap.frozen_convolution_.default", *["fxwrap.prepacked_linear.default"] * 2
]  # fmt: skip


class Images(nn.Module):
    """Convolutions with batch norm, residual and positive part, with a bias and groups, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16)
        self.short = nn.Conv2d(8, 16, 1, stride=2, groups=2)
        self.linear, self.last = nn.Linear(576, 256), nn.Linear(256, 300, bias=False)
        nn.init.normal_(self.norm.weight, 1, 0.3)
        nn.init.normal_(self.norm.bias)
        for statistic in (self.norm.running_mean, self.norm.running_var):
            nn.init.uniform_(statistic, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        images = torch.relu(self.norm(self.first(x)) + self.short(x))
        return self.last(torch.relu(self.linear(images.flatten(1))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_weights_without_python_follow_replaced_constants(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Images().eval().to(dtype), torch.randn(64, 8, 12, 12).to(dtype)
    sizes = None if dtype is torch.float32 else ({0: torch.export.Dim("images", max=100)},)
    program = torch.export.export(model, (x,), dynamic_shapes=sizes)
    compiled = fxwrap.compile_graph(program, name="images", options=Options(freeze=True, emitter="cpp"))
    targets = [line.target for line in compiled.program.body.lines if isinstance(line, ExternCall | Mutate)]
    assert [target for target in targets if target in FROZEN] == FROZEN
    compiled.save(tmp_path / "images.fxw", target="native")
    with torch.no_grad():
        results = [model(x)]
        model.norm.running_var.mul_(4)
        model.linear.weight.mul_(3)
        results.append(model(x))
    words = ["constant", "norm.running_var", *described(tmp_path, model.norm.running_var)]
    words += ["constant", "linear.weight", *described(tmp_path, model.linear.weight.detach())]
    before, after = ["run", tmp_path / "first", "run", tmp_path / "again"], ["run", tmp_path / "replaced"]
    start = ["open", tmp_path / "images.fxw", *tensor_commands(tmp_path, [x])]
    done = drive(*start, *before, "alive", *words, "replace", *after)
    assert done.code == 0 and done.lines == ("alive 0",), (done.lines, done.errors)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for name, expected in (("first", results[0]), ("again", results[0]), ("replaced", results[1])):
        result = read_result(tmp_path / f"{name}.0", expected)
        assert (result.double() - expected.double()).norm() <= tolerance * expected.norm()
    assert (results[0] - results[1]).norm() > 0.1 * results[0].norm()


def test_int8_layers_without_python(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Int8Layers(), torch.randn(64, 768)
    options = Options(freeze=True, emitter="cpp")
    compiled = fxwrap.compile_graph(torch.export.export(model, (x,)), name="int8", options=options)
    assert [line.target for line in compiled.program.body.lines if isinstance(line, ExternCall)] == [INT8] * 2
    compiled.save(tmp_path / "int8.fxw", target="native")
    done = drive("open", tmp_path / "int8.fxw", *tensor_commands(tmp_path, [x]), "run", tmp_path / "result", "alive")
    assert done.code == 0 and done.lines == ("alive 0",), (done.lines, done.errors)
    expected = compiled(x)
    assert torch.equal(read_result(tmp_path / "result.0", expected), expected)


def test_biased_linear_layers_without_python(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(256, 320).bfloat16(), torch.randn(256, 256).bfloat16()
    devices = (
        dataclasses.replace(
            CPU, matmuls=dataclasses.replace(CPU.matmuls, biased_linear_dtypes=frozenset({torch.bfloat16}))
        ),
    )
    program = torch.export.export(model, (x,))
    compiled = fxwrap.compile_graph(program, name="biased", options=Options(emitter="cpp", devices=devices))
    assert [line.target for line in compiled.program.body.lines if isinstance(line, ExternCall)] == [BIASED]
    compiled.save(tmp_path / "biased.fxw", target="native")
    start = ["open", tmp_path / "biased.fxw", *tensor_commands(tmp_path, [x])]
    done = drive(*start, "run", tmp_path / "result", "alive")
    assert done.code == 0 and done.lines == ("alive 0",), (done.lines, done.errors)
    with torch.no_grad():
        eager = model(x)
        exact = x.double() @ model.weight.double().t() + model.bias.double()
    result = read_result(tmp_path / "result.0", eager)
    assert_as_exact(result, eager, exact)


def test_gelu_matmuls_without_python(tmp_path: Path) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        hidden = nn.functional.linear(x, weight, bias)
        return hidden, nn.functional.gelu(hidden, approximate="tanh")

    inputs = [torch.randn(32, 16), torch.randn(24, 16), torch.randn(24)]
    traits = dataclasses.replace(CPU.matmuls, epilogue_dtypes=frozenset({torch.float32}))
    options = Options(emitter="cpp", devices=(dataclasses.replace(CPU, matmuls=traits),))
    graph = with_gelu_matmuls(function, inputs, options)
    compiled = fxwrap.compile_graph(graph, inputs, name="gelu", options=options)
    assert [line.target for line in compiled.program.body.lines if isinstance(line, ExternCall)] == [GELU]
    compiled.save(tmp_path / "gelu.fxw", target="native")
    start = ["open", tmp_path / "gelu.fxw", *tensor_commands(tmp_path, inputs)]
    done = drive(*start, "run", tmp_path / "result", "alive")
    assert done.code == 0 and done.lines == ("alive 0",), (done.lines, done.errors)
    for index, expected in enumerate(function(*inputs)):
        torch.testing.assert_close(read_result(tmp_path / f"result.{index}", expected), expected)
