"""A cache folder of a test's own, with the compile cache on; the bridge is that of the other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fxwrap.compile_cache import cache
from fxwrap.runtime.kernels import prepare_kernels
from fxwrap.runtime.native import build_bridge
from fxwrap.runtime.native.prebuilt import empty_prebuilt_tables


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the cache is in during the test."""
    bridge = build_bridge().folder
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / bridge.name).symlink_to(bridge)
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(folder))
    prepare_kernels.cache_clear()
    monkeypatch.setenv(cache.CACHE_ENV, "1")
    with empty_prebuilt_tables():  # without libraries from the folders of other tests
        yield folder


@pytest.fixture
def entries(cache_folder: Path) -> Path:
    """The folder of the cache's entries."""
    return cache_folder / cache.FOLDER
