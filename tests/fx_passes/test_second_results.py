"""Matmuls that store the input of their GELU, or sum an operand, where timing says that the library is faster so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxwrap
from fxwrap import Options
from fxwrap.compile import compiler
from fxwrap.devices import CPU
from fxwrap.fx_passes import prepare_graph
from fxwrap.fx_passes.epilogues import fuse_second_results, second_results
from fxwrap.fx_passes.prepared_graph import FxPassContext
from fxwrap.lines import ExternCall
from fxwrap.lowering import RULES
from fxwrap.testing import assert_emitters_agree
from fxwrap.tuning import Tuner, TuningRecords
from tests.fx_passes.test_rewrite_matmuls import formula

FUSED = "fxwrap.fused_matmul.default"
HALF = (torch.bfloat16, torch.float16)


DEVICE = dataclasses.replace(
    CPU, matmuls=dataclasses.replace(CPU.matmuls, epilogue_dtypes=frozenset({torch.float32, *HALF}))
)
OPTIONS = Options(devices=(DEVICE,), autotune=True, compile_cache=False)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _rewrites_are_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first one of two programs is faster by the records of tuning."""

    def time_programs(programs: Sequence[Callable[..., Any]], _inputs: object) -> list[list[float]]:
        return [[float(position)] * 3 for position in range(1, 1 + len(programs))]

    tuner = Tuner(lambda tasks: [], lambda _: None, TuningRecords(tmp_path / "records"), time_regions=time_programs)
    monkeypatch.setattr(compiler, "gpu_tuner", lambda: tuner)


def gelu(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, w, b)
    return hidden, F.gelu(hidden, approximate="tanh").sin()


def gelu_without_bias(x: Tensor, w: Tensor, _b: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, w)
    return hidden.cos(), F.gelu(hidden, approximate="tanh")


def written_out(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, w, b)
    return hidden, formula(hidden).view(-1, w.shape[0]) @ w


