"""Launchers of C++ and Triton kernels."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxwrap import parse, run, to_cpp, to_python
from fxwrap.errors import FxwrapError, NativeBuildError
from fxwrap.runtime import kernel_table
from fxwrap.runtime.cpp_kernels import KernelText, cpp_symbol
from fxwrap.runtime.kernels import CPP_KERNELS, load_kernel, prepare_kernels
from fxwrap.runtime.native import build_bridge
from fxwrap.wrapper_ir import KernelDefinition, Program, print_kernel

NUMBERS = """#include <cstdint>
extern "C" void kernel(const double* in0, double* out0, bool flag, int32_t small, int64_t big, float f, double d) {
  out0[0] = in0[0]; out0[1] = flag; out0[2] = small; out0[3] = static_cast<double>(big); out0[4] = f; out0[5] = d;
}
"""
SIGNATURE = ("*f64", "*f64", "bool", "i32", "i64", "f32", "f64")


def test_a_cpp_kernel_receives_tensors_and_scalars_of_every_kind() -> None:
    launch = load_kernel("cpp", NUMBERS, SIGNATURE, ())
    x, out = torch.tensor([0.5], dtype=torch.float64), torch.empty(6, dtype=torch.float64)
    launch((1, 1, 1), x, out, True, -7, 2**52 + 1, 0.25, 1e-300)
    assert out.tolist() == [0.5, 1.0, -7.0, float(2**52 + 1), 0.25, 1e-300]


def test_a_kernel_is_compiled_once_and_named_by_its_content() -> None:
    assert load_kernel("cpp", NUMBERS, SIGNATURE, ()) is load_kernel("cpp", NUMBERS, SIGNATURE, ())
    assert cpp_symbol(NUMBERS, SIGNATURE, ()) == cpp_symbol(NUMBERS, SIGNATURE, ())
    assert cpp_symbol(NUMBERS, SIGNATURE, ()) != cpp_symbol(NUMBERS, SIGNATURE, (("flags", "-O1"),))


def test_flags_of_a_cpp_kernel_are_used() -> None:
    source = 'extern "C" void kernel(float* out) { out[0] = VALUE; }\n'
    out = torch.zeros(1)
    load_kernel("cpp", source, ("*f32",), (("flags", "-O1 -DVALUE=2.5f"),))((1,), out)
    assert out.item() == 2.5
    with pytest.raises(NativeBuildError, match="VALUE"):
        load_kernel("cpp", source, ("*f32",), (("flags", "-O1"),))


@pytest.mark.parametrize(
    ("language", "signature", "options", "message"),
    [
        ("fortran", (), (), "no launcher for kernels in 'fortran', only for 'cpp', 'triton', 'user_triton' and 'fx'"),
        ("cpp", ("*f32", "q5"), (), "no type for a kernel's parameter 'q5'"),
        ("cpp", ("*f32",), (("num_warps", 4),), "has no.* option 'num_warps'|no option 'num_warps'"),
        ("triton", ("*f32",), (("warps", 4),), "a Triton kernel has no option 'warps', only num_warps"),
        ("triton", ("*f32",), (), "must define a function 'kernel' with @triton.jit"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_says_why(
    language: str, signature: tuple[str, ...], options: tuple[tuple[str, Any], ...], message: str
) -> None:
    with pytest.raises(FxwrapError, match=message):
        load_kernel(language, "answer = 42\n", signature, options)((1,), torch.ones(1))


def test_a_cpp_kernel_has_no_grid() -> None:
    launch = load_kernel("cpp", 'extern "C" void kernel(float* out) { out[0] = 1; }\n', ("*f32",), ())
    with pytest.raises(FxwrapError, match=r"the grid must be \(1, 1, 1\), not \(2, 1, 1\)"):
        launch((2, 1, 1), torch.ones(1))


SOFTMAX = """import triton
import triton.language as tl


@triton.jit
def scaled(value, factor):
    return value * factor


