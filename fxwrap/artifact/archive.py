"""The container of a saved program: a zip file of uncompressed entries with hashes, listed by a manifest.

The file is deterministic: fixed dates, a fixed order, no compression. Equal programs have equal files, and any zip tool
can read them. Loading never unpacks entries by name.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from fxwrap.errors import ArtifactError

FORMAT: Final = "fxwrap program"
FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
MANIFEST_HASH: Final = "manifest.sha256"
MANIFEST_SIGNATURE: Final = "manifest.signature"
"""The public key and the signature of the manifest, 32 and 64 bytes; a file may lack this entry."""

SIGNATURE_BYTES: Final = 32 + 64

_UNLISTED: Final = (MANIFEST, MANIFEST_HASH, MANIFEST_SIGNATURE)
"""The entries that the manifest does not list."""

CHUNK: Final = 1 << 20
"""Bytes per hashed chunk. An entry's hash is the SHA-256 of its content, or of the hashes of its chunks if it has
several, so that several threads can check a long entry."""

ALIGNMENT: Final = 64
"""Alignment in bytes of each entry's content in the file, for memory mapping."""

_MAX_MANIFEST_BYTES: Final = 64 << 20
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_MAX_BUFFERS: Final = 512

_MAX_ZIP32_BYTES: Final = 1 << 30
"""Size above which an entry has a zip64 field, of `_LONG_FIELD` bytes."""
_LONG_FIELD: Final = 20
_PADDING: Final = struct.Struct("<HH")
_PADDING_FIELD: Final = 0xD935  # as other tools that align entries

Buffer: TypeAlias = bytes | bytearray | memoryview

_SAVE_AGAIN = "Save the program again"
_FOREIGN_ENTRY = "It was not written by fxwrap.save: do not trust it"


def content_hash(parts: Iterable[Buffer]) -> str:
    """Returns the hash, 64 hex digits, of an entry with the concatenation of parts as its content."""
    hasher = _Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


class _Hasher:
    def __init__(self) -> None:
        self.size = 0
        self._digests: list[bytes] = []
        self._chunk = hashlib.sha256()
        self._room = CHUNK

    def update(self, part: Buffer) -> None:
        """Adds the next part of the content."""
        view = memoryview(part).cast("B")
        self.size += len(view)
        while len(view):
            if not self._room:
                self._finish_chunk()
            piece = view[: self._room]
            self._chunk.update(piece)
            self._room -= len(piece)
            view = view[len(piece) :]

    def _finish_chunk(self) -> None:
        self._digests.append(self._chunk.digest())
        self._chunk = hashlib.sha256()
        self._room = CHUNK

    def hexdigest(self) -> str:
        """Returns the hash of the content so far."""
        return _root([*self._digests, self._chunk.digest()])


def _root(digests: Sequence[bytes]) -> str:
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


# --- writing --------------------------------------------------------------------------------------------------------


