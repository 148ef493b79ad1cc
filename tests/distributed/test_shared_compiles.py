"""The ranks of a job compile each graph once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.processes import run_ranks


def test_ranks_share_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "1")
    cases = ("shared", "failed", "other_options", "late")
    first, second = run_ranks("tests.distributed.compile_rank", tmp_path, *cases)
    assert first["shared"] + second["shared"] == 2
    assert first["failed"] == second["failed"] == ["GraphError", True]
    assert first["other_options"] == ""
    assert second["other_options"] == (
        "RankError: ranks compile 'program' with options that differ: memory_planning=none on rank 0 and "
        "memory_planning=reuse on rank 1. Compile with the same options on all ranks"
    )
    assert (first["late"], second["late"]) == (1, 1)