@triton.jit
def kernel(in0, out0, width, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    loaded = scaled(tl.load(in0 + row * width + column, mask=inside, other=float("-inf")), factor)
    shifted = tl.exp(loaded - tl.max(loaded, axis=0))
    tl.store(out0 + row * width + column, shifted / shifted.sum(axis=0), mask=inside)
"""
SOFTMAX_OPTIONS = (("BLOCK", 16), ("enable_fp_fusion", False), ("num_warps", 4))


def test_a_triton_kernel_with_library_functions_runs_on_the_cpu() -> None:
    launch = load_kernel("triton", SOFTMAX, ("*f32", "*f32", "i64", "f64"), SOFTMAX_OPTIONS)
    x = torch.rand(5, 11)
    out = torch.full_like(x, -1.0)
    launch((5, 1, 1), x, out, 11, 0.5)
    torch.testing.assert_close(out, torch.softmax(0.5 * x, 1))
    launch((2,), x, out.zero_(), 11, 2.0)
    torch.testing.assert_close(out[:2], torch.softmax(2 * x[:2], 1))
    assert torch.equal(out[2:], torch.zeros(3, 11))


@pytest.mark.gpu
def test_a_triton_kernel_runs_on_a_gpu_after_one_that_was_interpreted() -> None:
    launch = load_kernel("triton", SOFTMAX, ("*f32", "*f32", "i64", "f64"), SOFTMAX_OPTIONS)
    x = torch.rand(5, 11)
    for device in ("cpu", "cuda"):
        out = torch.empty(5, 11, device=device)
        launch((5, 1, 1), x.to(device), out, 11, 0.5)
        torch.testing.assert_close(out.cpu(), torch.softmax(0.5 * x, 1))


def test_interpreting_leaves_triton_as_it_was() -> None:
    before = (triton.language.sum, triton.language.standard.max, triton.language.tensor.sum, dict(os.environ))
    launch = load_kernel("triton", SOFTMAX, ("*f32", "*f32", "i64", "f64"), SOFTMAX_OPTIONS)
    launch((1, 1, 1), torch.rand(1, 4), torch.empty(1, 4), 4, 1.0)
    after = (triton.language.sum, triton.language.standard.max, triton.language.tensor.sum, dict(os.environ))
    assert all(one is other for one, other in zip(before[:3], after[:3])) and before[3] == after[3]
    broken = SOFTMAX.replace("factor, BLOCK", "BLOCK").replace(", factor)", ", undefined)")
    with pytest.raises(Exception, match="undefined"):
        load_kernel("triton", broken, ("*f32", "*f32", "i64"), SOFTMAX_OPTIONS)(
            (1, 1, 1), torch.rand(1, 4), torch.empty(1, 4), 4
        )
    assert triton.language.sum is before[0] and not triton.knobs.runtime.interpret


def test_without_triton_only_its_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def no_triton(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError("No module named 'triton'")
        return real(name, *rest)

    monkeypatch.setattr("importlib.import_module", lambda name: no_triton(name))
    with pytest.raises(FxwrapError, match=r"this program has a Triton kernel.*install the package 'triton'"):
        load_kernel("triton", SOFTMAX + "# another text\n", (), ())
    out = torch.zeros(1)
    load_kernel("cpp", 'extern "C" void kernel(float* out) { out[0] = 3; }\n', ("*f32",), ())((1,), out)
    assert out.item() == 3


@pytest.fixture
def softmax_program() -> Program:
    kernel = KernelDefinition("softmax", "triton", SOFTMAX, ("*f32", "*f32", "i64", "f64"), SOFTMAX_OPTIONS)
    return parse(
        """program @softmax(%x: borrowed f32[s0, 8]@cpu, %seen: mutable f32[s0, 8]@cpu) {
  s0 = symbol.size(%x) dim=0
  %y = memory.alloc() : f32[s0, 8]@cpu
  kernel.launch @softmax(%x, 8, 0.5) outs=(%y) grid=(s0, 1, 1)
  kernel.launch @softmax(%x, 8, 2.0) outs=(%seen) grid=(s0)
  control.return(%y)
}
"""
        + print_kernel(kernel)
    )


@pytest.mark.parametrize("emit", [to_python, to_cpp], ids=["python", "cpp"])
def test_a_triton_kernel_runs_in_emitted_programs(softmax_program: Program, emit: Any) -> None:
    x, seen = torch.rand(3, 8), torch.zeros(3, 8)
    version = seen._version
    (y,) = emit(softmax_program)(x, seen)
    torch.testing.assert_close(y, torch.softmax(0.5 * x, 1))
    torch.testing.assert_close(seen, torch.softmax(2 * x, 1))
    assert seen._version == version + 1
    assert torch.equal(run(softmax_program, [x, torch.zeros(3, 8)])[0], y)


def test_a_cpp_kernel_bumps_versions_of_written_inputs() -> None:
    kernel = KernelDefinition("one", "cpp", 'extern "C" void kernel(float* out) { out[0] = 1; }\n', ("*f32",))
    program = parse(
        """program @write(%x: mutable f32[4]@cpu) {
  %tail = memory.view(%x) : f32[2 | | 2]@cpu
  kernel.launch @one() outs=(%tail)
  control.return()
}
"""
        + print_kernel(kernel)
    )
    x = torch.zeros(4)
    to_cpp(program)(x)
    assert x.tolist() == [0, 0, 1, 0] and x._version == 1


def test_an_item_of_fake_memory_after_another_launch_is_another_symbol() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        memory = torch.empty((), dtype=torch.int64)
        first = memory.item()
        assert str(memory.item()) == str(first)
        torch.ops.fxwrap.cpp_kernel("0" * 64, [], outs=[memory], sizes=[], numbers=[], grid=[1, 1, 1])
        assert str(memory.item()) != str(first)


def test_kernels_with_similar_names_do_not_collide() -> None:
    source = 'static float helper() {{ return {0}; }}\nextern "C" void kernel(float* out) {{ out[0] = helper(); }}\n'
    kernels = [KernelDefinition(f"size{n}", "cpp", source.format(n), ("*f32",)) for n in (1, 2)]
    program = parse(
        """program @two() {
  %a = memory.alloc() : f32[1]@cpu
  kernel.launch @size1() outs=(%a)
  %b = memory.alloc() : f32[1]@cpu
  kernel.launch @size2() outs=(%b)
  control.return(%a, %b)
}
"""
        + "".join(map(print_kernel, kernels))
    )
    assert [tensor.item() for tensor in to_cpp(program)()] == [1.0, 2.0]


def test_generated_kernels_are_compiled_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _empty_cache(monkeypatch, tmp_path)
    kernels = tuple([generated(number) for number in (1, 2, 3)])
    prepare_kernels.__wrapped__(kernels)
    assert len(list((tmp_path / "programs").iterdir())) == 1
    for number, kernel in enumerate(kernels, 1):
        out = torch.zeros(1)
        _load(kernel)(out)
        assert out.item() == number
    assert len(list((tmp_path / "programs").iterdir())) == 1


def test_kernels_are_compiled_once_for_all_emitters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Emitted C++ links the kernels into its library from the objects compiled for the other emitters."""
    _empty_cache(monkeypatch, tmp_path)
    kernel = generated(11)
    prepare_kernels.__wrapped__((kernel,))
    (unit,) = (tmp_path / "units").iterdir()
    (library,) = unit.glob("*.o")
    at_first = library.stat().st_mtime_ns
    definition = KernelDefinition("size11", kernel.language, kernel.source, kernel.signature, kernel.options)
    program = parse(
        """program @one() {
  %a = memory.alloc() : f32[1]@cpu
  kernel.launch @size11() outs=(%a)
  control.return(%a)
}
"""
        + print_kernel(definition)
    )
    assert to_cpp(program)()[0].item() == 11
    assert len(list((tmp_path / "programs").iterdir())) == 2
    assert [item.name for item in (tmp_path / "units").iterdir()] == [unit.name]
    assert library.stat().st_mtime_ns == at_first


def test_a_broken_kernel_does_not_affect_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _empty_cache(monkeypatch, tmp_path)
    good, bad = generated(7), KernelText("cpp", '#include "kernel.h"\nwrong\n', ("*f32",))
    prepare_kernels.__wrapped__((good, bad))
    out = torch.zeros(1)
    _load(good)(out)
    assert out.item() == 7
    with pytest.raises(NativeBuildError, match="wrong"):
        _load(bad)


def _empty_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use a cache folder that holds only the bridge, which takes long to build and is not tested here."""
    bridge = build_bridge().folder
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(folder))
    (folder / bridge.name).symlink_to(bridge)


def generated(number: int) -> KernelText:
    """A kernel that begins as generated ones do."""
    source = f'#include "kernel.h"\nextern "C" void kernel(float* out) {{ out[0] = {number}; }}\n'
    return KernelText("cpp", source, ("*f32",))


def _load(kernel: KernelText) -> Callable[..., None]:
    """Load the prepared kernels, whatever this process has loaded before."""
    return CPP_KERNELS.load(kernel.source, kernel.signature, kernel.options)


def test_a_first_launch_prepares_new_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each first launch prepared all kernels ever registered: quadratic time and memory in the number of graphs."""
    prepared: list[int] = []
    monkeypatch.setattr(kernel_table, "prepare_kernels", lambda kernels: prepared.append(len(kernels)))
    source = 'extern "C" void kernel(float* out) { out[0] = 7; }\n'
    with kernel_table.empty_kernel_table():
        for graph in range(4):
            hashes = [f"hash {graph} {i}" for i in (0, 1)]
            kernels = [kernel_table.RegisteredKernel("cpp", source, ("*f32",), (), name, 1) for name in hashes]
            owned = [kernel_table.register_kernel(*pair) for pair in zip(hashes, kernels)]
            for name in hashes:
                out = torch.zeros(1)
                torch.ops.fxwrap.cpp_kernel(name, [], outs=[out], sizes=[], numbers=[], grid=[1, 1, 1])
                assert out.item() == 7 and out._version > 0
            assert owned == kernels
    assert prepared == [2, 0] * 4