class ArchiveWriter:
    """Writes entries, and finally the manifest with their sizes and hashes. For use in a `with` statement."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        self._entries: dict[str, dict[str, object]] = {}

    def add(self, name: str, parts: Iterable[Buffer], size: int) -> None:
        """Adds an entry of `size` bytes, aligned to ALIGNMENT. An entry of an existing name is skipped."""
        if name not in self._entries:
            self._entries[name] = {"size": size, "sha256": self._write(name, parts, size)}

    def add_bytes(self, name: str, content: bytes) -> None:
        """Adds an entry."""
        self.add(name, (content,), len(content))

    def close(self, manifest: Mapping[str, object], sign: Callable[[bytes], bytes] | None = None) -> None:
        """Adds the manifest, with format and entries, and the signature that `sign` returns for it; ends the file."""
        contents = {"format": FORMAT, "format_version": FORMAT_VERSION, **manifest, "entries": self._entries}
        # A row for each key: with `indent`, json writes in Python, which takes ten times as long.
        rows = [f"{json.dumps(name)}: {json.dumps(item, sort_keys=True)}" for name, item in sorted(contents.items())]
        text = ("{\n" + ",\n".join(rows) + "\n}\n").encode()
        self._write(MANIFEST, (text,), len(text))
        digest = hashlib.sha256(text).hexdigest().encode() + b"\n"
        self._write(MANIFEST_HASH, (digest,), len(digest))
        if sign is not None:
            signature = sign(text)
            self._write(MANIFEST_SIGNATURE, (signature,), len(signature))
        self._zip.close()

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is not None:
            with suppress(OSError, ValueError):
                self._zip.close()  # otherwise its finaliser would write to the file

    def _write(self, name: str, parts: Iterable[Buffer], size: int) -> str:
        info = zipfile.ZipInfo(name, _EPOCH)
        info.create_system = 3  # Unix, on every machine
        info.external_attr = 0o644 << 16
        info.file_size = size
        long = size > _MAX_ZIP32_BYTES
        start = self._file.tell() + _LOCAL_HEADER.size + len(name.encode()) + _LONG_FIELD * long + _PADDING.size
        padding = -start % ALIGNMENT
        info.extra = _PADDING.pack(_PADDING_FIELD, padding) + bytes(padding)
        hasher = _Hasher()
        with self._zip.open(info, "w", force_zip64=long) as entry:
            for part in parts:
                hasher.update(part)
                entry.write(part)
        if hasher.size != size:
            raise ValueError(f"entry '{name}' has {hasher.size} bytes instead of {size}")
        return hasher.hexdigest()


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Extent:
    start: int
    size: int


class Archive:
    """An open saved program with verified directory and manifest; entries are verified when they are read.

    `file` is the open file if the caller has opened it; the archive closes it. Raises ArtifactError for an invalid file
    or entry.
    """

    def __init__(self, path: Path, file: IO[bytes] | None = None) -> None:
        self.path = path
        self._checked: set[str] = set()
        self._file = file or _open(path)
        try:
            self._extents = self._directory()
            self.manifest = self._manifest()
            self._check_entries()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def error(self, entry: str, reason: str, remedy: str = _SAVE_AGAIN) -> ArtifactError:
        """Returns the error of an entry, or of the whole file ("")."""
        return ArtifactError(str(self.path), entry, reason, remedy)

    def has(self, name: str) -> bool:
        """Whether there is an entry of this name."""
        return name in self._entries

    def size(self, name: str) -> int:
        """Returns the size of an entry. Raises ArtifactError for a missing one."""
        return self._entry(name)[0]

    def read(self, name: str) -> bytes:
        """Returns the verified content of an entry."""
        content = bytearray(self.size(name))
        self.read_into(name, (content,))
        return bytes(content)

    def read_text(self, name: str) -> str:
        """Returns the verified text of an entry."""
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise self.error(name, f"it is not a text: {error}") from None

    def read_into(self, name: str, targets: Sequence[Buffer]) -> None:
        """Reads an entry into consecutive buffers of the same total size and verifies its hash.

        After an error the content of the buffers is undefined.
        """
        _, expected = self._entry(name)
        pieces = _chunked(targets)
        start = self._extents[name].start
        work = [(start + position * CHUNK, piece) for position, piece in enumerate(pieces)]
        if len(work) < 2:
            digests = [self._read_chunk(name, *item) for item in work]
        else:
            with ThreadPoolExecutor(min(len(work), os.cpu_count() or 1, 8)) as pool:
                digests = list(pool.map(lambda item: self._read_chunk(name, *item), work))
        self._compare(name, digests, expected)

    def check_unread_entries(self) -> None:
        """Verifies the entries that were not read: a damaged file is rejected as a whole."""
        for name in self._entries:
            if name not in self._checked:
                self.read(name)

    def _compare(self, name: str, digests: Sequence[bytes], expected: str) -> None:
        self._checked.add(name)
        actual = _root(digests or [hashlib.sha256().digest()])
        if actual != expected:
            raise self.error(name, f"it is damaged: its hash is {actual}, not {expected}")

    def mapped(self, name: str) -> tuple[mmap.mmap, int]:
        """Maps an entry into memory and verifies it; returns the mapping and the offset of the content.

        The mapping is private: writes stay in this process. Changes of the file in place show in unwritten pages.
        Raises OSError where the system cannot map the file.
        """
        size, expected = self._entry(name)
        start = self._extents[name].start
        first = start - start % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(
            self._file.fileno(), start + size - first, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=first
        )
        view = memoryview(memory)[start - first :]
        offsets = range(0, size, CHUNK)
        with ThreadPoolExecutor(max(1, min(len(offsets), os.cpu_count() or 1, 8))) as pool:
            digests = list(pool.map(lambda offset: hashlib.sha256(view[offset : offset + CHUNK]).digest(), offsets))
        self._compare(name, digests, expected)
        return memory, start - first

    def peek(self, name: str, offset: int, size: int) -> bytes:
        """Returns an unverified part of an entry, e.g. a header that determines the buffers of the whole read."""
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
        for first in range(0, len(targets), _MAX_BUFFERS):
            some = targets[first : first + _MAX_BUFFERS]
            offset += self._fill(name, offset, some)
            for target in some:
                digest.update(target)
        return digest.digest()

    def _fill(self, name: str, offset: int, targets: Sequence[memoryview]) -> int:
        size = sum(len(target) for target in targets)
        if os.preadv(self._file.fileno(), targets, offset) == size:
            return size
        for target in targets:  # a short read, as on network file systems: one by one
            total = 0
            while total < len(target):
                count = os.preadv(self._file.fileno(), [target[total:]], offset + total)
                if count == 0:
                    raise self.error(name, "the file ends in the middle of it", "Copy the file again")
                total += count
            offset += total
        return size

    def _read_at(self, name: str, offset: int, size: int) -> bytes:
        content = os.pread(self._file.fileno(), size, offset)
        if len(content) != size:
            raise self.error(name, "the file ends in the middle of it", "Copy the file again")
        return content

    def _directory(self) -> dict[str, _Extent]:
        """Returns the extent of each entry, after checking that names are plain and contents uncompressed."""
        if self._file.read(4) != b"PK\x03\x04":
            raise self.error("", "it was not written by fxwrap.save", "Pass the path of a saved program")
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
        return self._locate_entries(infos, directory.start_dir)

    def _check_name(self, info: zipfile.ZipInfo, seen: set[str]) -> None:
        name = info.orig_filename
        parts = name.replace("\\", "/").split("/")
        if not name.isprintable() or any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in name:
            raise self.error(name, "its name is not a plain path", _FOREIGN_ENTRY)
        if name in seen:
            raise self.error(name, "its name occurs twice", _FOREIGN_ENTRY)
        seen.add(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            reason = f"it is compressed from {info.file_size} to {info.compress_size} bytes"
            raise self.error(name, reason, "fxwrap.save does not compress: save it again")
        if info.flag_bits & 0x1:
            raise self.error(name, "it is encrypted", "fxwrap.save does not encrypt: save it again")

    def _locate_entries(self, infos: Sequence[zipfile.ZipInfo], end: int) -> dict[str, _Extent]:
        extents = {}
        for info in sorted(infos, key=lambda info: -info.header_offset):
            name = info.orig_filename
            if not 0 <= info.header_offset <= end - _LOCAL_HEADER.size:
                raise self.error(
                    name, "its offset is outside of the file", "Copy the file again, or save the program again"
                )
            header = self._read_at(name, info.header_offset, _LOCAL_HEADER.size)
            magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if magic != b"PK\x03\x04" or start + info.file_size > end:
                raise self.error(name, "it overlaps the next entry, or has no header: the file is damaged")
            if self._read_at(name, info.header_offset + _LOCAL_HEADER.size, name_length) != name.encode():
                raise self.error(name, "its header has another name: the file is damaged")
            extents[name] = _Extent(start, info.file_size)
            end = info.header_offset
        return extents

    def _manifest(self) -> Mapping[str, Any]:
        foreign = "Pass the path of a file that fxwrap.save wrote"
        for name in (MANIFEST, MANIFEST_HASH):
            if name not in self._extents:
                raise self.error(name, "there is no such entry: this is another kind of zip file", foreign)
        extent, hash_extent = self._extents[MANIFEST], self._extents[MANIFEST_HASH]
        if extent.size > _MAX_MANIFEST_BYTES or hash_extent.size != 65:
            raise self.error(MANIFEST, f"it has {extent.size} bytes, more than the maximum of a manifest")
        text = self._read_at(MANIFEST, extent.start, extent.size)
        digest = self._read_at(MANIFEST_HASH, hash_extent.start, hash_extent.size)
        if hashlib.sha256(text).hexdigest().encode() + b"\n" != digest:
            raise self.error(MANIFEST, "it is damaged: its hash is wrong")
        self.manifest_text = text
        self.signature = self._signature()
        try:
            manifest = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(MANIFEST, f"it is not JSON: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise self.error(MANIFEST, "it is not the manifest of a saved program", foreign)
        version = manifest.get("format_version")
        if version != FORMAT_VERSION:
            writer = manifest.get("written_by", {})
            raise self.error(
                MANIFEST, f"the file has format {version}; this fxwrap reads format {FORMAT_VERSION}",
                f"It was written by fxwrap {writer.get('fxwrap', '?') if isinstance(writer, dict) else '?'}: "
                "load it with that version, or save the program again with this one",
            )  # fmt: skip
        return manifest

    def names(self) -> list[str]:
        """Returns the names of the entries that the manifest lists, in the order of the file."""
        return sorted(self._entries, key=lambda name: self._extents[name].start)

    def _signature(self) -> bytes | None:
        """Returns the content of the entry with the signature, or None."""
        extent = self._extents.get(MANIFEST_SIGNATURE)
        if extent is None:
            return None
        if extent.size != SIGNATURE_BYTES:
            raise self.error(MANIFEST_SIGNATURE, f"it has {extent.size} bytes instead of {SIGNATURE_BYTES}")
        return bytes(self._read_at(MANIFEST_SIGNATURE, extent.start, extent.size))

    def _check_entries(self) -> None:
        listed = self.manifest.get("entries")
        if not isinstance(listed, dict):
            raise self.error(MANIFEST, "it lists no entries")
        self._entries: dict[str, tuple[int, str]] = {}
        for name, entry in listed.items():
            size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
            if type(size) is not int or not isinstance(digest, str) or size < 0:
                raise self.error(MANIFEST, f"it has no size and hash of '{name}'")
            if name not in self._extents:
                raise self.error(name, "it is missing", "Copy the file again, or save the program again")
            if self._extents[name].size != size:
                raise self.error(name, f"it has {self._extents[name].size} bytes instead of {size}")
            self._entries[name] = size, digest
        for name in self._extents:
            if name not in listed and name not in _UNLISTED:
                raise self.error(name, "the manifest does not list it", _FOREIGN_ENTRY)


def _open(path: Path) -> IO[bytes]:
    remedy = "Pass the path of a file that fxwrap.save wrote"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a fifo must not block
    except OSError as error:
        raise ArtifactError(str(path), "", f"it cannot be read: {error.strerror}", remedy) from error
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        what = "a directory" if kind == stat.S_IFDIR else "a device or a pipe"
        raise ArtifactError(str(path), "", f"it cannot be read: it is {what}", remedy)
    return os.fdopen(handle, "rb")


def _chunked(targets: Sequence[Buffer]) -> list[list[memoryview]]:
    """Splits consecutive buffers at the chunk boundaries of their content."""
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
