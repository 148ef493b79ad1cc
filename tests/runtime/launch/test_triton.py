"""Compiled Triton kernels, as the bridge launches them: it selects the same variant as Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fxwrap.artifact.archive import Archive, ArchiveWriter
from fxwrap.artifact.binaries import install_triton_binaries, write_triton
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton import launchers
from fxwrap.runtime.triton.binaries import collect_triton_binaries, compiled_variants
from fxwrap.runtime.triton.launchers import make_native_launcher
from fxwrap.runtime.triton.prebuilt import has_prebuilt_variant
from fxwrap.runtime.triton.variants import variant_of
from tests.runtime.launch.fake_driver import FakeDriver
from tests.runtime.launch.kernels import compiled, fill

CONSTANTS = {"BLOCK"}
FILL = fill(0)


class Triton:
    """Compiles for the arguments, and counts; `launches` counts launches."""

    def __init__(self, kernel: KernelText) -> None:
        self.kernel = kernel
        self.functions: list[int] = []
        self.launches = 0

    def launch(self, _grid: Sequence[int], *_arguments: Any) -> None:
        self.launches += 1

    def compile(self, _grid: Sequence[int], *arguments: Any) -> Any:
        kernel = compiled(self.kernel, *arguments)
        if kernel.function is None:
            kernel.function = 500 + len(self.functions)
        self.functions.append(kernel.function)
        return kernel


def test_each_call_selects_the_compilation_triton_would_select(
    driver: FakeDriver, chip: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton sees a call once, and again where an argument is of another class; the bridge has the others."""
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    by_triton = Triton(FILL)
    launch = make_native_launcher(FILL, CONSTANTS, by_triton)
    x, out, shifted = driver.tensor(64), driver.tensor(64), driver.tensor(64, skipped=1)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("ppldb", (x, out, 2**31 + 8, 0.5, True)),
        ("ppidb", (x, out, 48, 0.5, True)),
        ("ppidb", (x, out, 50, 2.5, False)),
        ("ppdb", (x, out, 1, 0.5, True)),
        ("ppidb", (shifted, out, 48, 0.5, True)),
    ]
    for number, (kinds, arguments) in enumerate(cases):
        driver.expect(kinds)
        launch((3, 1, 1), *arguments)
        assert len(by_triton.functions) == number + 1
        assert driver.log()[1].startswith(f"launch {by_triton.functions[-1]} ")
        launch((3, 1, 1), *arguments)
        passed = [f"{item.data_ptr():x}" if isinstance(item, torch.Tensor) else str(item) for item in arguments]
        number = [] if arguments[2] == 1 else [passed[2]]
        wanted = [*passed[:2], *number, passed[3], str(int(arguments[4]))]
        (_, launched) = driver.log()
        assert launched.startswith(f"launch {by_triton.functions[-1]} grid 3,1,1 block 64,1,1 shared 0 ")
        assert launched.endswith(" with " + " ".join(wanted))
    for (kinds, arguments), function in zip(reversed(cases), reversed(by_triton.functions)):
        driver.expect(kinds)
        launch((1, 1, 1), *arguments)
        assert driver.log()[1].startswith(f"launch {function} ")
    assert len(by_triton.functions) == len(cases) == launch.variant_count == len(set(by_triton.functions))
    assert by_triton.launches == 0


