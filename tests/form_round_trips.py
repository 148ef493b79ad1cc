"""Round trips of the models' programs through the functional form: every model, plan of memory, and kind of graph.

    python -m tests.form_round_trips                                # `make form-round-trips`
    python -m tests.form_round_trips --models gpt2,t5 --plans auto --static

For inference and training graphs, static and with a symbolic batch, the program that is imported from the functional
form and planned again must be that of the compile: the same lines, kernels, reuse and pools. Prints a row for each
model, and the differences; the exit status is 1 after any. Part of it is in `tests/converters/fx/test_functional.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args, get_type_hints

from torch.fx import GraphModule

import fxwrap
from fxwrap.compile.steps import plan_program
from fxwrap.errors import FxwrapError
from fxwrap.options import Options
from fxwrap.wrapper_ir import Ownership, Program
from tests.support.capture import CapturedGraph, capture_graphs
from tests.support.models import SHALLOW
from tests.support.program_equality import assert_equal

PLANS: tuple[str, ...] = tuple(
    name for item in get_args(get_type_hints(Options)["memory_planning"]) for name in (get_args(item) or (item,))
)
"""The values of the option `memory_planning`."""


def compiled_program(captured: CapturedGraph, options: Options) -> Program:
    """Returns the program of a captured graph; a backward owns what its forward saved."""
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    owned = [
        position for position, node in enumerate(placeholders)
        if captured.kind == "backward" and not node.name.startswith("primals_")
    ]  # fmt: skip
    ownership = dict.fromkeys(owned, Ownership.OWNED)
    return fxwrap.compile_graph(
        captured.graph_module, captured.example_inputs, ownership=ownership, options=options
    ).program


def options_of(plan: str) -> Options:
    """Returns the options of a compile with a plan of memory."""
    return Options(memory_planning=plan, compile_cache=False)  # type: ignore[arg-type]


def check_round_trip(captured: CapturedGraph, plan: str) -> GraphModule:
    """Returns a graph in functional form. Raises AssertionError unless its program comes back from that."""
    options = options_of(plan)
    program = compiled_program(captured, options)
    module = fxwrap.to_fx(program, form="functional").graph_module
    assert_equal(program, plan_program(fxwrap.from_fx(module), options.resolve_devices()))
    return module


@dataclass(frozen=True)
class Cell:
    """The round trips of a model's graphs of one kind, with each plan."""

    model: str
    training: bool
    dynamic: bool

    def run(self, plans: Sequence[str]) -> Iterator[str]:
        """Yields a text for each difference."""
        for captured in capture_graphs(SHALLOW[self.model], self.training, dynamic=self.dynamic):
            for plan in plans:
                try:
                    check_round_trip(captured, plan)
                except (AssertionError, FxwrapError):
                    yield f"{self} {captured.kind}, plan {plan}: {traceback.format_exc()}"


def main() -> int:
    """Prints each model's number of programs and of differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHALLOW))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--static", action="store_true", help="without symbolic sizes")
    chosen = parser.parse_args()
    plans, count = chosen.plans.split(","), 0
    for model in chosen.models.split(","):
        start = time.monotonic()
        cells = [
            Cell(model, training, dynamic)
            for training in (False, True)
            for dynamic in ((False,) if chosen.static else (False, True))
        ]
        failures = [text for cell in cells for text in cell.run(plans)]
        count += len(failures)
        programs = sum(1 + cell.training for cell in cells) * len(plans)
        seconds = time.monotonic() - start
        print(f"{model}: {programs} programs, {len(failures)} differences, {seconds:.0f} s", *failures, sep="\n")
        sys.stdout.flush()
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
