"""The cache folder: damage heals, other users' files are refused, a folder that cannot be written is replaced."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fxwrap.errors import CacheError, CacheWarning, NativeBuildError
from fxwrap.runtime import cache_folder as cache
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernel_library, prepare_kernels
from fxwrap.runtime.modules import load_module, write_module
from fxwrap.runtime.native import BRIDGE_LIBRARIES, build_bridge, compile_cpp, compiled_kernels, load_program
from fxwrap.runtime.native import compiler as driver
from fxwrap.runtime.native.background import join_background
from tests.runtime.copying_compiler import write_compiler, write_script
from tests.runtime.native.test_native_build import DOUBLE
from tests.support.child_processes import run_python


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with the bridge only, and a compiler that builds the bridge at once."""
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "c++", build_bridge().folder)))
    monkeypatch.setenv(cache.FOLDER_ENV, str(tmp_path / "cache"))
    build_bridge()
    return tmp_path / "cache"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, and a process that has not yet failed to write its cache."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with cache.without_temporary_folder():
        yield tmp_path / "tmp"
        join_background()  # its folder is that of the process too


def replace_with_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


def replace_with_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)


DAMAGES: tuple[Callable[[Path], None], ...] = (
    truncate, flip, lambda path: os.truncate(path, 0), lambda path: path.write_bytes(bytes(path.stat().st_size)),
    Path.unlink, replace_with_pipe, replace_with_folder, replace_with_link,
)  # fmt: skip


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*BRIDGE_LIBRARIES, cache.HASH_TABLE])
def test_a_damaged_bridge_is_built_again(name: str, damage: Callable[[Path], None], folder: Path) -> None:
    whole = {path.name: path.read_bytes() for path in build_bridge().folder.iterdir()}
    damage(build_bridge().folder / name)
    built = build_bridge()
    assert built.seconds > 0 and build_bridge().seconds == 0
    assert {path.name: path.read_bytes() for path in built.folder.iterdir()} == whole
    assert list(folder.rglob(f"{cache.BUILDING}*")) == []


def test_a_process_with_a_damaged_bridge_runs(folder: Path) -> None:
    """The bridge was cut, which ended the process with a bus error."""
    os.truncate(build_bridge().folder / BRIDGE_LIBRARIES[1], 40000)
    line = "%y = extern.call @aten.neg.default(%x) : f32[2]@cpu"
    program = f"program @f(%x: borrowed f32[2]@cpu) {{ {line}\ncontrol.return(%y) }}"
    code = f"import torch, fxwrap; print(fxwrap.to_cpp(fxwrap.parse({program!r}))(torch.ones(2)))"
    done = run_python(["-c", code])
    assert done.returncode == 0, done.stderr
    assert "-1., -1." in done.stdout


@pytest.mark.parametrize("damage", [truncate, flip, replace_with_pipe])
def test_a_damaged_program_is_compiled_again(damage: Callable[[Path], None], folder: Path) -> None:
    library = compile_cpp(DOUBLE, name="double")
    content = library.read_bytes()
    damage(library)
    again = compile_cpp(DOUBLE, name="double")
    assert again == library and again.read_bytes() == content
    assert torch.equal(load_program(again)(torch.ones(2))[0], torch.full((2,), 2.0))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_module_is_written_again(damage: Callable[[Path], None], folder: Path) -> None:
    path = write_module("x = 'é'\n", "name")
    damage(path)
    assert load_module("x = 'é'\n", "name").x == "é"
    assert path.read_bytes() == "x = 'é'\n".encode()


def test_a_link_to_another_entry_is_replaced(folder: Path) -> None:
    """That entry is intact, but has another program under the same name."""
    first, second = compile_cpp(DOUBLE, name="double"), compile_cpp(DOUBLE + "// other\n", name="double")
    content = first.read_bytes()
    shutil.rmtree(first.parent)
    first.parent.symlink_to(second.parent)
    assert compile_cpp(DOUBLE, name="double") == first and first.read_bytes() == content
    assert not first.parent.is_symlink()


def test_an_index_file_names_nothing_outside_the_cache(folder: Path, tmp_path: Path) -> None:
    """It named a library to load, anywhere."""
    kernel = 'extern "C" void kernel(const float* x, float* y) { *y = *x + 1; }'
    text = KernelText("cpp", kernel, ("*f32", "*f32"))
    library, symbol, outside = compile_kernel_library([text]), text.symbol, tmp_path / "outside"
    shutil.copytree(library.parent, outside)
    prepare_kernels((text,))
    (index,) = (folder / "kernels").iterdir()
    assert compiled_kernels((symbol,)) == {symbol: library}
    for path in (f"../outside/{library.name}", str(outside / library.name), f"programs/../../outside/{library.name}"):
        index.write_text(path)
        assert compiled_kernels((symbol,)) == {}
    index.write_bytes(b"\xff\xfe")
    assert compiled_kernels((symbol,)) == {}


def test_leftovers_of_a_killed_build_are_removed_by_the_next(folder: Path) -> None:
    library = compile_cpp(DOUBLE, name="double")
    leftover = folder / cache.UNFINISHED_ENTRIES / f"{cache.BUILDING}{library.parent.name}-killed"
    leftover.mkdir()
    (leftover / "object.o").touch()
    shutil.rmtree(library.parent)
    assert compile_cpp(DOUBLE, name="double") == library
    assert list((folder / "programs").iterdir()) == [library.parent] and not list(leftover.parent.iterdir())


