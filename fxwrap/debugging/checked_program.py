"""Entries that check a program while it runs: bisection, and statistics of values."""

from __future__ import annotations

from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram
from fxwrap.debugging.bisection import GraphCase, find_divergence
from fxwrap.debugging.repro import attach_failure
from fxwrap.errors import DivergenceError


def bisecting_program(case: GraphCase) -> EmittedProgram:
    """Returns the emitted program of a graph; its calls are compared with the graph first.

    A call that diverges raises DivergenceError and changes no input.
    """

    def build() -> BoxedCallable:
        entry = case.emitted.boxed

        def run(inputs: list[object]) -> object:
            divergence = find_divergence(case, inputs)
            if divergence is not None:
                line = divergence.line
                location = line.locations[0] if line is not None and line.locations else ""
                error = DivergenceError(str(divergence), divergence.part, location, divergence)
                if divergence.failure is not None:
                    attach_failure(error, divergence.failure)
                raise error
            return entry(inputs)

        return run

    return EmittedProgram(case.emitted.source, build)
