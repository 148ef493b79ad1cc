"""What comes out of the cache is what a compile gives: by each emitter, for all kinds of graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap import Compiled, Options
from fxwrap.backend import make_backend
from fxwrap.cli import main
from fxwrap.compile_cache import Cached, cache
from fxwrap.compile_cache.entry import write_entry
from fxwrap.compile_cache.graph_text import NotCacheable
from fxwrap.errors import FusionWarning
from fxwrap.options import EMITTERS
from fxwrap.wrapper_ir import ConstantStore, Ownership
from tests.cache.graphs import CALLS, assert_same, compiled, graph, inputs


def twice(make: Callable[[], Compiled]) -> Compiled:
    """What the cache has of a compile, which was made before."""
    first, second = make(), make()
    assert (first.cached, second.cached) == (False, True)
    assert str(second.program) == str(first.program)
    assert second.source == first.source
    assert (second.coverage, second.key) == (first.coverage, first.key)
    assert second.provenance.to_json() == first.provenance.to_json()
    assert [stage.made_by for stage in second.stages] == ["cache"]
    return second


@pytest.mark.parametrize("emitter", EMITTERS)
def test_what_is_taken_is_what_was_compiled(cache_here: Path, emitter: str) -> None:
    found = twice(lambda: compiled(CALLS.replace(emitter=emitter)))
    assert_same(found(*inputs()))
    assert_same(found.graph_module(*inputs()))


def test_kernels_are_taken_without_a_compiler(cache_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for emitter in ("python", "cpp", "fx"):
        first = compiled(Options(emitter=emitter))
        assert first.program.kernels and not first.cached
    monkeypatch.setattr("subprocess.run", lambda *_args, **_keywords: pytest.fail("a compiler was started"))
    for emitter in ("python", "cpp", "fx"):
        found = compiled(Options(emitter=emitter))
        assert found.cached
        assert_same(found(*inputs()))


def test_a_memory_plan_is_taken_with_its_program(cache_here: Path) -> None:
    options = CALLS.replace(memory_planning="auto")
    first = compiled(options)
    found = compiled(options)
    assert found.cached and found.plan == first.plan is not None
    assert_same(found(*inputs()))


def test_ownership_and_free_outputs_are_kept_apart(cache_here: Path) -> None:
    calls: list[dict[str, Any]] = [{}, {"ownership": {0: Ownership.OWNED}}, {"free_outputs": (0,)}, {"name": "layer"}]
    for keywords in calls:
        assert not compiled(**keywords).cached
    programs = [compiled(**keywords) for keywords in calls]
    assert all(item.cached for item in programs)
    assert programs[1].program.inputs[0].ownership is Ownership.OWNED
    assert programs[3].program.name == "layer"


def test_known_programs_are_given_back_from_the_cache_too(cache_here: Path) -> None:
    compiled()
    known: dict[str, Compiled] = {}
    found = compiled(known=known)
    assert found.cached and list(known.values()) == [found]
    assert compiled(known=known, name="other") is found
    assert compiled(known=known) is found


def test_the_switches(cache_here: Path, entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiled(CALLS.replace(compile_cache=False)).cached
    monkeypatch.setenv(cache.SWITCH, "0")
    assert not compiled().cached
    assert not entries.exists()
    monkeypatch.delenv(cache.SWITCH)
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


def taken_by_place(model: Norm) -> dict[tuple[str, str], Tensor]:
    """The tensors of the model's graph, by where it has them."""
    return {("state", "weight"): model.weight, ("state", "calls"): model.get_buffer("calls")}


