"""The cache folder: where it is, who may write it, and how its files are read and written.

Code is loaded from the cache, so nobody but this user and root may write its folders and files: such a folder raises
CacheError, such a file is ignored and replaced. Files are synced and renamed, so that no reader sees a part of one.
Folders of compiled code have a table of sizes and hashes, which is checked before anything is loaded from them. If the
cache folder cannot be written, new files go to a private temporary folder. See docs/security.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from fxwrap.caching import bounded_cache
from fxwrap.errors import CacheError, CacheWarning

log = logging.getLogger("fxwrap.cache")

FOLDER_ENV = "FXWRAP_CACHE_DIR"
"""The environment variable with the cache folder."""

BUILDING = "building-"
"""The prefix of unfinished folders."""

UNFINISHED_ENTRIES = "unfinished"
"""The folder of unfinished entries: those of one entry are listed before it is built, and other folders are large."""

HASH_TABLE = "files.json"
"""The file with an entry's name, and the sizes and hashes of its compiled code."""

_HASHED_SUFFIXES = (".so", ".o", ".gch")
_MAX_FILE_BYTES = 1 << 32
_OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH

_Result = TypeVar("_Result")


class _TemporaryFolder:
    """The folder that takes the place of a cache folder that this process could not write; None while there is none."""

    path: Path | None = None


_temporary = _TemporaryFolder()


@contextmanager
def without_temporary_folder() -> Iterator[None]:
    """Runs as a process that has not failed to write its cache folder, and restores the state afterwards: for tests."""
    before, _temporary.path = _temporary.path, None
    try:
        yield
    finally:
        _temporary.path = before


def cache_folder() -> Path:
    """Returns the cache folder: `FXWRAP_CACHE_DIR`, else `fxwrap` in the user's cache folder."""
    chosen = os.environ.get(FOLDER_ENV)
    if chosen:
        return Path(os.path.abspath(chosen))
    user_caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(user_caches) / "fxwrap" if os.path.isabs(user_caches) else _temporary_path()  # a user without a home


def cache_folders() -> tuple[Path, ...]:
    """Returns the folders to read from: the cache folder, and the temporary one if this process uses it.

    Raises CacheError for a folder that other users can write.
    """
    folder = cache_folder()
    _check_folder(folder)
    return (folder,) if _temporary.path is None else (folder, _temporary.path)


def write_to_cache(write: Callable[[Path], _Result]) -> _Result:
    """Returns `write(folder)` for the cache folder, or for a temporary one, with a warning, if that raises OSError.

    Raises CacheError where neither can be written.
    """
    folder = cache_folders()[-1]
    try:
        return write(folder)
    except OSError as error:
        if folder == _temporary.path:
            raise _not_writable(folder, error) from error
        reason = error
    try:
        temporary = _make_temporary_folder()
        result = write(temporary)
    except OSError as error:
        raise _not_writable(folder, error) from error
    _temporary.path = temporary
    warnings.warn(
        f"the cache folder {folder} cannot be written ({reason.strerror or reason}), and {temporary} is used instead; "
        f"free space there, or set {FOLDER_ENV} to a writable folder",
        CacheWarning,
        stacklevel=2,
    )
    return result


def _not_writable(folder: Path, error: OSError) -> CacheError:
    reason = f"neither it nor a temporary folder can be written: {error.strerror or error}"
    return CacheError(str(folder), reason, f"Free disk space, or set {FOLDER_ENV} and TMPDIR to writable folders")


def _temporary_path() -> Path:
    return Path(tempfile.gettempdir()) / f"fxwrap-{os.geteuid()}"


def _make_temporary_folder() -> Path:
    """Returns this user's folder for temporary caches, which only this user can read: all processes share it."""
    folder = _temporary_path()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return folder if private else Path(tempfile.mkdtemp(prefix="fxwrap-"))


# --- trust ----------------------------------------------------------------------------------------------------------


def _check_folder(folder: Path) -> None:
    """Raises CacheError for a folder that another user owns or can write. A missing folder is valid."""
    if reason := distrust_reason(folder):
        remedy = f"Make it yours alone (chown, chmod go-w), delete it, or set {FOLDER_ENV} to another folder"
        raise CacheError(str(folder), f"compiled code is loaded from it, and {reason}", remedy)


def distrust_reason(folder: Path) -> str:
    """Returns why a folder may hold another user's content, or ""; a missing folder is trusted."""
    try:
        return _distrust(os.stat(folder))
    except OSError:
        return ""


