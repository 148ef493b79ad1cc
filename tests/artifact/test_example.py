"""The example of saving and loading runs, and prints the documented output."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "save_and_load.py"
EXPECTED_OUTPUT = (
    "bytes  constants.safetensors",
    "ms after load was called; emitter cpp",
    "torch's tracing was loaded: False",
    "rejected: the constants do not fit the program; of another type: 'p_first_weight' is f32[3], not f32[64, 32]",
    "program @model(%x: borrowed f32[4, 32]@cpu)",
)


def test_the_example_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLE))["main"](tmp_path)
    printed = capsys.readouterr().out
    for text in EXPECTED_OUTPUT:
        assert text in printed
