"""The Python of emitted graphs launches kernels directly while nothing watches operators, and else calls operators."""

from __future__ import annotations

import copy
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxwrap
from fxwrap.converters.fx.module import boxed_entry
from fxwrap.runtime.direct import can_bypass_dispatcher
from fxwrap.torch_compat import add_triton_constants, triton_constants_at
from tests.converters.fx.fused_graphs import LANGUAGES, fused, split_in_order
from tests.support.samples import SAMPLES

languages = pytest.mark.parametrize("language", LANGUAGES)


def _inputs(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 6, generator=generator), torch.randn(6, 7, generator=generator)]


@cache
def _program(language: str) -> fxwrap.Program:
    inputs = _inputs()
    graph = make_fx(fused, tracing_mode="fake")(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=LANGUAGES[language]).program


def _emitted(language: str = "cpp") -> GraphModule:
    return fxwrap.to_fx(_program(language)).graph_module


_CALLS = {cls.__call__.__code__ for cls in (OpOverload, OpOverloadPacket, HigherOrderOperator)}


@contextmanager
def operator_calls() -> Iterator[list[str]]:
    """Notes the operators that Python code calls through torch.ops, in this thread."""
    calls: list[str] = []

    def note(frame: types.FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code in _CALLS:
            calls.append(str(frame.f_locals["self"]))

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _assert_direct(run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    with operator_calls() as called:
        outputs = run(*inputs)
    assert called == []
    return outputs


def _assert_right(outputs: Any, inputs: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(tuple(outputs), fused(*inputs))


# --- the direct path --------------------------------------------------------------------------------------------------


@languages
def test_a_direct_launch_calls_no_operator(language: str) -> None:
    emitted = fxwrap.to_fx(_program(language))
    inputs = _inputs(1)
    boxed = boxed_entry(emitted.graph_module)
    for run in (emitted.graph_module, emitted.flat, lambda *args: boxed([*args])):
        _assert_right(_assert_direct(run, inputs), inputs)


def test_the_code_is_readable() -> None:
    lines = [line.strip() for line in _emitted().code.strip().splitlines()]
    lines = [line.partition("  ")[0] if line.startswith("#") else line for line in lines]  # without the call's handle
    assert lines == [
        "def forward(self, x_1, w_1):",
        "if not can_bypass_dispatcher(self, x_1, w_1):",
        "return by_operators(self, x_1, w_1)",
        "checks.check_layout(x_1, 'x_1', torch.float32, (5, 6), (6, 1), device_cpu)",
        "checks.check_layout(w_1, 'w_1', torch.float32, (6, 7), (7, 1), device_cpu)",
        "# mul: aten.mul.Tensor",
        "mul = allocate_cpu((5, 6), (6, 1), torch.float32)",
        "# tanh, mul: aten.tanh, aten.mul.Tensor",
        "kernel_tanh_mul_0(x_1, mul);  x_1 = None",
        "# mm: aten.mm",
        "mm = torch.mm(mul, w_1);  mul = w_1 = None",
        "# sum_1: aten.sum.dim_IntList",
        "sum_1 = allocate_cpu((7,), (1,), torch.float32)",
        "# sum_1: aten.sum.dim_IntList",
        "kernel_sum_0(mm, sum_1)",
        "# _softmax: aten._softmax",
        "kernel_softmax_0(mm)",
        "return (mm, sum_1)",
    ]


@pytest.mark.parametrize("wishes", [{}, {"colored": True}, {"include_stride": True, "include_device": True}])
def test_readable_code_is_direct_too(wishes: dict[str, bool]) -> None:
    text = _emitted().print_readable(print_output=False, **wishes)
    assert "kernel_tanh_mul_0(x_1, mul);" in text and "torch.ops" not in text
    assert text.count("= None") == 2  # x, and mul with w; mm has the softmax, and no launch has a result


def test_parameter_names_may_shadow_globals() -> None:
    graph = _emitted().graph
    names = ["can_bypass_dispatcher", "kernel_tanh_mul_0"]
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
    module = GraphModule({}, graph)
    inputs = _inputs(2)
    _assert_right(_assert_direct(module, inputs), inputs)


def test_module_code_is_generated_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[GraphModule] = []
    recompile, program = GraphModule.recompile, _program("cpp")
    monkeypatch.setattr(GraphModule, "recompile", lambda module: (written.append(module), recompile(module))[1])
    emitted = fxwrap.to_fx(program)
    whole, sums = emitted.boxed(_inputs())
    assert not written
    torch.testing.assert_close(emitted.graph_module(*_inputs()), (whole, sums), rtol=0, atol=0)
    assert written == [emitted.graph_module]
    assert emitted.source == emitted.graph_module.code
    emitted.graph_module.recompile()
    assert len(written) == 2
    assert copy.deepcopy(emitted.graph_module).code == emitted.source


def test_the_boxed_entry_drops_inputs_at_their_last_use() -> None:
    module = _emitted()
    seen: list[bool] = []
    inputs = _inputs()
    reference = weakref.ref(inputs[0])
    wanted = fused(*inputs)
    (mm,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    with module.graph.inserting_before(mm):
        module.graph.call_function(lambda: seen.append(reference() is None))
    module.recompile()
    torch.testing.assert_close(boxed_entry(module)(inputs), wanted)
    assert (seen, inputs) == ([True], [])


def test_kernels_may_be_launched_first_from_several_threads() -> None:
    module = _emitted()
    results: list[Any] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        results.append(module(*_inputs(3)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for outputs in results:
        _assert_right(outputs, _inputs(3))


@pytest.mark.parametrize("name", ["cond_nested", "while_loops", "scan_and_map", "shared_function"])
def test_blocks_are_called_without_higher_order_operators(name: str) -> None:
    sample = SAMPLES[name]
    module = fxwrap.to_fx(sample.program()).graph_module
    with torch.no_grad(), operator_calls() as called:
        outputs = module(*sample.inputs(4))
    assert [item for item in called if "." not in item] == []
    torch.testing.assert_close(outputs, fxwrap.run(sample.program(), sample.inputs(4)), rtol=0, atol=0, equal_nan=True)


# --- everything else --------------------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    pass


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _fake(inputs: Sequence[torch.Tensor]) -> list[Any]:
    mode = FakeTensorMode()
    return [mode.from_tensor(item) for item in inputs]


def _needing_gradients(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [item.clone().requires_grad_() for item in inputs]


SLOW: dict[str, tuple[Callable[[Sequence[torch.Tensor]], Sequence[Any]], Callable[[], AbstractContextManager[Any]]]] = {
    "fake tensors": (_fake, nullcontext),
    "meta tensors": (lambda inputs: [item.to("meta") for item in inputs], nullcontext),
    "one meta tensor": (lambda inputs: [inputs[0].to("meta"), inputs[1]], nullcontext),
    "dispatch mode": (list, _Watch),
    "function mode": (list, _Functions),
    "gradients": (_needing_gradients, nullcontext),
    "a negative bit": (lambda inputs: [torch._neg_view(inputs[0]), inputs[1]], nullcontext),
}


@pytest.mark.parametrize("name", SLOW)
def test_operators_are_called_when_a_dispatch_mode_is_active(name: str) -> None:
    prepare, context = SLOW[name]
    module, inputs = _emitted(), prepare(_inputs(5))
    with context(), operator_calls() as called:
        outputs = module(*inputs)
    assert called.count("fxwrap.cpp_kernel.default") >= 3
    assert [item.shape for item in outputs] == [(5, 7), (7,)]
    if not any(item.is_meta or isinstance(item, FakeTensor) for item in inputs):
        _assert_right(outputs, [item.detach() for item in inputs])


def test_tensors_without_storage_are_not_launched_directly() -> None:
    module, x = _emitted(), torch.rand(3)
    odd = [x.to_sparse(), torch._to_functional_tensor(x), x.as_subclass(_Subclass), *_fake([x])]
    odd.append(torch.empty(0, device="meta"))
    assert can_bypass_dispatcher(module, x, torch.nn.Parameter(x, requires_grad=False), 1, 2.5, None, torch.empty(0))
    for item in odd:
        assert not can_bypass_dispatcher(module, x, item)


@languages
def test_fake_inputs_produce_fake_outputs(language: str) -> None:
    for entered in (False, True):
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(item) for item in _inputs()]
        with mode if entered else nullcontext():
            outputs = _emitted(language)(*fakes)
        assert [(type(item), item.shape) for item in outputs] == [(FakeTensor, (5, 7)), (FakeTensor, (7,))]


def test_a_mode_sees_every_kernel() -> None:
    inputs = _inputs(6)
    with _Watch() as watch:
        outputs = _emitted()(*inputs)
    assert watch.called.count("fxwrap.cpp_kernel.default") == 3
    _assert_right(outputs, inputs)


@languages
def test_functionalisation_sees_every_kernel(language: str) -> None:
    inputs = _inputs(7)
    _assert_right(torch.func.functionalize(_emitted(language))(*inputs), inputs)


def test_export_sees_every_kernel() -> None:
    inputs = _inputs(8)
    for strict in (False, True):
        module = torch.export.export(_emitted(), tuple(inputs), strict=strict).module()
        kernels = [node for node in module.graph.nodes if node.target is torch.ops.fxwrap.cpp_kernel.default]
        assert len(kernels) == 3
        _assert_right(module(*inputs), inputs)
        fxwrap.fx.enable_direct_launches(module)
        _assert_right(_assert_direct(module, inputs), inputs)


def test_default_devices_leave_calls_direct() -> None:
    inputs = _inputs(9)
    with torch.device("meta"):
        outputs = _assert_direct(_emitted(), inputs)
    _assert_right(outputs, inputs)


def test_constants_are_checked_too() -> None:
    sample = SAMPLES["mutated_inputs_and_constants"]
    module = fxwrap.to_fx(sample.program()).graph_module
    fakes = {name: FakeTensorMode().from_tensor(item) for name, item in module.named_buffers()}
    assert fakes
    with torch.no_grad(), operator_calls() as called:
        mode = next(iter(fakes.values())).fake_mode
        fakes = {name: mode.from_tensor(item) for name, item in module.named_buffers()}
        torch.func.functional_call(module, fakes, tuple(mode.from_tensor(item) for item in sample.inputs(0)))
    assert called


@languages
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_runs_every_slice(language: str, dim: int) -> None:
    inputs = [torch.randn(3, 5, 6).movedim(0, dim).contiguous(), torch.randn(6, 7)]
    run: Callable[..., Any] = torch.func.vmap(_emitted(language), in_dims=(dim, None))
    outputs = run(*inputs)
    wanted = torch.func.vmap(fused, in_dims=(dim, None))(*inputs)
    torch.testing.assert_close(tuple(outputs), wanted)
    twice = torch.func.vmap(run, in_dims=(None, 0))(inputs[0], torch.stack([inputs[1], -inputs[1]]))
    torch.testing.assert_close(twice[1][0], wanted[1])
    boxed = boxed_entry(_emitted(language))
    again = torch.func.vmap(lambda *args: boxed([*args]), in_dims=(dim, None))(*inputs)
    torch.testing.assert_close(tuple(again), wanted)


_ADDS = """
program @adds(%x: mutable f32[4]@cpu, %y: borrowed f32[4]@cpu) {
  extern.mutate @aten.add_.Tensor(%x, %y) writes=(%x)
  control.return(%x)
}
"""


def test_vmap_writes_batched_inputs_only() -> None:
    module = fxwrap.to_fx(fxwrap.parse(_ADDS)).graph_module
    x, y = torch.rand(4, 3), torch.rand(4)
    wanted = x + y[:, None]
    outputs = torch.func.vmap(module, in_dims=(1, None))(x, y)
    torch.testing.assert_close(outputs[0], wanted.T)
    torch.testing.assert_close(x, wanted)
    before = y.clone()
    with pytest.raises(RuntimeError, match="mutates a tensor that is not batched"):
        torch.func.vmap(module, in_dims=(None, 0))(y, torch.rand(3, 4))
    assert torch.equal(y, before)


_DRAWS = """
program @draws(%x: borrowed f32[4]@cpu) {
  %y = extern.call @aten.rand_like.default(%x) effect_set=(random("cpu")) : f32[4]@cpu
  control.return(%y)
}
"""


def test_vmap_respects_its_randomness_setting() -> None:
    module = fxwrap.to_fx(fxwrap.parse(_DRAWS)).graph_module
    with pytest.raises(RuntimeError, match="randomness='error'"):
        torch.func.vmap(module)(torch.zeros(3, 4))
    (same,) = torch.func.vmap(module, randomness="same")(torch.zeros(3, 4))
    (different,) = torch.func.vmap(module, randomness="different")(torch.zeros(3, 4))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])


# --- rewrites ---------------------------------------------------------------------------------------------------------


class _Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _with_function(module: GraphModule) -> float:
    (mm,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    with module.graph.inserting_after(mm):
        doubled = module.graph.call_function(_twice, (mm,))
    mm.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    return 2.0


def _with_module(module: GraphModule) -> float:
    (mm,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    module.add_submodule("scale", _Scale())
    with module.graph.inserting_after(mm):
        scaled = module.graph.call_module("scale", (mm,))
    mm.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return 3.0


def _with_attribute(module: GraphModule) -> float:
    (mm,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    module.register_buffer("factor", torch.tensor(4.0))
    with module.graph.inserting_after(mm):
        factor = module.graph.get_attr("factor")
    with module.graph.inserting_after(factor):
        scaled = module.graph.call_method("mul", (mm, factor))
    mm.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return 4.0


REWRITES = {"function": _with_function, "module": _with_module, "attribute": _with_attribute}


@languages
@pytest.mark.parametrize("name", REWRITES)
def test_rewritten_graphs_are_right_and_direct(language: str, name: str) -> None:
    module, inputs = _emitted(language), _inputs(10)
    factor = REWRITES[name](module)
    module.recompile()
    for variant in (module, copy.deepcopy(module)):
        outputs = _assert_direct(variant, inputs)
        torch.testing.assert_close(tuple(outputs), fused(inputs[0], inputs[1] * factor))
        variant.graph.eliminate_dead_code()
        variant.recompile()
        torch.testing.assert_close(_assert_direct(variant, inputs), outputs)


_LAYOUTS = """
program @layouts(%x: borrowed f32[4, 4]@cpu) {
  check.layout(%x) name="x" : f32[4, 4]@cpu
  %a = extern.call @aten.clone.default(%x) : f32[4, 4]@cpu
  %b = memory.view(%a) : f32[4, 2 | 4, 1]@cpu
  %c = extern.call @aten.neg.default(%b) : f32[4, 2]@cpu
  memory.free(%a)
  control.return(%c)
}
"""


def test_storage_views_become_views_of_a_rewritten_base() -> None:
    module = fxwrap.to_fx(fxwrap.parse(_LAYOUTS)).graph_module
    x = torch.rand(4, 4)
    assert "tensors.strided_view(a, (4, 2), (4, 1))" in module.code
    assert torch.equal(module(x)[0], -x[:, :2])
    (clone,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    clone.target, clone.args = torch.ops.aten.t.default, clone.args
    module.recompile()
    assert "strided_view" not in module.code
    assert torch.equal(module(x)[0], -x.t()[:, :2])


def test_modified_launches_call_the_operator() -> None:
    sample = SAMPLES["triton_kernel"]
    inputs = sample.inputs(0)
    wanted = fxwrap.run(sample.program(), inputs)
    module = fxwrap.to_fx(sample.program()).graph_module
    _assert_direct(module, inputs)
    (launch,) = [node for node in module.graph.nodes if "kernel_idx" in node.kwargs]
    launch.kwargs = {**launch.kwargs, "constant_args_idx": _other_constants(launch.kwargs["constant_args_idx"])}
    module.recompile()
    with operator_calls() as called:
        torch.testing.assert_close(module(*inputs), wanted, rtol=0, atol=0)
    assert called == ["triton_kernel_wrapper_mutation"]


def _other_constants(index: Any) -> int:
    return add_triton_constants({**triton_constants_at(index), "num_warps": 8})


def test_hooks_run() -> None:
    module, inputs = _emitted(), _inputs(11)
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    _assert_direct(module, inputs)
    assert seen == ["before", "after"]
    module.graph.on_generate_code(lambda own: lambda body: ["print('begins')\n", *(own(body) if own else body)])
    module.recompile()
    assert module.code.count("print('begins')") == 1
    _assert_right(_assert_direct(module, inputs), inputs)


# --- other graphs -----------------------------------------------------------------------------------------------------


MAKERS: dict[str, Callable[[GraphModule, Sequence[Any]], GraphModule]] = {
    "split_module": lambda module, _inputs: split_in_order(module),
    "make_fx": lambda module, inputs: make_fx(module, tracing_mode="fake")(*inputs),
    "make_fx with symbols": lambda module, inputs: make_fx(module, tracing_mode="symbolic")(*inputs),
    "plain copy": lambda module, _inputs: GraphModule(module, copy.deepcopy(module.graph)),
}


@languages
@pytest.mark.parametrize("maker", MAKERS)
def test_accelerated_graphs_are_right_and_direct(language: str, maker: str) -> None:
    inputs = _inputs(12)
    derived = MAKERS[maker](_emitted(language), inputs)
    if maker != "plain copy":
        with operator_calls() as called:
            derived(*inputs)
        assert called
    assert fxwrap.fx.enable_direct_launches(derived) is derived
    _assert_right(_assert_direct(derived, inputs), inputs)
    copied = copy.deepcopy(derived)
    copied.recompile()
    _assert_right(_assert_direct(copied, inputs), inputs)


def test_accelerated_graphs_keep_their_calling_convention() -> None:
    module, inputs = _emitted(), _inputs(13)
    derived = make_fx(lambda arguments: {"both": module(arguments["x"], arguments["w"])}, tracing_mode="fake")(
        {"x": inputs[0], "w": inputs[1]}
    )
    fxwrap.fx.enable_direct_launches(derived)
    outputs = _assert_direct(derived, [{"x": inputs[0], "w": inputs[1]}])
    _assert_right(outputs["both"], inputs)
    with _Watch():
        _assert_right(derived({"x": inputs[0], "w": inputs[1]})["both"], inputs)


def test_interpreters_agree_with_the_code() -> None:
    module, inputs = _emitted(), _inputs(14)
    torch.testing.assert_close(Interpreter(module).run(*inputs), module(*inputs), rtol=0, atol=0)