def _distrust(status: os.stat_result) -> str:
    """Returns why a file or folder may hold another user's content, or ""."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (id {status.st_uid})"
    if status.st_mode & _OTHERS_CAN_WRITE:
        return f"other users can write it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


# --- files ----------------------------------------------------------------------------------------------------------


def open_cache_file(path: Path) -> IO[bytes] | None:
    """Opens a file of the cache to read; None if it is missing, no regular file, or another user can write it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a fifo must not block
    except OSError:
        return None
    file = os.fdopen(handle, "rb", closefd=True) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    if file is None:
        os.close(handle)
        return None
    reason = _distrust(os.fstat(handle))
    if reason:
        log.warning("the file %s of the cache is not used: %s; delete it, or chmod go-w", path, reason)
        file.close()
        return None
    _check_folder(path.parent)
    return file


def read_cache_file(path: Path) -> bytes | None:
    """Returns the content of a file of the cache; None where `open_cache_file` does, and for a read error."""
    file = open_cache_file(path)
    if file is None:
        return None
    with file, suppress(OSError):
        if os.fstat(file.fileno()).st_size <= _MAX_FILE_BYTES:
            return file.read()
    return None


def write_cache_file(root: Path, name: str, content: bytes, *, replaces: bool = True) -> Path:
    """Writes the file `name`, "kind/name", of the cache folder `root` atomically and returns its path.

    What is no file in its place is deleted. It is not synced, which takes milliseconds of a compile for each kernel: a
    machine that stops may leave an empty one, so its readers check the content. Raises OSError, and FileExistsError for
    a file that exists unless it `replaces` that.
    """
    path = _make_folder(root, os.path.dirname(name)) / os.path.basename(name)
    _remove_unless_file(path)
    write_file(path, lambda file: file.write(content), 0o600, synced=False, replaces=replaces)
    return path


def write_file(
    path: Path, write: Callable[[IO[bytes]], object], mode: int | None = None, *, synced: bool = True,
    replaces: bool = True,
) -> None:  # fmt: skip
    """Writes a file atomically, also when several processes write it at once, and if synced when the machine stops.

    `mode` are the file's permissions, by default those of a new file. Raises OSError; then, and when `write` raises,
    the previous file remains. Unless it `replaces` that, it is FileExistsError: the first of several processes writes.
    A device or pipe, such as /dev/stdout, is not replaced: the content is written into it.
    """
    with _naming_file(path):
        if replaces and is_stream(path):
            with path.open("wb") as file:
                write(file)
        else:
            _write_atomically(path, write, mode, synced, replaces)


def is_stream(path: Path) -> bool:
    """Whether a path leads to a device, a pipe or a socket."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Adds the path to an OSError without one, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _write_atomically(
    path: Path, write: Callable[[IO[bytes]], object], mode: int | None, synced: bool, replaces: bool
) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w+b") as file:
            write(file)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask() if mode is None else mode)
            if synced:
                os.fsync(file.fileno())
        if replaces or not _link(temporary, path):
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _link(temporary: str, path: Path) -> bool:
    """Moves a file to a path that must not exist; returns whether the file system can. Raises FileExistsError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    os.unlink(temporary)
    return True


def _umask() -> int:
    """Returns the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _make_folder(root: Path, kind: str) -> Path:
    """Returns a folder of a cache folder, made for this user alone; a file in its place is deleted. Raises OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = root / kind
    if not folder.is_dir():
        with suppress(FileNotFoundError, IsADirectoryError):  # another process may have made it meanwhile
            folder.unlink()
        folder.mkdir(mode=0o700, exist_ok=True)
    _check_folder(folder)
    return folder


