"""Time per operator call from emitted C++ against eager, and seconds to compile emitted C++.

Both sides are timed in interleaved rounds, on tiny tensors and one thread; ratios are of medians. Run:
    python benchmarks/bridge_calls.py [--record]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results import Cell, Report, add_record_option
from fxwrap.runtime.native import NativeProgram, build_bridge, compile_cpp, load_program


@dataclass(frozen=True)
class Case:
    """One operator: name, overload, arguments after the first tensor, and the eager call."""

    title: str
    operator: str
    overload: str
    arguments: str
    eager: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    results: str = "({out})"


CASES = (
    Case("mul", "aten::mul", "Tensor", ", w", torch.mul),
    Case("add", "aten::add", "Tensor", ", w", torch.add),
    Case("relu", "aten::relu", "", "", lambda x, w: torch.relu(x)),
    Case("mm", "aten::mm", "", ", w", torch.mm),
    Case("view", "aten::view", "", ", list(2), 4, 4", lambda x, w: x.view(4, 4)),
    Case("layer_norm", "aten::native_layer_norm", "", ", list(1), 4, none, none, 1e-05",
         lambda x, w: torch.native_layer_norm(x, (4,), None, None, 1e-5)[0], "({out}, none, none)"),
)  # fmt: skip


def chain_source(case: Case, count: int) -> str:
    """Returns a program of `count` calls, each of which reads the previous result, which is dropped after it."""
    slots = ", ".join(f"v{i}{{{i + 1}}}" for i in range(count + 1))
    lines = [f"constexpr Slot w{{0}}, {slots};", f'static Operator op{{"{case.operator}", "{case.overload}"}};']
    functions = []
    for start in range(0, count, 200):
        functions.append(f"part_{start}")
        lines.append(f"static void part_{start}(Frame& f) {{")
        for i in range(start, min(start + 200, count)):
            results = case.results.format(out=f"v{i + 1}")
            lines.append(f"  // {case.title}_{i}: {case.operator}  model.py:{i}")
            lines.append(f"  CALL(f, op, (v{i}{case.arguments}), {results});")
            if i:
                lines.append(f"  drop(f, v{i});")
        lines.append("}")
    body = "\n".join(lines)
    calls = " ".join(f"{name}(f);" for name in functions)
    return f"""// {uuid.uuid4()} (prevents a cache hit)
#include "bridge.h"
namespace program {{
using namespace fxwrap;
{body}
static constexpr Input inputs[] = {{{{"x", v0}}, {{"w", w}}}};
static constexpr Arg outputs[] = {{v{count}}};
static void run(Frame& f) {{ {calls} }}
}}  // namespace program
FXWRAP_EXPORT const fxwrap::Program fxwrap_program = {{
    .name = "chain", .slots = {count + 2}, .inputs = program::inputs, .outputs = program::outputs,
    .run = program::run}};
"""


def many_inputs_source(count: int) -> str:
    """Returns a program of one operator and `count` tensor inputs."""
    slots = ", ".join(f"x{i}{{{i}}}" for i in range(count))
    inputs = ", ".join(f'{{"x{i}", x{i}}}' for i in range(count))
    return f"""#include "bridge.h"
namespace program {{
using namespace fxwrap;
constexpr Slot {slots}, out{{{count}}};
static Operator mul{{"aten::mul", "Tensor"}};
static void run(Frame& f) {{ CALL(f, mul, (x0, x1), (out)); }}
static constexpr Input inputs[] = {{{inputs}}};
static constexpr Arg outputs[] = {{out}};
}}  // namespace program
FXWRAP_EXPORT const fxwrap::Program fxwrap_program = {{
    .name = "many", .slots = {count + 1}, .inputs = program::inputs, .outputs = program::outputs,
    .run = program::run}};
"""


def interleaved(sides: list[Callable[[], object]], repeats: int = 15, seconds: float = 0.02) -> list[float]:
    """Returns median seconds per call of each side, in interleaved rounds."""
    counts = []
    for side in sides:
        start = time.perf_counter()
        side()
        side()
        counts.append(max(1, int(seconds / max((time.perf_counter() - start) / 2, 1e-7))))
    samples: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for index, side in enumerate(sides):
            start = time.perf_counter()
            for _ in range(counts[index]):
                side()
            samples[index].append((time.perf_counter() - start) / counts[index])
    return [statistics.median(values) for values in samples]


def eager_chain(case: Case, count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the same chain as straight-line Python."""
    body = "\n".join("    x = op(x, w)" for _ in range(count))
    names: dict[str, object] = {"op": case.eager}
    exec(f"def chain(x, w):\n{body}\n    return x\n", names)
    return names["chain"]  # type: ignore[return-value]


def measure_calls(chosen: argparse.Namespace) -> None:
    """Prints the table of call times."""
    x, w = torch.rand(4, 4), torch.eye(4)
    report = Report("bridge_calls", chosen, note=f"bridge built in {build_bridge().seconds:.1f} s (0.0: cached)")
    for case in CASES:
        for count in (1, 10, 100, 1000):
            program: NativeProgram = load_program(compile_cpp(chain_source(case, count), name="chain"))
            eager, mul = eager_chain(case, count), eager_chain(CASES[0], count)
            with torch.no_grad():
                torch.testing.assert_close(program(x, w)[0], eager(x, w))
                seconds = interleaved([partial(side, x, w) for side in (eager, program, mul)])
            base, ours, multiply = (value / count * 1e6 for value in seconds)
            cells: dict[str, Cell] = {"operator": case.title, "calls": count, "eager, us": base, "bridge, us": ours}
            report.add({**cells, "bridge / eager": ours / base, "bridge / torch.mul": ours / multiply})


def measure_inputs(chosen: argparse.Namespace) -> None:
    """Prints the cost of 200 inputs."""
    values = [torch.rand(4, 4) for _ in range(200)]
    program = load_program(compile_cpp(many_inputs_source(200), name="many"))
    eager, ours = interleaved([lambda: torch.mul(values[0], values[1]), lambda: program(*values)])
    report = Report("bridge_calls-inputs", chosen, note="one mul in a program of 200 inputs")
    report.add({"inputs": 200, "eager, us": 1e6 * eager, "program, us": 1e6 * ours})


def measure_compile(chosen: argparse.Namespace) -> None:
    """Prints the C++ compiler's seconds for long chains."""
    report = Report("bridge_calls-compile", chosen)
    for count in (1000, 6400):
        source = chain_source(CASES[-1], count)
        start = time.perf_counter()
        compile_cpp(source, name="chain")
        seconds = time.perf_counter() - start
        report.add({"calls": count, "compile, s": seconds, "ms/call": seconds / count * 1e3})


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for measure in (measure_calls, measure_inputs, measure_compile):
        measure(chosen)


if __name__ == "__main__":
    main()
