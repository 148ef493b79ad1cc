"""The files of the cache: many processes at once, damage, versions, the folder's size, a folder that is read-only."""

from __future__ import annotations

import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from fxwrap import Options, cache_limit
from fxwrap.artifact import archive
from fxwrap.compile_cache import cache, key
from fxwrap.errors import OptionError
from tests.cache.graphs import CALLS, assert_same, compiled, inputs


def in_child(run: Callable[[], bool]) -> int:
    """Starts a process with all that this one has loaded; returns its number. It ends with 0 where `run` says True."""
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


def _runs_right() -> bool:
    found = compiled()
    assert_same(found(*inputs()))
    return True


def test_sixteen_processes_at_once(entries: Path) -> None:
    children = [in_child(_runs_right) for _ in range(16)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0] * 16
    (entry,) = entries.iterdir()
    assert entry.suffix == ".fxw"
    assert compiled().cached


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(
    entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> bool:
        monkeypatch.setattr(archive.os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return _runs_right()

    _, status = os.waitpid(in_child(killed), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    (left,) = entries.iterdir()
    assert left.suffix == ".tmp"
    assert not compiled().cached
    assert compiled().cached
    old = time.time() - 2 * cache_limit.ABANDONED
    os.utime(left, (old, old))
    cache_limit.limit_cache()
    assert [item.suffix for item in entries.iterdir()] == [".fxw"]


def _damage(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]


def test_damaged_truncated_and_foreign_entries_are_replaced(entries: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled()
    (entry,) = entries.iterdir()
    whole = entry.read_bytes()
    cases = {
        "truncated": whole[: len(whole) // 2], "empty": b"", "text": b"no archive at all",
        "damaged program": _damage(whole, whole.index(b"program @")),
        "damaged manifest": _damage(whole, whole.index(b"format_version")),
    }  # fmt: skip
    for name, content in cases.items():
        entry.write_bytes(content)
        caplog.clear()
        with caplog.at_level("WARNING", "fxwrap.cache"):
            found = compiled()
        assert not found.cached, name
        assert "an entry of the cache is of no use" in caplog.text, name
        assert_same(found(*inputs()))
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
        changed.setattr(key, "_process_parts", lambda: ("fxwrap=9.9.9",))
        assert not compiled().cached
        assert compiled().cached
    assert compiled().cached
    assert len(list(entries.iterdir())) == 2


@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_compiled_code_that_is_damaged_or_gone_is_made_again(
    cache_here: Path, emitter: str
) -> None:
    def runs_right() -> bool:
        assert_same(compiled(Options(emitter=emitter))(*inputs()))
        return True

    assert os.waitpid(in_child(runs_right), 0)[1] == 0
    libraries = list((cache_here / "programs").glob("*/*.so"))
    assert libraries
    for gone in (False, True):
        for library in libraries:
            content = library.read_bytes()
            library.unlink()  # it may be loaded: what is written into it now would be seen there
            library.write_bytes(_damage(content, 5000))
            if gone:
                shutil.rmtree(library.parent)
        assert os.waitpid(in_child(runs_right), 0)[1] == 0
        assert all(library.is_file() for library in libraries)


def test_least_recently_used_goes_first(cache_here: Path, entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        shutil.rmtree(cache_here / folder, ignore_errors=True)
    assert cache_limit.limit_cache() >= 1.5 * size
    assert [name for name in names if paths[name].exists()] == [names[0], names[3]]


def test_the_folders_that_grow_are_limited(cache_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = time.time() - 10_000
    for kind in cache_limit.KINDS:
        item = cache_here / kind / "item"
        item.mkdir(parents=True)
        (item / "content").write_bytes(bytes(1000))
        os.utime(item, (old, old))
    notes = cache_here / "kernels"
    notes.mkdir()
    (notes / "gone").write_text("programs/item/content")
    monkeypatch.setattr(cache_limit, "cache_limit", lambda: 1)
    cache_limit.limit_cache()
    assert [kind for kind in cache_limit.KINDS if list((cache_here / kind).iterdir())] == []
    assert not list(notes.iterdir())
    fresh = cache_here / "compiled" / "fresh"
    fresh.write_bytes(bytes(1000))
    assert cache_limit.limit_cache() == 0 and fresh.exists()


def test_the_limit_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_limit.cache_limit() == cache_limit.DEFAULT_LIMIT << 20
    monkeypatch.setenv(cache_limit.LIMIT_VARIABLE, "3")
    assert cache_limit.cache_limit() == 3 << 20
    monkeypatch.setenv(cache_limit.LIMIT_VARIABLE, "3 MB")
    with pytest.raises(OptionError, match="FXWRAP_CACHE_LIMIT is a number of MiB"):
        cache_limit.cache_limit()


def test_a_folder_that_cannot_be_written_to_is_read(
    entries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(CALLS.replace(emitter="interpreter"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # this process may write everywhere

    monkeypatch.setattr(archive.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(cache_limit.os, "utime", refuse)
    assert compiled(CALLS.replace(emitter="interpreter")).cached
    with caplog.at_level("INFO", "fxwrap.cache"):
        found = compiled(CALLS.replace(emitter="interpreter"), name="other")
    assert not found.cached and "is not kept in the cache" in caplog.text
    assert_same(found(*inputs()))


def test_no_entry_is_written_where_a_folder_is_in_the_way(cache_here: Path) -> None:
    (cache_here / cache.FOLDER).write_text("a file")
    for _ in range(2):
        found = compiled()
        assert not found.cached
        assert_same(found(*inputs()))
