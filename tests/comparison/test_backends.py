"""`compare` with other backends of torch.compile, with objects that hold tensors, and its JSON and HTML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import DynamicCache

import fxwrap
from fxwrap.comparison import Backend, compare
from fxwrap.debugging import copy_inputs, named_leaves
from fxwrap.errors import CompareError
from fxwrap.lines import ExternCall
from tests.support.long_form import long_only


@dataclasses.dataclass
class Output:
    """A dataclass that is no node of a pytree."""

    values: Tensor
    count: int


class Cache:
    """A plain class with nested tensors, and a reference to itself."""

    def __init__(self, x: Tensor) -> None:
        self.layers = [{"key": x + 1}, {"key": x * 2}]
        self.itself = self


def returns_objects(x: Tensor) -> tuple[Output, Cache]:
    return Output(x.sin(), 3), Cache(x)


def appends(cache: Cache, x: Tensor) -> Tensor:
    cache.layers[0]["key"].add_(x)
    return cache.layers[0]["key"] * 2


def wrong(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend whose results are 1% too large."""
    return lambda *arguments: [item * 1.01 for item in graph(*arguments)]


def failing(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
    raise ValueError("no such machine")


def test_objects_are_compared_by_their_tensors() -> None:
    report = compare(returns_objects, torch.randn(4), repeats=0, emitters=("python",), backends=[wrong])
    assert report["python"].agrees_in()
    different = {item.where for item in report["wrong"].disagreements}
    assert different == {"output[0].values", "output[1].layers[0]['key']", "output[1].layers[1]['key']"}


def test_objects_as_inputs_are_copied_and_their_mutations_compared() -> None:
    cache, x = Cache(torch.zeros(3)), torch.ones(3)
    report = compare(appends, (cache, x), repeats=0, emitters=("python", "cpp"))
    assert report.agrees, report
    assert torch.equal(cache.layers[0]["key"], torch.ones(3))
    copied = copy_inputs(cache)
    assert copied.itself is not cache and copied.layers[0]["key"] is not cache.layers[0]["key"]
    names = [name for name, leaf in named_leaves(cache, "cache").items() if isinstance(leaf, Tensor)]
    assert names[:2] == ["cache.layers[0]['key']", "cache.layers[1]['key']"]


def test_an_hf_cache_is_compared() -> None:
    def prefill(x: Tensor) -> Any:
        cache = DynamicCache()
        cache.update(x.sin(), x.cos(), 0)
        return x * 2, cache

    report = compare(prefill, torch.randn(1, 2, 3, 4), repeats=0, emitters=("python",), backends=[wrong])
    assert report["python"].agrees_in(), report
    assert any("keys" in item.where for item in report["wrong"].disagreements)


@pytest.mark.parametrize("training", [False, True])
def test_backends_stand_beside_the_emitters(training: bool) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.softmax(x @ x, -1).tanh()

    x = torch.randn(8, 8, requires_grad=training)
    backends: list[Backend] = ["aot_eager", wrong, failing, ("fxwrap", {"fuse": False})]
    report = compare(model, x, repeats=1, emitters=("python",), backends=backends, training=training)
    names = [outcome.name for outcome in report.outcomes]
    assert names == ["eager", "float64", "python", "aot_eager", "wrong", "failing", "fxwrap(fuse=False)"]
    assert report["aot_eager"].agrees_in() and report["fxwrap(fuse=False)"].agrees_in()
    assert not report["wrong"].agrees_in("values") and "no such machine" in report["failing"].failure
    assert report["aot_eager"].run_seconds is not None and report["aot_eager"].host_seconds is not None
    assert report["aot_eager"].compile_seconds is not None and report["aot_eager"].kernels is None
    kernels, launches = report["python"].kernels, report["python"].launches
    assert kernels and launches and launches >= kernels
    data = json.loads(report.to_json())
    assert [item["name"] for item in data["outcomes"]] == names and data["agrees"] is False
    page = report.to_html()
    assert "fxwrap(fuse=False)" in page and '<td class="bad">DIFFER</td>' in page and "http" not in page
    assert page.count("<tr>") == len(names) + 1


def test_a_module_is_timed_with_a_backend() -> None:
    report = compare(torch.nn.Linear(4, 4), torch.randn(2, 4), repeats=1, emitters=(), backends=["aot_eager"])
    assert report["aot_eager"].run_seconds is not None and report["aot_eager"].agrees_in()


@pytest.mark.parametrize("backends", [long_only(["inductor", ("inductor", {"cpp_wrapper": True})])])
def test_inductor_stands_beside_the_emitters(backends: list[Backend]) -> None:
    report = compare(lambda x: torch.softmax(x @ x, -1), torch.randn(8, 8), repeats=1, backends=backends)
    assert report.agrees and report["inductor(cpp_wrapper=True)"].kernels


def test_a_difference_names_the_next_step() -> None:
    def change(program: fxwrap.Program) -> fxwrap.Program:
        lines = [
            line.replace(arguments=line.arguments[::-1]) if isinstance(line, ExternCall) else line
            for line in program.body.lines
        ]
        return program.replace(body=dataclasses.replace(program.body, lines=tuple(lines)))

    options = {"passes": [fxwrap.Pass(change, key="1")]}
    report = compare(lambda x, y: x @ y, (torch.randn(3, 3), torch.randn(3, 3)), options=options, repeats=0)
    assert "next: fxwrap.bisect(function, inputs), or python -m fxwrap bisect, names" in str(report)
    assert "next:" not in str(compare(torch.sin, torch.ones(1), repeats=0))


@pytest.mark.parametrize(("backend", "message"), [
    (3, "3 is no backend: pass a name that torch.compile knows"),
    (("inductor", 3), "options of a backend are a mapping, not 3"),
])  # fmt: skip
def test_bad_backends_are_refused(backend: Any, message: str) -> None:
    with pytest.raises(CompareError, match=message):
        compare(torch.sin, torch.ones(1), backends=[backend])
