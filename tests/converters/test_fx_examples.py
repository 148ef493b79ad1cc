"""The examples about emitted FX graphs run, and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("own_backend", ["forward   graph", "backward  graph", "inference graph", "3 are written"]),
        ("rewrite_output_graph", ["by_nodes: 2 replaced", "by_pattern: 2 replaced"]),
        ("graph_pass", ["of which 3 launch kernels", "every kernel and call is still there"]),
    ],
)
def test_an_example_runs(
    name: str, promised: list[str], capsys: pytest.CaptureFixture[str], fresh_dynamo: None
) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for text in promised:
        assert text in printed
