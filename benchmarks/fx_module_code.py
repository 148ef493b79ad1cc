"""Whether `from_fx` then `to_python` can replace the code that an emitted GraphModule generates for itself.

For a graph of three operators and for the inference graph of GPT-2 with two layers, both fused, the script measures

- a call: of the GraphModule, of the Python program imported from it behind the same `can_bypass_dispatcher` check, and
  of the GraphModule's fallback code, in which everything is an operator;
- code generation after a rewrite: `recompile()`, and `from_fx` followed by `to_python`.

Times are the minima of rounds that alternate in one process, which other jobs disturb least. A second file lists the
rewrites that both forms accept: an inserted ATen operator, Python function, submodule and method.
Run: `python benchmarks/fx_module_code.py [--record]`.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.results import Report, add_record_option
from fxwrap.errors import FxwrapError
from fxwrap.runtime.direct import can_bypass_dispatcher
from tests.support.capture import capture_graphs
from tests.support.models import MODELS

ROUNDS = 25
SECONDS_PER_ROUND = 0.05

Inputs = Sequence[Any]
Form = Callable[[GraphModule], Callable[..., Any]]


def tiny() -> tuple[GraphModule, Inputs]:
    """Returns the emitted graph of three pointwise operators on eight numbers, with its inputs."""
    inputs = [torch.randn(8), torch.randn(8)]
    graph = make_fx(lambda x, y: ((x.tanh() * y) + 1,), tracing_mode="fake")(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(emitter="fx")).graph_module, inputs


def gpt2() -> tuple[GraphModule, Inputs]:
    """Returns the emitted inference graph of GPT-2 with two layers, with its inputs."""
    (captured,) = capture_graphs(replace(MODELS["gpt2"], layers=2), training=False)
    options = fxwrap.Options(emitter="fx")
    return fxwrap.compile_graph(captured.graph_module, captured.inputs, options=options).graph_module, captured.inputs


def imported(module: GraphModule) -> Callable[..., Any]:
    """Returns the Python program imported from a GraphModule, behind the check of the module's own code."""
    program = fxwrap.to_python(fxwrap.from_fx(module)).flat
    fallback = operators(module)

    def call(*inputs: Any) -> Any:
        return program(*inputs) if can_bypass_dispatcher(module, *inputs) else fallback(*inputs)

    return call


def operators(module: GraphModule) -> GraphModule:
    """Returns a copy of a GraphModule with the code that torch.fx generates by default."""
    graph = copy.deepcopy(module.graph)
    graph.set_codegen(CodeGen())
    return GraphModule(module, graph)


def seconds(function: Callable[[], object], calls: int) -> float:
    """Returns seconds per call over one round."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def alternate(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the seconds of each contender, one entry for each round."""
    for run in contenders.values():  # the first calls load kernels
        seconds(run, 3)
    calls = {name: max(1, int(SECONDS_PER_ROUND / seconds(run, 3))) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            times[name].append(seconds(run, calls[name]))
    return times


def measure(report: Report, name: str, module: GraphModule, inputs: Inputs) -> None:
    """Adds the rows of one graph to a report."""
    program, fallback = imported(module), operators(module)
    torch.testing.assert_close(program(*inputs), module(*inputs))
    tasks: dict[str, dict[str, Callable[[], object]]] = {
        "call": {
            "module": lambda: module(*inputs),
            "imported": lambda: program(*inputs),
            "operators": lambda: fallback(*inputs),
        },
        "code generation": {"module": module.recompile, "imported": lambda: imported(module)},
    }
    for task, contenders in tasks.items():
        times = alternate(contenders)
        micros = {form: 1e6 * min(rounds) for form, rounds in times.items()}
        report.add(
            {
                "graph": name, "task": task, "module, us": micros["module"], "imported, us": micros["imported"],
                "imported / module": micros["imported"] / micros["module"],
                "operators, us": micros.get("operators"),
            },
            raw=times,
        )  # fmt: skip


class Scale(torch.nn.Module):
    """A submodule that a rewrite inserts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Doubles a tensor."""
        return x * 2


REWRITES: dict[str, Callable[[Graph, Node], Node]] = {
    "operator": lambda graph, node: graph.call_function(torch.ops.aten.mul.Tensor, (node, 2)),
    "function": lambda graph, node: graph.call_function(torch.mul, (node, 2)),
    "submodule": lambda graph, node: graph.call_module("scale", (node,)),
    "method": lambda graph, node: graph.call_method("mul", (node, 2)),
}


def try_rewrite(module: GraphModule, inputs: Inputs, name: str, form: Form) -> str:
    """Returns "right" if a form computes the rewritten graph, else the first line of its error."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    outputs: Any = graph.graph_copy(module.graph, copies)
    graph.output((REWRITES[name](graph, outputs[0]),))
    rewritten = GraphModule({**dict(module.named_buffers()), "scale": Scale()}, graph)
    rewritten.meta.update(module.meta)
    fxwrap.fx.enable_direct_launches(rewritten)
    try:
        return "right" if torch.allclose(form(rewritten)(*inputs)[0], 2 * module(*inputs)[0]) else "wrong"
    except FxwrapError as error:
        return str(error).partition("\n")[0]


def main() -> None:
    """Prints and records both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        module, inputs = tiny()
        rewrites = Report("fx_module_code-rewrites", options)
        for name in REWRITES:
            outcomes = [try_rewrite(module, inputs, name, form) for form in (lambda item: item, imported)]
            rewrites.add({"inserted": name, "module": outcomes[0], "imported": outcomes[1]}, raw=outcomes)
        times = Report("fx_module_code-times", options, note="other jobs ran beside")
        measure(times, "tiny", module, inputs)
        measure(times, "GPT-2, 2 layers", *gpt2())


if __name__ == "__main__":
    main()