def test_triton_launches_what_only_it_can_launch(
    driver: FakeDriver, chip: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(launchers, "variant_of", lambda _compiled, _constants: None)
    kernel = fill(300)
    by_triton = Triton(kernel)
    launch = make_native_launcher(kernel, CONSTANTS, by_triton)
    for _ in range(3):
        launch((3, 1, 1), driver.tensor(64), driver.tensor(64), 48, 0.5, True)
    assert by_triton.launches == 3 and len(by_triton.functions) == 1 and launch.variant_count == 0


def test_unaligned_operands_of_descriptors_are_copied() -> None:
    memory = torch.randn(80)
    whole, shifted = memory[4:].as_strided((5, 6), (12, 2)), memory[1:].as_strided((5, 6), (12, 2))
    assert launchers.aligned_arguments([whole, shifted, 3], {0}) == [whole, shifted, 3]
    first, second, number = launchers.aligned_arguments([whole, shifted, 3], {0, 1})
    assert first is whole and number == 3 and isinstance(second, torch.Tensor)
    assert second.data_ptr() % 16 == 0 and second.stride() == shifted.stride() and torch.equal(second, shifted)


@pytest.mark.parametrize("capability", [90, 80])
def test_saved_binaries_are_launched_without_triton(
    driver: FakeDriver, chip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int
) -> None:
    """One kernel's Triton binaries, written and read as those of another kernel, which is not compiled."""
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    chip.capability = capability
    here, there = fill(70 + capability), fill(170 + capability)
    x, out = driver.tensor(64), driver.tensor(64)
    compiled(here, x, out, 48, 0.5, True)
    assert collect_triton_binaries(there) == compiled_variants(there) == []
    with open(tmp_path / "file", "wb") as file, ArchiveWriter(file) as writer:
        rows = write_triton(writer, [here])
        assert [row["symbol"] for row in rows] == [here.symbol]
        writer.close({"triton": [{**row, "symbol": there.symbol} for row in rows]})
    with Archive(tmp_path / "file") as archive:
        install_triton_binaries(archive, archive.manifest["triton"])
    assert compiled_variants(there) == compiled_variants(here)
    assert [item.files for item in collect_triton_binaries(there)] == [
        item.files for item in collect_triton_binaries(here)
    ]
    assert has_prebuilt_variant(there.symbol, capability) and not has_prebuilt_variant(there.symbol, 100)

    by_triton = Triton(there)
    launch = make_native_launcher(there, CONSTANTS, by_triton)
    with driver.chips(capability, capability):
        driver.expect("ppidb")
        for _ in range(2):
            launch((3, 1, 1), x, out, 48, 0.5, True)
        asked = [line.split()[0] for line in driver.log()]
        assert [word for word in asked if word in ("load", "launch")] == ["load", "launch", "launch"]
        assert by_triton.functions == [] and launch.variant_count == 1
        driver.expect("ppdb")
        launch((3, 1, 1), x, out, 1, 0.5, True)
        assert len(by_triton.functions) == 1, "arguments of other classes are Triton's"
        again = make_native_launcher(there, CONSTANTS, by_triton)
        driver.expect("ppidb")
        again((3, 1, 1), x, out, 48, 0.5, True)
        assert len(by_triton.functions) == 1 and again.variant_count == 2
    with pytest.raises(ValueError, match="a kernel of 5 parameters has classes for 4"):
        launch.add_variant_image("kernel", b"", b"", 90, 32, 0, 0, bytes(4), bytes(5))


def test_attributes_of_a_compiled_kernel(driver: FakeDriver, chip: Any) -> None:
    arguments = (driver.tensor(64), driver.tensor(64, skipped=1), 7, 0.5, True)
    kernel = compiled(FILL, *arguments)
    variant = variant_of(kernel, CONSTANTS)
    assert variant is not None
    assert (variant.name, variant.capability, variant.threads, variant.shared) == ("kernel", 90, 64, 0)
    assert variant.cubin == kernel.asm["cubin"] and variant.ptx == ""  # sm_90a
    assert (list(variant.classes), list(variant.parameter_passing)) == ([13, 12, 1, 0, 0], [1, 1, 1, 1, 1])
    chip.capability = 80
    older = variant_of(compiled(FILL, *arguments), CONSTANTS)
    assert older is not None and older.capability == 80 and ".target sm_80" in older.ptx


class PatchedKernel:
    """A compiled kernel with other metadata, types or attributes."""

    def __init__(self, kernel: Any, **changes: Any) -> None:
        self.metadata = kernel.metadata._replace(**changes.get("metadata", {}))
        self.asm = {**kernel.asm, **changes.get("asm", {})}
        self.src = _Source(kernel.src, changes)


class _Source:
    def __init__(self, source: Any, changes: dict[str, Any]) -> None:
        self.fn = source.fn
        self.signature = {**source.signature, **changes.get("signature", {})}
        self.constants = {**source.constants, **changes.get("constants", {})}
        self.attrs = {**source.attrs, **changes.get("attrs", {})}


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"num_ctas": 2}},
        {"metadata": {"global_scratch_align": 1024}},
        {"metadata": {"profile_scratch_size": 128}},
        {"metadata": {"launch_cooperative_grid": True}},
        {"metadata": {"launch_pdl": True}},
        {"metadata": {"tensordesc_meta": [{}]}},
        {"metadata": {"instrumentation_mode": "gsan"}},
        {"signature": {"n": "u64"}},
        {"signature": {"x_ptr": "*fp8e4b15"}},
        {"signature": {"x_ptr": "tensordesc<fp32[16, 16]>"}},
        {"signature": {"n": "constexpr"}, "constants": {(2,): 5}},
        {"signature": {"n": "constexpr"}, "constants": {(2,): True}},
        {"signature": {"n": "constexpr"}, "constants": {(2,): 1}},  # the code takes a parameter more than that
        {"attrs": {(0,): [["tt.divisibility", 8]]}},
        {"attrs": {(0,): [["tt.divisibility", 16], ["tt.pointer_range", 32]]}},
        {"attrs": {(3,): [["tt.divisibility", 16]]}},
        {"asm": {"ptx": ""}},
    ],
    ids=str,
)
def test_unknown_arguments_fall_back_to_triton(
    chip: object, changes: dict[str, Any], compile_fill_kernel: Callable[[], Any]
) -> None:
    kernel = compile_fill_kernel()
    assert variant_of(PatchedKernel(kernel), CONSTANTS) is not None
    assert variant_of(PatchedKernel(kernel, **changes), CONSTANTS) is None


@pytest.fixture
def compile_fill_kernel(driver: FakeDriver) -> Callable[[], Any]:
    return lambda: compiled(FILL, driver.tensor(64), driver.tensor(64), 48, 0.5, True)
