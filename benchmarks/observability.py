"""What looking inside costs: profiler ranges per line, artifacts under TORCH_TRACE, and opening a report.

`--measure ranges` times a call of a program of many small operators with ranges and without, while no profiler runs,
in interleaved rounds. `--measure traces` compiles a model forward and backward in a process under TORCH_TRACE, with all
kernels cached, and times the writing of artifacts. `--measure report` opens reports in headless Chromium and reads the
browser's clock, from the navigation until the page is laid out.

    python benchmarks/observability.py [--measure ranges,traces,report] [--rounds 300] [--record]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from benchmarks.processes import result_of
from benchmarks.results import Report, Row, add_record_option
from fxwrap.report import report_page
from tests.support.capture import capture_graphs
from tests.support.models import MODELS, ModelCase

OPERATORS = 100
REPORTS = {"a layer": ("gpt2", 1), "GPT-2": ("gpt2", 12), "Llama": ("llama", 32)}
OPENED = """<script>addEventListener("load", () => {
  document.body.offsetHeight;
  document.body.replaceChildren(String(performance.now()));
});</script></body>"""


def measure_ranges(chosen: argparse.Namespace) -> None:
    """Records nanoseconds per line of each emitter."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(OPERATORS):
            x = torch.neg(x)
        return x

    x = torch.ones(2)
    graph = make_fx(chain)(x)
    report = Report("observability-ranges", chosen, note=f"{OPERATORS} calls of aten.neg, no profiler")
    for emitter in ("python", "cpp", "fx"):
        calls = {
            ranges: fxwrap.compile_graph(
                graph, [x], options=fxwrap.Options(emitter=emitter, fuse=False, profile_ranges=ranges)
            ).boxed
            for ranges in (False, True)
        }
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(chosen.rounds):
            for ranges, call in calls.items():
                start = time.perf_counter()
                for _ in range(5):
                    call([x])
                seconds[ranges].append((time.perf_counter() - start) / 5)
        least = {ranges: min(items) for ranges, items in seconds.items()}  # other work only adds
        added = (least[True] - least[False]) / OPERATORS
        row = {"emitter": emitter, "call, us": least[False] * 1e6, "range, ns per line": added * 1e9}
        report.add(row, raw=[sorted(items)[:10] for items in seconds.values()])


def compile_traced() -> dict[str, float]:
    """Compiles GPT-2 forward and backward twice; returns seconds of the second compile and of its artifacts."""
    from fxwrap.compile import inspection  # which calls `trace_compile`

    case = MODELS["gpt2"]
    model = case.build(0, layers=12).train()
    inputs = case.inputs(0, training=True)
    spent: list[float] = []
    original = vars(inspection)["trace_compile"]

    def timed(content: Any) -> None:
        start = time.perf_counter()
        original(content)
        spent.append(time.perf_counter() - start)

    vars(inspection)["trace_compile"] = timed
    seconds = 0.0
    for _ in range(2):
        torch.compiler.reset()
        spent.clear()
        start = time.perf_counter()
        case.loss(torch.compile(model, backend="fxwrap", options={"compile_cache": False})(**inputs)).backward()
        seconds = time.perf_counter() - start
    return {"compile": seconds, "artifacts": sum(spent), "graphs": len(spent)}


def measure_traces(chosen: argparse.Namespace) -> None:
    """Records the part of a compile's time that artifacts take."""
    report = Report(
        "observability-traces", chosen, note="GPT-2 with 12 small layers, forward and backward, kernels cached"
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = [result_of([__file__, "--job"], {"TORCH_TRACE": folder}) for _ in range(chosen.processes)]
        size = sum([path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]) / chosen.processes
    parts = [run["artifacts"] / run["compile"] for run in runs]
    report.add({
        "graphs": runs[0]["graphs"], "compile, s": statistics.median([run["compile"] for run in runs]),
        "artifacts, ms": 1e3 * statistics.median([run["artifacts"] for run in runs]), "trace, MB": size / 1e6,
        "artifacts / compile": statistics.median(parts),
    }, raw=runs)  # fmt: skip


def open_in_chromium(chromium: str, page: str) -> float:
    """Returns the milliseconds that a page takes to open."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        path.write_text(page.replace("</body>", OPENED))
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
                   "--window-size=1600,900", "--dump-dom", path.as_uri()]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    opened = re.search(r"<body[^>]*>([\d.]+)</body>", done.stdout)
    if opened is None:
        raise SystemExit(f"Chromium did not open the page: {done.stderr}")
    return float(opened[1])


def report_of(case: ModelCase) -> tuple[str, int]:
    """Returns the report of a model's inference graph, and the number of the program's lines."""
    graph = capture_graphs(case, training=False)[0]
    compiled = fxwrap.compile_graph(graph.graph_module, graph.example_inputs)
    contents = [record.content() for record in fxwrap.inspect(compiled)]
    return report_page(contents, case.name), sum([1 for _ in compiled.program.lines()])


def measure_report(chosen: argparse.Namespace) -> None:
    """Records how long Chromium takes to open reports of three sizes."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("install Chromium to measure how long a report takes to open")
    report = Report("observability-report", chosen, note="headless Chromium")
    for name, (model, layers) in REPORTS.items():
        page, lines = report_of(replace(MODELS[model], layers=layers))
        times = [open_in_chromium(chromium, page) for _ in range(chosen.openings)]
        row: Row = {
            "model": name, "layers": layers, "lines": lines, "page, MB": len(page.encode()) / 1e6,
            "opens in, ms": statistics.median(times),
        }  # fmt: skip
        report.add(row, raw=times)


MEASURES = {"ranges": measure_ranges, "traces": measure_traces, "report": measure_report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", default=",".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=300, help="rounds of the calls with ranges and without")
    parser.add_argument("--processes", type=int, default=3, help="processes that compile under TORCH_TRACE")
    parser.add_argument("--openings", type=int, default=5, help="openings of each report")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    add_record_option(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.job:
        print(json.dumps(compile_traced()))
        return
    for name in chosen.measure.split(","):
        MEASURES[name](chosen)


if __name__ == "__main__":
    main()
