"""The direct code of functional launches: the names of results, and graphs that were rewritten after `to_fx`."""

from __future__ import annotations

import operator
import sys
import traceback
import types
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.fx.direct_writer import DirectWriter, NoDirectForm
from fxwrap.errors import InputError
from fxwrap.runtime.direct import can_bypass_dispatcher
from fxwrap.runtime.native import find_plain_inputs_check

LAUNCH = torch.ops.fxwrap.cpp_kernel_functional.default


def _chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    """Four kernels, of which three overwrite the result of the one before."""
    for dim in (0, 1, 0, 1):
        x = torch.softmax(x * y, dim)
    return (x,)


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.rand(8, 8, generator=generator)


def _program() -> fxwrap.Program:
    return fxwrap.compile_graph(make_fx(_chain)(*_inputs()), _inputs()).program


def _functional() -> GraphModule:
    module = fxwrap.to_fx(_program(), form="functional").graph_module
    assert len(module.graph.find_nodes(op="call_function", target=LAUNCH)) >= 4
    return module


def _statements(code: str) -> list[str]:
    """Returns the statements between the checks and the return, without comments."""
    lines = [line.strip() for line in code.splitlines()]
    return [line for line in lines if line.startswith(("kernel_", "tensors.")) or "allocate" in line]


def _assert_right(module: GraphModule, expected: Callable[..., tuple[torch.Tensor, ...]] = _chain) -> None:
    for seed in range(2):
        torch.testing.assert_close(module(*_inputs(seed)), expected(*_inputs(seed)))


def test_the_code_is_that_of_the_in_place_form() -> None:
    in_place, functional = fxwrap.to_fx(_program()).graph_module, _functional()
    *first, last = _statements(functional.code)
    assert first == _statements(in_place.code)[:-1] and len(first) >= 4
    assert last == "kernel_softmax_0(mul_4);  mul_1 = None"  # the program's result has a name of its own
    assert "[0]" not in functional.code
    _assert_right(functional)


def test_a_result_with_another_user_is_copied() -> None:
    module = _functional()
    second = module.graph.find_nodes(op="call_function", target=LAUNCH)[1]
    (result,) = second.users
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], result),)  # type: ignore[misc]
    module.recompile()
    assert module.code.count("tensors.copy_with_strides(") == 1
    _, first = module(*_inputs())
    module(*_inputs(1))
    last, again = module(*_inputs())
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close((last,), _chain(*_inputs()))
    assert not torch.equal(last, again)


@pytest.mark.parametrize("position", range(4))
def test_two_nodes_of_one_result(position: int) -> None:
    module = _functional()
    launch = module.graph.find_nodes(op="call_function", target=LAUNCH)[position]
    (result,) = launch.users
    with module.graph.inserting_after(result):
        twice = module.graph.call_function(operator.getitem, (launch, 0))
    twice.meta.update(result.meta)
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], twice),)  # type: ignore[misc]
    module.recompile()
    assert f"{launch}[0]" in module.code
    torch.testing.assert_close(module(*_inputs())[:1], _chain(*_inputs()))


def test_operators_between_launches_use_their_own_names() -> None:
    module = _functional()
    second = module.graph.find_nodes(op="call_function", target=LAUNCH)[1]
    (result,) = second.users
    with module.graph.inserting_after(result):
        doubled = module.graph.call_function(torch.ops.aten.mul.Tensor, (result, 2))
    doubled.meta.update(result.meta)
    result.replace_all_uses_with(doubled, lambda user: user is not doubled)
    module.recompile()
    assert f"{doubled} = torch.mul({result}, 2)" in module.code

    by_operators = torch.fx.Interpreter(module).run(*_inputs())
    torch.testing.assert_close(module(*_inputs()), by_operators, rtol=0, atol=0)


