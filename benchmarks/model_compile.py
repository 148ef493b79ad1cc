"""Seconds to lower, verify, emit and build the graphs of the test-suite's models, and GPT-2 with 12 layers.

The graphs are those AOTAutograd hands to a backend: inference, forward and backward. "build" makes the text
callable: CPython imports it, the C++ compiler runs with an empty cache, torch.fx writes its code.
Run: `python benchmarks/model_compile.py`.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fxwrap
from fxwrap.runtime.native import build_bridge

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.capture import capture_graphs
from tests.models import MODELS, ModelCase


class Layers12:
    """GPT-2 of the test-suite with 12 layers instead of 2."""

    def __init__(self, case: ModelCase) -> None:
        self.case = case

    def build(self, seed: int, dropout: bool = False) -> Any:
        return self.case.build(seed, dropout, layers=12)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.case, name)


def seconds(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and the seconds it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def row(name: str, graph: Any) -> None:
    """Prints one graph's row."""
    program, lowering = seconds(lambda: fxwrap.lower(graph.graph_module))
    _, verifying = seconds(lambda: fxwrap.verify(program))
    cells = []
    for convert in (fxwrap.to_python, fxwrap.to_fx, fxwrap.to_cpp):
        emitted, emitting = seconds(functools.partial(convert, program))
        _, building = seconds(functools.partial(getattr, emitted, "boxed"))
        cells.append(f"{emitting:>8.3f}{building:>8.3f}")
    label = f"{name} {graph.kind}"
    print(f"{label:<34}{len(program.body.lines):>7}{lowering:>8.3f}{verifying:>8.3f}{''.join(cells)}", flush=True)


def main() -> None:
    """Prints the table."""
    bridge = build_bridge().folder
    folder = Path(tempfile.mkdtemp())
    (folder / bridge.name).symlink_to(bridge)
    os.environ["FXWRAP_CACHE_DIR"] = str(folder)
    heads = "".join(f"{name:>8}{'build':>8}" for name in ("Python", "FX", "C++"))
    print(f"{'seconds':<34}{'lines':>7}{'lower':>8}{'verify':>8}{heads}")
    for name, case in {"gpt2, 12 layers": Layers12(MODELS["gpt2"]), **MODELS}.items():
        for training in (False, True):
            for graph in capture_graphs(case, training):  # type: ignore[arg-type]
                row(name, graph)


if __name__ == "__main__":
    main()
