"""Launches from Python: how arguments are passed, which variant is selected, and on which device and stream it runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fxwrap.runtime.native import launcher_class, override_driver_library
from tests.runtime.launch.fake_driver import FakeDriver, build

# Classes, as launch.h has them.
F32, F32_ALIGNED, BF16_ALIGNED, BOOL_ALIGNED = 12, 13, 31, 23
ONE, NARROW, NARROW_DIVISIBLE, WIDE, WIDE_DIVISIBLE = range(5)
NONE = 0
WHOLE, SINGLE = 1, 2

COUNTS = iter(range(1000))


class Fallback:
    """The fallback of a launcher without a matching variant; it records the arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "fallback"


def launcher(signature: str, *held: tuple[bytes, bytes, int], device: int = 0) -> tuple[Any, Fallback]:
    """A launcher of a new kernel that holds functions for classes: (classes, ways to pass, function)."""
    fallback = Fallback()
    instance = launcher_class()(f"kernel_of_tests_{next(COUNTS)}", signature, fallback)
    for classes, parameter_passing, function in held:
        instance.add_variant("kernel", 128, 0, 0, classes, parameter_passing, device, function, None)
    return instance, fallback


def address_of(tensor: torch.Tensor) -> str:
    return f"{tensor.data_ptr():x}"


def test_a_launch_has_scratch_memory_for_all_blocks(driver: FakeDriver) -> None:
    instance, fallback = launcher("*f32")
    instance.add_variant("kernel", 128, 0, 256, bytes([F32_ALIGNED]), bytes([WHOLE]), 0, 77, None)
    x, allocated = driver.tensor(8), list[torch.Tensor]()

    def allocate(size: Sequence[int], **_options: object) -> torch.Tensor:
        allocated.append(driver.tensor(size[0], torch.uint8))
        return allocated[-1]

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", allocate, "CUDA")
    driver.expect("ppp")
    assert instance((2, 3, 4), x) is None
    del library
    (memory,) = allocated
    assert memory.numel() == 24 * 256 and fallback.calls == []
    assert driver.log()[-1].endswith(f"with {address_of(x)} {address_of(memory)} 0")


def test_arguments_are_packed_in_the_functions_layout(driver: FakeDriver) -> None:
    signature = "*f32, i64, i64, f32, f64, i1, *bf16"
    classes = bytes([F32_ALIGNED, NARROW, ONE, NONE, NONE, NONE, BF16_ALIGNED])
    launch, fallback = launcher(signature, (classes, bytes([WHOLE, WHOLE, 0, SINGLE, WHOLE, WHOLE, WHOLE]), 77))
    x, y = driver.tensor(8), driver.tensor(8, torch.bfloat16)
    driver.expect("pifdbppp")  # the second number is left out; two scratch buffers are added
    assert launch((2, 3, 4), x, -7, 1, 0.1, 0.1, True, y) is None
    parameters = f"{address_of(x)} -7 0.1 0.1 1 {address_of(y)} 0 0"
    launched = f"launch 77 grid 2,3,4 block 128,1,1 shared 0 stream 7 context 100 with {parameters}"
    assert driver.log() == ["push 100", launched] and fallback.calls == []
    launch((1, 1, 1), torch.nn.Parameter(x, requires_grad=False), -7, 1, 2, 3, False, y)  # ints are floats too
    assert driver.log()[-1].endswith(f"with {address_of(x)} -7 2 3 0 {address_of(y)} 0 0")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (1, ONE), (0, NARROW_DIVISIBLE), (16, NARROW_DIVISIBLE), (5, NARROW), (-16, NARROW_DIVISIBLE), (-1, NARROW),
        (2**31 - 1, NARROW), (2**31, WIDE_DIVISIBLE), (2**31 + 1, WIDE), (-(2**31), NARROW_DIVISIBLE),
        (-(2**31) - 1, WIDE), (2**63 - 1, WIDE),
    ],
)  # fmt: skip
def test_integer_specialization_selects_the_compilation(driver: FakeDriver, number: int, kind: int) -> None:
    held = [(bytes([F32_ALIGNED, item]), bytes([WHOLE, WHOLE]), 50 + item) for item in range(5)]
    launch, fallback = launcher("*f32, i64", *held)
    launch((1, 1, 1), driver.tensor(4), number)
    assert driver.log()[-1].startswith(f"launch {50 + kind} ") and fallback.calls == []


