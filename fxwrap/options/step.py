"""One row of a pipeline: the steps of a compile are tables of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from fxwrap.options.options import Options

State = TypeVar("State")
Context = TypeVar("Context")


def _always(_options: Options) -> bool:
    return True


@dataclass(frozen=True)
class Step(Generic[State, Context]):
    """One step of a pipeline over some state (a graph, a program).

    Fields:
        name: the name in stages, errors and logs.
        description: one line of what the step does.
        run: maps the state before the step and the pipeline's context to the state after it. Returns the same state
            if the step changes nothing.
        option: the option that turns the step on, as users write it; "" for a step that always runs.
        enabled: whether the step runs with the options of a compile.
    """

    name: str
    description: str
    run: Callable[[State, Context], State]
    option: str = ""
    enabled: Callable[[Options], bool] = _always


def enabled_steps(steps: Iterable[Step[State, Context]], options: Options) -> Iterator[Step[State, Context]]:
    """Yields the steps that the options turn on, in order."""
    return (step for step in steps if step.enabled(options))
