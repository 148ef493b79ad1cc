"""Seconds to lower, verify, emit and build the graphs of the test suite's models, and GPT-2 with 12 layers.

The graphs are AOTAutograd's: inference, forward and backward. The C++ compiler runs with an empty cache.
Run: `python benchmarks/model_compile.py [--record]`.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.results import Cell, Report, add_record_option
from fxwrap.runtime.native import build_bridge
from tests.support.capture import capture_graphs
from tests.support.models import MODELS, ModelCase


class Layers12:
    """The test suite's GPT-2 with 12 layers instead of 2."""

    def __init__(self, case: ModelCase) -> None:
        self.case = case

    def build(self, seed: int, dropout: bool = False) -> Any:
        return self.case.build(seed, dropout, layers=12)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.case, name)


def seconds(function: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result and the seconds of a call."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def measure(name: str, graph: Any) -> dict[str, Cell]:
    """Returns the row of a graph."""
    program, lowering = seconds(lambda: fxwrap.lower(graph.graph_module))
    _, verifying = seconds(lambda: fxwrap.verify(program))
    lines = len(program.body.lines)
    cells: dict[str, Cell] = {
        "graph": f"{name} {graph.kind}", "lines": lines, "lower, s": lowering, "verify, s": verifying,
    }  # fmt: skip
    for convert, text, build in (
        (fxwrap.to_python, "Python text, s", "Python import, s"),
        (fxwrap.to_fx, "FX graph, s", "FX code, s"),
        (fxwrap.to_cpp, "C++ text, s", "g++, s"),
    ):
        emitted, cells[text] = seconds(functools.partial(convert, program))
        _, cells[build] = seconds(functools.partial(getattr, emitted, "boxed"))
    return cells


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    report = Report("model_compile", parser.parse_args())
    bridge = build_bridge().folder
    folder = Path(tempfile.mkdtemp())
    (folder / bridge.name).symlink_to(bridge)
    os.environ["FXWRAP_CACHE_DIR"] = str(folder)
    for name, case in {"gpt2, 12 layers": Layers12(MODELS["gpt2"]), **MODELS}.items():
        for training in (False, True):
            for graph in capture_graphs(case, training):  # type: ignore[arg-type]
                report.add(measure(name, graph))


if __name__ == "__main__":
    main()
