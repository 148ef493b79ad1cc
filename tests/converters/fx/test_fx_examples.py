"""The examples about emitted FX graphs run, and print the expected texts."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_backend", ["forward   graph", "backward  graph", "inference graph", "3 are written"]),
        ("rewrite_output_graph", ["rewrite_nodes: 2 replaced", "rewrite_by_pattern: 2 replaced"]),
        ("compile_regions eager", ["forward graph: 13 calls of 6 regions", "largest difference to eager: 0.0e+00"]),
        ("graph_pass", ["of which 3 launch kernels", "all kernels and calls are left"]),
    ],
)
def test_an_example_runs(
    name: str, expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *arguments = name.split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed
