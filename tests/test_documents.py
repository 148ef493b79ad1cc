"""README.md and the chapters in docs/: the texts are what fxwrap prints, the snippets run, the links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import operator
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes import tools_common

import fxwrap
from fxwrap.cli import main
from fxwrap.devices import CUDA, DeviceRuntime, DeviceSpec, KernelLanguage, KernelRuntime, scoped_registration
from fxwrap.errors import FxwrapError
from fxwrap.lowering.rules import softmax
from fxwrap.printers import KernelRequest
from tests.support.documents import ROOT, check_printed, run_snippets, section

OUTSIDE = {"versions.md", "integrations.md", "opinfo.md"}
"""Chapters about names of other libraries."""

CHAPTERS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*CHAPTERS, *[ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]]


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ w + b).t()


def make_model() -> tuple[torch.nn.Module, tuple[Tensor]]:
    """The model of the coverage report in README.md, and its inputs."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()), (torch.ones(4, 8),)


def triton_source(function: object, x: Tensor) -> str:
    """The Triton kernel of a function, without its helper functions."""
    lowered = fxwrap.lower(make_fx(function)(x), [x], options=fxwrap.Options(cpu_kernels="triton"))
    return "@triton.jit\ndef fxwrap_" + lowered.kernels[0].source.split("@triton.jit\ndef fxwrap_")[1]


