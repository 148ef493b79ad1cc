"""Signatures of saved programs: a file that a caller's trusted key has signed is as trusted as the key's owner."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import IO, Final

from fxwrap.artifact import ed25519
from fxwrap.artifact.archive import MANIFEST_SIGNATURE, Archive, ArchiveWriter
from fxwrap.errors import ArtifactError, OptionError
from fxwrap.runtime.cache_folder import write_file

_PUBLIC: Final = "ed25519:"
_PRIVATE: Final = "ed25519-private:"
_KEY = re.compile(r"(ed25519:|ed25519-private:)([0-9a-f]{64})\s*")
_PURPOSE: Final = b"fxwrap saved program\n"
"""The beginning of each signed message, so that a signature has no other meaning."""


def make_signing_key() -> str:
    """Returns a new private key as text, "ed25519-private:" and 64 hexadecimal digits."""
    return _PRIVATE + secrets.token_hex(32)


def public_key_of(private_key: str) -> str:
    """Returns the public key as text, "ed25519:" and 64 hexadecimal digits. Raises OptionError for another text."""
    return _PUBLIC + ed25519.public_key(_key_bytes(private_key, _PRIVATE)).hex()


def is_public_key(text: str) -> bool:
    """Returns whether a text is a public key."""
    return _key_text(text, _PUBLIC) is not None


def sign(path: str | Path, private_key: str) -> str:
    """Signs a saved program in place, all of whose entries are checked first; returns the public key.

    A signature that the file has is replaced. Raises OptionError for a text that is no private key, and ArtifactError
    for a damaged or foreign file, or one that cannot be written.
    """
    key = _key_bytes(private_key, _PRIVATE)
    public = ed25519.public_key(key)

    def write(file: IO[bytes]) -> None:
        with Archive(Path(path)) as archive, ArchiveWriter(file) as writer:
            for name in archive.names():
                writer.add_bytes(name, archive.read(name))
            described = {
                name: value
                for name, value in archive.manifest.items()
                if name not in ("format", "format_version", "entries")
            }
            writer.close(described, lambda manifest: public + ed25519.sign(key, _PURPOSE + manifest))

    try:
        write_file(Path(path), write)
    except OSError as error:
        remedy = "Free disk space, or choose a folder that can be written"
        raise ArtifactError(str(path), "", f"it cannot be written: {error.strerror or error}", remedy) from error
    return _PUBLIC + public.hex()


def check_signature(archive: Archive, public_key: str) -> None:
    """Raises ArtifactError unless the owner of a public key has signed a file, whose hashes then vouch for the rest."""
    trusted = _key_bytes(public_key, _PUBLIC)
    remedy = "Ask its author for a file that is signed by this key, or load it with trust='none'"
    if archive.signature is None:
        raise archive.error(MANIFEST_SIGNATURE, "the file is not signed", remedy)
    signer, signature = archive.signature[:32], archive.signature[32:]
    if signer != trusted:
        raise archive.error(
            MANIFEST_SIGNATURE,
            f"the file is signed by {_PUBLIC}{signer.hex()}, not by {_PUBLIC}{trusted.hex()}",
            remedy,
        )
    if not ed25519.verify(trusted, _PURPOSE + archive.manifest_text, signature):
        raise archive.error(MANIFEST_SIGNATURE, "the signature is not that of this file", remedy)


def _key_text(text: str, kind: str) -> str | None:
    match = _KEY.fullmatch(text)
    return match[2] if match is not None and match[1] == kind else None


def _key_bytes(text: str, kind: str) -> bytes:
    digits = _key_text(text, kind)
    if digits is None:
        raise OptionError(f"a {'public' if kind == _PUBLIC else 'private'} key is '{kind}' and 64 hexadecimal digits")
    return bytes.fromhex(digits)