def test_tensor_specialization_selects_the_compilation(driver: FakeDriver) -> None:
    launch, fallback = launcher("*f32", (bytes([F32_ALIGNED]), bytes([WHOLE]), 5), (bytes([F32]), bytes([WHOLE]), 6))
    launch((1, 1, 1), driver.tensor(4))
    launch((1, 1, 1), driver.tensor(4, skipped=1))
    launch((1, 1, 1), driver.tensor(4, skipped=4))
    assert [line[:9] for line in driver.log() if line.startswith("launch")] == ["launch 5 ", "launch 6 ", "launch 5 "]
    assert launch((1, 1, 1), driver.tensor(4, torch.float64)) == "fallback"
    assert launch((1, 1, 1), driver.tensor(4, device=1)) == "fallback"
    assert launch((1, 1, 1), torch.zeros(4)) == "fallback"
    assert driver.log() == [] and len(fallback.calls) == 3


class Subclass(torch.Tensor):
    """A tensor that may be anything."""

    __torch_function__ = classmethod(lambda cls, *_arguments: None)  # type: ignore[assignment]


def test_unsupported_arguments_fall_back_to_triton(driver: FakeDriver) -> None:
    launch, fallback = launcher("*f32, i64, i1, f64", (bytes([F32_ALIGNED, NARROW, 0, 0]), bytes([WHOLE] * 4), 5))
    x = driver.tensor(4)
    odd: list[tuple[Any, ...]] = [
        ((1,), x, 5, True, 1.0),  # Triton takes grids of one or two axes
        ([1, 1, 1], x, 5, True, 1.0),
        ((1, 1, 1), x.as_subclass(Subclass), 5, True, 1.0),  # type: ignore[no-untyped-call]
        ((1, 1, 1), x, 2**70, True, 1.0),
        ((1, 1, 1), x, True, True, 1.0),
        ((1, 1, 1), x, 5, 1, 1.0),
        ((1, 1, 1), x, 5, True, "1"),
        ((1, 1, 1), None, 5, True, 1.0),
        ((1, 1, 1), x, 5, True),
        ((1, 1, 1), x, 5, True, 1.0, 2),
        (),
    ]
    assert [launch(*arguments) for arguments in odd] == ["fallback"] * len(odd)
    assert all(one is other for call, arguments in zip(fallback.calls, odd) for one, other in zip(call, arguments))
    assert driver.log() == []
    launch((1, 1, 1), x, 5, True, 1.0)
    assert len(driver.log()) == 2


def test_empty_and_oversized_grids(driver: FakeDriver) -> None:
    launch, fallback = launcher("*f32", (bytes([F32_ALIGNED]), bytes([WHOLE]), 5))
    x = driver.tensor(4)
    for grid in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        assert launch(grid, x) is None
    assert driver.log() == [] and fallback.calls == []
    with pytest.raises(RuntimeError, match="'kernel' cannot be launched over a grid of 2147483648 along one axis"):
        launch((2**31, 1, 1), x)


def test_a_launch_uses_its_tensors_device(driver: FakeDriver) -> None:
    """On torch's stream of their device, whatever device is current, which stays as it was: also on other threads."""
    held = (bytes([F32_ALIGNED]), bytes([WHOLE]))
    launch, _ = launcher("*f32", (*held, 5))
    launch.add_variant("kernel", 64, 32, 0, *held, 1, 6, None)
    x, y = driver.tensor(4), driver.tensor(4, device=1)
    driver.enter(0)
    launch((1, 1, 1), x)
    assert driver.context() == 100
    launch((1, 1, 1), y)
    head = "launch 6 grid 1,1,1 block 64,1,1 shared 32 stream 8 context 101"
    first, pushed, second = driver.log()
    assert first.startswith("launch 5 ") and "stream 7 context 100" in first
    assert pushed == "push 101" and second.startswith(head)

    contexts: list[int] = []

    def elsewhere() -> None:
        launch((1, 1, 1), y)
        contexts.append(driver.context())

    driver.enter(0)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert contexts == [0] and driver.context() == 100  # the thread has no context, and gets none
    driver.set("stream", 20)  # torch's current stream has changed
    launch((1, 1, 1), x)
    _, other, here = [line.split(" with")[0].split("stream ")[-1] for line in driver.log()]
    assert (other, here) == ("8 context 101", "20 context 100")
    driver.set("stream", 7)


