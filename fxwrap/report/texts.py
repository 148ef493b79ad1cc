"""The texts of a compile, which dumps and structured traces write."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping

from fxwrap.memory_planning import plan_to_json
from fxwrap.passes.provenance import provenance
from fxwrap.report.content import ReportContent
from fxwrap.wrapper_ir import print_program

LANGUAGE_SUFFIXES: Mapping[str, str] = {
    "python": ".py", "cpp": ".cpp", "fx": ".py", "interpreter": ".txt", "triton": ".py",
}  # fmt: skip
"""The suffixes of files with texts of emitters and kernel languages."""


def compile_texts(content: ReportContent) -> Iterator[tuple[str, str]]:
    """Yields the path of a file and its text: the graph, the program of each stage, the emitted text, and the analyses.

    The program has its kernels; so does each stage whose kernels differ from those of the stage before it.
    """
    yield "graph.txt", content.graph
    yield "options.txt", content.options + "\n"
    kernels: object = None
    for number, (name, program) in enumerate(content.stages):
        shown = program if program.kernels != kernels else program.replace(kernels=())
        kernels = program.kernels
        yield f"stages/{number:02}_{file_name(name)}.txt", print_program(shown, origins=True)
    yield "program.txt", str(content.program)
    yield f"source{LANGUAGE_SUFFIXES[content.emitter]}", content.source
    if content.emitted_graph:
        yield "emitted_graph.txt", content.emitted_graph
    if content.plan is not None:
        yield "plan.json", plan_to_json(content.plan)
    yield "provenance.json", provenance(content.program).to_json()
    yield "coverage.json", json.dumps([dataclasses.asdict(item) for item in content.coverage], indent=1)
    yield "events.json", content.events.to_json()


def file_name(text: str) -> str:
    """Returns a text with the characters that a file's name may have everywhere."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text)[:80].strip("-.") or "unnamed"
