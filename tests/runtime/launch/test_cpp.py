"""Launches from emitted C++: compiled kernels are linked in; Python is called only if no variant matches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact.archive import Archive
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.cpp.library import linked_units
from fxwrap.runtime.cache_folder import cache_folder
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import NativeProgram, compile_cpp, launcher_class, load_program, precompile_cpp
from fxwrap.runtime.triton.binaries import compiled_variants, variants_unit
from fxwrap.runtime.triton.launchers import add_variant
from fxwrap.wrapper_ir import KernelDefinition, print_kernel
from tests.runtime.launch.conftest import Calls
from tests.runtime.launch.fake_driver import FakeDriver, build
from tests.runtime.launch.kernels import compiled, fill


def program(kernel: KernelText) -> fxwrap.Program:
    """A program that launches over grids of three axes and of one, with numbers of every kind."""
    definition = KernelDefinition("fill", kernel.language, kernel.source, kernel.signature, kernel.options)
    return fxwrap.parse(
        """program @filled(%x: borrowed f32[s0]@cuda:0, %out: mutable f32[s0]@cuda:0, f0: float, b0: bool) {
  s0 = symbol.size(%x) dim=0
  kernel.launch @fill(%x, s0, f0, b0) outs=(%out) grid=(ceildiv(s0, 64), 2, s0 + 1)
  kernel.launch @fill(%out, 1, 2.5, false) outs=(%out) grid=(s0 - 64, 1, 1)
  control.return()
}
"""
        + print_kernel(definition)
    )


def dependent_program(kernel: KernelText) -> fxwrap.Program:
    """A launch, and one that may start before it has ended."""
    definition = KernelDefinition("fill", kernel.language, kernel.source, kernel.signature, kernel.options)
    return fxwrap.parse(
        """program @filled(%x: borrowed f32[64]@cuda:0, %out: mutable f32[64]@cuda:0) {
  kernel.launch @fill(%x, 48, 0.5, true) outs=(%out) grid=(3, 1, 1)
  kernel.launch @fill(%out, 48, 0.5, true) outs=(%out) grid=(5, 1, 1) dependent=true
  control.return()
}
"""
        + print_kernel(definition)
    )


def built(kernel: KernelText, make: Callable[[KernelText], fxwrap.Program] = program, **changes: Any) -> NativeProgram:
    """The program, linked with its kernel's compiled variants; `changes` replace fields of these."""
    variants = [replace(item, **changes) for item in compiled_variants(kernel)]
    units = variants_unit({kernel.symbol: variants})
    return load_program(compile_cpp(to_cpp(make(kernel)).source, name="filled", extra_sources=units))


def address(*tensors: torch.Tensor) -> str:
    return " ".join([f"{tensor.data_ptr():x}" for tensor in tensors])


def test_linked_kernels_are_launched(driver: FakeDriver, chip: object, python_launches: Calls) -> None:
    kernel = fill(1)
    x, out = driver.tensor(128), driver.tensor(128)
    source = to_cpp(program(kernel)).source
    assert linked_units([kernel]) == []
    binary = compiled(kernel, x, out, 128, 0.5, True)
    (unit,) = linked_units([kernel])
    assert to_cpp(program(kernel)).source == source  # which machine emits it does not matter
    library = compile_cpp(source, name="filled", extra_sources=[unit])
    assert library.read_bytes().count(binary.asm["cubin"]) == 1
    assert sorted(item.suffix for item in library.parent.iterdir()) == [".cpp", ".cpp", ".json", ".so"]

    run = load_program(library)
    driver.expect("ppidbpp")
    run(x, out, 0.25, True)
    loaded = ["push 100", "load cubin in 100 mode 2", "function kernel"]  # also while a stream is captured
    launched = "launch 1100 grid 2,2,129 block 64,1,1 shared 0 stream 7 context 100"
    assert driver.log() == [*loaded, "push 100", f"{launched} with {address(x, out)} 128 0.25 1 0 0"]
    ((grid, arguments),) = python_launches  # no variant is compiled for the number 1
    assert grid == (64, 1, 1) and arguments[2:] == (1, 2.5, False) and type(arguments[4]) is bool
    assert arguments[0].data_ptr() == arguments[1].data_ptr() == out.data_ptr()


