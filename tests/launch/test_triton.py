"""What Triton compiled, as the bridge launches it: the same compilation as Triton itself would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fxwrap.artifact.archive import Archive, ArchiveWriter
from fxwrap.artifact.binaries import put_back_triton, write_triton
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton_binaries import compiled_triton
from fxwrap.runtime.triton_launchers import held_launcher
from fxwrap.runtime.triton_provided import launches_provided
from fxwrap.runtime.triton_units import compiled_variants
from fxwrap.runtime.triton_variants import variant_of
from tests.launch.fake_driver import FakeDriver
from tests.launch.kernels import compiled, fill

CONSTANTS = {"BLOCK"}
FILL = fill(0)


class ByTriton:
    """Launches as Triton does, but for the launch: it compiles for the arguments, and counts."""

    def __init__(self, kernel: KernelText) -> None:
        self.kernel = kernel
        self.functions: list[int] = []

    def __call__(self, grid: Sequence[int], *arguments: Any) -> Any:
        made = compiled(self.kernel, *arguments)
        if made.function is None:
            made.function = 500 + len(self.functions)
        self.functions.append(made.function)
        return made


def test_each_call_starts_what_triton_would_start(
    driver: FakeDriver, chip: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton sees a call once, and again where an argument is of another class; the bridge has the others."""
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    by_triton = ByTriton(FILL)
    launch = held_launcher(FILL, CONSTANTS, by_triton)
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
        assert len(by_triton.functions) == number + 1 and driver.log() == []
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
    assert len(by_triton.functions) == len(cases) == launch.held == len(set(by_triton.functions))


@pytest.mark.parametrize("capability", [90, 80])
def test_what_a_file_brought_along_is_launched_without_triton(
    driver: FakeDriver, chip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int
) -> None:
    """What Triton compiled for one kernel, written and read as the code of another, which nobody has compiled."""
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    chip.capability = capability
    here, there = fill(70 + capability), fill(170 + capability)
    x, out = driver.tensor(64), driver.tensor(64)
    compiled(here, x, out, 48, 0.5, True)
    assert compiled_triton(there) == compiled_variants(there) == []
    with open(tmp_path / "file", "wb") as file, ArchiveWriter(file) as writer:
        rows = write_triton(writer, [here])
        assert [row["symbol"] for row in rows] == [here.symbol]
        writer.close({"triton": [{**row, "symbol": there.symbol} for row in rows]})
    with Archive(tmp_path / "file") as archive:
        put_back_triton(archive, archive.manifest["triton"])
    assert compiled_variants(there) == compiled_variants(here)
    assert [item.files for item in compiled_triton(there)] == [item.files for item in compiled_triton(here)]
    assert launches_provided(there.symbol, capability) and not launches_provided(there.symbol, 100)

    by_triton = ByTriton(there)
    launch = held_launcher(there, CONSTANTS, by_triton)
    with driver.chips(capability, capability):
        driver.expect("ppidb")
        for _ in range(2):
            launch((3, 1, 1), x, out, 48, 0.5, True)
        asked = [line.split()[0] for line in driver.log()]
        assert [word for word in asked if word in ("load", "launch")] == ["load", "launch", "launch"]
        assert by_triton.functions == [] and launch.held == 1
        driver.expect("ppdb")
        launch((3, 1, 1), x, out, 1, 0.5, True)
        assert len(by_triton.functions) == 1, "arguments of other classes are Triton's"
        again = held_launcher(there, CONSTANTS, by_triton)
        driver.expect("ppidb")
        again((3, 1, 1), x, out, 48, 0.5, True)
        assert len(by_triton.functions) == 1 and again.held == 2
    with pytest.raises(ValueError, match="a kernel of 5 parameters has classes for 4"):
        launch.hold_image("kernel", b"", b"", 90, 32, 0, bytes(4), bytes(5))


def test_facts_of_a_compiled_kernel(driver: FakeDriver, chip: Any) -> None:
    arguments = (driver.tensor(64), driver.tensor(64, skipped=1), 7, 0.5, True)
    made = compiled(FILL, *arguments)
    variant = variant_of(made, CONSTANTS)
    assert variant is not None
    assert (variant.name, variant.capability, variant.threads, variant.shared) == ("kernel", 90, 64, 0)
    assert variant.cubin == made.asm["cubin"] and variant.ptx == ""  # sm_90a
    assert (list(variant.classes), list(variant.passed)) == ([13, 12, 1, 0, 0], [1, 1, 1, 1, 1])
    chip.capability = 80
    older = variant_of(compiled(FILL, *arguments), CONSTANTS)
    assert older is not None and older.capability == 80 and ".target sm_80" in older.ptx


class Changed:
    """A compiled kernel with other metadata, types or attributes."""

    def __init__(self, made: Any, **changes: Any) -> None:
        self.metadata = made.metadata._replace(**changes.get("metadata", {}))
        self.asm = {**made.asm, **changes.get("asm", {})}
        self.src = _Source(made.src, changes)


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
        {"metadata": {"global_scratch_size": 128}},
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
def test_what_is_not_known_is_left_to_triton(chip: object, changes: dict[str, Any], facts: Callable[[], Any]) -> None:
    made = facts()
    assert variant_of(Changed(made), CONSTANTS) is not None
    assert variant_of(Changed(made, **changes), CONSTANTS) is None


@pytest.fixture
def facts(driver: FakeDriver) -> Callable[[], Any]:
    return lambda: compiled(FILL, driver.tensor(64), driver.tensor(64), 48, 0.5, True)
