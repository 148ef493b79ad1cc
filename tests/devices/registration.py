"""The registration of the Abacus, the imaginary device of the tests."""

from __future__ import annotations

from typing import Any

from fxwrap import devices
from tests.devices import abacus
from tests.devices.abacus_runtime import RUNTIME
from tests.devices.copy_engine import LINES


def on_abacus(**others: Any) -> Any:
    """The Abacus in the place of the CPU, with some of it replaced."""
    defaults = {"printer": abacus.print_abacus, "runtime": RUNTIME, "language": abacus.LANGUAGE, "lines": LINES}
    return devices.scoped_registration(others.pop("spec", abacus.SPEC), **{**defaults, **others})