def test_constants_are_those_of_the_graph_at_hand(cache_here: Path) -> None:
    x = torch.randn(3, 6)
    models = [Norm(seed) for seed in (0, 1)]
    programs = [fxwrap.compile_graph(torch.export.export(model, (x,)), options=CALLS) for model in models]
    assert [item.cached for item in programs] == [False, True]
    for model, program in zip(models, programs, strict=True):
        (result,) = program(x)
        torch.testing.assert_close(result, x @ model.weight + model.weight[0] + 1)
        program(x)
    taken = programs[1].program.store.tensors
    copies = {name: tensor.clone() for name, tensor in taken.items()}  # as of weights that are made channels-last
    computed = Cached(programs[1].program.replace(store=ConstantStore(copies)), (), None)
    with pytest.raises(NotCacheable, match="the constant 'p_weight' was computed when it was compiled"):
        write_entry(cache_here / "entry", "", computed, "python", "", taken_by_place(models[1]))
    assert not (cache_here / "entry").exists()
    assert any(tensor is models[1].weight or tensor.data_ptr() == models[1].weight.data_ptr()
               for tensor in taken.values())  # fmt: skip


def test_numbers_that_a_graph_holds_are_told_apart(cache_here: Path) -> None:
    x = torch.randn(3)
    for number in (2.0, 3.0):
        table = torch.tensor([number, 1.0, 1.0])
        made = graph(partial(torch.mul, table), (x,), "real")
        assert made.graph.find_nodes(op="get_attr")
        for cached in (False, True):
            program = fxwrap.compile_graph(made, (x,), options=CALLS)
            assert program.cached is cached
            torch.testing.assert_close(program(x)[0], x * table)


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a step under torch.compile, for any batch."""
    torch.compiler.reset()
    step = torch.compile(model, backend="fxwrap", fullgraph=True, dynamic=True, options={"fuse": False})
    step(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def test_training_is_taken_forward_and_backward(
    cache_here: Path, caplog: pytest.LogCaptureFixture, fresh_dynamo: None
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    with caplog.at_level("INFO", "fxwrap.cache"):
        compiled_, taken = _step(model, x), _step(model, x)
    found = [record.getMessage() for record in caplog.records if "was found in the cache" in record.getMessage()]
    assert sorted(text.split("'")[1] for text in found) == ["backward", "forward"]
    model(x).square().sum().backward()
    for parameter, first, second in zip(model.parameters(), compiled_, taken, strict=True):
        torch.testing.assert_close(first, parameter.grad)
        assert torch.equal(second, first)


def test_one_dynamic_program_is_taken_for_all_sizes(cache_here: Path, fresh_dynamo: None) -> None:
    def run() -> tuple[Any, list[bool]]:
        torch.compiler.reset()
        found: list[bool] = []

        def compile_graph(*arguments: Any, **keywords: Any) -> Compiled:
            made = fxwrap.compile_graph(*arguments, **keywords)
            found.append(made.cached)
            return made

        backend = make_backend(CALLS, compile_graph)
        return torch.compile(lambda x: torch.cat([x, x * x.shape[0]]), backend=backend, dynamic=True), found

    for cached in (False, True):
        function, found = run()
        for size in (3, 7, 5):
            x = torch.randn(size, 2)
            torch.testing.assert_close(function(x), torch.cat([x, x * size]))
        assert found == [cached]


def test_control_flow_is_taken(cache_here: Path) -> None:
    def branches(flag: Tensor, x: Tensor) -> Tensor:
        return torch.cond(flag, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))

    given = (torch.tensor(True), torch.randn(3))
    found = twice(lambda: fxwrap.compile_graph(graph(branches, given), options=CALLS))
    for flag in (True, False):
        (result,) = found(torch.tensor(flag), given[1])
        torch.testing.assert_close(result, given[1].sin() + 1 if flag else given[1].cos() - 1)


def test_the_log_says_what_a_compile_did(cache_here: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fxwrap"):
        compiled(CALLS, name="layer")
    (text,) = [record.getMessage() for record in caplog.records if record.name == "fxwrap.compile"]
    assert text.startswith("'layer': 3 calls became 7 lines with 0 launches of 0 kernels in "), text
    assert [stage.split()[0] for stage in text.partition("(")[2].split(", ")] == [
        "lowering", "passes", "emission", "kernels",
    ]  # fmt: skip


def test_the_command_line_shows_stages_of_what_is_in_the_cache(
    cache_here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_dynamo: None
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


def test_what_a_warning_was_given_for_is_compiled_again(
    cache_here: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        with pytest.warns(FusionWarning):
            assert not compiled(Options()).cached
    assert not entries.exists()
