"""Seconds of the first `torch.compile` of a Llama with two layers on a fresh machine, and of `import fxwrap`.

Each measurement is a process with a cache folder of its own. "sources" has no native libraries and compiles them,
"wheel" has those of a wheel, "warm" has them in its cache folder, but nothing of the model; Inductor is "fresh" with an
empty cache folder. `beyond` is the difference to the warm process. CPU seconds include those of compilers.

    python benchmarks/first_compile.py [--emitters python,cpp] [--processes 3] [--imports 9] [--record]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.processes import CACHE_VARIABLES, output_of, result_of
from benchmarks.results import Report, add_record_option

IMPORTS = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import fxwrap
print(middle - start, time.perf_counter() - middle)
"""


def cpu_seconds() -> float:
    """The CPU seconds of this process and of its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum([usage.ru_utime + usage.ru_stime for usage in usages])


def measure(backend: str, emitter: str, libraries: str) -> dict[str, float]:
    """Compiles the model in this process and calls it; returns wall and CPU seconds of the first call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fxwrap.runtime.native import installed_libraries

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    words = torch.randint(0, 1000, (1, 32))
    options: dict[str, Any] | None = {"emitter": emitter} if backend == "fxwrap" else None
    with torch.no_grad(), installed_libraries(Path(libraries or "/nonexistent")):
        wanted = model(words).logits
        compiled = torch.compile(model, backend=backend, options=options)
        start, start_cpu = time.perf_counter(), cpu_seconds()
        logits = compiled(words).logits
        seconds = {"seconds": time.perf_counter() - start, "CPU seconds": cpu_seconds() - start_cpu}
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
    return seconds


def measure_in_process(backend: str, emitter: str, libraries: Path | None, warm: bool) -> dict[str, float]:
    """Returns the result of `measure` in a new process with an empty cache folder; a warm one has `libraries` in it."""
    with tempfile.TemporaryDirectory() as folder:
        caches = dict(zip(CACHE_VARIABLES, (f"{folder}/fxwrap", f"{folder}/inductor", f"{folder}/triton")))
        if warm:
            build = "import sys; from pathlib import Path; from fxwrap.runtime.native import *\n"
            build += "with installed_libraries(Path(sys.argv[1])): build_bridge(); build_planner()"
            output_of(["-c", build, str(libraries)], caches)
        job = [__file__, "--job", backend, emitter, "" if libraries is None else str(libraries)]
        result: dict[str, float] = result_of(job, caches)
    return result


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    """The median of each value."""
    return {name: statistics.median([result[name] for result in results]) for name in results[0]}


def report_compiles(chosen: argparse.Namespace, libraries: Path) -> None:
    """Prints the table of first compiles."""
    note = f"Llama, 2 layers, 32 tokens; medians of {chosen.processes} processes, one for builds from sources"
    report = Report("first_compile", chosen, "cpu", note)
    cases: list[tuple[str, str, str, Path | None, bool]] = [("inductor", "", "fresh", None, False)]
    for emitter in chosen.emitters.split(","):
        for name, folder, warm in (("warm", libraries, True), ("wheel", libraries, False), ("sources", None, False)):
            cases.append(("fxwrap", emitter, name, folder, warm))
    warm_seconds: dict[str, float] = {}
    for backend, emitter, name, folder, warm in cases:
        number = 1 if name == "sources" else chosen.processes
        results = [measure_in_process(backend, emitter, folder, warm) for _ in range(number)]
        values = medians(results)
        if warm:
            warm_seconds[emitter] = values["seconds"]
        beyond = values["seconds"] - warm_seconds[emitter] if emitter in warm_seconds else None
        row = {"compiler": f"{backend} {emitter}".strip(), "libraries": name, **values, "beyond": beyond}
        report.add(row, [result["seconds"] for result in results])


def report_imports(chosen: argparse.Namespace) -> None:
    """Prints the table of imports."""
    report = Report("first_compile-import", chosen, "cpu", f"medians of {chosen.imports} processes")
    times = [list(map(float, output_of(["-c", IMPORTS], {}).split())) for _ in range(chosen.imports)]
    for name, values in zip(("import torch", "import fxwrap after it"), zip(*times, strict=True), strict=True):
        report.add({"statement": name, "seconds": statistics.median(values)}, list(values))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emitters", default="python,cpp")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--imports", type=int, default=9)
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    add_record_option(parser)
    chosen = parser.parse_args()
    if chosen.job:
        print(json.dumps(measure(*chosen.job)))
        return
    report_imports(chosen)
    with tempfile.TemporaryDirectory() as folder:
        output_of(["-m", "fxwrap", "build", "--package", folder], {})
        report_compiles(chosen, Path(folder))


if __name__ == "__main__":
    main()
