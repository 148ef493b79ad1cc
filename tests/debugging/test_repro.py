"""`save_repro` and `minify`: a failure as a file, and the smallest graph that fails."""

from __future__ import annotations

import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.caching import clear_caches
from fxwrap.debugging import find_failure
from fxwrap.errors import DivergenceError, GraphError, OptionError, ReproError
from fxwrap.lowering import RULES
from fxwrap.options import Options
from tests.debugging.test_bisection import chain, tensors
from tests.support import seeded_bugs
from tests.support.child_processes import run_python
from tests.support.seeded_bugs import BUGS


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patch after which no printed kernel is cached."""
    yield monkeypatch
    monkeypatch.undo()
    clear_caches()


def run_clean(path: Path, bug: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a file in a new process, with a bug in it."""
    code = (
        "import runpy, sys, pytest\n"
        "from tests.support.seeded_bugs import BUGS\n"
        f"BUGS.get({bug!r}, lambda patch: None)(pytest.MonkeyPatch())\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    return run_python(["-c", code], timeout=300)


def fail_to_lower(patch: pytest.MonkeyPatch) -> None:
    """Lets the rule of `tanh` fail."""

    def fail(*arguments: object, **keywords: object) -> None:
        raise ZeroDivisionError("seeded")

    patch.setitem(RULES, "aten.tanh.default", fail)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", BUGS)
def test_a_seeded_bug_shrinks_to_few_nodes(part: str, patch: pytest.MonkeyPatch) -> None:
    BUGS[part](patch)
    bisection = fxwrap.bisect(chain, tensors(), options={"emitter": "python"})
    if part in ("converter", "pass"):  # the bug depends on the place in the graph
        patch.setattr(seeded_bugs, "is_third", lambda arguments: True)
        patch.setattr(seeded_bugs, "THIRD", 1)
    minified = fxwrap.minify(bisection)
    assert len(minified.graph_module.graph.nodes) <= 5
    assert minified.calls == 1
    assert max(size for item in minified.inputs if isinstance(item, Tensor) for size in item.shape) <= 2
    again = fxwrap.bisect(minified.graph_module, minified.inputs, options={"emitter": "python"}).divergence
    assert again is not None and again.part == part


def test_a_failing_compile_offers_the_command_and_shrinks(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail_to_lower(patch)
    with pytest.raises(Exception, match="seeded") as caught:
        torch.compile(chain, backend="fxwrap")(*tensors())
    failure = find_failure(caught.value)
    assert failure is not None and failure.check == "compile"
    minified = fxwrap.minify(caught.value)
    assert minified.calls == 1 and "tanh" in str(minified)
    with pytest.raises(ZeroDivisionError) as direct:
        fxwrap.compile_graph(minified.graph_module, minified.inputs)
    assert "fxwrap.save_repro(error, 'repro.py')" in direct.value.__notes__[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_file_fails_alike(patch: pytest.MonkeyPatch, tmp_path: Path, dynamic: bool) -> None:
    BUGS["lowering"](patch)
    bisection = fxwrap.bisect(chain, tensors(size=6), options={"emitter": "python"}, dynamic=dynamic)
    path = tmp_path / "repro.py"
    fxwrap.save_repro(bisection, path)
    text = path.read_text()
    assert f"# torch {torch.__version__}" in text and "OPTIONS = fxwrap.Options(" in text
    assert ("SYMBOLS = {}" in text) != dynamic
    if dynamic:
        failed = run_clean(path, "lowering")
        assert failed.returncode == 1 and "At fault: lowering of aten.tanh" in failed.stderr, failed.stderr
        return
    with pytest.raises(DivergenceError, match=r"lowering of aten\.tanh"):
        runpy.run_path(str(path), run_name="__main__")


def test_a_file_passes_without_the_bug(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "repro.py"
    with monkeypatch.context() as patch:
        BUGS["lowering"](patch)
        fxwrap.save_repro(fxwrap.bisect(chain, tensors(), options={"emitter": "python"}), path)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == "it does not fail here\n"


def test_a_file_of_a_graph_that_cannot_compile(tmp_path: Path) -> None:
    graph = make_fx(lambda x: torch.special.airy_ai(x) + 1)(torch.ones(3))
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
        if "airy" in str(node.target):
            node.args = (node.args[0], 1)
    with pytest.raises(GraphError) as caught:
        fxwrap.compile_graph(graph, [torch.ones(3)])
    path = tmp_path / "repro.py"
    fxwrap.save_repro(caught.value, path)
    assert "airy_ai" in path.read_text()
    with pytest.raises(GraphError) as again:
        runpy.run_path(str(path), run_name="__main__")
    assert str(again.value) == str(caught.value)


def test_subgraphs_constants_and_odd_literals_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        full = torch.full_like(y, float("inf"), dtype=torch.float64)
        return full + y + torch.tensor([1.5, 2.5]) + x[0:1].to(x.dtype)

    graph = make_fx(step)(torch.ones(2))
    path = tmp_path / "repro.py"
    fxwrap.save_repro(graph, path, [torch.ones(2)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == "it does not fail here\n"
    text = path.read_text()
    assert "def graph_true_graph_0():" in text and "float('inf')" in text and "[1.5, 2.5]" in text


@pytest.mark.parametrize("after", ["compile", "accuracy"])
def test_the_environment_writes_files(after: str, patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setenv("FXWRAP_REPRO_AFTER", after)
    patch.chdir(tmp_path)
    x = torch.randn(4, 4)
    if after == "compile":
        fail_to_lower(patch)
    else:
        BUGS["lowering"](patch)
    with pytest.raises(Exception, match=r"seeded|aten\.tanh"):
        torch.compile(lambda x: torch.tanh(x) + 1, backend="fxwrap")(x)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"fxwrap_repro_{after}_") and "aten.tanh.default" in path.read_text()


def test_bad_values_are_refused(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setenv("FXWRAP_REPRO_AFTER", "always")
    with pytest.raises(OptionError, match='FXWRAP_REPRO_AFTER is "compile" or "accuracy", not'):
        fxwrap.compile_graph(make_fx(lambda x: x + 1)(torch.ones(1)))
    with pytest.raises(ReproError, match="no graph is known for an object of type int"):
        fxwrap.save_repro(3, tmp_path / "repro.py")
    with pytest.raises(ReproError, match="ValueError is no error of a compile"):
        fxwrap.minify(ValueError("other"))
    patch.delenv("FXWRAP_REPRO_AFTER")
    with pytest.raises(ReproError, match="does not fail"):
        fxwrap.minify(make_fx(lambda x: x + 1)(torch.ones(1)), [torch.ones(1)])


def test_options_that_code_cannot_build_are_named(tmp_path: Path) -> None:
    options = Options(lowerings={"aten.sin.default": lambda builder, node: None}, fuse=False)
    path = tmp_path / "repro.py"
    fxwrap.save_repro(make_fx(torch.cos)(torch.ones(1)), path, [torch.ones(1)], options=options)
    text = path.read_text()
    assert "OPTIONS = fxwrap.Options(fuse=False)" in text
    assert "# Not written, since code cannot build it: the option 'lowerings'." in text


def test_a_divergence_error_is_a_subject(patch: pytest.MonkeyPatch) -> None:
    BUGS["lowering"](patch)
    with pytest.raises(DivergenceError) as caught:
        torch.compile(chain, backend="fxwrap", options={"debug": "bisect"})(*tensors())
    assert fxwrap.minify(caught.value).calls == 1
