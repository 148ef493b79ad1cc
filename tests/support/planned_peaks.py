"""Planned peaks of programs that run in one process, with the state of the process that they do not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import fxwrap
from fxwrap.compile import Compiled
from fxwrap.compile.backend import make_backend
from fxwrap.memory_planning import plan_memory
from fxwrap.options import Options


def planned_peak(compiled: Compiled | fxwrap.LoadedProgram) -> int:
    """Returns the peak of a program by its plan in bytes, its inputs included."""
    plan = compiled.plan or plan_memory(compiled.program, alignment=lambda _device: 1)
    return plan.body.peak


class PlannedPeaks:
    """The largest memory that separate programs plan: each has the state that it does not take as inputs beside it.

    `state` returns the parameters and the optimizer's state.
    """

    def __init__(self, state: Callable[[], Sequence[Tensor]]) -> None:
        self.state = state
        self.largest = 0

    def backend(self, options: Options | None = None) -> Any:
        """Returns a backend for `torch.compile` whose programs are observed."""
        peaks = self

        class Observed:
            def __init__(self, graph: Any, inputs: Any, **arguments: Any) -> None:
                self.compiled = fxwrap.compile_graph(graph, inputs, **arguments)
                self.program = self.compiled.program

            def boxed(self, inputs: list[Any]) -> Any:
                peaks.observe(self.compiled, inputs)
                return self.compiled.boxed(inputs)

        return make_backend(options or Options(), Observed)

    def observe(self, compiled: Compiled, inputs: Sequence[Any]) -> None:
        """Adds a call."""
        seen = {item.data_ptr() for item in inputs if isinstance(item, Tensor)}
        outside = sum(item.nbytes for item in self.state() if item.data_ptr() not in seen)
        self.largest = max(self.largest, planned_peak(compiled) + outside)
