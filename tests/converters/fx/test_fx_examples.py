"""The examples about emitted FX graphs run, and print the expected texts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_backend", ["forward   graph", "backward  graph", "inference graph", "3 are written"]),
        ("rewrite_output_graph", ["rewrite_nodes: 2 replaced", "rewrite_by_pattern: 2 replaced"]),
        ("graph_pass", ["of which 3 launch kernels", "all kernels and calls are left"]),
    ],
)
def test_an_example_runs(
    name: str, expected: list[str], capsys: pytest.CaptureFixture[str], fresh_dynamo: None
) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed
