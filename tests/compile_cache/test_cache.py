"""A cached program equals the compiled one, for each emitter and all kinds of graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._library.fake_class_registry import maybe_to_fake_obj
from torch._subclasses.fake_tensor import FakeTensorMode

import fxwrap
from fxwrap import Compiled, Options
from fxwrap.cli import main
from fxwrap.compile import make_backend
from fxwrap.compile_cache import CachedCompile, cache
from fxwrap.compile_cache.entry import entry_content
from fxwrap.compile_cache.graph_serializer import NotCacheable
from fxwrap.errors import FusionWarning
from fxwrap.options import EMITTERS
from fxwrap.wrapper_ir import ConstantStore, Ownership, launched_calls
from tests.compile_cache.graphs import CALLS, assert_same, compiled, graph, inputs
from tests.converters.exported.models import CASES, assert_calls_equal
from tests.support.opaque import Counter, Shift


def cached_compile(make: Callable[[], Compiled]) -> Compiled:
    """Compiles twice; returns the second program, which comes from the cache and equals the first."""
    first, second = make(), make()
    assert (first.cached, second.cached) == (False, True)
    assert str(second.program) == str(first.program)
    assert second.source == first.source
    assert (second.coverage, second.key) == (first.coverage, first.key)
    assert second.provenance.to_json() == first.provenance.to_json()
    calls = [[launched_calls(line.origin) for line in item.program.lines()] for item in (first, second)]
    assert calls[0] == calls[1]
    assert [stage.pass_name for stage in second.stages] == ["cache"]
    return second


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_cached_program_equals_the_compiled_one(cache_folder: Path, emitter: str) -> None:
    program = cached_compile(lambda: compiled(CALLS.replace(emitter=emitter)))
    assert_same(program(*inputs()))
    assert_same(program.graph_module(*inputs()))


def test_cached_kernels_need_no_compiler(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for emitter in ("python", "cpp", "fx"):
        first = compiled(Options(emitter=emitter))
        assert first.program.kernels and not first.cached
    monkeypatch.setattr("subprocess.run", lambda *_args, **_keywords: pytest.fail("a compiler was started"))
    for emitter in ("python", "cpp", "fx"):
        second = compiled(Options(emitter=emitter))
        assert second.cached
        assert_same(second(*inputs()))


def test_a_memory_plan_is_cached_with_its_program(cache_folder: Path) -> None:
    options = CALLS.replace(memory_planning="auto")
    first = compiled(options)
    second = compiled(options)
    assert second.cached and second.plan == first.plan is not None
    assert_same(second(*inputs()))


def test_ownership_and_free_outputs_are_part_of_the_key(cache_folder: Path) -> None:
    calls: list[dict[str, Any]] = [
        {},
        {"ownership": {0: Ownership.OWNED}},
        {"flexible_stride_outputs": (0,)},
        {"name": "layer"},
    ]
    for keywords in calls:
        assert not compiled(**keywords).cached
    programs = [compiled(**keywords) for keywords in calls]
    assert all(item.cached for item in programs)
    assert programs[1].program.inputs[0].ownership is Ownership.OWNED
    assert programs[3].program.name == "layer"


def test_in_memory_programs_are_returned_with_a_cache_hit(cache_folder: Path) -> None:
    compiled()
    known: dict[str, Compiled] = {}
    program = compiled(compiled_by_key=known)
    assert program.cached and list(known.values()) == [program]
    assert compiled(compiled_by_key=known, name="other") is program
    assert compiled(compiled_by_key=known) is program


def test_cache_switches(cache_folder: Path, entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiled(CALLS.replace(compile_cache=False)).cached
    monkeypatch.setenv(cache.CACHE_ENV, "0")
    assert not compiled().cached
    assert not entries.exists()
    monkeypatch.delenv(cache.CACHE_ENV)
    assert not compiled().cached
    assert compiled().cached
    assert not compiled(CALLS.replace(compile_cache=False)).cached


class Norm(nn.Module):
    """A weight, a bias that is a view of it, and a count that the model changes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x @ self.weight + self.weight[0] + self.calls


def tensors_by_attribute(model: Norm) -> dict[tuple[str, str], Tensor]:
    """The tensors of the model's graph, by where it has them."""
    return {("state", "weight"): model.weight, ("state", "calls"): model.get_buffer("calls")}


def test_a_cache_hit_binds_the_current_graphs_constants(cache_folder: Path) -> None:
    x = torch.randn(3, 6)
    models = [Norm(seed) for seed in (0, 1)]
    programs = [fxwrap.compile_graph(torch.export.export(model, (x,)), options=CALLS) for model in models]
    assert [item.cached for item in programs] == [False, True]
    for model, program in zip(models, programs, strict=True):
        torch.testing.assert_close(program(x), x @ model.weight + model.weight[0] + 1)
        program(x)
    constants = programs[1].program.store.tensors
    copies = {name: tensor.clone() for name, tensor in constants.items()}  # as for weights converted to channels-last
    computed = CachedCompile(programs[1].program.replace(store=ConstantStore(copies)), (), None)
    with pytest.raises(NotCacheable, match="the constant 'p_weight' was computed by the compile"):
        entry_content("", computed, "python", "", tensors_by_attribute(models[1]), [])
    assert any(tensor is models[1].weight or tensor.data_ptr() == models[1].weight.data_ptr()
               for tensor in constants.values())  # fmt: skip