@pytest.mark.parametrize("position", range(1, 4))
def test_a_launch_without_a_direct_form_reads_and_drops_the_right_names(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _functional()
    chosen = module.graph.find_nodes(op="call_function", target=LAUNCH)[position]
    write = DirectWriter._call

    def refuse(writer: DirectWriter, node: Node) -> str:
        if node is chosen:
            raise NoDirectForm
        return write(writer, node)

    monkeypatch.setattr(DirectWriter, "_call", refuse)
    module.recompile()
    assert module.code.count("torch.ops.fxwrap.cpp_kernel_functional") == 1
    _assert_right(module)


def test_a_name_that_ends_in_another_is_dropped() -> None:
    module = fxwrap.to_fx(_program()).graph_module
    launch = module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default)[0]
    (x, _) = module.graph.find_nodes(op="placeholder")
    x.name = f"x_{launch.name}"
    module.recompile()
    assert f";  {x.name} = None" in module.code
    _assert_right(module)


def test_errors_of_emitted_modules_have_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    module = _functional()
    with pytest.raises(InputError) as raised:
        module(torch.zeros(3, 8), torch.zeros(8, 8))
    code = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__) if frame.name == "forward"]
    assert [line.partition("(")[0] for line in code if line] == ["checks.check_layout"]
    assert capsys.readouterr().err == ""


def test_launchers_replace_themselves_at_the_first_launch() -> None:
    module = _functional()
    names = sorted({line.partition("(")[0] for line in _statements(module.code) if line.startswith("kernel_")})
    code_globals = type(module).forward.__globals__
    waiting = [code_globals[name] for name in names]
    _assert_right(module)
    assert all(code_globals[name] is not launcher for name, launcher in zip(names, waiting, strict=True))
    assert not any(getattr(code_globals[name], "__code__", None) for name in names)


def test_the_native_check_is_certain_of_ordinary_inputs_only() -> None:
    module = _functional()
    _assert_right(module)  # loads the bridge
    are_plain = find_plain_inputs_check()
    assert are_plain is not None
    x = torch.rand(3)
    assert are_plain((x, torch.nn.Parameter(x, requires_grad=False), 1, 2.5, True, None, torch.empty(0), x[:0]))
    gradients = torch.rand(3, requires_grad=True)
    assert not are_plain((gradients,))
    with torch.no_grad():
        assert are_plain((gradients,))
    conjugate = torch.randn(2, dtype=torch.complex64).conj()
    uncertain = [
        x.to_sparse(),
        torch.empty(2, device="meta"),
        conjugate,
        conjugate.imag,
        torch._to_functional_tensor(x),
    ]
    uncertain += ["text", torch.float32]
    assert not any(are_plain((x, item)) for item in uncertain)
    seen = []
    torch.func.vmap(lambda item: (seen.append(are_plain((item, x))), item)[1])(torch.rand(2, 3))
    torch.func.functionalize(lambda item: (seen.append(are_plain((item, x))), item)[1])(x)
    with torch.utils._python_dispatch.TorchDispatchMode():
        seen.append(are_plain((x,)))
    with torch.overrides.TorchFunctionMode():
        seen.append(are_plain((x,)))
    assert seen == [False] * 4
    with torch.device("cpu"):  # a mode too: Python decides
        assert not are_plain((x,)) and can_bypass_dispatcher(module, x)
    with pytest.raises(TypeError, match=r"are_plain_inputs\(\) takes a tuple, got list"):
        are_plain([x])  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["in_place", "functional"])
def test_the_first_call_through_torch_compile_is_direct(form: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_chain, backend="fxwrap", options={"emitter": "fx", "fx_form": form})
    called: list[str] = []

    def note(frame: types.FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name in ("_cpp_kernel", "_cpp_kernel_functional"):
            called.append(frame.f_code.co_filename.rpartition("/")[2])

    with torch.no_grad():
        sys.setprofile(note)
        try:
            results = compiled(*_inputs())
        finally:
            sys.setprofile(None)
    assert "library.py" not in called
    torch.testing.assert_close(results, _chain(*_inputs()))
