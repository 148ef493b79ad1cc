"""Saved programs as archives whose entries tests replace."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

from fxwrap.artifact.archive import content_hash

Entries = dict[str, bytes]


def entries_of(content: bytes) -> Entries:
    """The entries of an archive by name."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(entries: Entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these entries, as any zip tool writes them."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def with_manifest(entries: Entries, change: Callable[[dict[str, Any]], None]) -> Entries:
    """The entries with a changed manifest, whose own hash is right."""
    manifest = json.loads(entries["manifest.json"])
    change(manifest)
    text = json.dumps(manifest).encode()
    return {**entries, "manifest.json": text, "manifest.sha256": hashlib.sha256(text).hexdigest().encode() + b"\n"}


def with_manifest_entry(entries: Entries, name: str, content: bytes) -> Entries:
    """The entries with other content for one of them and a manifest that matches it."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["entries"][name] = {"size": len(content), "sha256": content_hash([content])}

    return with_manifest({**entries, name: content}, change)