# --- other users ----------------------------------------------------------------------------------------------------


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(CacheError, match=r"other users can write it \(mode 777\)\. Make it yours alone \(.*chmod go-w"):
        compile_cpp(DOUBLE, name="double")
    folder.chmod(0o755)
    (folder / "programs").mkdir()
    (folder / "programs").chmod(0o775)
    with pytest.raises(CacheError, match="programs: compiled code is loaded from it"):
        compile_cpp(DOUBLE, name="double")


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="it belongs to another user"):
        build_bridge()


def test_a_file_that_others_can_write_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = compile_cpp(DOUBLE, name="double")
    library.chmod(0o777)
    assert compile_cpp(DOUBLE, name="double") == library
    assert "is not used: other users can write it" in caplog.text
    assert stat.S_IMODE(library.stat().st_mode) & 0o022 == 0


def test_compiled_code_is_synced_before_it_is_renamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops would otherwise leave entries that have their names and no content.

    Files that are checked when they are read are not synced.
    """
    synced, entries, sync, replace = set[int](), [], os.fsync, os.replace

    def record_sync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        sync(handle)

    def record_replace(source: Path, target: Path) -> None:
        paths = [path for path in (Path(source), *Path(source).rglob("*")) if path.is_file()]
        hashed = [path for path in paths if path.suffix in (".so", ".json") or cache.HASH_TABLE in path.name]
        assert all(path.stat().st_ino in synced for path in hashed), hashed
        entries.append(hashed)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    compile_cpp(DOUBLE, name="double")
    assert {path.suffix for paths in entries for path in paths} >= {".so", ".tmp"}
    synced.clear()
    module = write_module("x = 1", "module")
    assert not synced
    module.write_text("")
    assert write_module("x = 1", "module").read_text() == "x = 1"


def test_the_umask_does_not_matter(folder: Path) -> None:
    before = os.umask(0)
    try:
        library = compile_cpp(DOUBLE, name="double")
        time_written = library.stat().st_mtime_ns
        assert compile_cpp(DOUBLE, name="double").stat().st_mtime_ns == time_written
        paths = [folder, *folder.rglob("*")]
        assert [path for path in paths if path.stat().st_mode & 0o022 and path.suffix != ".cpp"] == []
    finally:
        os.umask(before)


def test_a_lock_follows_no_link(folder: Path, tmp_path: Path) -> None:
    """Its target was truncated."""
    library = compile_cpp(DOUBLE, name="double")
    target = tmp_path / "precious"
    target.write_text("content")
    lock = folder / "locks" / library.parent.name
    lock.unlink()
    lock.symlink_to(target)
    library.unlink()
    assert compile_cpp(DOUBLE, name="double").is_file()
    assert target.read_text() == "content"


# --- folders that cannot be written ---------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_replaced(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.FOLDER_ENV, "/proc/self/fxwrap")  # not even for root
    with pytest.warns(CacheWarning, match=r"/proc/self/fxwrap cannot be written \(No such file.*FXWRAP_CACHE_DIR"):
        library = compile_cpp(DOUBLE, name="double")
    assert library.is_relative_to(temporary) and stat.S_IMODE(temporary.stat().st_mode) != 0
    (private,) = temporary.iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cpp(DOUBLE, name="double") == library
        assert write_module("x = 1\n", "name").is_relative_to(private)
        x = torch.randn(4, 4)
        torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1, backend="fxwrap")(x), x.sin() + 1)


def test_a_full_disk(folder: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As g++ reports it."""
    full = f'case "$PWD" in {folder}/*) echo "x.s: fatal error: No space left on device" >&2; exit 1;; esac\n'
    text = (tmp_path / "c++").read_text().replace("for last", f"{full}for last")
    write_script(tmp_path / "c++", text)
    with pytest.warns(CacheWarning, match="No space left on device"):
        assert compile_cpp(DOUBLE, name="double").is_relative_to(temporary)


def test_no_folder_can_be_written(folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.FOLDER_ENV, str(temporary / "file"))
    (temporary / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
    with pytest.raises(CacheError, match=r"neither it nor a temporary folder can be written.*TMPDIR"):
        compile_cpp(DOUBLE, name="double")


# --- compilers ------------------------------------------------------------------------------------------------------


def test_a_compiler_that_hangs_after_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '#!/bin/sh\ncase "$1" in --version) echo 1;; *) sleep 60;; esac\n'
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "hanging", text)))
    monkeypatch.setattr(driver, "PROBE_TIMEOUT_SECONDS", 0.3)
    with pytest.raises(NativeBuildError, match=r"did not finish within 0\.3 s(.|\n)*-print-file-name"):
        driver.find_compiler()


def test_a_compiler_that_prints_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "garbage", "#!/bin/sh\nprintf '/\\377\\001\\0'\n")))
    assert driver.find_compiler().runtime == ()
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "failing", "#!/bin/sh\nprintf '\\377\\001'; exit 3\n")))
    with pytest.raises(NativeBuildError, match="exit status 3"):
        driver.find_compiler()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_compiler_ends_with_its_parent(number: int, tmp_path: Path) -> None:
    """With the processes that it has started."""
    compiler = write_script(tmp_path / "endless", f"#!/bin/sh\nsleep 77 & echo $! > {tmp_path}/started; wait\n")
    child = os.fork()
    if not child:
        driver.run_compiler([str(compiler)])
        os._exit(0)
    started = tmp_path / "started"
    while not (started.exists() and started.read_text().endswith("\n")):
        time.sleep(0.01)
    os.kill(child, number)
    os.waitpid(child, 0)
    status = Path(f"/proc/{int(started.read_text())}/status")
    for _ in range(60_000):
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.01)
    pytest.fail("the compiler still runs")