def test_the_text_is_compiled_beside_the_kernels(
    driver: FakeDriver, chip: object, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A precompiled object is used once and then removed; without it the text is compiled as usual."""

    def commands() -> list[str]:
        texts = [record.getMessage().split() for record in caplog.records if record.name == "fxwrap.native"]
        return [words[-3] if "-c" in words else "link" for words in texts]

    caplog.set_level("DEBUG", "fxwrap.native")
    kernel = fill(8)
    compiled(kernel, driver.tensor(64), driver.tensor(64), 64, 0.5, True)
    source = f"{to_cpp(program(kernel)).source}// {tmp_path}\n"  # not in the cache
    before = set((cache_folder() / "programs").glob("ahead-*"))
    caplog.clear()
    precompile_cpp(source)
    precompile_cpp(source)
    assert commands() == ["program.cpp"]
    library = compile_cpp(source, name="filled", extra_sources=linked_units([kernel]))
    assert commands()[1:] == ["filled_kernels_1.cpp", "link"] and library.is_file()
    assert set((cache_folder() / "programs").glob("ahead-*")) == before
    source += "// again\n"
    compile_cpp(source, name="filled", extra_sources=linked_units([kernel]))
    assert sorted(commands()[3:]) == ["filled.cpp", "filled_kernels_1.cpp", "link"]


@pytest.mark.parametrize("capability", [80, 90])
def test_dependent_launches_pass_their_attribute(driver: FakeDriver, chip: object, capability: int) -> None:
    """Not those of code for older chips, which does not wait for the launch before it."""
    kernel = fill(9)
    kernel = replace(kernel, options=tuple(sorted((*kernel.options, ("early_reads", "")))))
    x, out = driver.tensor(64), driver.tensor(64)
    compiled(kernel, x, out, 48, 0.5, True)
    built(kernel, dependent_program, capability=capability, ptx="portable")(x, out)
    calls = [line.partition(" block")[0] for line in driver.log() if line.startswith("launch")]
    attribute = ["launch attribute 6 is 1"] if capability == 90 else []
    assert calls == ["launch 1100 grid 3,1,1", *attribute, "launch 1100 grid 5,1,1"]


def test_emitted_code_launches_kernels_compiled_by_python(
    driver: FakeDriver, chip: object, python_launches: Calls
) -> None:
    kernel = fill(2)
    x, out = driver.tensor(64), driver.tensor(64, skipped=1)
    run = built(kernel)
    run(x, out, 1.5, False)
    assert driver.log() == [] and [grid for grid, _ in python_launches] == [(1, 2, 65)]  # and no grid of no programs
    binary = compiled(kernel, x, out, 64, 0.5, True)
    binary.function = 44
    add_variant(launcher_class()(kernel.symbol, ", ".join(kernel.signature), None), binary, {"BLOCK"}, 0)
    driver.expect("ppidb")
    run(x, out, 1.5, False)
    assert driver.log()[-1].startswith("launch 44 grid 1,2,65 ") and len(python_launches) == 1


@pytest.mark.parametrize(
    ("compiled_for", "chips", "wanted"), [(80, (86, 90), ("cubin", "ptx")), (90, (90, 100), ("cubin", ""))]
)
def test_compute_capabilities(
    driver: FakeDriver,
    chip: Any,
    python_launches: Calls,
    compiled_for: int,
    chips: Sequence[int],
    wanted: Sequence[str],
) -> None:
    """PTX runs on newer chips unless it uses features of its own chip only; otherwise the kernel is compiled anew."""
    chip.capability = compiled_for
    kernel = fill(compiled_for)
    with driver.chips(*chips):
        for device, form in enumerate(wanted):
            x, out = driver.tensor(64, device=device), driver.tensor(64, device=device)
            if device == 0:
                compiled(kernel, x, out, 64, 0.5, True)
                run = built(kernel)
            run(x, out, 0.5, True)
            loaded = [line.split()[1] for line in driver.log() if line.startswith("load ")]
            assert loaded == [form] * bool(form) and len(python_launches) == (not form)


def test_device_requirements_of_a_kernel(driver: FakeDriver, chip: object) -> None:
    x, out = driver.tensor(64), driver.tensor(64)
    compiled(fill(3), x, out, 64, 0.5, True)
    run = built(fill(3), shared=100_000)
    driver.set("shared", 90_000)
    message = "kernel 'kernel' needs 100000 bytes of shared memory, and the GPU has 90000"
    with pytest.raises(RuntimeError, match=message):
        run(x, out, 0.5, True)
    driver.set("shared", 232_448)
    driver = FakeDriver(build())
    driver.set("cuModuleLoadData", 700)
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed: an illegal memory access was encountered"):
        run(x, out, 0.5, True)
    driver.set("cuModuleLoadData", 0)
    driver.log()
    run(x, out, 0.5, True)
    assert "attribute 8 of 1100 is 231424" in driver.log()  # the chip's limit less the function's static shared memory


def test_a_saved_program_contains_linked_kernels(driver: FakeDriver, chip: object, tmp_path: Path) -> None:
    kernel = fill(7)
    x, out = driver.tensor(64), driver.tensor(64)
    binary = compiled(kernel, x, out, 64, 0.5, True)
    fxwrap.save(program(kernel), tmp_path / "f.fxw", emitters=["cpp"])
    with Archive(tmp_path / "f.fxw") as archive:
        library = archive.read(archive.manifest["binaries"]["programs"][0]["entry"])
    assert library.count(binary.asm["cubin"]) == 1
