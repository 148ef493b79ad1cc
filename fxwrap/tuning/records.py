"""Tuning records on disk: one small file a kernel, in the cache folder, which many processes may write at once."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_FIELDS = {"way": str, "seconds": float, "guess_seconds": float}


@dataclass(frozen=True)
class Choice:
    """What was chosen for a kernel: the fingerprint of the printed kernel, its time, and that of the best guess."""

    way: str
    seconds: float
    guess_seconds: float


class TuningRecords:
    """The choices in a folder, by key. What cannot be read as one is no record, and the next write replaces it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> Choice | None:
        """Returns the choice under a key; None where there is none, or no whole one."""
        try:
            found = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or set(found) != set(_FIELDS):
            return None
        if not all(isinstance(found[name], kind) for name, kind in _FIELDS.items()):
            return None
        return Choice(**found)

    def settle(self, key: str, choice: Choice, replacing: bool = False) -> Choice:
        """Writes a choice and returns the one that counts: another process's where that was there first.

        With `replacing`, the choice that is there is known to be of no use. A folder that cannot be written is left.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        except OSError:
            return choice
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(choice), file)
            if not replacing:
                try:
                    os.link(temporary, self._path(key))
                    return choice
                except FileExistsError:
                    there = self.read(key)
                    if there is not None:
                        return there
            os.replace(temporary, self._path(key))
            return choice
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