def autocast(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As autocast computes the formula on GPUs: a power in float32, and the cast after a view."""
    hidden = F.linear(x, w, b)
    power = torch.pow(hidden.float(), 3.0)
    result = 0.5 * hidden * (1.0 + torch.tanh(0.7978845608028654 * (hidden + 0.044715 * power)))
    return hidden, result.view(-1, w.shape[0]).to(x.dtype)


def linear_backward(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The gradients of weight and bias of a linear layer, whose rows are [out, in]."""
    gradient = (x @ w.t() + b).tanh()
    rows = gradient.view(-1, w.shape[0])
    return rows.t() @ x.view(-1, w.shape[1]), rows.sum([0], True).view(-1), gradient


def transposed_backward(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The same for weights of rows [in, out]."""
    gradient = (x @ w.t() + b).tanh()
    return x.view(-1, w.shape[1]).t() @ gradient.view(-1, w.shape[0]), gradient.sum([0, 1], True)


EPILOGUES: dict[Function, str] = {
    gelu: "gelu", gelu_without_bias: "gelu", written_out: "gelu", autocast: "gelu",
    linear_backward: "left_sums", transposed_backward: "right_sums",
}  # fmt: skip


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple([torch.randn(*size, generator=generator).to(dtype) for size in ((4, 8, 16), (32, 16), (32,))])


def epilogues(program: fxwrap.Program) -> list[object]:
    """The epilogues of a program's calls of the operator, in order."""
    return [line.arguments[3] for line in program.lines() if isinstance(line, ExternCall) and line.target == FUSED]


def compiled(function: Function, *inputs: Tensor, **options: Any) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=OPTIONS.replace(**options))


def with_second_results(function: Function, inputs: Sequence[Tensor], options: Options) -> torch.fx.GraphModule:
    """The graph of a function in which all matmuls that can have a second result have one."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    context = FxPassContext(options, RULES)
    prepared = prepare_graph(graph, inputs, options, fused_operators=RULES)
    names = [match.name for match in second_results(prepared, context)]
    return fuse_second_results(prepared, context, names).graph_module


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("function", EPILOGUES)
def test_a_matmul_has_a_second_result(function: Function, dtype: torch.dtype) -> None:
    inputs = operands(dtype)
    result = compiled(function, *inputs)
    assert epilogues(result.program) == [EPILOGUES[function]]
    exact = function(*[item.double() for item in inputs])
    for item, eager, truth in zip(result(*inputs), function(*inputs), exact, strict=True):
        assert (item.dtype, item.shape, item.stride()) == (eager.dtype, eager.shape, eager.stride())
        assert relative_error(item, truth) <= 1.2 * relative_error(eager, truth) + 1e-6


@pytest.mark.parametrize("function", EPILOGUES)
def test_emitters_agree(function: Function) -> None:
    assert_emitters_agree(function, list(operands()), options=OPTIONS)


def _erf_form(x: Tensor, w: Tensor, b: Tensor) -> Any:
    hidden = F.linear(x, w, b)
    return hidden, F.gelu(hidden)


def _outer_product(x: Tensor, w: Tensor, b: Tensor) -> Any:
    """Elements of GELU that are not computed from one element of the matmul each."""
    hidden = F.linear(x[:1, :1], w, b)
    column = hidden.view(-1, 1)
    return hidden, 0.5 * column * (1.0 + torch.tanh(0.7978845608028654 * (hidden + 0.044715 * torch.pow(hidden, 3.0))))


def _input_written_before(x: Tensor, w: Tensor, b: Tensor) -> Any:
    hidden = torch.addmm(b, x[0], w.t())
    hidden.add_(1)
    return hidden, F.gelu(hidden, approximate="tanh")


def _sums_of_columns(x: Tensor, w: Tensor, b: Tensor) -> Any:
    gradient = (x[0] @ w.t()).tanh()
    return gradient.t() @ x[0], gradient.sum(1)


def _sums_in_another_dtype(x: Tensor, w: Tensor, b: Tensor) -> Any:
    gradient = (x[0] @ w.t()).tanh()
    return gradient.t() @ x[0], gradient.sum(0, dtype=torch.float64)


def _sums_that_the_matmul_reads(x: Tensor, w: Tensor, b: Tensor) -> Any:
    gradient = (x[0] @ w.t()).tanh()
    return gradient.t() @ (x[0] + gradient.sum(0)[:16]), gradient


def _rows_written_between(x: Tensor, w: Tensor, b: Tensor) -> Any:
    gradient = (x[0] @ w.t()).tanh()
    weight = gradient.t() @ x[0]
    gradient.add_(1)
    return weight, gradient.sum(0)


def _unaligned(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return gelu(x, w[:30], b[:30])


@pytest.mark.parametrize(
    "function",
    [_erf_form, _outer_product, _input_written_before, _sums_of_columns, _sums_in_another_dtype,
     _sums_that_the_matmul_reads, _rows_written_between, _unaligned],
)  # fmt: skip
def test_other_results_stay(function: Function) -> None:
    inputs = operands()
    result = compiled(function, *inputs)
    assert epilogues(result.program) == []
    torch.testing.assert_close(tuple(result(*inputs)), function(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", ["aten.gelu.default", "aten.addmm.default"])
def test_preserved_operators_stay(operator: str) -> None:
    assert epilogues(compiled(gelu, *operands(), preserve_ops=(operator,)).program) == []


def test_the_sums_of_one_tensor_are_those_of_one_matmul() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        weight, bias, gradient = linear_backward(x, w, b)
        return weight, bias, gradient.view(-1, 32).t() @ x.view(-1, 16).sin()

    inputs = operands()
    result = compiled(function, *inputs)
    assert epilogues(result.program) == ["left_sums"]
    torch.testing.assert_close(tuple(result(*inputs)), function(*inputs))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh")) + x


def test_a_training_step() -> None:
    """The forward stores the input of GELU, which the backward reads; both biases' gradients are second results."""
    programs: list[fxwrap.Program] = []

    def record(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8, 16)
    options = {
        "devices": OPTIONS.devices, "autotune": True, "compile_cache": False,
        "passes": (fxwrap.Pass(record, key="record"),),
    }  # fmt: skip
    torch.compile(model, backend="fxwrap", options=options)(x).square().sum().backward()
    results = [item.grad.clone() for item in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(results, [item.grad for item in model.parameters()])
    assert [epilogues(program) for program in programs] == [["gelu"], ["left_sums"] * 2]


@pytest.mark.parametrize("function", [gelu, written_out, linear_backward, transposed_backward])
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_programs_for_gpus(function: Function, emitter: str) -> None:
    """On fake tensors, without a GPU."""
    with FakeTensorMode():
        inputs = [torch.empty(item.shape, dtype=torch.bfloat16, device="cuda") for item in operands()]
    options = Options(emitter=emitter)
    program = fxwrap.lower(with_second_results(function, inputs, options), options=options)
    assert epilogues(program) == [EPILOGUES[function]]
    {"python": fxwrap.to_python, "cpp": fxwrap.to_cpp, "fx": fxwrap.to_fx}[emitter](program)


def test_generated_matmuls_stay_kernels() -> None:
    assert epilogues(compiled(gelu, *operands(), matmul_kernels="generated").program) == []


def test_a_saved_program(tmp_path: Path) -> None:
    inputs = operands()
    result = compiled(gelu, *inputs)
    result.save(tmp_path / "gelu.fxw")
    torch.testing.assert_close(tuple(fxwrap.load(tmp_path / "gelu.fxw")(*inputs)), gelu(*inputs))


@pytest.mark.parametrize("epilogue", ["gelu", "left_sums", "right_sums"])
@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1)], ids=str)
def test_operator_on_few_elements(epilogue: str, sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    left, right = torch.randn(inner, rows).t(), torch.randn(columns, inner).t()
    results = torch.ops.fxwrap.fused_matmul(left, right, None, epilogue)
    product = left @ right
    expected = {
        "gelu": (F.gelu(product, approximate="tanh"), product), "left_sums": (product, left.sum(1)),
        "right_sums": (product, right.sum(0)),
    }  # fmt: skip
    torch.testing.assert_close(results, expected[epilogue])
    torch.library.opcheck(torch.ops.fxwrap.fused_matmul.default, (left, right, None, epilogue))


def test_unknown_epilogues() -> None:
    with pytest.raises(ValueError, match="unknown epilogue 'max'; known epilogues: gelu, left_sums, right_sums"):
        torch.ops.fxwrap.fused_matmul(torch.randn(2, 2), torch.randn(2, 2), None, "max")
