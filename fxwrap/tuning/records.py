"""Tuning records on disk: one small file per kernel in the cache folder, safe for concurrent processes."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from fxwrap.runtime.cache_folder import read_cache_file

_FIELDS = {"fingerprint": str, "seconds": float, "default_seconds": float}


@dataclass(frozen=True)
class TuningRecord:
    """A kernel's selected configuration: fingerprint of the printed kernel, its seconds and those of the default."""

    fingerprint: str
    seconds: float
    default_seconds: float


class TuningRecords:
    """The records in a folder, by key. Unreadable files are ignored, and replaced by the next write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> TuningRecord | None:
        """Returns the record of a key; None without a valid one."""
        try:
            fields = json.loads(read_cache_file(self._path(key)) or b"")
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or set(fields) != set(_FIELDS):
            return None
        if not all(isinstance(fields[name], kind) for name, kind in _FIELDS.items()):
            return None
        return TuningRecord(**fields)

    def commit(self, key: str, record: TuningRecord, replacing: bool = False) -> TuningRecord:
        """Writes a record and returns the valid one: another process's if it was first.

        `replacing` overwrites an existing record, which is stale. A read-only folder is not an error.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        except OSError:
            return record
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(record), file)
                file.flush()
                os.fsync(file.fileno())
            if not replacing:
                try:
                    os.link(temporary, self._path(key))
                    return record
                except FileExistsError:
                    existing = self.read(key)
                    if existing is not None:
                        return existing
            os.replace(temporary, self._path(key))
            return record
        except OSError:  # a full disk, or a folder in the record's place
            return record
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
