"""The garbage collector pauses while programs and graphs are built and compiled, and is as it was afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import Compiled, compile_graph, kernels, make_backend
from fxwrap.errors import ParseError
from fxwrap.garbage_collection import gc_paused
from fxwrap.options import Options
from tests.support.garbage import freeze_heap
from tests.support.samples import SAMPLES

SAMPLE = SAMPLES["views_share_one_root"]


@contextmanager
def _frequent_collections() -> Iterator[list[str]]:
    """Collects after every few allocations, and lists the phases of each collection."""
    phases: list[str] = []
    callback: Callable[[str, dict[str, Any]], None] = lambda phase, _info: phases.append(phase)  # noqa: E731
    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(10)
    try:
        yield phases
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)


@pytest.mark.parametrize("stage", ["parse", "to_fx", "from_fx"])
def test_construction_runs_without_collections(stage: str) -> None:
    program = SAMPLE.program()
    emitted = fxwrap.to_fx(program)
    emitted.graph_module.recompile()
    run: dict[str, Callable[[], object]] = {
        "parse": lambda: fxwrap.parse(SAMPLE.text),
        "to_fx": lambda: fxwrap.to_fx(program),
        "from_fx": lambda: fxwrap.from_fx(emitted),
    }
    assert gc.isenabled()
    freeze_heap()
    with _frequent_collections() as phases:
        gc.collect()
        phases.clear()
        run[stage]()
        count = phases.count("start")
    assert count <= 3, "only the code around the construction may collect"
    assert gc.isenabled()


def test_a_pause_ends_with_an_error_and_nests() -> None:
    assert gc.isenabled()
    with pytest.raises(ParseError):
        fxwrap.parse("program @broken(")
    assert gc.isenabled()
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        fxwrap.parse(SAMPLE.text)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::fxwrap.errors.PassWarning")  # the pass has no key
def test_garbage_of_a_compile_is_collected_while_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    references: list[weakref.ref[Cycle]] = []
    alive: list[bool] = []
    compile_kernels = kernels.compile_kernels

    def make_garbage(program: fxwrap.Program) -> fxwrap.Program:
        references.append(weakref.ref(Cycle()))
        alive.append(references[0]() is not None)
        return program

    def observe(uses: Any) -> Any:
        alive.append(references[0]() is not None)
        return compile_kernels(uses)

    monkeypatch.setattr(kernels, "compile_kernels", observe)
    graph = make_fx(lambda x: x.relu() + 1)(torch.randn(8))
    compile_graph(graph, [torch.randn(8)], options=Options(passes=[make_garbage], compile_cache=False))
    assert alive == [True, False]


_seen_by_dynamo: list[bool] = []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _observe_in_trace() -> int:
    _seen_by_dynamo.append(gc.isenabled())
    return 1


@pytest.mark.parametrize(("backend", "during"), [
    ("fxwrap", False), (fxwrap.compile.fxwrap, False), (make_backend(Options(fuse=False)), False), ("eager", True),
])  # fmt: skip
def test_dynamo_traces_without_collections_for_this_backend(backend: Any, during: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return x + _observe_in_trace()

    def failing(x: Tensor) -> Tensor:
        y = x + _observe_in_trace()
        torch._dynamo.graph_break()
        return y

    x = torch.randn(8)
    torch.compile(lambda x: x.relu(), backend="fxwrap")(
        x
    )  # after torch.compiler.reset, the first compile may not pause
    _seen_by_dynamo.clear()
    assert torch.equal(torch.compile(function, backend=backend)(x), x + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(failing, backend=backend, fullgraph=True)(x)
    assert {*_seen_by_dynamo} == {during}
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore::fxwrap.errors.PassWarning")  # the pass has no key
@pytest.mark.parametrize(("autotune", "during"), [(False, False), (True, True)])
def test_compiles_run_without_collections_unless_kernels_are_timed(autotune: bool, during: bool) -> None:
    seen: list[bool] = []

    def observed(graph: Any, *arguments: Any, **keywords: Any) -> Compiled:
        seen.append(gc.isenabled())  # AOTAutograd has traced the graph

        def observe(inner: Any) -> Any:
            seen.append(gc.isenabled())
            return inner

        options = keywords.pop("options").replace(passes=[observe])
        return compile_graph(graph, *arguments, options=options, **keywords)

    def function(x: Tensor) -> Tensor:
        return x.relu() + 1

    torch.compiler.reset()
    assert gc.isenabled()
    compiled = torch.compile(function, backend=make_backend(Options(fuse=False, autotune=autotune), observed))
    x = torch.randn(8)
    torch.compile(lambda x: x.relu(), backend="fxwrap")(x)  # later compiles pause from Dynamo's trace on
    assert torch.equal(compiled(x), function(x))
    assert seen == [during, during]
    assert gc.isenabled()
