"""Modules whose exported programs have something of each kind, with inputs for two calls."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import fxwrap
from fxwrap import Compiled
from tests.support.models import SHALLOW

_GPT2 = SHALLOW["gpt2"]


class Everything(nn.Module):
    """Tied weights, an unused parameter, mutated buffers and inputs, constants, and dicts in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.shift = torch.arange(8.0)

    def forward(self, batch: Mapping[str, Tensor], flag: int) -> dict[str, Any]:
        x = batch["x"]
        y = self.norm(torch.tanh(self.down(torch.relu(self.up(x)))) * self.mask + self.shift * flag)
        batch["count"].add_(1)
        return {"out": torch.softmax(y, -1), "rows": x.shape[0], "same": x, "count": batch["count"]}


class Cache(nn.Module):
    """A decoder's cache of keys, written at a position that the cache counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 4, 8))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64))
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        position = self.length.reshape(1)
        self.keys.index_copy_(1, position, self.project(x))
        scores = torch.softmax((x @ self.keys.transpose(1, 2)).masked_fill(torch.arange(4) > position, -1e9), -1)
        self.length.add_(1)
        return scores @ self.keys


class Branches(nn.Module):
    """A branch with kernels in it, and a result of unknown length."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cond(x.sum() > 0, lambda t: (t.sin() * 2).exp(), lambda t: t.cos() - t.tanh(), (x,))
        return y, torch.nonzero(x > 0).to(x.dtype) * 2


class Elementwise(nn.Module):
    """One kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x + 1


class Largest(nn.Module):
    """A maximum, which no rows have."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(0)


class ViewsOnly(nn.Module):
    """No kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Logits(nn.Module):
    """GPT-2 with tensors as results: torch.export needs the classes of others where it loads a file."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _GPT2.build(0)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids).logits
        return logits


@dataclass(frozen=True)
class Case:
    """A module and its inputs: positional ones from a seed, and the sizes that vary."""

    make_module: Callable[[], nn.Module]
    make_inputs: Callable[[int], tuple[Any, ...]] = lambda _rows: ()
    keywords: Mapping[str, Tensor] = field(default_factory=dict)
    dynamic_shapes: Any = None

    def export(self) -> ExportedProgram:
        """The module's exported program; weights and inputs are equal in every call."""
        torch.manual_seed(0)
        module = self.make_module()
        return torch.export.export(module, self.make_inputs(3), dict(self.keywords), dynamic_shapes=self.dynamic_shapes)


def _everything_inputs(rows: int) -> tuple[Any, ...]:
    return {"x": torch.randn(rows, 8), "count": torch.zeros(3)}, 2


CASES: Mapping[str, Case] = {
    "everything": Case(
        Everything, _everything_inputs,
        dynamic_shapes={"batch": {"x": {0: Dim("rows", min=2, max=64)}, "count": None}, "flag": None},
    ),
    "cache": Case(Cache, lambda _rows: (torch.randn(1, 1, 8),)),
    "branches": Case(Branches, lambda _rows: (torch.randn(4, 4),)),
    "elementwise": Case(Elementwise, lambda rows: (torch.randn(rows, 5),), dynamic_shapes=({0: Dim("rows", min=2)},)),
    "bfloat16": Case(Elementwise, lambda _rows: (torch.randn(4, 5, dtype=torch.bfloat16),)),
    "empty": Case(Elementwise, lambda _rows: (torch.randn(0, 5),)),
    "views_only": Case(ViewsOnly, lambda _rows: (torch.randn(2, 5),)),
    "gpt2": Case(Logits, keywords={"input_ids": _GPT2.inputs(1)["input_ids"]}),
}  # fmt: skip


@cache
def compiled_case(name: str) -> Compiled:
    """A case, compiled once; its buffers keep their contents, since tests run copies of it."""
    return fxwrap.compile_graph(CASES[name].export())


def exported_case(name: str) -> ExportedProgram:
    """A case's exported program, loaded from its file."""
    return reloaded(fxwrap.fx.export(compiled_case(name)))


def export(exported: ExportedProgram, **options: Any) -> ExportedProgram:
    """The exported program of the compiled one."""
    return fxwrap.fx.export(fxwrap.compile_graph(exported, options=fxwrap.Options(**options)))


def saved(exported: ExportedProgram) -> io.BytesIO:
    """The file of an exported program."""
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return file


def reloaded(exported: ExportedProgram) -> ExportedProgram:
    """The program from its file."""
    return torch.export.load(saved(exported))


@torch.no_grad()
def assert_calls_equal(original: ExportedProgram, exported: ExportedProgram, case: Case, rows: int = 5) -> None:
    """Two calls return equal results in equal trees, and write inputs and buffers equally."""
    modules = original.module(), exported.module()
    for seed in (1, 2):
        torch.manual_seed(seed)
        inputs = case.make_inputs(rows)
        other_inputs = copy.deepcopy(inputs)
        wanted, got = modules[0](*inputs, **case.keywords), modules[1](*other_inputs, **case.keywords)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(other_inputs, inputs)
    states = [module.state_dict() for module in modules]
    assert states[0].keys() == states[1].keys()
    torch.testing.assert_close(states[1], states[0])
