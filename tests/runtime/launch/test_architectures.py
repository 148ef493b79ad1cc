"""Kernels for several GPU architectures in one file: each GPU runs the code of its generation, or PTX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact.archive import Archive
from fxwrap.cli.saved import inspection, read_program_file
from fxwrap.converters.cpp import to_cpp
from fxwrap.errors import ArtifactError, KernelBuildError, OptionError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import compile_cpp, load_program
from fxwrap.runtime.triton.architectures import compile_for_architectures
from fxwrap.runtime.triton.binaries import compiled_variants, variants_unit
from fxwrap.runtime.triton.compile import KernelUse, triton_jit_function
from fxwrap.runtime.triton.variants import make_source
from tests.artifact.cross_compile import fake_gpu_program
from tests.runtime.launch.conftest import Calls
from tests.runtime.launch.fake_driver import FakeDriver
from tests.runtime.launch.kernels import compiled, fill
from tests.runtime.launch.test_cpp import program

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("number", (1, 16, 17, -5, 2**40, 2**40 + 1))
def test_sources_are_those_of_a_launch(driver: FakeDriver, chip: object, number: int) -> None:
    kernel = fill(40)
    source = compiled(kernel, driver.tensor(64), driver.tensor(64), number, 0.5, True).src
    function = triton_jit_function(kernel.source, kernel.signature, kernel.options)
    arguments = (torch.float32, torch.float32, number, 0.5, True)
    own = make_source(function, arguments, {"BLOCK": 64})
    assert (own.signature, own.constants) == (source.signature, source.constants)
    assert own.attrs == {position: attributes for position, attributes in source.attrs.items() if attributes}


@pytest.mark.parametrize(
    ("chips", "wanted"),
    (
        ((80, 86), (("cubin", 80), ("cubin", 80))),
        ((90, 100), (("cubin", 90), ("cubin", 100))),
        ((75, 120), (None, ("ptx", 80))),
    ),
)
def test_each_gpu_runs_its_code_or_ptx(
    driver: FakeDriver, python_launches: Calls, chips: tuple[int, int], wanted: Any
) -> None:
    """Code for 9.0 and newer is for one architecture alone; that for 8.0 has PTX. No GPU is needed to compile it."""
    kernel = fill(sum(chips))
    compile_for_architectures([KernelUse(kernel, CUDA, (64, 0.5, True))], ARCHITECTURES)
    variants = [replace(item, shared=item.capability) for item in compiled_variants(kernel)]
    assert [item.capability for item in variants] == [80, 90, 100]
    units = variants_unit({kernel.symbol: variants})
    run = load_program(compile_cpp(to_cpp(program(kernel)).source, name="filled", extra_sources=units))
    driver.expect("ppidb")
    with driver.chips(*chips):
        for device, expected in enumerate(wanted):
            x, out = driver.tensor(64, device=device), driver.tensor(64, device=device)
            python_launches.clear()
            run(x, out, 0.5, True)
            log = driver.log()
            loads = [line.split()[1] for line in log if line.startswith("load ")]
            launches = [line for line in log if line.startswith("launch ")]
            if expected is None:
                assert len(python_launches) == 1 and not loads and not launches
            else:
                assert not python_launches and loads == [expected[0]]
                assert len(launches) == 1 and f" shared {expected[1]} " in launches[0]


MATMUL = """import triton
import triton.language as tl


@triton.jit
def kernel(x, out, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    matrix = tl.load(x + rows * N + columns)
    tl.store(out + rows * M + tl.arange(0, M)[None, :], tl.dot(matrix, tl.trans(matrix)))
"""
"""A matrix of few rows times itself: large operands, and few instructions to compile."""


def test_a_kernel_has_the_shared_memory_that_it_needs() -> None:
    kernel = KernelText("triton", MATMUL, ("*f16", "*f32"), (("M", 16), ("N", 4096), ("num_warps", 8)))
    with pytest.raises(
        KernelBuildError, match=r"needs \d+ bytes of shared memory, sm_86 has 101376\. Compile for it: O"
    ):
        compile_for_architectures([KernelUse(kernel, CUDA)], ["sm_86"])


def test_a_file_has_code_for_every_architecture(tmp_path: Path) -> None:
    subject, path = fake_gpu_program(), tmp_path / "model.fxw"
    with pytest.raises(ArtifactError, match="call the program once before it is saved, or name architectures"):
        subject.save(path, target="native")
    subject.save(path, target="native", architectures=ARCHITECTURES)
    with Archive(path) as archive:
        binaries = archive.manifest["binaries"]
        library = archive.read(binaries["native"]["library"])
        capabilities: dict[str, list[int]] = {}
        for row in [item["variant"] for item in binaries["triton"]]:
            capabilities.setdefault(row["name"], []).append(row["capability"])
            cubin, ptx = archive.read(row["cubin"]), archive.read(row["ptx"])
            assert library.count(cubin) == 1 and cubin.startswith(b"\x7fELF")
            assert (b".target sm_80" in ptx and library.count(ptx) == 1) if row["capability"] == 80 else not ptx
    assert "Triton code for: sm_80, sm_90, sm_100\n" in inspection(read_program_file(str(path)))
    assert len(capabilities) == 2 and list(capabilities.values()) == [[80, 90, 100]] * 2
    subject.save(tmp_path / "again.fxw", target="native", architectures=ARCHITECTURES)
    assert (tmp_path / "again.fxw").read_bytes() == path.read_bytes()
    fxwrap.load(path).save(tmp_path / "loaded.fxw", target="native", architectures=ARCHITECTURES)
    assert (tmp_path / "loaded.fxw").read_bytes() == path.read_bytes()


def test_bad_architectures(tmp_path: Path) -> None:
    subject = fake_gpu_program()
    for name in ("90", "sm_9", "gfx942"):
        with pytest.raises(OptionError, match=f"unknown architecture '{name}'; name them as 'sm_80'"):
            subject.save(tmp_path / "f.fxw", architectures=(name,))
    kernel = replace(fill(50), source=fill(50).source.replace("tl.store(", "tl.stored("))
    with pytest.raises(KernelBuildError, match=rf"Triton cannot compile {kernel.symbol} for sm_80: CompilationError: "):
        compile_for_architectures([KernelUse(kernel, CUDA, (64, 0.5, True))], ("sm_80",))
    assert not list(tmp_path.iterdir())
