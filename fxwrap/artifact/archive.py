"""The container of a saved program: a zip file of uncompressed entries, each with its hash, and a manifest of them all.

What is in the file follows from the content alone: fixed dates, a fixed order, no compression. So equal programs give
equal files, an entry's size in the file is its size in memory, and any tool that knows zip files can look inside.
Nothing is unpacked by name.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, TypeAlias

from fxwrap.errors import ArtifactError

FORMAT: Final = "fxwrap program"
FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
MANIFEST_HASH: Final = "manifest.sha256"

CHUNK: Final = 1 << 20
"""Bytes that are hashed at a time. An entry's hash is the SHA-256 of its content, or, where that is longer than this,
of the hashes of its parts of this length, so that a long entry is checked by several threads."""

ALIGNMENT: Final = 64
"""Bytes that the place of each entry's content in the file is a multiple of, so that memory may be mapped to it."""

_LARGEST_MANIFEST: Final = 64 << 20
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_MOST_BUFFERS: Final = 512

_LARGEST_PLAIN: Final = 1 << 30
"""Bytes from which on an entry's sizes are written as zip files write long ones: in a field of this length."""
_LONG_FIELD: Final = 20
_PADDING: Final = struct.Struct("<HH")
_PADDING_FIELD: Final = 0xD935  # what other tools that align entries use

Buffer: TypeAlias = bytes | bytearray | memoryview

_ANEW = "Save the program again"
_FOREIGN_ENTRY = "It was not written by fxwrap.save: do not trust it"


def content_hash(parts: Iterable[Buffer]) -> str:
    """Returns the hash of an entry whose content is these parts, one after another; 64 hex digits."""
    hasher = _Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


class _Hasher:
    """Hashes content of any length as it comes."""

    def __init__(self) -> None:
        self.size = 0
        self._digests: list[bytes] = []
        self._chunk = hashlib.sha256()
        self._room = CHUNK

    def update(self, part: Buffer) -> None:
        """Takes the next part of the content."""
        view = memoryview(part).cast("B")
        self.size += len(view)
        while len(view):
            if not self._room:
                self._finish_chunk()
            taken = view[: self._room]
            self._chunk.update(taken)
            self._room -= len(taken)
            view = view[len(taken) :]

    def _finish_chunk(self) -> None:
        self._digests.append(self._chunk.digest())
        self._chunk = hashlib.sha256()
        self._room = CHUNK

    def hexdigest(self) -> str:
        """Returns the hash of all that came."""
        return _root([*self._digests, self._chunk.digest()])


def _root(digests: Sequence[bytes]) -> str:
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


# --- writing --------------------------------------------------------------------------------------------------------


