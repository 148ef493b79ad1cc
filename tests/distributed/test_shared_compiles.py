"""The ranks of a job compile each graph once."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from fxwrap import CompileCounts
from tests.distributed.processes import run_ranks


def test_ranks_share_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "1")
    cases = ("shared", "failed", "other_options", "other_versions", "late")
    first, second = run_ranks("tests.distributed.compile_rank", tmp_path, *cases)
    counts = [CompileCounts(*rank["shared"]) for rank in (first, second)]
    assert sum(item.compiled for item in counts) == 2
    assert sum(item.received for item in counts) == sum(item.shared for item in counts) == 2
    assert all(item.compiled + item.loaded == 2 and not item.timeouts for item in counts)
    assert first["failed"] == second["failed"] == ["GraphError", 0]
    assert first["other_options"] == ""
    assert second["other_options"] == (
        "RankError: ranks compile 'program' with options that differ: memory_planning=none on rank 0 and "
        "memory_planning=reuse on rank 1. Compile with the same options on all ranks"
    )
    assert first["other_versions"] == ""
    assert re.fullmatch(
        rf"ranks compile versions that differ: torch={re.escape(version('torch'))} on rank [01] and torch=1\.0 on "
        r"rank 1\. Install the same packages on all ranks",
        second["other_versions"],
    )
    counts = [CompileCounts(*rank["late"]) for rank in (first, second)]
    assert counts == [CompileCounts(compiled=1, shared=1), CompileCounts(compiled=1, shared=1, timeouts=1)]
