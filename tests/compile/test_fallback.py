"""Kernels that cannot be compiled: their operators are called, with one warning, or an error where it is asked for."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import FusionWarning, FxwrapError, KernelBuildError, NativeBuildError
from fxwrap.options import EMITTERS
from fxwrap.printers import PrintedKernel, languages
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.wrapper_ir import KernelDefinition, Program

NEED_NO_COMPILER = [emitter for emitter in EMITTERS if emitter != "cpp"]


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two kernels, around a call that nothing is fused with."""
    return (x.tanh() * 2) @ w + x.exp()


def inputs(device: str = "cpu") -> list[torch.Tensor]:
    return [torch.randn(17, 17, device=device) for _ in range(2)]


def compiled_with_warnings(arguments: list[torch.Tensor], **options: Any) -> tuple[fxwrap.Compiled, list[str]]:
    """The compiled function, and the texts of the warnings about its kernels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = fxwrap.compile_graph(make_fx(function)(*arguments), arguments, options=fxwrap.Options(**options))
    return compiled, [str(item.message) for item in caught if item.category is FusionWarning]


def breaking_printer(printer: Callable[..., PrintedKernel], operator: str, source: str) -> Callable[..., PrintedKernel]:
    """A printer whose kernels with an operator in them do not compile."""

    def printed(*arguments: Any) -> PrintedKernel:
        actual = printer(*arguments)
        return dataclasses.replace(actual, source=actual.source + source) if operator in actual.source else actual

    return printed


@pytest.fixture(autouse=True)
def forgotten_kernels() -> Iterator[None]:
    """Nothing printed by another test, or by a printer that was put in place of the real one, is known."""
    languages._print_cached.cache_clear()
    yield
    languages._print_cached.cache_clear()


@pytest.fixture
def broken_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ kernels with a tanh in them do not compile."""
    broken = breaking_printer(languages.print_cpp_kernel, "tanh", "\n#error no tanh today\n")
    monkeypatch.setattr(languages, "print_cpp_kernel", broken)


@pytest.mark.parametrize("emitter", NEED_NO_COMPILER)
def test_without_a_compiler_operators_are_called(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    arguments = inputs()
    compiled, messages = compiled_with_warnings(arguments, emitter=emitter)
    (message,) = messages
    for part in ("aten.tanh", "aten.exp", "are called instead", "cannot run the C++ compiler '/nonexistent/compiler'"):
        assert part in message
    assert compiled.program.kernels == ()
    torch.testing.assert_close(compiled(*arguments)[0], function(*arguments), rtol=0, atol=0)


def test_torch_compile_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    arguments = [item.requires_grad_() for item in inputs()]
    with pytest.warns(FusionWarning, match=r"aten\.tanh.*are called instead"):
        result = torch.compile(function, backend="fxwrap", fullgraph=True)(*arguments)
        gradients = torch.autograd.grad(result.sum(), arguments)
    torch.testing.assert_close(gradients, torch.autograd.grad(function(*arguments).sum(), arguments))


def test_without_a_compiler_emitting_cpp_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    arguments = inputs()
    with pytest.raises(NativeBuildError, match="cannot run the C\\+\\+ compiler '/nonexistent/compiler'"):
        fxwrap.compile_graph(make_fx(function)(*arguments), arguments, options=fxwrap.Options(emitter="cpp"))


@pytest.mark.parametrize("emitter", NEED_NO_COMPILER)
def test_without_a_compiler_a_program_without_kernels_runs(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    arguments = inputs()
    compiled, messages = compiled_with_warnings(arguments, emitter=emitter, fuse=False)
    assert messages == []
    torch.testing.assert_close(compiled(*arguments)[0], function(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_only_the_failing_kernel_falls_back(emitter: str, broken_tanh: None) -> None:
    arguments = inputs()
    compiled, messages = compiled_with_warnings(arguments, emitter=emitter)
    (message,) = messages
    assert "aten.tanh" in message and "aten.exp" not in message and "no tanh today" in message
    assert len(compiled.program.kernels) == 1
    called = {outcome.node for outcome in compiled.coverage if outcome.kind == "call"}
    assert {name.rstrip("_0123456789") for name in called} == {"tanh", "mul", "mm"}
    torch.testing.assert_close(compiled(*arguments)[0], function(*arguments))


@pytest.mark.parametrize("emitter", EMITTERS)
def test_errors_instead_of_fallback_when_requested(emitter: str, broken_tanh: None) -> None:
    arguments = inputs()
    with pytest.raises(NativeBuildError, match="no tanh today"):
        compiled_with_warnings(arguments, emitter=emitter, fallback="error")


def test_without_triton_operators_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    arguments = inputs()
    compiled, messages = compiled_with_warnings(arguments, cpu_kernels="triton")
    (message,) = messages
    assert "Triton cannot be imported" in message and "aten.tanh" in message
    torch.testing.assert_close(compiled(*arguments)[0], function(*arguments), rtol=0, atol=0)
    with pytest.raises(FxwrapError, match="Triton cannot be imported"):
        compiled_with_warnings(arguments, cpu_kernels="triton", fallback="error")


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_gpu_program_is_compiled_without_a_gpu(emitter: str) -> None:
    with FakeTensorMode():
        arguments = inputs("cuda:0")
        traced = make_fx(function)(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        compiled = fxwrap.compile_graph(traced, arguments, options=fxwrap.Options(emitter=emitter))
    assert {kernel.language for kernel in compiled.program.kernels} == {"triton"}


def test_a_pass_s_kernel_has_no_operators_to_fall_back_to() -> None:
    """A pass that puts a broken kernel in place of another, and forgets where it came from."""

    def break_kernels(program: Program) -> Program:
        lines = [dataclasses.replace(line, origin=None) for line in program.body.lines]
        kernels = [
            KernelDefinition(kernel.name, kernel.language, "#error broken by a pass\n", kernel.signature)
            for kernel in program.kernels
        ]
        return program.replace(kernels=tuple(kernels), body=dataclasses.replace(program.body, lines=tuple(lines)))

    with pytest.raises(NativeBuildError, match="broken by a pass"):
        compiled_with_warnings(inputs(), passes=(break_kernels,))


@pytest.mark.gpu
@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_failing_triton_kernel_falls_back(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = breaking_printer(languages.print_triton, "tanh", "    tl.there_is_no_such_function()\n")
    monkeypatch.setattr(languages, "print_triton", broken)
    arguments = inputs("cuda")
    compiled, messages = compiled_with_warnings(arguments, emitter=emitter)
    (message,) = messages
    assert "aten.tanh" in message and "aten.exp" not in message and "there_is_no_such_function" in message
    assert len(compiled.program.kernels) == 1
    torch.testing.assert_close(compiled(*arguments)[0], function(*arguments))
    with pytest.raises(KernelBuildError, match="there_is_no_such_function"):
        compiled_with_warnings(arguments, emitter=emitter, fallback="error")