class ArchiveWriter:
    """Writes entries one after another, and at the end the manifest with their sizes and hashes.

    To be used in a `with` statement, at whose end the manifest has been written, or something was raised.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        self._entries: dict[str, dict[str, Any]] = {}

    def add(self, name: str, parts: Iterable[Buffer], size: int) -> None:
        """Adds an entry of `size` bytes, whose content comes in parts. A second one of the same name is not written.

        Its content begins in the file at a multiple of ALIGNMENT.
        """
        if name not in self._entries:
            self._entries[name] = {"size": size, "sha256": self._write(name, parts, size)}

    def add_bytes(self, name: str, content: bytes) -> None:
        """Adds an entry with this content."""
        self.add(name, (content,), len(content))

    def close(self, manifest: Mapping[str, Any]) -> None:
        """Adds the manifest, which gets the format and the entries, and ends the file."""
        whole = {"format": FORMAT, "format_version": FORMAT_VERSION, **manifest, "entries": self._entries}
        text = (json.dumps(whole, indent=1, sort_keys=True) + "\n").encode()
        self._write(MANIFEST, (text,), len(text))
        digest = hashlib.sha256(text).hexdigest().encode() + b"\n"
        self._write(MANIFEST_HASH, (digest,), len(digest))
        self._zip.close()

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            with suppress(OSError, ValueError):
                self._zip.close()  # the file goes away, but without this the archive would write to it later

    def _write(self, name: str, parts: Iterable[Buffer], size: int) -> str:
        info = zipfile.ZipInfo(name, _EPOCH)
        info.create_system = 3  # Unix, on every machine
        info.external_attr = 0o644 << 16
        info.file_size = size
        long = size > _LARGEST_PLAIN
        start = self._file.tell() + _LOCAL_HEADER.size + len(name.encode()) + _LONG_FIELD * long + _PADDING.size
        padding = -start % ALIGNMENT
        info.extra = _PADDING.pack(_PADDING_FIELD, padding) + bytes(padding)
        hasher = _Hasher()
        with self._zip.open(info, "w", force_zip64=long) as entry:
            for part in parts:
                hasher.update(part)
                entry.write(part)
        if hasher.size != size:
            raise ValueError(f"entry '{name}' has {hasher.size} bytes, and {size} were announced")
        return hasher.hexdigest()


def write_file(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Writes a file that is seen whole or not at all, also when several processes write it at once.

    Raises ArtifactError where the folder cannot be written to; then, and when `write` raises, what was at `path` stays.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise ArtifactError(
            str(path), "", f"nothing can be written there: {error.strerror}", "Choose a folder that can be written to"
        ) from error
    try:
        with os.fdopen(handle, "w+b") as file:
            write(file)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ArtifactError(
            str(path), "", f"it cannot be written: {error.strerror}", "Make room there, or choose another place"
        ) from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Returns the process's mask of file permissions, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where the content of an entry lies in the file."""

    start: int
    size: int


