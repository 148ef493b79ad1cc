"""Every higher-order operator of the installed torch: a case that runs, or the reason why there is none."""

from __future__ import annotations

import importlib
import operator
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch._higher_order_ops
from torch import Tensor
from torch._higher_order_ops import InvokeQuant, foreach_map, invoke_quant
from torch._higher_order_ops.out_dtype import out_dtype
from torch._ops import _higher_order_ops
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fxwrap.testing import assert_emitters_agree
from tests.fx_passes import test_flex_attention
from tests.lowering.control import test_checkpoints, test_cond, test_loops, test_operators, test_slices, test_subgraphs
from tests.lowering.control.cases import random
from tests.lowering.streams import test_lowering
from tests.lowering.symbols import test_prints
from tests.user_kernels import test_kernels

X = random(4, 8)
WEIGHT = torch.arange(-32, 32, dtype=torch.int8).view(8, 8)
SCALES = random(8, seed=1).abs()

TESTED: Mapping[str, Callable[..., Any]] = {
    "associative_scan": test_slices.test_scan_and_map,
    "auto_functionalized_v2": test_operators.test_mutating_operators,
    "cond": test_cond.test_cond,
    "control_deps": test_lowering.test_every_emitter_runs_a_model_with_streams,
    "flex_attention": test_flex_attention.test_masks,
    "flex_attention_backward": test_flex_attention.test_gradients,
    "graphsafe_run_with_rng_state": test_checkpoints.test_random_numbers_match_eager,
    "invoke_subgraph": test_subgraphs.test_invoke_subgraph,
    "map_impl": test_slices.test_scan_and_map,
    "print": test_prints.test_a_graph_prints_the_same_as_eager,
    "run_and_save_rng_state": test_checkpoints.test_random_numbers_match_eager,
    "run_with_rng_state": test_checkpoints.test_random_numbers_match_eager,
    "scan": test_slices.test_scan_and_map,
    "triton_kernel_wrapper_functional": test_kernels.test_on_cpu,
    "triton_kernel_wrapper_mutation": test_kernels.test_on_cpu,
    "while_loop": test_loops.test_while_loop,
    "while_loop_stack_output": test_loops.test_while_loop,
    "with_effects": test_operators.test_effects_stay_ordered,
}
"""Operators that work, with tests of their own."""

REASONS: Mapping[str, str] = {
    "_export_tracepoint": "marks module calls for torch.export, which removes it from exported programs",
    "aoti_call_delegate": "calls a library that Inductor compiled",
    "call_torchbind": "calls a method of a script object, which has no schema of tensors",
    "custom_function_call": "functorch's form of autograd.Function; tracing runs it and it is in no graph",
    "dynamo_bypassing_wrapper": "runs a Python callable that Dynamo does not trace",
    "executorch_call_delegate": "calls a program of ExecuTorch",
    "flat_apply": "calls a Python function of pytrees, which no program can store",
    "flex_gemm": "names a GEMM and its epilogue for a template of Inductor, since torch 2.15",
    "inductor_compiled_code": "calls code that Inductor compiled",
    "inline_asm_elementwise": "is CUDA assembly as text; kernels have no operation for it",
    "invoke_leaf_function": "calls a Python function that the model's author excludes from compiling",
    "local_map_hop": "AOTAutograd inlines it; without that, its placements are metadata of its graph alone",
    "run_dtensor_rng_op": "sets the generator of a mesh of devices, which is an opaque value",
    "switch": "is a prototype of torch 2.15; nested calls of torch.cond compile",
    "trace_wrapped": "calls a Python hook of compiled autograd, which Dynamo traces into",
    "wrap_activation_checkpoint": "is in Dynamo's graphs only, as Python functions, and AOTAutograd traces into it",
}
"""Operators that fxwrap does not compile."""


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """A graph with a constant of its own."""
    return x.sin(), x + torch.tensor([2.0] * 8)


def _graph(name: str, *before: Any, packed: bool = False, after: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Returns a graph that calls an operator on a graph, and its inputs; torch's front ends rarely leave such calls."""
    graph = Graph()
    x, inner = graph.placeholder("x"), graph.get_attr("inner")
    operands = ((x,),) if packed else (x,)
    call = graph.call_function(getattr(torch.ops.higher_order, name), (*before, inner, *operands, *after))
    first, second = [graph.call_function(operator.getitem, (call, position)) for position in range(2)]
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (first, second)), second))
    return GraphModule({"inner": make_fx(_pair)(X)}, graph), (X,)