def _remove_unless_file(path: Path) -> None:
    """Deletes what is in the place of a file: a folder, a link, a pipe or a device."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            remove_path(path)


def remove_path(path: Path) -> None:
    """Deletes a file or folder. No process sees a part of a folder."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            aside = tempfile.mkdtemp(prefix=BUILDING, dir=path.parent)
            os.replace(path, aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            path.unlink()


# --- entries: folders of compiled code ------------------------------------------------------------------------------


def find_entry(name: str) -> Path | None:
    """Returns the intact entry with this name, a path within the cache folder, or None."""
    return next((folder for root in cache_folders() if is_intact(folder := root / name)), None)


def find_or_build_entry(name: str, build: Callable[[Path], None]) -> Path:
    """Returns the intact entry with this name; `build(temporary folder)` makes its files if there is none.

    Processes that need the same entry wait for one another. Raises CacheError where no folder can be written, and what
    `build` raises.
    """
    return find_entry(name) or write_to_cache(lambda root: _build_entry(root, name, build))


def _build_entry(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    folder = _make_folder(root, os.path.dirname(name)) / os.path.basename(name)
    with file_lock(root, folder.name):
        if is_intact(folder):
            return folder
        unfinished, prefix = _make_folder(root, UNFINISHED_ENTRIES), f"{BUILDING}{folder.name}-"
        for leftover in unfinished.glob(f"{prefix}*"):  # of a killed process, which had the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=unfinished))
        try:
            build(temporary)
            seal_entry(temporary, folder.name)
            if os.path.lexists(folder):
                log.info("the compiled code in %s was damaged, and was built again", folder)
                remove_path(folder)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def seal_entry(folder: Path, name: str) -> None:
    """Syncs the compiled code of an entry and writes the table of its sizes and hashes. Raises OSError."""
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(path.stat().st_mode & ~_OTHERS_CAN_WRITE & 0o7777)
        if path.suffix in _HASHED_SUFFIXES:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                content = file.read()
            files[path.name] = [len(content), hashlib.sha256(content).hexdigest()]
    table = json.dumps({"entry": name, "files": files}).encode()
    write_file(folder / HASH_TABLE, lambda file: file.write(table), 0o600)


def file_hash(path: Path) -> str | None:
    """Returns the SHA-256 of a file of the cache, 64 hex digits, computed once; None where it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _file_hash(path, status.st_size, status.st_mtime_ns, status.st_ino)


@bounded_cache(4096)
def _file_hash(path: Path, _size: int, _time: int, _inode: int) -> str | None:
    content = read_cache_file(path)
    mark_used(path.parent)
    return None if content is None else hashlib.sha256(content).hexdigest()


def is_intact(folder: Path) -> bool:
    """Whether an entry has its table of hashes, and all files in it have their hash."""
    table = _hash_table(folder)
    return bool(table) and all(file_hash(folder / name) == digest for name, (_, digest) in table.items())


def read_entry_files(folder: Path) -> dict[str, bytes]:
    """Returns the compiled code of an entry outside of the cache folder by name; {} unless all of it is intact.

    The owner of the files is not checked: the caller trusts the folder as fxwrap's own code.
    """
    try:
        table = _parse_hash_table(folder, (folder / HASH_TABLE).read_bytes())
        files = {name: (folder / name).read_bytes() for name in table}
    except OSError:
        return {}
    intact = all((len(files[name]), hashlib.sha256(files[name]).hexdigest()) == row for name, row in table.items())
    return files if intact else {}


def _hash_table(folder: Path) -> Mapping[str, tuple[int, str]]:
    return _parse_hash_table(folder, read_cache_file(folder / HASH_TABLE))


def _parse_hash_table(folder: Path, content: bytes | None) -> Mapping[str, tuple[int, str]]:
    try:
        table = json.loads(content or b"")
        files = table["files"].items() if table["entry"] == folder.name else ()  # a link may lead to another entry
        return {name: (int(size), str(digest)) for name, (size, digest) in files if Path(name).name == name}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def mark_used(path: Path) -> None:
    """Updates the time of last use of a path in the cache folder; ignores read-only folders."""
    with suppress(OSError):
        os.utime(path)


@contextmanager
def file_lock(root: Path, name: str, timeout_s: float | None = None) -> Iterator[IO[bytes] | None]:
    """Holds a lock file of a cache folder, which the system releases with the process; yields the open file.

    Waits for other processes and threads that hold it, at most `timeout_s` seconds; then it yields None. File systems
    without locks have none. Raises OSError where the folder cannot be written.
    """
    path = _make_folder(root, "locks") / name
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    _remove_unless_file(path)
    with os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
        if not _acquire(file, timeout_s):
            yield None
            return
        try:
            yield file
        finally:  # a child process that was forked meanwhile has the file, too
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _acquire(file: IO[bytes], timeout_s: float | None) -> bool:
    """Locks a file; returns whether it could within `timeout_s` seconds."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = 0.001
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if end is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if end is not None and time.monotonic() >= end:
                return False
        except OSError:  # a file system without locks
            return True
        else:
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
