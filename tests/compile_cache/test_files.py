"""The files of the cache: many processes at once, damage, versions, the folder's size, a folder that is read-only."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from fxwrap import Options
from fxwrap.compile_cache import key
from fxwrap.errors import OptionError
from fxwrap.runtime import cache_eviction as cache_limit
from tests.compile_cache.graphs import CALLS, assert_same, compiled, inputs


def in_child(run: Callable[[], bool]) -> int:
    """Forks a process and returns its id. Its exit status is 0 if `run` returns True."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = 0 if run() else 2
    except Exception:  # noqa: BLE001 - it is the process that ends
        traceback.print_exc()
    finally:
        os._exit(code)


def _check_results() -> bool:
    program = compiled()
    assert_same(program(*inputs()))
    return True


def test_concurrent_writers(entries: Path) -> None:
    children = [in_child(_check_results) for _ in range(16)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0] * 16
    (entry,) = entries.iterdir()
    assert entry.suffix == ".fxw"
    assert compiled().cached


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(
    entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> bool:
        monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return _check_results()

    _, status = os.waitpid(in_child(killed), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    (left,) = entries.iterdir()
    assert left.suffix == ".tmp"
    assert not compiled().cached
    assert compiled().cached
    old = time.time() - 2 * cache_limit.STALE_TEMPORARY_SECONDS
    os.utime(left, (old, old))
    cache_limit.evict_cache()
    assert [item.suffix for item in entries.iterdir()] == [".fxw"]


def _corrupt(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]


def test_corrupt_truncated_and_foreign_entries_are_replaced(entries: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled()
    (entry,) = entries.iterdir()
    whole = entry.read_bytes()
    cases = {
        "truncated": whole[: len(whole) // 2], "empty": b"", "text": b"no archive at all",
        "damaged program": _corrupt(whole, whole.index(b"program @")),
        "damaged manifest": _corrupt(whole, whole.index(b"format_version")),
    }  # fmt: skip
    for name, content in cases.items():
        entry.write_bytes(content)
        caplog.clear()
        with caplog.at_level("WARNING", "fxwrap.cache"):
            program = compiled()
        assert not program.cached, name
        assert "is unusable, and it is compiled again" in caplog.text, name
        assert_same(program(*inputs()))
        assert entry.read_bytes() == whole, name
    assert compiled().cached


def test_an_entry_of_another_compile_is_replaced(entries: Path) -> None:
    compiled()
    (entry,) = entries.iterdir()
    whole = entry.read_bytes()
    compiled(name="other")
    (other,) = [path for path in entries.iterdir() if path != entry]
    shutil.copyfile(other, entry)
    assert not compiled().cached
    assert entry.read_bytes() == whole


def test_another_version_has_entries_of_its_own(entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    with monkeypatch.context() as changed:
        changed.setattr(key, "process_environment", lambda: ("fxwrap=9.9.9",))
        assert not compiled().cached
        assert compiled().cached
    assert compiled().cached
    assert len(list(entries.iterdir())) == 2


@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_corrupt_or_missing_binaries_are_rebuilt(cache_folder: Path, emitter: str) -> None:
    def runs_right() -> bool:
        assert_same(compiled(Options(emitter=emitter))(*inputs()))
        return True

    assert os.waitpid(in_child(runs_right), 0)[1] == 0
    libraries = list((cache_folder / "programs").glob("*/*.so"))
    assert libraries
    for gone in (False, True):
        for library in libraries:
            content = library.read_bytes()
            library.unlink()  # it may be loaded: overwriting it would change the loaded code
            library.write_bytes(_corrupt(content, 5000))
            if gone:
                shutil.rmtree(library.parent)
        assert os.waitpid(in_child(runs_right), 0)[1] == 0
        assert all(library.is_file() for library in libraries)


def test_least_recently_used_entries_are_evicted_first(
    cache_folder: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"layer{number}" for number in range(4)]
    paths = {}
    for number, name in enumerate(names):
        before = set(entries.iterdir()) if entries.is_dir() else set()
        compiled(name=name)
        (paths[name],) = set(entries.iterdir()) - before
        old = time.time() - 10_000 + number
        os.utime(paths[name], (old, old))
    assert compiled(name=names[0]).cached  # now it is the one that was used last
    size = paths[names[0]].stat().st_size
    monkeypatch.setattr(cache_limit, "cache_limit", lambda: int(2.5 * size))
    for folder in ("python", "programs", "loaded"):
        shutil.rmtree(cache_folder / folder, ignore_errors=True)
    assert cache_limit.evict_cache() >= 1.5 * size
    assert [name for name in names if paths[name].exists()] == [names[0], names[3]]


def test_every_growing_folder_has_a_size_limit(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = time.time() - 10_000
    for kind in cache_limit.EVICTABLE_FOLDERS:
        item = cache_folder / kind / "item"
        item.mkdir(parents=True)
        (item / "content").write_bytes(bytes(1000))
        os.utime(item, (old, old))
    notes = cache_folder / "kernels"
    notes.mkdir()
    (notes / "gone").write_text("programs/item/content")
    monkeypatch.setattr(cache_limit, "cache_limit", lambda: 1)
    cache_limit.evict_cache()
    assert [kind for kind in cache_limit.EVICTABLE_FOLDERS if list((cache_folder / kind).iterdir())] == []
    assert not list(notes.iterdir())
    fresh = cache_folder / "compiled" / "fresh"
    fresh.write_bytes(bytes(1000))
    assert cache_limit.evict_cache() == 0 and fresh.exists()


def test_one_process_in_ten_minutes_checks_the_size(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a folder of 100,000 files takes seconds."""
    monkeypatch.setattr(cache_limit, "cache_limit", lambda: 1)
    old, entry = time.time() - 10_000, cache_folder / "compiled" / "entry"
    entry.parent.mkdir()

    def evicts(checked: float) -> bool:
        """Whether a compile evicts an old entry, where the last check was at this time."""
        entry.write_bytes(bytes(1000))
        os.utime(entry, (old, old))
        os.utime(cache_folder / "size_checked", (checked, checked))
        compiled(name=f"layer{checked}")
        return not entry.exists()

    compiled()
    assert [evicts(time.time() + seconds) for seconds in (-60, -700, 700)] == [False, True, True]
    assert not evicts(time.time())


def test_the_limit_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_limit.cache_limit() == cache_limit.DEFAULT_LIMIT << 20
    monkeypatch.setenv(cache_limit.LIMIT_ENV, "3")
    assert cache_limit.cache_limit() == 3 << 20
    monkeypatch.setenv(cache_limit.LIMIT_ENV, "3 MB")
    with pytest.raises(OptionError, match="FXWRAP_CACHE_LIMIT must be a number of MiB"):
        cache_limit.cache_limit()


def test_a_read_only_folder_is_still_read(
    entries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(CALLS.replace(emitter="interpreter"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # this process may write everywhere

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    assert compiled(CALLS.replace(emitter="interpreter")).cached
    with caplog.at_level("INFO", "fxwrap.cache"):
        program = compiled(CALLS.replace(emitter="interpreter"), name="other")
    assert not program.cached and "is not cached" in caplog.text
    assert_same(program(*inputs()))


def test_whatever_is_in_an_entrys_place_is_replaced(entries: Path) -> None:
    entries.write_text("a file in the folder's place")
    assert not compiled().cached and compiled().cached
    (entry,) = entries.iterdir()
    makers: tuple[Callable[[Path], object], ...] = (
        Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("absent"),
    )  # fmt: skip
    for make in makers:
        entry.unlink()
        make(entry)
        program = compiled()
        assert not program.cached
        assert_same(program(*inputs()))
        assert compiled().cached
