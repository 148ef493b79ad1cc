"""Signed programs: `trust=` with a public key, in Python and in C, with the same errors."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact import ed25519
from fxwrap.artifact.archive import MANIFEST_SIGNATURE
from fxwrap.artifact.signing import make_signing_key, public_key_of
from fxwrap.cli import main
from fxwrap.errors import ArtifactError, OptionError
from tests.artifact.native_host import drive, read_result, tensor_commands

# RFC 8032, section 7.1: private key, public key, message, signature.
VECTORS = (
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        (
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
        ),
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        (
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
        ),
    ),
)
KEY = "ed25519-private:" + "5" * 64
PUBLIC = public_key_of(KEY)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x * 2, -1)

    path = tmp_path_factory.mktemp("signed") / "doubled.fxw"
    exported = torch.export.export(Doubled(), (torch.ones(2, 3),))
    fxwrap.compile_graph(exported, options=fxwrap.Options(emitter="cpp")).save(path, target="native")
    before = zipfile.ZipFile(path).namelist()
    assert fxwrap.sign(path, KEY) == PUBLIC
    assert zipfile.ZipFile(path).namelist() == [*before, MANIFEST_SIGNATURE]
    return path


@pytest.mark.parametrize(("private", "public", "message", "signature"), VECTORS)
def test_published_signatures(private: str, public: str, message: str, signature: str) -> None:
    secret, key, text, expected = map(bytes.fromhex, (private, public, message, signature))
    assert ed25519.public_key(secret) == key and ed25519.sign(secret, text) == expected
    assert ed25519.verify(key, text, expected) and not ed25519.verify(key, text + b"x", expected)
    for position in range(0, 64, 7):
        changed = bytearray(expected)
        changed[position] ^= 1
        assert not ed25519.verify(key, text, bytes(changed))


def test_a_signature_has_one_form() -> None:
    """A second scalar for the same signature, and keys that encode no point, are rejected."""
    secret = bytes(range(32))
    key, signature = ed25519.public_key(secret), ed25519.sign(secret, b"text")
    scalar = int.from_bytes(signature[32:], "little") + 2**252 + 27742317777372353535851937790883648493
    assert not ed25519.verify(key, b"text", signature[:32] + scalar.to_bytes(32, "little"))
    for number in (2, 2**255 - 19, 2**255 - 1, 1 | 1 << 255):
        assert not ed25519.verify(number.to_bytes(32, "little"), b"text", signature)
    assert not ed25519.verify(key, b"text", signature[:-1]) and not ed25519.verify(key[:-1], b"text", signature)


def test_a_signed_file_runs_in_python_and_in_c(signed: Path, tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    (wanted,) = fxwrap.load(signed, trust=PUBLIC).flat(x)
    assert fxwrap.load(signed, trust=PUBLIC).trust == "full" and fxwrap.load(signed).trust == "full"
    done = drive("trust", PUBLIC, "open", signed, *tensor_commands(tmp_path, [x]), "run", tmp_path / "out")
    assert done.code == 0 and torch.equal(read_result(tmp_path / "out.0", wanted), wanted), done.lines
    assert drive("trust", "full", "open", signed).code == 0


def changed(source: Path, target: Path, **entries: bytes | None) -> Path:
    """Writes a file again with other contents of some entries, or without them."""
    file = io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            content = entries.get(name.replace(".", "_"), old.read(name))
            if content is not None:
                new.writestr(name, content)
    target.write_bytes(file.getvalue())
    return target


@pytest.mark.parametrize("case", ("unsigned", "other key", "other file", "forged key", "short"))
def test_files_that_the_key_has_not_signed(signed: Path, tmp_path: Path, case: str) -> None:
    signature = zipfile.ZipFile(signed).read(MANIFEST_SIGNATURE)
    other = make_signing_key()
    match case:
        case "unsigned":
            path = changed(signed, tmp_path / "bad.fxw", manifest_signature=None)
            reason = "entry 'manifest.signature': the file is not signed"
        case "other key":
            path = changed(signed, tmp_path / "bad.fxw")
            fxwrap.sign(path, other)
            reason = f"the file is signed by {public_key_of(other)}, not by {PUBLIC}"
        case "other file":
            exported = torch.export.export(torch.nn.ReLU(), (torch.ones(3),))
            path = tmp_path / "bad.fxw"
            fxwrap.compile_graph(exported, options=fxwrap.Options(emitter="cpp")).save(path, target="native")
            fxwrap.sign(path, other)
            path = changed(path, path, manifest_signature=signature)
            reason = "the signature is not that of this file"
        case "forged key":
            path = changed(signed, tmp_path / "bad.fxw")
            fxwrap.sign(path, other)
            forged = signature[:32] + zipfile.ZipFile(path).read(MANIFEST_SIGNATURE)[32:]
            path = changed(path, path, manifest_signature=forged)
            reason = "the signature is not that of this file"
        case _:
            path = changed(signed, tmp_path / "bad.fxw", manifest_signature=signature[:-1])
            reason = "it has 95 bytes instead of 96"
    with pytest.raises(ArtifactError) as error:
        fxwrap.load(path, trust=PUBLIC)
    assert reason in str(error.value)
    assert drive("trust", PUBLIC, "open", path).lines[0] == f"ArtifactError: {error.value}"


def test_a_signed_file_that_is_damaged(signed: Path, tmp_path: Path) -> None:
    """The signature is of the manifest, whose hashes are those of the other entries."""
    content = bytearray(signed.read_bytes())
    content[content.index(b"\x7fELF") + 5000] ^= 1
    (tmp_path / "bad.fxw").write_bytes(content)
    with pytest.raises(ArtifactError, match="it is damaged: its hash is") as error:
        fxwrap.load(tmp_path / "bad.fxw", trust=PUBLIC)
    done = drive("trust", PUBLIC, "open", tmp_path / "bad.fxw")
    assert done.lines[0] == f"ArtifactError: {error.value}"
    with pytest.raises(ArtifactError, match="it is damaged: its hash is"):
        fxwrap.sign(tmp_path / "bad.fxw", KEY)


@pytest.mark.parametrize("trust", ("some", "ed25519:12", PUBLIC.upper(), f"{PUBLIC}0"))
def test_unknown_trust(signed: Path, trust: str) -> None:
    with pytest.raises(OptionError, match=r"unknown trust .*; known: full, none, a public key, 'ed25519:\.\.\.'"):
        fxwrap.load(signed, trust=trust)
    done = drive("trust", trust, "open", signed)
    assert done.lines[0] == f"OptionError: unknown trust '{trust}'; known: full, a public key, 'ed25519:...'"


def test_c_has_no_interpreter_for_files_from_strangers(signed: Path) -> None:
    assert drive("trust", "none", "open", signed).lines[0] == (
        "OptionError: trust='none' runs programs in the interpreter, which is in Python: use fxwrap.load"
    )


def test_texts_that_are_no_keys(signed: Path) -> None:
    for key in ("", PUBLIC, "ed25519-private:12"):
        with pytest.raises(OptionError, match="a private key is 'ed25519-private:' and 64 hexadecimal digits"):
            fxwrap.sign(signed, key)


def test_the_command_line(signed: Path, tmp_path: Path, capsys: Any) -> None:
    key, path = tmp_path / "signing.key", changed(signed, tmp_path / "again.fxw")
    assert main(["sign", "--key", str(key), "--new"]) == 0
    public = capsys.readouterr().out.strip()
    assert key.stat().st_mode & 0o777 == 0o600
    assert main(["sign", str(path), "--key", str(key)]) == 0 and capsys.readouterr().out.strip() == public
    assert main(["run", str(path), "--trust", public]) == 0
    assert main(["run", str(path), "--trust", PUBLIC]) == 3 and "the file is signed by" in capsys.readouterr().err
    assert main(["sign", "--key", str(key), "--new"]) == 2 and "File exists" in capsys.readouterr().err