def _dequantized_matmul(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return x @ (weight.to(x.dtype) * scales)


def _quantized(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return InvokeQuant()(_dequantized_matmul, x, weight, scales, scheme="nf4") + 1


class _TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _hooked(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: gradient * 3)
    return y * 2


def _checkpointed(x: Tensor) -> Any:
    return checkpoint(lambda a: a.sin().cos(), x, use_reentrant=False)


def _auto_functionalized() -> None:
    """The first version of the operator, which torch still has but no longer traces."""

    @torch.library.custom_op("fxwrap_tests::twice", mutates_args={"x"})
    def twice(x: Tensor) -> None:
        x.mul_(2)

    graph = Graph()
    x = graph.placeholder("x")
    operators = torch.ops.higher_order.auto_functionalized, torch.ops.fxwrap_tests.twice.default
    call = graph.call_function(operators[0], operators[1:], {"x": x})
    graph.output((graph.call_function(operator.getitem, (call, 1)),))
    assert_emitters_agree(GraphModule({}, graph), (X,))


class _Autocast(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.t()


def _training(function: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    leaves = [item.clone().requires_grad_() if item.is_floating_point() else item for item in inputs]
    return lambda: assert_emitters_agree(function, leaves, training=True, emitters=("python", "cpp"))


def _inference(function: Any, *inputs: Any) -> Callable[[], Any]:
    return lambda: assert_emitters_agree(function, inputs, emitters=("python", "cpp"))


WORKS: Mapping[str, Callable[[], Any]] = {
    "auto_functionalized": lambda: _auto_functionalized(),
    "autograd_function_apply": _training(_TwiceTheGradient.apply, X),
    "foreach_map": _inference(lambda a, b: foreach_map(lambda x, y: x * y + 1, a, b), [X, X + 1], [X, X * 2]),
    "hints_wrapper": lambda: assert_emitters_agree(*_graph("hints_wrapper", packed=True, after=({}, {}))),
    "invoke_quant": lambda: assert_emitters_agree(*_graph("invoke_quant")),
    "invoke_quant_packed": _training(_quantized, X, WEIGHT, SCALES),
    "out_dtype": _inference(lambda x: out_dtype(torch.ops.aten.mm.default, torch.int32, x, x), WEIGHT),
    "register_hook": _training(_hooked, X),
    "run_const_graph": lambda: assert_emitters_agree(*_graph("run_const_graph", packed=True)),
    "strict_mode": lambda: assert_emitters_agree(*_graph("strict_mode", packed=True)),
    "tag_activation_checkpoint": _training(_checkpointed, X),
    "wrap": lambda: assert_emitters_agree(*_graph("wrap")),
    "wrap_with_autocast": lambda: _inference(torch.export.export(_Autocast(), (X,)), X)(),
    "wrap_with_set_grad_enabled": lambda: assert_emitters_agree(*_graph("wrap_with_set_grad_enabled", False)),
}


for _module in pkgutil.iter_modules(torch._higher_order_ops.__path__):  # each registers its operators
    importlib.import_module(f"torch._higher_order_ops.{_module.name}")


def test_every_operator_is_listed() -> None:
    unknown = sorted(set(_higher_order_ops) - {*TESTED, *REASONS, *WORKS})
    assert not unknown, f"torch {torch.__version__} has higher-order operators of unknown support: {unknown}"
    assert not {*TESTED} & {*REASONS, *WORKS} and not {*REASONS} & {*WORKS}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in WORKS if name in _higher_order_ops])
def test_operators_that_work(name: str) -> None:
    WORKS[name]()


def test_quantized_calls_compile_as_their_functions() -> None:
    def called(x: Tensor) -> Any:
        return invoke_quant(lambda a: (a.sin(), a.cos()), x, scheme="nf4")

    compiled = torch.compile(called, backend="fxwrap", fullgraph=True)
    torch.testing.assert_close(compiled(X), (X.sin(), X.cos()))