def test_scalar_constants_are_part_of_the_key(cache_folder: Path) -> None:
    x = torch.randn(3)
    for number in (2.0, 3.0):
        table = torch.tensor([number, 1.0, 1.0])
        traced = graph(partial(torch.mul, table), (x,), "real")
        assert traced.graph.find_nodes(op="get_attr")
        for cached in (False, True):
            program = fxwrap.compile_graph(traced, (x,), options=CALLS)
            assert program.cached is cached
            torch.testing.assert_close(program(x)[0], x * table)


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a step under torch.compile, for any batch."""
    torch.compiler.reset()
    step = torch.compile(model, backend="fxwrap", fullgraph=True, dynamic=True, options={"fuse": False})
    step(x).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def test_training_caches_forward_and_backward(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    with caplog.at_level("INFO", "fxwrap.cache"), functorch_config.patch(enable_autograd_cache=False):
        compiled_, cached = _step(model, x), _step(model, x)
    messages = [record.getMessage() for record in caplog.records if "was loaded from the cache" in record.getMessage()]
    assert sorted(text.split("'")[1] for text in messages) == ["backward", "forward"]
    model(x).square().sum().backward()
    for parameter, first, second in zip(model.parameters(), compiled_, cached, strict=True):
        torch.testing.assert_close(first, parameter.grad)
        assert torch.equal(second, first)


def test_one_dynamic_entry_covers_all_sizes(cache_folder: Path) -> None:
    def run() -> tuple[Any, list[bool]]:
        torch.compiler.reset()
        hits: list[bool] = []

        def compile_graph(*arguments: Any, **keywords: Any) -> Compiled:
            program = fxwrap.compile_graph(*arguments, **keywords)
            hits.append(program.cached)
            return program

        backend = make_backend(CALLS, compile_graph)
        return torch.compile(lambda x: torch.cat([x, x * x.shape[0]]), backend=backend, dynamic=True), hits

    for cached in (False, True):
        function, hits = run()
        for size in (3, 7, 5):
            x = torch.randn(size, 2)
            torch.testing.assert_close(function(x), torch.cat([x, x * size]))
        assert hits == [cached]


def test_control_flow_is_cached(cache_folder: Path) -> None:
    def branches(flag: Tensor, x: Tensor) -> Tensor:
        return torch.cond(flag, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))

    arguments = (torch.tensor(True), torch.randn(3))
    program = cached_compile(lambda: fxwrap.compile_graph(graph(branches, arguments), options=CALLS))
    for flag in (True, False):
        (result,) = program(torch.tensor(flag), arguments[1])
        torch.testing.assert_close(result, arguments[1].sin() + 1 if flag else arguments[1].cos() - 1)


def test_the_compile_log_reports_hits_and_misses(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fxwrap"):
        compiled(CALLS, name="layer")
    (text,) = [record.getMessage() for record in caplog.records if record.name == "fxwrap.compile"]
    assert text.startswith("'layer': 3 calls became 7 lines with 0 launches of 0 kernels in "), text
    steps = dict([step.split() for step in text.partition("(")[2].rstrip(")").split(", ")])
    assert "lower" in steps and all(float(seconds) >= 1e-3 for seconds in steps.values())


def test_the_command_line_shows_stages_of_cached_programs(
    cache_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.py"
    function = "def f(x):\n    return torch.relu(x)\n"
    model.write_text(f"import torch\n{function}def f_example_inputs():\n    return (torch.ones(2),)\n")
    shown = []
    for arguments in ([], ["--stages"], ["--stages"]):
        torch.compiler.reset()
        assert main(["show", f"{model}:f", "--option", "fuse=false", *arguments]) == 0
        shown.append(capsys.readouterr().out)
    assert "--- after lower" in shown[1] and shown[1] == shown[2]


def test_compiles_that_warned_are_not_cached(
    cache_folder: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        with pytest.warns(FusionWarning):
            assert not compiled(Options()).cached
    assert not entries.exists()


@pytest.mark.parametrize("emitter", EMITTERS)
def test_objects_of_a_graph_are_bound_to_its_cached_program(cache_folder: Path, emitter: str) -> None:
    graphs = [object_graph(Counter(count), Shift(3)) for count in (1, 2)]
    options = CALLS.replace(emitter=emitter)
    remaining = iter(graphs)
    program = cached_compile(lambda: fxwrap.compile_graph(next(remaining), options=options))
    counter, x = Counter(5), torch.rand(3)
    total, own = program(x, counter)
    torch.testing.assert_close(total, x + 2 + 5 + 3)
    assert own is graphs[1].own
    assert not fxwrap.compile_graph(object_graph(Counter(1), Shift(4)), options=options).cached


def object_graph(own: Counter, by: Shift) -> torch.fx.GraphModule:
    """A graph with an object of its own, a literal one, and one as input, whose content is unknown."""
    empty = FakeTensorMode().from_tensor(torch.empty(3))
    fx_graph = torch.fx.Graph()
    x, counter = fx_graph.placeholder("x"), fx_graph.placeholder("counter")
    counter.meta["val"] = maybe_to_fake_obj(None, Counter(own.count))
    first = fx_graph.call_function(torch.ops.fxwrap_tests.sum_counts.default, ([fx_graph.get_attr("own"), counter], x))
    second = fx_graph.call_function(torch.ops.fxwrap_tests.shift.default, (by, first))
    fx_graph.output((second, fx_graph.get_attr("own")))
    for node in (x, first, second):
        node.meta["val"] = empty
    return torch.fx.GraphModule({"own": own}, fx_graph)


def test_a_cached_result_has_the_signature_of_its_export(cache_folder: Path) -> None:
    case = CASES["elementwise"]
    assert not fxwrap.compile_graph(case.export()).cached
    compiled = fxwrap.compile_graph(case.export())
    assert compiled.cached
    assert_calls_equal(case.export(), fxwrap.fx.export(compiled), case)
