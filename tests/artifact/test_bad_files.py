"""Damaged, foreign and hostile files are rejected with an error that names the entry and the remedy."""

from __future__ import annotations

import errno
import hashlib
import io
import multiprocessing
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxwrap
from fxwrap.artifact import saving
from fxwrap.artifact.archive import CHUNK, content_hash
from fxwrap.errors import ArtifactError, OptionError
from tests.artifact.archives import Entries, archive_of, entries_of, with_manifest, with_manifest_entry
from tests.artifact.programs import batch, compiled
from tests.support.long_form import sample_size


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A saved program."""
    path = tmp_path_factory.mktemp("saved") / "small.fxw"
    compiled("cpp", memory_planning="auto").save(path)
    return path.read_bytes()


def load_error(content: bytes, tmp_path: Path) -> ArtifactError:
    """The error that loading such a file raises."""
    path = tmp_path / "bad.fxw"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        fxwrap.load(path)
    assert caught.value.path == str(path) and str(path) in str(caught.value)
    assert caught.value.remedy and caught.value.remedy in str(caught.value)
    return caught.value


def kernel_entry(entries: Entries) -> str:
    return next(name for name in entries if name.startswith("kernels/"))


def test_damaged_entries_are_named_in_the_error(content: bytes, tmp_path: Path) -> None:
    entries = entries_of(content)
    for name, text in entries.items():
        middle = len(text) // 2
        damaged = {**entries, name: text[:middle] + bytes([text[middle] ^ 1]) + text[middle + 1 :]}
        error = load_error(archive_of(damaged), tmp_path)
        assert error.entry == ("manifest.json" if name == "manifest.sha256" else name), name
        assert "damaged" in error.reason
        missing = {other: item for other, item in entries.items() if other != name}
        assert load_error(archive_of(missing), tmp_path).entry == name


def test_a_truncated_file(content: bytes, tmp_path: Path) -> None:
    for length in (len(content) - 1, len(content) - 50, len(content) // 2, 100):
        assert "truncated" in load_error(content[:length], tmp_path).reason
    assert "was not written by fxwrap.save" in load_error(b"", tmp_path).reason


def test_foreign_files(content: bytes, tmp_path: Path) -> None:
    assert "was not written by fxwrap.save" in load_error(b"\x80\x02torch", tmp_path).reason
    torch.save({"a": torch.ones(3)}, tmp_path / "state.pt")
    error = load_error((tmp_path / "state.pt").read_bytes(), tmp_path)
    assert error.entry == "manifest.json" and "another kind of zip file" in error.reason
    other = with_manifest(entries_of(content), lambda manifest: manifest.update(format="other"))
    assert "not the manifest of a saved program" in load_error(archive_of(other), tmp_path).reason
    with pytest.raises(ArtifactError, match="No such file"):
        fxwrap.load(tmp_path / "absent.fxw")
    with pytest.raises(ArtifactError, match="directory"):
        fxwrap.load(tmp_path)


def test_a_newer_format_names_the_version_that_wrote_it(content: bytes, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["format_version"] = 2
        manifest["written_by"]["fxwrap"] = "9.1"

    error = load_error(archive_of(with_manifest(entries_of(content), change)), tmp_path)
    assert error.reason == "the file has format 2; this fxwrap reads format 1" and "fxwrap 9.1" in error.remedy


@pytest.mark.parametrize("name", ["../evil.so", "/etc/evil", "kernels/../../evil", "..\\evil", "C:evil", "a//", "a\0b"])
def test_entries_with_paths_outside_the_archive(name: str, content: bytes, tmp_path: Path) -> None:
    """The entry gets its name in the finished archive, because zipfile would cut the last of these at its NUL."""
    other = "q" * len(name)
    archive = archive_of({**entries_of(content), other: b"evil"}).replace(other.encode(), name.encode())
    error = load_error(archive, tmp_path)
    assert error.entry == name and "its name is not a plain path" in error.reason
    assert [item.name for item in tmp_path.iterdir()] == ["bad.fxw"]


def test_duplicate_and_unlisted_entries(content: bytes, tmp_path: Path) -> None:
    entries = entries_of(content)
    added = archive_of({**entries, "program.xx": entries["program.ir"]})
    error = load_error(added.replace(b"program.xx", b"program.ir"), tmp_path)
    assert (error.entry, error.reason) == ("program.ir", "its name occurs twice")
    error = load_error(archive_of({**entries, "extra.txt": b"?"}), tmp_path)
    assert (error.entry, error.reason) == ("extra.txt", "the manifest does not list it")


def test_a_zip_bomb_is_rejected(content: bytes, tmp_path: Path) -> None:
    entries = entries_of(content)
    bomb = archive_of({**entries, "constants.safetensors": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    error = load_error(bomb, tmp_path)
    assert "is compressed" in error.reason
    claimed = with_manifest(entries, lambda manifest: manifest["entries"]["constants.safetensors"].update(size=1 << 60))
    error = load_error(archive_of(claimed), tmp_path)
    assert error.entry == "constants.safetensors" and f"instead of {1 << 60}" in error.reason


def test_entries_that_overlap(content: bytes, tmp_path: Path) -> None:
    """Two entries of the directory that name one place: how a small file becomes a large one without compression."""
    entries = entries_of(content)
    plain = archive_of({**entries, "a.txt": bytes(1000), "b.txt": b"second"})
    with zipfile.ZipFile(io.BytesIO(plain)) as archive:
        place = {name: archive.getinfo(name).header_offset for name in ("a.txt", "b.txt")}
    head = plain.rindex(b"b.txt") - 46
    assert plain[head : head + 4] == b"PK\x01\x02"
    moved = plain[: head + 42] + place["a.txt"].to_bytes(4, "little") + plain[head + 46 :]
    assert load_error(moved, tmp_path).entry in ("a.txt", "b.txt")


def test_a_kernel_hash_mismatch(content: bytes, tmp_path: Path) -> None:
    entries = entries_of(content)
    name = kernel_entry(entries)
    error = load_error(archive_of(with_manifest_entry(entries, name, entries[name] + b"\n// more")), tmp_path)
    assert error.entry == name and "has the hash" in error.reason


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("program.ir", b"program @f(", "not a program"),
        ("program.ir", b"\xff\xfe", "not a text"),
        ("program.ir", b"program @f(%x: borrowed f32[4]@cpu) {\n  memory.free(%x)\n  control.return()\n}\n", "free"),
        ("origins.json", b"{}", "cannot be read"),
        ("memory_plan.json", b"[]", "invalid memory plan"),
        ("constants.safetensors", bytes(8), "tensors"),
        ("constants.safetensors", (1 << 62).to_bytes(8, "little"), "longer than the file"),
    ],
)
def test_invalid_content_with_a_valid_hash(name: str, text: bytes, reason: str, content: bytes, tmp_path: Path) -> None:
    error = load_error(archive_of(with_manifest_entry(entries_of(content), name, text)), tmp_path)
    assert error.entry == name and reason in error.reason


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("entries"),
        lambda manifest: manifest.pop("constants"),
        lambda manifest: manifest.update(emitter="rust"),
        lambda manifest: manifest["kernels"][0].pop("hash"),
        lambda manifest: manifest["constants"]["windows"].pop(),
        lambda manifest: manifest["constants"]["windows"][0].update(start=10**9),
        lambda manifest: manifest["constants"]["windows"][0].update(dtype="f64"),
        lambda manifest: manifest["constants"]["windows"][0].update(strides=[-1, 1]),
        lambda manifest: manifest["binaries"].pop("bridge"),
        lambda manifest: manifest["binaries"].update(programs=3),
        lambda manifest: manifest.update(binaries=[]),
        lambda manifest: manifest.update(kernels=7),
        lambda manifest: manifest["entries"].update({"program.ir": 3}),
    ],
)
def test_an_inconsistent_manifest(change: Callable[[dict[str, Any]], None], content: bytes, tmp_path: Path) -> None:
    load_error(archive_of(with_manifest(entries_of(content), change)), tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    """A saved program without compiled code, and the positions of its entry headers and central directory."""
    path = tmp_path_factory.mktemp("saved") / "small.fxw"
    fxwrap.save(compiled("interpreter", fuse=False), path, emitters=[])
    content = path.read_bytes()
    return content, [place for place in range(len(content)) if content[place : place + 2] == b"PK"]


@settings(max_examples=sample_size(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_always_detected(data: st.DataObject, small: tuple[bytes, list[int]], tmp_path: Path) -> None:
    """Positions are drawn from the headers and directory as often as from the contents, which are far longer."""
    content, heads = small
    last = len(content) - 1
    near_a_head = st.builds(lambda head, more: min(head + more, last), st.sampled_from(heads), st.integers(0, 60))
    changed = bytearray(content)
    for place in data.draw(st.lists(st.one_of(st.integers(0, last), near_a_head), min_size=1, max_size=4)):
        changed[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "flipped.fxw"
    path.write_bytes(changed)
    saved = compiled("interpreter", fuse=False)
    try:
        loaded = fxwrap.load(path)
    except ArtifactError:
        return
    assert loaded.program == saved.program
    calls = saved.program.store.tensors["b_calls"]
    torch.testing.assert_close(loaded(batch()) - loaded.program.store.tensors["b_calls"], saved(batch()) - calls)


# --- saving ---------------------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.fxw"
    path.write_text("what was there before")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write_constants", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        compiled().save(path)
    monkeypatch.setattr(saving, "write_constants", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiled().save(path)
    assert path.read_text() == "what was there before" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ArtifactError, match="it cannot be written: No such file"):
        compiled().save(tmp_path / "absent" / "small.fxw")


def _save_repeatedly(path: str) -> None:
    program = fxwrap.parse("program @f(%x: owned f32[4]@cpu) {\n  control.return(%x)\n}\n")
    for _ in range(5):
        fxwrap.save(program, path)


def test_concurrent_saves_to_one_path(tmp_path: Path) -> None:
    path = tmp_path / "f.fxw"
    processes = [
        multiprocessing.get_context("fork").Process(target=_save_repeatedly, args=(str(path),)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if path.exists():
            assert fxwrap.load(path).program.name == "f"
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    _save_repeatedly(str(tmp_path / "f.fxw"))
    (tmp_path / "plain").touch()
    assert (tmp_path / "f.fxw").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_unknown_save_options(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "small.fxw").write_bytes(content)
    with pytest.raises(OptionError, match="unknown emitter 'rust'"):
        fxwrap.load(tmp_path / "small.fxw", emitter="rust")
    with pytest.raises(OptionError, match="unknown choice of binaries 'never'"):
        fxwrap.load(tmp_path / "small.fxw", binaries="never")


def test_chunked_hash_equals_hash_of_whole_content() -> None:
    content = bytes(range(256)) * (CHUNK // 128) + b"end"
    parts = [hashlib.sha256(content[start : start + CHUNK]).digest() for start in range(0, len(content), CHUNK)]
    assert content_hash([content[:5], content[5:]]) == hashlib.sha256(b"".join(parts)).hexdigest()
    assert content_hash([b"short"]) == hashlib.sha256(b"short").hexdigest()
    assert content_hash([]) == hashlib.sha256().hexdigest()