def test_a_dependent_launch_passes_its_attribute_to_chips_that_have_it(driver: FakeDriver) -> None:
    """The kernels of older chips do not wait for the launch before them."""
    instance = launcher_class()(f"kernel_of_tests_{next(COUNTS)}", "*f32", Fallback(), dependent=True)
    instance.add_variant("kernel", 128, 0, 0, bytes([F32_ALIGNED]), bytes([WHOLE]), 0, 5, None)
    ordinary, _ = launcher("*f32", (bytes([F32_ALIGNED]), bytes([WHOLE]), 5))
    x = driver.tensor(4)
    instance((2, 3, 4), x)
    pushed, attribute, launched = driver.log()
    assert attribute == "launch attribute 6 is 1"
    ordinary((2, 3, 4), x)
    assert [pushed, launched] == driver.log()
    with driver.chips(80):
        override_driver_library(build())  # it asks the devices again
        instance((2, 3, 4), x)
        assert [pushed, launched] == driver.log()
    override_driver_library(build())


def test_a_driver_without_attributes_launches_one_kernel_after_the_other(driver: FakeDriver, tmp_path: Path) -> None:
    library = tmp_path / "libold_driver.so"
    library.write_bytes(build().read_bytes().replace(b"cuLaunchKernelEx\0", b"cuLaunchKernelE_\0"))
    old = FakeDriver(library)
    instance = launcher_class()(f"kernel_of_tests_{next(COUNTS)}", "*f32", Fallback(), dependent=True)
    instance.add_variant("kernel", 128, 0, 0, bytes([F32_ALIGNED]), bytes([WHOLE]), 0, 5, None)
    instance((2, 3, 4), old.tensor(4))
    override_driver_library(build())
    assert [line.partition(" block")[0] for line in old.log()] == ["push 100", "launch 5 grid 2,3,4"]
    assert driver.log() == []


def test_driver_errors_are_raised_with_their_message(driver: FakeDriver) -> None:
    launch, _ = launcher("*f32", (bytes([F32_ALIGNED]), bytes([WHOLE]), 5))
    x = driver.tensor(4)
    driver.set("cuLaunchKernel", 700)
    message = (
        r"the launch of kernel 'kernel' over the grid \(1, 2, 3\) failed: an illegal memory access was encountered"
    )
    with pytest.raises(RuntimeError, match=message + r" \(700\)"):
        launch((1, 2, 3), x)
    driver.set("cuLaunchKernel", 1)
    with pytest.raises(RuntimeError, match=r"unknown error \(1\)"):
        launch((1, 2, 3), x)
    assert driver.context() == 0
    driver.set("cuLaunchKernel", 0)
    with pytest.raises(RuntimeError, match=r"without NVIDIA's driver: cannot open .*libmissing.so"):
        override_driver_library(Path("/libmissing.so"))
    launch((1, 2, 3), x)  # the driver that was there still is


def test_loaded_kernels_are_shared(driver: FakeDriver) -> None:
    launch, _ = launcher("*f32")
    first = launcher_class()("kernel_shared", "*f32", Fallback())
    second = launcher_class()("kernel_shared", "*f32", Fallback())
    owner = Fallback()
    before = sys.getrefcount(owner)
    for function in (5, 6):
        first.add_variant("kernel", 32, 0, 0, bytes([F32_ALIGNED]), bytes([WHOLE]), 0, function, owner)
    assert sys.getrefcount(owner) == before + 1  # it may unload the function
    assert (launch.variant_count, first.variant_count, second.variant_count) == (0, 1, 1)
    second((1, 1, 1), driver.tensor(4))
    assert driver.log()[-1].startswith("launch 5 ")
    with pytest.raises(ValueError, match="a kernel of 1 parameters has classes for 2 and ways to pass 1"):
        first.add_variant("kernel", 32, 0, 0, bytes([F32, F32]), bytes([WHOLE]), 0, 7, None)


def test_calls_hold_no_references(driver: FakeDriver) -> None:
    launch, fallback = launcher("*f32, i64", (bytes([F32_ALIGNED, NARROW]), bytes([WHOLE] * 2), 5))
    x, grid, number = driver.tensor(4), (2, 1, 1), 2**20 + 1
    before = [sys.getrefcount(item) for item in (x, grid, number)]
    for _ in range(1000):
        launch(grid, x, number)
        launch(grid, x, 1)
    fallback.calls.clear()
    assert [sys.getrefcount(item) for item in (x, grid, number)] == before
    driver.log()
