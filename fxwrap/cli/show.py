"""The command `show`: programs, their stages, coverage and provenance, as text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fxwrap.cli.colours import add_color_flag, coloured
from fxwrap.cli.flags import refuse_flags
from fxwrap.cli.saved import read_program_file
from fxwrap.cli.tables import coverage_table
from fxwrap.comparison import CapturedGraph
from fxwrap.compile import Stage
from fxwrap.passes.provenance import provenance
from fxwrap.report import program_drawing, program_to_json
from fxwrap.wrapper_ir import print_program


def add_show_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `show`."""
    shown = command.add_mutually_exclusive_group()
    shown.add_argument(
        "--coverage",
        action="store_true",
        help="print which operators were fused, and the decline reasons of the others",
    )
    shown.add_argument("--provenance", action="store_true", help="print, as JSON, the source lines of each kernel")
    shown.add_argument("--stages", action="store_true", help="print the program after each step that changed it")
    shown.add_argument("--dot", action="store_true", help="print a drawing for Graphviz: show ... --dot | dot -Tsvg")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--origins", action="store_true", help="end each line with its operator and source location")
    form.add_argument("--json", action="store_true", help="print JSON: lines, types, origins, kernels")
    add_color_flag(command)
    command.add_argument("--graph", type=int, metavar="N", help="only graph N, from 0 (default: all)")


def _check_form(chosen: argparse.Namespace) -> None:
    """Raises CommandError for flags of a text that have no effect on the target."""
    if chosen.dot:
        refuse_flags(chosen, ("origins", "json", "color"), "a drawing has a form of its own")
    elif chosen.coverage:
        refuse_flags(chosen, ("origins", "color"), "coverage is no program")
    elif chosen.provenance:
        refuse_flags(chosen, ("origins", "color"), "provenance is JSON")
    elif chosen.json:
        refuse_flags(chosen, ("color",), "JSON has no colours")


def show_saved(chosen: argparse.Namespace) -> Iterator[str]:
    """Yields the texts of a saved program."""
    _check_form(chosen)
    program = read_program_file(chosen.target).program
    if chosen.provenance:
        yield provenance(program).to_json()
    elif chosen.json:
        yield json.dumps([program_to_json(program)], indent=1)
    elif chosen.dot:
        yield program_drawing(program)
    else:
        yield coloured(print_program(program, origins=chosen.origins), "interpreter", chosen.color)


def show_graphs(chosen: argparse.Namespace, graphs: Sequence[CapturedGraph]) -> Iterator[str]:
    """Yields the texts of compiled graphs; with --json, one list with an object for each graph."""
    _check_form(chosen)
    if chosen.json:
        yield json.dumps([_graph_data(chosen, graph) for graph in graphs], indent=1)
        return
    for graph in graphs:
        if chosen.coverage:
            yield coverage_table(graph.name, graph.compiled.coverage)
        elif chosen.provenance:
            yield graph.compiled.provenance.to_json()
        elif chosen.dot:
            yield program_drawing(graph.compiled.program)
        else:
            yield from _stage_texts(chosen, graph.compiled.stages)


def _graph_data(chosen: argparse.Namespace, graph: CapturedGraph) -> dict[str, Any]:
    compiled = graph.compiled
    if chosen.coverage:
        return {"name": graph.name, "coverage": [dataclasses.asdict(item) for item in compiled.coverage]}
    if chosen.provenance:
        return {"name": graph.name, "provenance": json.loads(compiled.provenance.to_json())}
    if chosen.stages:
        stages = [{"step": stage.pass_name, **program_to_json(stage.program)} for stage in compiled.stages]
        return {"name": graph.name, "stages": stages}
    return program_to_json(compiled.program)


def _stage_texts(chosen: argparse.Namespace, stages: Sequence[Stage]) -> Iterator[str]:
    for stage in stages if chosen.stages else stages[-1:]:
        if chosen.stages:
            yield f"--- after {stage.pass_name}"
        yield coloured(print_program(stage.program, origins=chosen.origins), "interpreter", chosen.color)
