"""From kernels to the model's source and back: complete, the same after every pass, in all that is emitted."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap.lines import ExternCall, IndexPut, Launch, Mutate, Scatter
from fxwrap.passes.provenance import provenance
from fxwrap.wrapper_ir import Program

_CALLS = (ExternCall, IndexPut, Launch, Mutate, Scatter)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(x))
        mixed = x + self.down(hidden)
        return self.norm(mixed)


def _place(code: str) -> str:
    """The place of a line of `Layer.forward`."""
    lines, first = inspect.getsourcelines(Layer.forward)
    (actual,) = [first + position for position, line in enumerate(lines) if code in line]
    return f"{Path(__file__).resolve()}:{actual}"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def _handles(program: Program) -> list[str]:
    return [line.origin.handle for line in program.lines() if isinstance(line, _CALLS) and line.origin is not None]


def test_kernels_and_lines_are_mapped_both_ways() -> None:
    compiled = fxwrap.compile_graph(torch.export.export(_model(), (torch.randn(4, 8),)))
    actual = json.loads(compiled.provenance.to_json())
    norms = [handle for handle in actual["calls"] if handle.startswith("add_layer_norm")]
    assert [actual["calls"][handle]["modules"] for handle in norms] == [["0", "0.norm"], ["1", "1.norm"]]
    assert actual["calls"][norms[0]]["operators"] == ["aten.add.Tensor", "aten.native_layer_norm"]
    assert actual["calls"][norms[0]]["original_nodes"] == ["add", "layer_norm"]
    assert set(actual["calls"][norms[0]]["lines"]) == {_place("x + self.down"), _place("self.norm(mixed)")}
    assert actual["lines"][_place("x + self.down")] == ["aten.addmm:2", norms[0], "aten.addmm:4", norms[1]]
    assert actual["lines"][_place("self.norm(mixed)")] == norms
    for place, handles in actual["lines"].items():
        assert all(place in actual["calls"][handle]["lines"] for handle in handles)


@pytest.mark.parametrize(
    "options",
    [{}, {"memory_planning": "auto"}, {"memory_planning": "reuse"}, {"reorder_for_peak_memory": True}, {"fuse": False}],
    ids=lambda options: next(iter(options), "default"),
)
def test_debug_handles_survive_all_passes(options: dict[str, Any]) -> None:
    exported = torch.export.export(_model(), (torch.randn(4, 8),))
    compiled = fxwrap.compile_graph(exported, options=fxwrap.Options(**options))
    first, last = compiled.stages[0].program, compiled.program
    assert len(_handles(first)) == len(set(_handles(first))) == sum(isinstance(line, _CALLS) for line in first.lines())
    assert sorted(_handles(last)) == sorted(_handles(first))
    assert provenance(last).lines.keys() == provenance(first).lines.keys()


def test_a_backward_names_the_lines_of_its_forward() -> None:
    seen: dict[str, Program] = {}
    options = {"on_graph": lambda module, info: seen.setdefault(info.kind, module)}
    torch.compile(_model(), backend="fxwrap", options=options)(torch.randn(4, 8)).sum().backward()
    actual = [node.meta["fxwrap_origin"] for node in seen["backward"].graph.nodes if "fxwrap_origin" in node.meta]
    called = [origin for origin in actual if origin.handle]
    places = {f"{source.file}:{source.line}" for origin in called for source in origin.sources}
    assert {_place("gelu(self.up"), _place("x + self.down"), _place("self.norm(mixed)")} <= places
    assert {"0.norm", "1.up"} <= {module for origin in called for module in origin.modules}


@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_emitted_code_has_origin_comments(emitter: str) -> None:
    exported = torch.export.export(_model(), (torch.randn(4, 8),))
    compiled = fxwrap.compile_graph(exported, options=fxwrap.Options(emitter=emitter))
    name, _, line = _place("self.norm(mixed)").rpartition("/")[2].partition(":")
    comments = [text for text in compiled.source.splitlines() if re.search(rf"  {name}:(\d+, )*{line}\b", text)]
    handles = compiled.provenance.lines[_place("self.norm(mixed)")]
    assert [text.rpartition("  ")[2] for text in comments] == list(handles)
