"""`fxwrap.compiles` and `fxwrap.inspect`: graphs that this process compiled and holds, and dumps of them."""

from __future__ import annotations

import copy
import gc
import html
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import CompileRecord, Options
from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.compile import make_backend
from fxwrap.errors import DumpWarning, InspectionError, OptionError
from fxwrap.events import CacheHit, CacheMiss, GraphLoaded, OperatorDeclined, StepEnded
from fxwrap.report import report_page
from tests.support.garbage import freeze_heap

PLAIN = {"fuse": False}
"""Options with which nothing is compiled in C++."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Without compiled graphs of other tests."""
    freeze_heap()
    yield
    torch.compiler.reset()


class Model(torch.nn.Module):
    """A linear layer, a graph break if asked for, and a softmax."""

    def __init__(self, width: int = 4, *, breaks: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.softmax(y, -1)


class Decorated:
    """A class with a compiled method."""

    @torch.compile(backend="fxwrap", options=PLAIN)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def kinds(records: tuple[CompileRecord, ...]) -> list[str]:
    return [record.kind for record in records]


def test_compiled_graphs_are_listed_while_they_are_held() -> None:
    graph = make_fx(lambda x: x.sin() + 1, tracing_mode="fake")(torch.randn(3))
    before = fxwrap.compiles()
    compiled = fxwrap.compile_graph(graph, options=Options(fuse=False), name="waves")
    (record,) = [item for item in fxwrap.compiles() if item not in before]
    assert record.compiled is compiled and fxwrap.inspect(compiled) == (record,)
    assert (record.name, record.kind, record.compile_id, record.cached) == ("waves", "graph", "", False)
    assert "%sin: f32[3] = aten.sin.default(%x_1)" in record.graph
    assert record.options == "fuse=False" or record.options.startswith("fuse=False ")
    assert record.stages == compiled.stages and record.coverage == compiled.coverage
    assert {"lower", "emit", "compile_kernels"} <= record.seconds.keys()
    assert all(seconds >= 0 for seconds in record.seconds.values())
    assert record.total_seconds >= sum(record.seconds.values())
    del record, compiled
    gc.collect()
    assert [item for item in fxwrap.compiles() if item not in before] == []


def test_graphs_of_one_model_with_breaks_sizes_and_gradients() -> None:
    model, other = (torch.compile(Model(breaks=breaks), backend="fxwrap", options=PLAIN) for breaks in (True, False))
    with torch.no_grad():
        other(torch.randn(2, 4))
        model(torch.randn(2, 4))
        model(torch.randn(3, 4))
    assert kinds(fxwrap.inspect(model)) == ["inference"] * 4
    assert kinds(fxwrap.inspect(other)) == ["inference"]
    assert len({record.compile_id for record in fxwrap.inspect(model)}) == 4
    other(torch.randn(2, 4)).sum().backward()
    assert kinds(fxwrap.inspect(other)) == ["inference", "forward", "backward"]
    assert {record.compiled for record in (*fxwrap.inspect(model), *fxwrap.inspect(other))} <= {
        record.compiled for record in fxwrap.compiles()
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["function", "module.compile", "method", "decorated", "make_backend", "torch.nn"])
def test_every_form_of_a_compiled_function(form: str) -> None:
    x, module = torch.randn(2, 4), Model().requires_grad_(False)
    match form:
        case "function":
            compiled = torch.compile(lambda x: x.sin(), backend="fxwrap", options=PLAIN)
        case "module.compile":
            compiled = module
            module.compile(backend="fxwrap", options=PLAIN)
        case "method":
            compiled = torch.compile(module.forward, backend="fxwrap", options=PLAIN)
        case "decorated":
            compiled = Decorated().double
        case "make_backend":
            compiled = torch.compile(module, backend=make_backend(Options(fuse=False)))
        case _:
            compiled = torch.compile(torch.nn.ReLU(), backend="fxwrap", options=PLAIN)
    compiled(x)
    assert kinds(fxwrap.inspect(compiled)) == ["inference"]


def test_graphs_of_on_graph_are_listed() -> None:
    compiled = torch.compile(
        lambda x: x.cos(), backend="fxwrap", options={**PLAIN, "emitter": "fx", "on_graph": lambda graph, _info: graph}
    )
    compiled(torch.randn(3))
    gc.collect()
    assert kinds(fxwrap.inspect(compiled)) == ["inference"]


def test_graphs_that_a_module_of_the_same_class_compiled() -> None:
    first, second = (torch.compile(Model().requires_grad_(False), backend="fxwrap", options=PLAIN) for _ in range(2))
    first(torch.randn(2, 4))
    second(torch.randn(2, 4))  # runs the code that Dynamo has for the class
    assert fxwrap.inspect(second) == fxwrap.inspect(first)


def _never_compiled(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (None, "cannot inspect '_never_compiled': it was not compiled. Pass the result of torch.compile"),
        ("fxwrap", "cannot inspect '_never_compiled': it has no compiled graph. Call it first"),
        ("eager", "cannot inspect '_never_compiled': it was compiled with the backend 'eager'. Compile it with"),
    ],
)
def test_functions_without_compiled_graphs(backend: str | None, text: str) -> None:
    function = _never_compiled if backend is None else torch.compile(_never_compiled, backend=backend)
    if backend == "eager":
        function(torch.randn(2))
    with pytest.raises(InspectionError) as caught:
        fxwrap.inspect(function)
    assert str(caught.value).startswith(text)


