"""Fused programs as users see them: fused operators and decline reasons, kernels of equal layers, both languages."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module

import fxwrap
from fxwrap import Options
from fxwrap.caching import clear_caches
from fxwrap.comparison import capture
from fxwrap.errors import OptionError
from fxwrap.lines import ExternCall, Launch
from fxwrap.lowering.fusion import kernels
from fxwrap.options import EMITTERS
from fxwrap.printers import languages
from fxwrap.runtime.native import build_bridge
from fxwrap.testing import assert_emitters_agree
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.wrapper_ir import symbol_infos
from tests.support.capture import capture_graphs
from tests.support.models import MODELS

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(nn.functional.gelu(x @ w + b).t(), -1)


def inputs() -> list[Tensor]:
    return [torch.randn(4, 8), torch.randn(8, 16), torch.randn(16)]


def graph_of(function: Callable[..., Any], arguments: Sequence[Tensor]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*arguments)


def launches(program: fxwrap.Program) -> list[str]:
    """The kernels that a program launches, in order."""
    return [line.kernel for line in program.lines() if isinstance(line, Launch)]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse": 1}, "option 'fuse' takes a bool, not 1"),
        ({"cpu_kernels": "rust"}, "option 'cpu_kernels' takes 'cpp' or 'triton', not 'rust'"),
        ({"cpu_kernels": None}, "option 'cpu_kernels' takes 'cpp' or 'triton', not None"),
        ({"fallback": "ignore"}, "option 'fallback' takes 'warn' or 'error', not 'ignore'"),
        ({"cpu_kernel": "cpp"}, "unknown option 'cpu_kernel' \\(did you mean 'cpu_kernels'"),
    ],
)
def test_options_of_fusion_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.from_mapping(options)


def test_without_fusion_every_operator_is_a_call() -> None:
    arguments = inputs()
    fused = fxwrap.compile_graph(graph_of(layer, arguments), arguments)
    calls = fxwrap.compile_graph(graph_of(layer, arguments), arguments, options=Options(fuse=False))
    assert launches(fused.program) == ["add_gelu_0", "softmax_0"] or launches(fused.program) == ["add_gelu_softmax_0"]
    assert [line.target for line in fused.program.lines() if isinstance(line, ExternCall)] == ["aten.mm.default"]
    assert not launches(calls.program) and not calls.program.kernels
    assert [line.target for line in calls.program.lines() if isinstance(line, ExternCall)] == [
        "aten.mm.default", "aten.add.Tensor", "aten.gelu.default", "aten._softmax.default",
    ]  # fmt: skip
    torch.testing.assert_close(fused(*arguments), calls(*arguments))


# --- coverage ---------------------------------------------------------------------------------------------------------


def test_coverage_reports_every_call() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        hidden = torch.relu(x @ w)
        return (hidden + torch.rand_like(hidden)).t() * x.shape[0]

    arguments = inputs()[:2]
    compiled = fxwrap.compile_graph(graph_of(function, arguments), arguments)
    actual = {outcome.operator: (outcome.kind, outcome.reason) for outcome in compiled.coverage}
    assert actual == {
        "aten.mm.default": ("call", "a library call, by design: matmul"),
        "aten.relu.default": ("fused", ""),
        "aten.rand_like.default": ("call", "it writes its operands, draws random numbers or has another effect"),
        "aten.add.Tensor": ("fused", ""),
        "aten.t.default": ("view", ""),
        "aten.mul.Tensor": ("fused", ""),
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options(fuse=False), "fusion is off"),
        (Options(preserve_ops=frozenset({"aten.relu.default"})), "the options preserve it"),
    ],
)
def test_coverage_reports_calls_caused_by_options(options: Options, reason: str) -> None:
    arguments = [torch.randn(3)]
    compiled = fxwrap.compile_graph(graph_of(torch.relu, arguments), arguments, options=options)
    assert [(outcome.kind, outcome.reason) for outcome in compiled.coverage] == [("call", reason)]


def test_unsupported_dtypes_are_extern_calls() -> None:
    arguments = [torch.randn(3, dtype=torch.complex64)]
    compiled = fxwrap.compile_graph(graph_of(lambda x: x * 2, arguments), arguments)
    assert [(outcome.kind, outcome.reason) for outcome in compiled.coverage] == [
        ("call", "kernels have no torch.complex64")
    ]
    torch.testing.assert_close(compiled(*arguments)[0], arguments[0] * 2)


# --- both languages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitter", EMITTERS)
def test_triton_kernels_run_on_a_cpu_through_every_emitter(emitter: str) -> None:
    arguments = inputs()
    options = Options(emitter=emitter, cpu_kernels="triton", fallback="error")
    compiled = fxwrap.compile_graph(graph_of(layer, arguments), arguments, options=options)
    assert {kernel.language for kernel in compiled.program.kernels} == {"triton"} and launches(compiled.program)
    torch.testing.assert_close(compiled(*arguments)[0], layer(*arguments))


def test_a_training_step_with_triton_kernels_agrees_with_eager() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3), nn.LogSoftmax(-1))
    options = Options(cpu_kernels="triton", fallback="error")
    report = assert_emitters_agree(model, (torch.randn(4, 6, requires_grad=True),), training=True, options=options)
    assert report.graphs == 2


# --- identity ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A feed-forward layer with a norm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(nn.functional.gelu(self.grow(self.norm(x))))


def stacked(layers: int) -> list[fxwrap.Program]:
    """The forward and backward programs of equal layers, one after the other."""
    model = nn.Sequential(*[Layer(8) for _ in range(layers)])
    graphs = capture(model, (torch.randn(4, 8, requires_grad=True),), training=True)
    return [graph.compiled.program for graph in graphs]


def test_equal_layers_share_their_kernels() -> None:
    """More layers need no other kernels; it takes a few to see all, as sums of one may be in the kernel of the next."""
    for program, larger in zip(stacked(6), stacked(12), strict=True):
        assert {kernel.hash for kernel in larger.kernels} == {kernel.hash for kernel in program.kernels}
        assert len(launches(larger)) >= 3 * len(larger.kernels)


def test_kernels_of_symbolic_sizes_are_built_once_for_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module, name in ((languages, "print_cpp_kernel"), (kernels, "fold_uniform_reductions")):
        original = getattr(module, name)

        def counted(*arguments: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(module, name, counted)

    def layers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        for _ in range(6):
            x = x + layer(x, w, b).t()
        return x

    graph = make_fx(layers, tracing_mode="symbolic")(torch.randn(5, 8), torch.randn(8, 8), torch.randn(8))
    clear_caches()
    program = fxwrap.compile_graph(graph, options=Options(fallback="error")).program
    assert symbol_infos(program) and len(launches(program)) >= 2 * len(program.kernels)
    assert calls.count("print_cpp_kernel") == calls.count("fold_uniform_reductions") == len(program.kernels)


def split_at_attention(module: GraphModule) -> list[GraphModule]:
    """A graph in one piece a layer, cut behind each attention but the first."""
    piece_of: dict[Node, int] = {}
    seen, count = 0, len(module.graph.find_nodes(op="call_function", target=ATTENTION))
    for node in module.graph.nodes:
        of_attention = node.target is operator.getitem and node.args[0].target is ATTENTION
        piece_of[node] = piece_of[node.args[0]] if of_attention else min(max(seen - 1, 0), count - 1)
        seen += node.target is ATTENTION
    whole = split_module(module, module, lambda node: piece_of[node])  # type: ignore[arg-type]
    return [whole.get_submodule(node.target) for node in whole.graph.nodes if node.op == "call_module"]


@pytest.mark.long  # `test_equal_layers_share_their_kernels` is of the kernels that are built
def test_a_model_split_in_six_builds_at_most_three_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bridge = build_bridge().folder  # takes long to build, and is not what is tested
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    (tmp_path / bridge.name).symlink_to(bridge)
    (captured,) = capture_graphs(replace(MODELS["gpt2"], layers=6), training=False)
    options = Options(check_inputs=False)  # checks name the inputs, which are called otherwise in each piece
    compiled = [fxwrap.compile_graph(piece, options=options) for piece in split_at_attention(captured.graph_module)]
    assert len(compiled) == 6 and all(launches(item.program) for item in compiled)
    assert len({item.key for item in compiled}) <= 3
    for item in compiled:
        _ = item.boxed  # loads its kernels
    assert 1 <= len(list((tmp_path / "programs").iterdir())) <= 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32])
def test_triton_grids_are_rounded_up(dtype: torch.dtype) -> None:
    """Triton divides integers towards zero, so a size below a block is not `-(-size // block)` blocks."""

    def function(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(x, counts, 1)

    x, counts = (torch.arange(24).reshape(2, 3, 4) % 3 == 0).to(dtype), torch.tensor([0, 1, 2])
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=shapes)
    fakes = [mode.from_tensor(item, static_shapes=True) for item in (x, counts)]
    with mode, enable_python_dispatcher():
        graph = make_fx(function)(*fakes)
    compiled = fxwrap.compile_graph(graph, fakes, options=Options(cpu_kernels="triton", fallback="error"))
    assert torch.equal(compiled(x, counts)[0], function(x, counts))


def test_triton_broadcasts_uniform_loads() -> None:
    x = torch.arange(10.0) ** 2
    graph = make_fx(lambda x: torch.gradient(x)[0])(x)
    compiled = fxwrap.compile_graph(graph, [x], options=Options(cpu_kernels="triton", fallback="error"))
    torch.testing.assert_close(compiled(x)[0], torch.gradient(x)[0])


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
def test_a_kernel_may_read_a_part_of_static_size_of_a_dynamic_input(cpu_kernels: Any) -> None:
    """The kernel has no symbols, though the size of the memory that it reads has one."""
    x = torch.randn(3, 6)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(lambda x: x[0].sin(), backend="fxwrap", options={"cpu_kernels": cpu_kernels})
    torch.testing.assert_close(compiled(x), x[0].sin())
