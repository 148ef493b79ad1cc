"""Matmuls that store the input of their GELU, where timing says that the library is faster so."""

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
from fxwrap.fx_passes.matmuls.epilogues import fuse_gelu_matmuls, gelu_matmuls
from fxwrap.fx_passes.prepared_graph import FxPassContext
from fxwrap.lines import ExternCall
from fxwrap.lowering import RULES
from fxwrap.testing import assert_emitters_agree
from fxwrap.tuning import Tuner, TuningRecords
from tests.fx_passes.test_rewrite_matmuls import formula
from tests.support.agreement import assert_as_exact

FUSED = "fxwrap.gelu_matmul.default"
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


FUNCTIONS = (gelu, gelu_without_bias, written_out, autocast)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple([torch.randn(*size, generator=generator).to(dtype) for size in ((4, 8, 16), (32, 16), (32,))])


def count_calls(program: fxwrap.Program) -> int:
    """The number of a program's calls of the operator."""
    return len([line for line in program.lines() if isinstance(line, ExternCall) and line.target == FUSED])


def compiled(function: Function, *inputs: Tensor, **options: Any) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=OPTIONS.replace(**options))


def with_gelu_matmuls(function: Function, inputs: Sequence[Tensor], options: Options) -> torch.fx.GraphModule:
    """The graph of a function in which all matmuls that can store the input of their GELU do so."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    context = FxPassContext(options, RULES)
    prepared = prepare_graph(graph, inputs, options, fused_operators=RULES)
    names = [match.name for match in gelu_matmuls(prepared, context)]
    return fuse_gelu_matmuls(prepared, context, names).graph_module


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_matmul_and_gelu_are_one_call(function: Function, dtype: torch.dtype) -> None:
    inputs = operands(dtype)
    result = compiled(function, *inputs)
    assert count_calls(result.program) == 1
    exact = function(*[item.double() for item in inputs])
    for item, eager, truth in zip(result(*inputs), function(*inputs), exact, strict=True):
        assert item.stride() == eager.stride()
        assert_as_exact(item, eager, truth, slack=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
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


def _unaligned(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return gelu(x, w[:30], b[:30])


@pytest.mark.parametrize("function", [_erf_form, _outer_product, _input_written_before, _unaligned])
def test_other_results_stay(function: Function) -> None:
    inputs = operands()
    result = compiled(function, *inputs)
    assert count_calls(result.program) == 0
    torch.testing.assert_close(tuple(result(*inputs)), function(*inputs))


@pytest.mark.parametrize("operator", ["aten.gelu.default", "aten.addmm.default"])
def test_preserved_operators_stay(operator: str) -> None:
    assert count_calls(compiled(gelu, *operands(), preserve_ops=(operator,)).program) == 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh")) + x


def test_a_training_step() -> None:
    """The forward stores the input of GELU, which the backward reads."""
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
    assert [count_calls(program) for program in programs] == [1, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_programs_for_gpus(function: Function, emitter: str) -> None:
    """On fake tensors, without a GPU."""
    with FakeTensorMode():
        inputs = [torch.empty(item.shape, dtype=torch.bfloat16, device="cuda") for item in operands()]
    options = Options(emitter=emitter)
    program = fxwrap.lower(with_gelu_matmuls(function, inputs, options), options=options)
    assert count_calls(program) == 1
    {"python": fxwrap.to_python, "cpp": fxwrap.to_cpp, "fx": fxwrap.to_fx}[emitter](program)


def test_generated_matmuls_stay_kernels() -> None:
    assert count_calls(compiled(gelu, *operands(), matmul_kernels="generated").program) == 0


def test_a_saved_program(tmp_path: Path) -> None:
    inputs = operands()
    result = compiled(gelu, *inputs)
    result.save(tmp_path / "gelu.fxw")
    torch.testing.assert_close(tuple(fxwrap.load(tmp_path / "gelu.fxw")(*inputs)), gelu(*inputs))


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1)], ids=str)
def test_operator_on_few_elements(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    left, right = torch.randn(inner, rows).t(), torch.randn(columns, inner).t()
    results = torch.ops.fxwrap.gelu_matmul(left, right, None)
    product = left @ right
    torch.testing.assert_close(results, (F.gelu(product, approximate="tanh"), product))
    torch.library.opcheck(torch.ops.fxwrap.gelu_matmul.default, (left, right, None))