def test_graphs_from_the_compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "1")
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    graph = make_fx(lambda x: x.sin() + 2, tracing_mode="fake")(torch.randn(3))
    compiled = [fxwrap.compile_graph(copy.deepcopy(graph), options=Options(fuse=False)) for _ in range(2)]
    first, second = (fxwrap.inspect(item)[0] for item in compiled)
    assert (first.cached, second.cached) == (False, True)
    assert any(isinstance(event, CacheMiss) for event in first.events)
    assert [type(event) for event in second.events if not isinstance(event, StepEnded)] == [CacheHit]
    assert second.graph == first.graph and [stage.pass_name for stage in second.stages] == ["cache"]


def test_graphs_from_the_cache_of_autograd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "1")
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path / "fxwrap"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    for _ in range(2):
        torch.compiler.reset()
        model = torch.compile(Model(), backend="fxwrap", options=PLAIN)
        model(torch.randn(2, 4)).sum().backward()
    records = fxwrap.inspect(model)
    assert kinds(records) == ["forward", "backward"] and all(record.cached for record in records)
    assert all(isinstance(record.compiled, LoadedProgram) for record in records)
    assert records[0].events == (GraphLoaded(),) and records[0].compile_id == "0/0"
    assert records[0].options == "check_inputs=False fuse=False" and records[0].content().stages[0][0] == "cache"


def test_dumps(tmp_path: Path) -> None:
    graph = make_fx(lambda x: (x @ x).sin(), tracing_mode="fake")(torch.randn(4, 4))
    for options in (Options(fuse=False, dump=tmp_path / "dump"), Options(dump=str(tmp_path / "dump"))):
        fxwrap.compile_graph(copy.deepcopy(graph), options=options, name="a graph/of 1")
    first, second = sorted((tmp_path / "dump").iterdir())
    assert first.name.endswith("-a-graph-of-1") and first.name != second.name
    assert {str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()} == {
        "graph.txt", "options.txt", "program.txt", "stages/00_lower.txt", "source.py", "provenance.json",
        "coverage.json", "events.json", "index.html",
    }  # fmt: skip
    assert [path.suffix for path in (second / "kernels").iterdir()] == [".cpp"]
    fxwrap.verify(fxwrap.parse((first / "program.txt").read_text()))
    events = json.loads((first / "events.json").read_text())
    declined = [event["operator"] for event in events if event["event"] == OperatorDeclined.__name__]
    assert declined == ["aten.mm.default", "aten.sin.default"]
    assert [event["at_s"] for event in events] == sorted(event["at_s"] for event in events)


def test_dumps_of_torch_compile_bypass_caches_and_change_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "1")
    for name in ("FXWRAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    keys = []
    for dump in (None, None, str(tmp_path / "dump")):
        torch.compiler.reset()
        if dump is not None:
            monkeypatch.setenv("FXWRAP_DUMP", dump)
        model = torch.compile(Model().requires_grad_(False), backend="fxwrap", options=PLAIN)
        model(torch.randn(2, 4))
        keys.append(fxwrap.inspect(model)[0].compiled.key)
    assert len(set(keys)) == 1
    (folder,) = (tmp_path / "dump").iterdir()
    assert folder.name.endswith("-inference-0-0") and (folder / "stages" / "00_lower.txt").is_file()
    assert Options(dump="somewhere").text() == Options().text() == ""


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    graph = make_fx(lambda x: x.sin(), tracing_mode="fake")(torch.randn(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fxwrap.compile_graph(copy.deepcopy(graph), options=Options(fuse=False, dump=tmp_path / "file" / "in"))
    (warning,) = [item for item in caught if item.category is DumpWarning]
    assert f"to the folder {tmp_path / 'file' / 'in'}: it cannot be written (Not a directory)" in str(warning.message)
    assert "set the option 'dump' or FXWRAP_DUMP to another folder" in str(warning.message)


def test_a_record_in_a_notebook_is_its_report() -> None:
    graph = make_fx(lambda x: x.sin(), tracing_mode="fake")(torch.randn(3))
    compiled = fxwrap.compile_graph(graph, options=Options(fuse=False), name="waves")
    (record,) = fxwrap.inspect(compiled)
    frame, start, rest = record._repr_html_().partition('srcdoc="')
    page, end, _ = rest.partition('"')
    assert frame.startswith("<iframe ") and start and end and "<" not in page
    assert html.unescape(page) == report_page([record.content()], "waves")


def test_a_dump_is_a_path() -> None:
    with pytest.raises(OptionError, match=r"option 'dump' takes a path, not 3"):
        Options(dump=3)  # type: ignore[arg-type]
