"""What every test runs under: one thread a process, and no skip that nobody counts."""

from __future__ import annotations

import gc
import os
import platform
from collections import Counter
from collections.abc import Generator, Hashable
from contextlib import suppress
from importlib import import_module
from typing import Any
from zlib import crc32

# Must be set before torch is imported. Under pytest-xdist each worker has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests are of what compiles now, not of what another run left in the cache; tests/cache turns it on.
os.environ.setdefault("FXWRAP_COMPILE_CACHE", "0")
# Buckets do not depend on the speed of this machine.
os.environ.setdefault("FXWRAP_MEASURE_GROUPS", "0")
if "PYTEST_XDIST_WORKER" in os.environ:  # there are processes enough
    os.environ.setdefault("FXWRAP_COMPILE_WORKERS", "0")

import pytest

from tests.support.long_form import LONG, short_form

NO_CUDA = "needs a CUDA device"
NO_SECOND_CUDA = "needs two CUDA devices"
HAS_CUDA = "needs a machine without CUDA devices"
NO_ACCELERATE = "needs the package accelerate, which the Trainer of transformers imports"
NO_CHROMIUM = "needs the browser Chromium"
NO_CMAKE = "needs CMake"
NO_CLANG = "needs clang++ with OpenMP, in PATH or named by FXWRAP_CLANG"
NO_EXPECTTEST = "needs the package expecttest, which torch's operator database imports"
NO_HATCHLING = "needs the package hatchling, which builds wheels"
NO_PKG_CONFIG = "needs pkg-config"
NO_PYDOT = "needs the package pydot, by which torch draws graphs"
NO_PYGMENTS = "needs the package pygments, which colours emitted text"
NO_TQDM = "needs the package tqdm, which shows the progress of a compile"
NO_SANITIZER = "needs a compiler with the sanitizers of threads and addresses"
NO_SPHINX = "needs Sphinx, which make docs installs"
NO_SCRIPT_CLASSES = "needs libtorchbind_test.so, which some builds of torch do not ship"
NO_X86 = "needs an x86-64 processor"

_OFTEN_MISSING = (
    *(NO_ACCELERATE, NO_CMAKE, NO_EXPECTTEST, NO_HATCHLING, NO_PKG_CONFIG, NO_PYDOT, NO_PYGMENTS, NO_SANITIZER),
    NO_TQDM,
)
"""What CI has, and other machines may lack."""

ON_X86 = platform.machine() in ("x86_64", "AMD64")

# The only reasons for which a test may be skipped. A skip for any other reason is reported as a failure.
ALLOWED_SKIPS = frozenset(
    {
        *(NO_CUDA, NO_SECOND_CUDA, HAS_CUDA, NO_CHROMIUM, NO_CLANG, NO_SCRIPT_CLASSES, NO_SPHINX),
        *(() if ON_X86 else (NO_X86,)),
        *(() if "CI" in os.environ else _OFTEN_MISSING),
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what is printed")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten rather than compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Loads the fixtures where tests run: the session of pytest-xdist that starts workers does without torch."""
    if not session.config.pluginmanager.has_plugin("dsession"):
        session.config.pluginmanager.import_plugin("tests.support.torch_plugin")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Imports test modules from the last to the first in each second worker, before it collects them in order.

    In a fresh clone no module's assertions are rewritten. Workers that start from both ends each rewrite half of them.
    """
    if int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2 == 0:
        return
    root = session.config.rootpath
    folders = [root / argument.partition("::")[0] for argument in session.config.args]
    for path in sorted((path for folder in folders for path in folder.rglob("test_*.py")), reverse=True):
        with suppress(Exception, pytest.skip.Exception):  # the module's collection reports it
            import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Leaves modules and collected tests out of garbage collections, of which there are few."""
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)


# The longest tests run first, or one core would wait for the other at the end. So do those that fork processes: one
# worker has most of them, and imports once what they are forked with.
_LONGEST = ("test_native_threads.py", "test_cmake_export.py", "test_precompile.py")
_FORKING = ("forking_context", "run_python", "run_ranks")


_LONG_CASES = pytest.StashKey[int]()
"""The number of cases that this run left to the long form."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _runs_first(item))
    if not LONG:
        _mark_combinations_long(items)
    import torch  # where nothing is collected, it is not imported

    without_gpus = not torch.cuda.is_available()
    chosen, long = [], []
    for item in items:
        if item.get_closest_marker("gpu") and without_gpus:
            item.add_marker(pytest.mark.skip(reason=NO_CUDA))
        elif item.get_closest_marker("long") and not LONG:
            long.append(item)
            continue
        chosen.append(item)
    # Deselected, not skipped: a skip takes milliseconds in each of two processes, and there are thousands.
    config.hook.pytest_deselected(items=long)
    items[:] = chosen
    config.stash[_LONG_CASES] = len(long)
    if hasattr(config, "workeroutput"):  # of a worker of pytest-xdist
        config.workeroutput["long_cases"] = len(long)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over the number of cases that a worker of pytest-xdist left out: each collects the same ones."""
    node.config.stash[_LONG_CASES] = getattr(node, "workeroutput", {}).get("long_cases", 0)


def _runs_first(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return item.path.name in _LONGEST or any(hasattr(module, name) for name in _FORKING)


def _mark_combinations_long(items: list[pytest.Item]) -> None:
    """Marks cases as long that others of the test cover, but for those on GPUs. Which remain depends on its name.

    Those remain that `tests.support.long_form.short_form` chooses, of a test marked `sampled(part)` for that part. Of a
    test marked `every_combination`, all remain.
    """
    families: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if not any(map(item.get_closest_marker, ("gpu", "long", "every_combination"))):
                families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, family in families.items():
        lists = [_names(mark) for mark in family[0].iter_markers("parametrize")]
        part = getattr(family[0].get_closest_marker("sampled"), "args", (1,))[0]
        remaining = {*short_form([*map(_parameters, family)], lists, crc32(name.encode()), part)}
        for position, item in enumerate(family):
            if position not in remaining:
                item.add_marker(pytest.mark.long)


def _names(mark: pytest.Mark) -> list[str]:
    """Returns the names of the parameters of a decorator."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]


def _parameters(item: pytest.Function) -> dict[str, Hashable]:
    """Returns the parameters of a test, texts and numbers with their types: 1 is neither True nor 1.0."""
    values = item.callspec.params.items()
    return {name: (type(value), value) if isinstance(value, str | int | float) else id(value) for name, value in values}


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why a test or a module was skipped; None where it was not, or where it is an expected failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _refuse_unknown_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = _skip_reason(report)
    if reason is None or reason in ALLOWED_SKIPS:
        return
    report.outcome = "failed"
    report.longrepr = f"skipped because '{reason}', which is not in ALLOWED_SKIPS of tests/conftest.py"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_unknown_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_unknown_skip(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(_skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    for reason, count in sorted(reasons.items(), key=str):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    if count := terminalreporter.config.stash.get(_LONG_CASES, 0):
        terminalreporter.write_line(f"left {count} to the long form: make long-test")
