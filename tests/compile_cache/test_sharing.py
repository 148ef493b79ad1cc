"""Processes that compile a graph at once for one cache folder: one of them compiles it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch

import fxwrap
from fxwrap.compile_cache import CompileCounts
from fxwrap.compile_cache.cache import FOLDER
from fxwrap.errors import OptionError
from fxwrap.runtime.cache_folder import file_lock
from tests.compile_cache.shared_folder import OPTIONS, X, graph_of
from tests.support.child_processes import run_python


def test_eight_processes() -> None:
    """Also after damage of the entries, with compiles that fail, and where the process that compiles is killed."""
    done = run_python(["-m", "tests.compile_cache.shared_folder", "--processes", 8])
    assert done.stdout.startswith("8 processes"), done.stderr


def test_threads_compile_once(cache_folder: Path) -> None:
    before, results, graph = fxwrap.compile_counts(), [], graph_of(2.0)

    def work() -> None:
        results.append(fxwrap.compile_graph(graph, [X], options=OPTIONS)(X)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(item, 2 * X) for item in results) and len(results) == 4
    assert fxwrap.compile_counts() - before == CompileCounts(compiled=1, loaded=3)


def test_the_time_limit(cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The lock is that of a process that does not finish."""
    fxwrap.compile_graph(graph_of(2.0), [X], options=OPTIONS)
    (entry,) = (cache_folder / FOLDER).iterdir()
    entry.unlink()
    monkeypatch.setenv("FXWRAP_COMPILE_WAIT", "0.1")
    before = fxwrap.compile_counts()
    with file_lock(cache_folder, entry.stem):
        assert torch.equal(fxwrap.compile_graph(graph_of(2.0), [X], options=OPTIONS)(X)[0], 2 * X)
    assert fxwrap.compile_counts() - before == CompileCounts(compiled=1, timeouts=1)
    assert "'program' is compiled by process" in caplog.text
    entry.unlink()
    monkeypatch.setenv("FXWRAP_COMPILE_WAIT", "0")
    with file_lock(cache_folder, entry.stem):
        fxwrap.compile_graph(graph_of(2.0), [X], options=OPTIONS)
    assert fxwrap.compile_counts() - before == CompileCounts(compiled=2, timeouts=1)


def test_a_time_limit_that_is_no_number(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_COMPILE_WAIT", "soon")
    with pytest.raises(OptionError, match="FXWRAP_COMPILE_WAIT='soon' is no number of seconds"):
        fxwrap.compile_graph(graph_of(2.0), [X], options=OPTIONS)


def test_a_folder_that_cannot_be_written(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("fxwrap.compile_cache.sharing.file_lock", fail)
    before = fxwrap.compile_counts()
    fxwrap.compile_graph(graph_of(2.0), [X], options=OPTIONS)
    assert fxwrap.compile_graph(graph_of(2.0), [X], options=OPTIONS).cached
    assert fxwrap.compile_counts() - before == CompileCounts(compiled=1, loaded=1)


def test_a_full_disk(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the entry nor the content of its lock file can be written; the compile raised the lock's OSError."""

    def fail(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def full_lock(*_arguments: object) -> Iterator[IO[bytes]]:
        with open("/dev/full", "r+b", buffering=0) as file:
            yield file

    monkeypatch.setattr("fxwrap.compile_cache.sharing.file_lock", full_lock)
    monkeypatch.setattr("fxwrap.compile_cache.cache.write_cache_file", fail)
    assert torch.equal(fxwrap.compile_graph(graph_of(2.0), [X], options=OPTIONS)(X)[0], 2 * X)
