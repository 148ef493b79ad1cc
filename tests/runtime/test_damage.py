"""A small part of `python -m tests.runtime.damage`: damaged caches and programs, and processes that are killed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.runtime.damage import FUZZERS, is_bad

COUNTS = {"programs": 12, "cache": 5, "kills": 2}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUZZERS)
def test_random_damage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    for variable in ("CXX", "FXWRAP_CACHE_DIR", "FXWRAP_COMPILE_CACHE", "TMPDIR"):  # a run sets them
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    seed = random.randrange(1 << 30)
    assert [case for case in FUZZERS[name](COUNTS[name], seed, tmp_path) if is_bad(case)] == [], f"seed {seed}"
