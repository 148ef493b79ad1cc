"""The documentation site: `make docs` builds it without warnings, its tutorials run, and every page is reachable."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fxwrap
from tests.conftest import NO_SPHINX
from tests.support.documents import ROOT, check_printed, run_snippets

DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.skipif(getattr(importlib.util.find_spec("sphinx"), "origin", None) is None, reason=NO_SPHINX)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html", DOCS, tmp_path / "site"]
    built = subprocess.run([*command, "-d", tmp_path / "cache"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    text = (tmp_path / "site" / "reference" / "functions.html").read_text()
    assert "Returns the graphs that this process compiled" in text
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r'<(?:script|img|link)[^>]*(?:src|href)="https?://', page.read_text()), page.name


def test_every_page_is_in_a_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text()
    trees = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(entries) == [page for page in PAGES if page != "index"]


def test_the_reference_has_every_public_name() -> None:
    """A page lists the names of its module's `__all__`."""
    pages = "".join([path.read_text() for path in (DOCS / "reference").glob("*.md")])
    shown = set(re.findall(r"\{fxwrap-names\} ([\w.]+)", pages))
    modules = {f"fxwrap.{name}" for name in fxwrap.__all__ if inspect.ismodule(getattr(fxwrap, name))}
    assert {"fxwrap", *modules, "fxwrap.lines", "fxwrap.errors", "fxwrap.testing"} <= shown


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(
    tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    assert len(tutorial.read_text().splitlines()) <= 200
    assert run_snippets(tutorial.relative_to(ROOT).as_posix())


def test_the_program_of_a_tutorial_is_printed(update_golden: bool) -> None:
    document = "docs/tutorials/read_a_program.md"
    program = str(run_snippets(document)["program"])
    check_printed(document, {"program": program[: program.index("\nkernel @")]}, update_golden)
