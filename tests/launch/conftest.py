"""The fake driver, built once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as triton_driver

from tests.launch.fake_driver import FakeDriver, build


@pytest.fixture(scope="package")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver as a library."""
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(driver_library: Path) -> FakeDriver:
    """The driver, in use, with an empty log and no current context."""
    found = FakeDriver(driver_library)
    found.log()
    return found


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    """torch is to use deterministic algorithms only."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class _ChipThatIsNotHere:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device

    def get_current_stream(self, _device: int) -> int:
        return 0


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> _ChipThatIsNotHere:
    """Triton compiles for a chip of 9.0; `capability` says for which instead."""
    made = _ChipThatIsNotHere(90)
    monkeypatch.setattr(triton_driver, "_active", made)
    return made
