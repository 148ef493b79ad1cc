"""Runs of compute-sanitizer: a tool of the same name, which prints reports for one of two files of tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import results
from tests import sanitize_kernels

TOOL = """#!/bin/sh
for path; do true; done
echo "4 passed, 2 deselected in 1.00s"
case "$2 $path" in
"memcheck wrong.py") echo "========= Invalid __global__ read of size 4 bytes"; exit 1;;
"racecheck wrong.py") echo "========= Internal Sanitizer Error: no memory"; exit 1;;
esac
echo "========= ERROR SUMMARY: 0 errors"
"""


def test_reports_fail_a_run_and_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compute-sanitizer").write_text(TOOL)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(
        results, "write_result", lambda path, result: (tmp_path / "rows.json").write_text(json.dumps(result))
    )
    arguments = ["--device", "cpu", "--record", "--log", str(tmp_path / "log")]
    assert sanitize_kernels.main([*arguments, "right.py", "wrong.py"]) == 1
    result = json.loads((tmp_path / "rows.json").read_text())
    raw = {(row["tool"], row["tests of"]): item for row, item in zip(result["rows"], result["raw"], strict=True)}
    assert raw.pop(("memcheck", "wrong.py")) == ["Invalid __global__ read of size 4 bytes"]
    assert len(raw) == 3 and not any(raw.values())
    stopped = [row["tests of"] for row in result["rows"] if row["result"] == "an internal error of the tool"]
    assert stopped == ["wrong.py"]
    assert (tmp_path / "log").read_text().startswith("4 passed")
    assert sanitize_kernels.main(["--device", "cpu", "right.py"]) == 0
