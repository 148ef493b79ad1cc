"""The libraries of a wheel: copied to the cache folder, checked, and compiled instead where they cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxwrap.runtime.cache_folder import cache_folder, is_intact, seal_entry
from fxwrap.runtime.native import (
    BRIDGE_LIBRARIES,
    bridge_build,
    build_bridge,
    build_planner,
    package_bridge,
    package_planner,
    packaged,
)

BRIDGE, _BINDING = BRIDGE_LIBRARIES


@pytest.fixture
def wheel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The libraries of a wheel for this torch, in an installation with an empty cache folder beside the common one."""
    folder = tmp_path / "compiled"
    package_bridge(folder)
    package_planner(folder)
    compiled = build_bridge().folder
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / compiled.name).symlink_to(compiled)  # what a fallback compiles
    with packaged.installed_libraries(folder):
        yield folder


def bridge_entry(folder: Path) -> Path:
    (entry,) = folder.glob("bridge-*")
    return entry


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fxwrap.native"]


def test_intact_libraries_are_copied_to_the_cache_folder(wheel_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxwrap.native")
    bridge = build_bridge()
    assert bridge.folder == cache_folder() / bridge_entry(wheel_folder).name and bridge.seconds == 0
    assert is_intact(bridge.folder) and messages(caplog) == []
    assert (bridge.folder / BRIDGE).read_bytes() == (bridge_entry(wheel_folder) / BRIDGE).read_bytes()
    assert build_bridge().folder == bridge.folder


def test_a_compiler_is_not_needed(wheel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_bridge().folder.name == bridge_entry(wheel_folder).name
    assert build_planner().is_file()


def test_damaged_libraries_are_reported_once_and_compiled(wheel_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = bridge_entry(wheel_folder) / BRIDGE
    content = bytearray(library.read_bytes())
    content[1000] ^= 1
    library.write_bytes(content)
    for _ in range(2):
        assert build_bridge().folder.name != bridge_entry(wheel_folder).name
    (message,) = messages(caplog)
    assert "are not used, and are compiled now: they are damaged" in message and "install it again" in message


def test_a_library_of_another_system_is_reported_and_compiled(
    wheel_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = bridge_entry(wheel_folder)
    (entry / BRIDGE).write_bytes(b"\x7fELF of another system")
    seal_entry(entry, entry.name)
    assert build_bridge().folder.name != entry.name
    (message,) = messages(caplog)
    assert "cannot be loaded" in message
    assert not (cache_folder() / entry.name).exists()


def test_a_wheel_for_other_versions_is_reported(
    wheel_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge_build, "torch_identity", lambda: ("9.9.0", "another commit"))
    assert build_bridge().folder.name != bridge_entry(wheel_folder).name
    (message,) = messages(caplog)
    assert f"none of them is for torch {torch.__version__}" in message


def test_damage_in_the_cache_folder_is_mended_from_the_wheel(wheel_folder: Path) -> None:
    library = build_bridge().folder / BRIDGE
    library.unlink()  # it is loaded: its memory must not change
    library.write_bytes(b"")
    assert (build_bridge().folder / BRIDGE).stat().st_size > 1000
    assert build_bridge().folder == library.parent