def test_readme_shows_the_printed_texts(update_golden: bool, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [torch.randn(4, 8), torch.randn(8, 16), torch.randn(16)]
    program = fxwrap.lower(make_fx(layer)(*inputs), inputs, name="layer")
    assert main(["show", f"{__file__}:make_model", "--coverage"]) == 0
    texts = {
        "program": str(program),
        "python": section(fxwrap.to_python(program).source, "# mm:", "return"),
        "cpp": section(fxwrap.to_cpp(program).source, "// mm:", "view("),
        "fx": section(fxwrap.to_fx(program).source, "# mm:", "return"),
        "coverage": "$ python -m fxwrap show model.py:make_model --coverage\n" + capsys.readouterr().out.strip(),
    }
    check_printed("README.md", texts, update_golden)


def test_the_overview_shows_the_printed_texts(update_golden: bool) -> None:
    x = torch.randn(64, 1024)
    graph = make_fx(lambda x: torch.softmax(x, -1))(x)
    program = fxwrap.lower(graph, [x], name="softmax")
    texts = {
        "graph": str(graph.graph),
        "rule": inspect.getsource(softmax._softmax),
        "loop_ir": loop_ir_of(graph, x),
        "cpp_kernel": program.kernels[0].source.partition("\n\n")[2],
        "triton_kernel": triton_source(lambda x: torch.softmax(x, -1), x),
        "program": section(str(program), "program @softmax", "control.return") + "\n}",
        "python": section(fxwrap.to_python(program).source, "# _softmax", "return"),
        "cpp": section(fxwrap.to_cpp(program).source, "// _softmax", "data_ptr("),
        "fx": str(fxwrap.to_fx(program).graph_module.graph),
    }
    check_printed("docs/overview.md", texts, update_golden)


def loop_ir_of(graph: torch.fx.GraphModule, x: Tensor) -> str:
    """The loop IR of a graph's one kernel, as a printer receives it."""
    requests: list[KernelRequest] = []

    def record(request: KernelRequest) -> tuple[()]:
        requests.append(request)
        return ()

    runtime = DeviceRuntime(kernels=KernelRuntime(load=lambda *_: pytest.fail("nothing is loaded")))
    spec, language = DeviceSpec("cpu", "loop_ir"), KernelLanguage("loop_ir")
    with scoped_registration(spec, printer=record, language=language, runtime=runtime), pytest.raises(FxwrapError):
        fxwrap.lower(graph, [x], options=fxwrap.Options(fallback="error"))
    return str(requests[0].kernel)


def test_the_snippets_of_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_snippets("README.md")
    torch.testing.assert_close(names["logits"], names["model"](names["x"]))  # type: ignore[operator]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_short_and_link_to_files(document: Path) -> None:
    text = document.read_text()
    assert len(text.splitlines()) <= (250 if document.parent.name == "benchmarks" else 200)
    for target, anchor in re.findall(r"\]\(([^)#]+\.\w+)?(?:#([\w-]+))?\)", text):
        path = document.parent / target if target else document
        assert "://" in target or path.exists(), f"{document.name} links to {target}"
        assert not anchor or "://" in target or anchor in anchors(path), f"{document.name} links to {target}#{anchor}"


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a document's headings: lower case, words joined by hyphens, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@functools.cache
def words_of_sources() -> frozenset[str]:
    """All words in the sources of fxwrap, its tests and its tools: names of torch that documents have are tested."""
    paths = [path for folder in ("fxwrap", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.*")]
    texts = [item.read_text() for item in paths if item.suffix in (".py", ".h", ".cpp") and item != Path(__file__)]
    return frozenset([*re.findall(r"\w+", "\n".join(texts)), *[path.stem for path in paths]])


def unknown_names(text: str) -> list[str]:
    """Returns the names of several words, and of Python modules, that inline code of a document has and no source."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    code = re.findall(r"`([^`\n]+)`", prose)
    names = [name for item in code for name in re.findall(r"\b_?[a-z]\w*_[a-z]\w*|\b\w+(?=\.py\b)", item)]
    return [
        name for name in names
        if words_of_sources().isdisjoint((name, name.removeprefix("_"))) and not name.startswith("fxwrap_")
        and not hasattr(torch.ops.aten, name) and not hasattr(tools_common, name)
    ]  # fmt: skip


@pytest.mark.parametrize("chapter", [path for path in CHAPTERS if path.name not in OUTSIDE], ids=lambda path: path.name)
def test_names_in_chapters_are_names_of_the_code(chapter: Path) -> None:
    text = chapter.read_text()
    assert not unknown_names(text)
    for name in re.findall(r"`DeviceSpec\.([\w.]+)`", text):
        operator.attrgetter(name)(CUDA)


def test_unknown_names_are_found() -> None:
    text = "`rules/former_name.py` and `DeviceSpec` of `find_former_form(kernel)`, `kernels.py`\n```\n`a_block`\n```\n"
    assert unknown_names(text) == ["former_name", "find_former_form"]


def test_the_overview_lists_every_chapter() -> None:
    text = (ROOT / "docs" / "overview.md").read_text()
    assert {path.name for path in CHAPTERS} - {"overview.md", "opinfo.md", "index.md"} == set(
        re.findall(r"\]\((\w+\.md)\)", text)
    )


@pytest.mark.parametrize("package", ["printers/cpp", "printers/triton"])
def test_packages_that_list_their_modules_list_all(package: str) -> None:
    folder = ROOT / "fxwrap" / package
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert "by module:" in docstring
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.endswith(("__", "_configuration"))}
    assert modules == modules & set(re.findall(r"`(\w+)\.\w+`", docstring))


def test_every_option_has_a_row() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(fxwrap.Options))


def test_every_command_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z-]+)", capsys.readouterr().out.partition("  COMMAND\n")[2], re.MULTILINE)
    table = (ROOT / "docs" / "api.md").read_text()
    assert commands and sorted(commands) == sorted(re.findall(r"^\| `python -m fxwrap ([a-z-]+)", table, re.MULTILINE))


SOURCES = [path.read_text() for path in (ROOT / "fxwrap").rglob("*") if path.suffix in (".py", ".cpp", ".h")]


def test_every_environment_variable_has_a_row() -> None:
    pattern = r'(?:_ENV = |env\()"(FXWRAP_[A-Z_]+)"'  # in Python, and in C++
    variables = {name for text in SOURCES for name in re.findall(pattern, text)}
    table = (ROOT / "docs" / "options.md").read_text().partition("## Environment variables")[2]
    rows = set(re.findall(r"^\| `(FXWRAP_[A-Z_]+)` \|", table, re.MULTILINE))
    assert variables == rows


def test_every_logger_has_a_row() -> None:
    loggers = {
        name for text in SOURCES
        for name in re.findall(r'(?:getLogger\(|logger(?:: ClassVar\[str\])? = )"(fxwrap\.[a-z_]+)"', text)
    }  # fmt: skip
    table = (ROOT / "docs" / "runtime.md").read_text().partition("## Logs")[2].partition("##")[0]
    assert loggers == set(re.findall(r"`(fxwrap\.[a-z_]+)`", table))


def test_the_snippets_of_the_tutorial_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_snippets("docs/debugging.md")
    printed = capsys.readouterr().out
    assert "At fault: pass 'confuse_operands'\n  line 6: %mm_1 = extern.call @aten.mm.default(%addmm, %mm)" in printed
    assert "pass debugging.md>:19" in printed and "graph 'inference' (debugging.md>:5)" in printed
    assert "Not written, since code cannot build it: the option 'passes'." in (tmp_path / "repro.py").read_text()
