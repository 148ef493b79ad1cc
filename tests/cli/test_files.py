"""Commands name the file that they cannot write or read; a full disk leaves no part of it and no temporary file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fxwrap
from fxwrap.cli import main
from fxwrap.errors import ArtifactError


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Lets new files of the folder raise as those of a full disk, at the first byte that is written."""
    create = tempfile.mkstemp

    def create_full(dir: Path, **arguments: str) -> tuple[int, str]:
        handle, name = create(dir=dir, **arguments)  # type: ignore[call-overload]
        if dir != folder:
            return handle, name
        os.close(handle)
        return os.open("/dev/full", os.O_RDWR), name

    monkeypatch.setattr(tempfile, "mkstemp", create_full)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a saved program."""
    module = torch.export.export(torch.nn.Identity(), (torch.ones(3),))
    fxwrap.compile_graph(module, options=fxwrap.Options(compile_cache=False)).save(tmp_path / "saved.fxw")
    return tmp_path


@pytest.mark.parametrize("name", ["values.pt", "values.npz", "values.safetensors"])
def test_values(name: str, folder: Path, full_disk: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder / "saved.fxw"), "-o", str(folder / name)]) == 3
    assert f"No space left on device: '{folder / name}'" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["saved.fxw"]


@pytest.fixture
def pipe(folder: Path) -> Iterator[tuple[Path, int]]:
    """A pipe, and the descriptor from which its content is read."""
    path = folder / "pipe.npz"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reader
    os.close(reader)


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_pipe_is_written_and_not_replaced(
    folder: Path, pipe: tuple[Path, int], is_writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder that cannot be written, as /dev/stdout."""
    path, reader = pipe
    access = os.access
    monkeypatch.setattr(os, "access", lambda item, mode: access(item, mode) and (is_writable or item != folder))
    assert main(["run", str(folder / "saved.fxw"), "-o", str(path)]) == 0
    assert path.is_fifo() and os.read(reader, 1 << 16).startswith(b"PK")


def test_a_program_is_not_saved_into_a_pipe(folder: Path, pipe: tuple[Path, int]) -> None:
    """Its entries are aligned to positions, which a pipe does not have."""
    program = fxwrap.load(folder / "saved.fxw")
    with pytest.raises(ArtifactError, match=r"pipe\.npz: it cannot be written: Illegal seek"):
        program.save(pipe[0])
    assert pipe[0].is_fifo()


def test_a_signing_key(folder: Path, full_disk: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A part of a key would be an existing file to the next attempt."""
    assert main(["sign", "--key", str(folder / "key"), "--new"]) == 2
    assert f"the key file '{folder / 'key'}': [Errno 28] No space left on device" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["saved.fxw"]


@pytest.mark.parametrize("name", ["values.pt", "values.npz", "values.safetensors"])
def test_damaged_inputs_are_named(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder / "saved.fxw"), "-o", str(folder / name)]) == 0
    content = (folder / name).read_bytes()
    for damaged in (b"", content[:40], content[:-9], b"PK\3\4" + content[:20]):
        (folder / name).write_bytes(damaged)
        assert main(["run", str(folder / "saved.fxw"), "--inputs", str(folder / name)]) == 2
        assert f"'{folder / name}' cannot be read: " in capsys.readouterr().err


def test_a_key_that_exists_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = folder / "key"
    assert main(["sign", "--key", str(key), "--new"]) == 0
    content = key.read_bytes()
    assert main(["sign", "--key", str(key), "--new"]) == 2
    assert "File exists" in capsys.readouterr().err
    assert key.read_bytes() == content
    assert key.stat().st_mode & 0o777 == 0o600