class Archive:
    """An open file of the format, whose directory and manifest are checked; entries are checked as they are read.

    Raises ArtifactError for everything else: the file, the entry, what is wrong with it, and what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: set[str] = set()
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ArtifactError(
                str(path), "", f"it cannot be read: {error.strerror}", "Give the path of a file that fxwrap.save wrote"
            ) from error
        try:
            self._extents = self._directory()
            self.manifest = self._manifest()
            self._check_entries()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def error(self, entry: str, reason: str, remedy: str = _ANEW) -> ArtifactError:
        """Returns the error for what is wrong with an entry, or with the file as a whole ("")."""
        return ArtifactError(str(self.path), entry, reason, remedy)

    def has(self, name: str) -> bool:
        """Returns whether there is an entry of this name."""
        return name in self._entries

    def size(self, name: str) -> int:
        """Returns the bytes of an entry. Raises ArtifactError where there is none."""
        return self._entry(name)[0]

    def read(self, name: str) -> bytes:
        """Returns the content of an entry, checked by its hash."""
        content = bytearray(self.size(name))
        self.read_into(name, (content,))
        return bytes(content)

    def read_text(self, name: str) -> str:
        """Returns the text of an entry, checked by its hash."""
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise self.error(name, f"it is no text: {error}") from None

    def read_into(self, name: str, targets: Sequence[Buffer]) -> None:
        """Fills buffers with the content of an entry, one after another, and checks it by its hash.

        The buffers are as long together as the entry; when this raises, what they hold is of no use.
        """
        _, wanted = self._entry(name)
        pieces = _chunked(targets)
        start = self._extents[name].start
        work = [(start + position * CHUNK, piece) for position, piece in enumerate(pieces)]
        if len(work) < 2:
            digests = [self._read_chunk(name, *item) for item in work]
        else:
            with ThreadPoolExecutor(min(len(work), os.cpu_count() or 1, 8)) as pool:
                digests = list(pool.map(lambda item: self._read_chunk(name, *item), work))
        self._compare(name, digests, wanted)

    def check_others(self) -> None:
        """Checks the entries that nobody has read by their hashes: a damaged file is refused as a whole."""
        for name in self._entries:
            if name not in self._checked:
                self.read(name)

    def _compare(self, name: str, digests: Sequence[bytes], wanted: str) -> None:
        self._checked.add(name)
        found = _root(digests or [hashlib.sha256().digest()])
        if found != wanted:
            raise self.error(name, f"it is damaged: its hash is {found}, and {wanted} was written")

    def mapped(self, name: str) -> tuple[mmap.mmap, int]:
        """Returns memory that is an entry's content, checked by its hash, and the byte of it where that begins.

        Writes into the memory stay in this process. Until it is written to, it is what the file is: who changes the
        file in place changes it too. Raises OSError where the system cannot map the file.
        """
        size, wanted = self._entry(name)
        start = self._extents[name].start
        first = start - start % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(
            self._file.fileno(), start + size - first, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=first
        )
        view = memoryview(memory)[start - first :]
        places = range(0, size, CHUNK)
        with ThreadPoolExecutor(max(1, min(len(places), os.cpu_count() or 1, 8))) as pool:
            digests = list(pool.map(lambda place: hashlib.sha256(view[place : place + CHUNK]).digest(), places))
        self._compare(name, digests, wanted)
        return memory, start - first

    def peek(self, name: str, offset: int, size: int) -> bytes:
        """Returns a part of an entry that is not checked: for what decides where the whole is read to."""
        if offset + size > self.size(name):
            raise self.error(name, "it ends too early")
        return self._read_at(name, self._extents[name].start + offset, size)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> tuple[int, str]:
        if name not in self._entries:
            raise self.error(name, "there is no such entry")
        return self._entries[name]

    def _read_chunk(self, name: str, offset: int, targets: Sequence[memoryview]) -> bytes:
        digest = hashlib.sha256()
        for first in range(0, len(targets), _MOST_BUFFERS):
            some = targets[first : first + _MOST_BUFFERS]
            offset += self._fill(name, offset, some)
            for target in some:
                digest.update(target)
        return digest.digest()

    def _fill(self, name: str, offset: int, targets: Sequence[memoryview]) -> int:
        wanted = sum(len(target) for target in targets)
        got = os.preadv(self._file.fileno(), targets, offset)
        if got == wanted:
            return wanted
        for target in targets:  # a short read, which files on some networks give: one by one
            done = 0
            while done < len(target):
                got = os.preadv(self._file.fileno(), [target[done:]], offset + done)
                if got == 0:
                    raise self.error(name, "the file ends in the middle of it", "Copy the file again")
                done += got
            offset += done
        return wanted

    def _read_at(self, name: str, offset: int, size: int) -> bytes:
        content = os.pread(self._file.fileno(), size, offset)
        if len(content) != size:
            raise self.error(name, "the file ends in the middle of it", "Copy the file again")
        return content

    def _directory(self) -> dict[str, _Extent]:
        """Returns where each entry is, after checking that names are plain and content lies there as it is."""
        if self._file.read(4) != b"PK\x03\x04":
            raise self.error("", "it is no file that fxwrap.save wrote", "Give the path of one")
        self._file.seek(0)
        try:
            directory = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError, EOFError) as error:
            raise self.error("", f"its directory cannot be read ({error}): it is damaged or truncated",
                             "Copy the file again, or save the program again") from None  # fmt: skip
        infos = directory.infolist()
        seen: set[str] = set()
        for info in infos:
            self._check_name(info, seen)
        return self._placed(infos, directory.start_dir)

    def _check_name(self, info: zipfile.ZipInfo, seen: set[str]) -> None:
        name = info.orig_filename
        parts = name.replace("\\", "/").split("/")
        if not name.isprintable() or any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in name:
            raise self.error(name, "its name points out of the file", _FOREIGN_ENTRY)
        if name in seen:
            raise self.error(name, "there are two of this name", _FOREIGN_ENTRY)
        seen.add(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            reason = f"it is compressed, {info.compress_size} bytes that claim to be {info.file_size}"
            raise self.error(name, reason, "fxwrap.save compresses nothing, and nothing is unpacked: save it again")
        if info.flag_bits & 0x1:
            raise self.error(name, "it is encrypted", "fxwrap.load reads what fxwrap.save wrote, which is not")

    def _placed(self, infos: Sequence[zipfile.ZipInfo], end: int) -> dict[str, _Extent]:
        found = {}
        for info in sorted(infos, key=lambda info: -info.header_offset):
            name = info.orig_filename
            if not 0 <= info.header_offset <= end - _LOCAL_HEADER.size:
                raise self.error(name, "it lies outside of the file", "Copy the file again, or save the program again")
            header = self._read_at(name, info.header_offset, _LOCAL_HEADER.size)
            magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if magic != b"PK\x03\x04" or start + info.file_size > end:
                raise self.error(name, "it overlaps what follows it, or has no head: the file is damaged")
            if self._read_at(name, info.header_offset + _LOCAL_HEADER.size, name_length) != name.encode():
                raise self.error(name, "its head has another name: the file is damaged")
            found[name] = _Extent(start, info.file_size)
            end = info.header_offset
        return found

    def _manifest(self) -> Mapping[str, Any]:
        foreign = "Give the path of a file that fxwrap.save wrote"
        for name in (MANIFEST, MANIFEST_HASH):
            if name not in self._extents:
                raise self.error(name, "there is no such entry: this is some other zip file", foreign)
        extent, given = self._extents[MANIFEST], self._extents[MANIFEST_HASH]
        if extent.size > _LARGEST_MANIFEST or given.size != 65:
            raise self.error(MANIFEST, f"it has {extent.size} bytes, more than any manifest needs")
        text = self._read_at(MANIFEST, extent.start, extent.size)
        digest = self._read_at(MANIFEST_HASH, given.start, given.size)
        if hashlib.sha256(text).hexdigest().encode() + b"\n" != digest:
            raise self.error(MANIFEST, "it is damaged: its hash is another than the one that was written")
        try:
            manifest = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(MANIFEST, f"it is no JSON: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise self.error(MANIFEST, "it is not of a program that fxwrap saved", foreign)
        version = manifest.get("format_version")
        if version != FORMAT_VERSION:
            made_by = manifest.get("made_by", {})
            raise self.error(
                MANIFEST, f"the file has format {version}, and this fxwrap reads format {FORMAT_VERSION}",
                f"It was written by fxwrap {made_by.get('fxwrap', '?') if isinstance(made_by, dict) else '?'}: "
                "load it with that version, or save the program again with this one",
            )  # fmt: skip
        return manifest

    def _check_entries(self) -> None:
        listed = self.manifest.get("entries")
        if not isinstance(listed, dict):
            raise self.error(MANIFEST, "it lists no entries")
        self._entries: dict[str, tuple[int, str]] = {}
        for name, entry in listed.items():
            size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
            if type(size) is not int or not isinstance(digest, str) or size < 0:
                raise self.error(MANIFEST, f"it does not say the size and hash of '{name}'")
            if name not in self._extents:
                raise self.error(name, "it is missing", "Copy the file again, or save the program again")
            if self._extents[name].size != size:
                raise self.error(name, f"it has {self._extents[name].size} bytes, and {size} were written")
            self._entries[name] = size, digest
        for name in self._extents:
            if name not in listed and name not in (MANIFEST, MANIFEST_HASH):
                raise self.error(name, "the manifest does not know it", _FOREIGN_ENTRY)


def _chunked(targets: Sequence[Buffer]) -> list[list[memoryview]]:
    """Returns buffers cut where the chunks of the content that they hold together end."""
    chunks: list[list[memoryview]] = []
    room = 0
    for target in targets:
        view = memoryview(target).cast("B")
        while len(view):
            if not room:
                chunks.append([])
                room = CHUNK
            piece = view[:room]
            chunks[-1].append(piece)
            room -= len(piece)
            view = view[len(piece) :]
    return chunks
