"""Entries of caches run by the emitted code that they hold; the program is read when it is asked for, or if it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.artifact import LoadedProgram, SavedContent, load_content, loading, program_content, program_text
from fxwrap.converters.emission import emit
from fxwrap.devices import DeviceSpec, scoped_registration
from fxwrap.errors import ArtifactError
from tests.artifact.archives import archive_of, entries_of, with_manifest
from tests.artifact.programs import Small, batch
from tests.artifact.test_fresh_process import partitioned
from tests.devices.copy_engine import AbacusCopy
from tests.support.samples import SAMPLES

TEXTS = {"python": "emitted.py", "cpp": "emitted.cpp"}
"""The entry of the emitted text by emitter."""


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of programs that were parsed since the test began."""
    parse, parsed = loading.parse_texts, []

    def counted(archive: Any, texts: Any, *arguments: Any) -> fxwrap.Program:
        parsed.append(texts.program)
        return parse(archive, texts, *arguments)

    for module in (loading, program_text):
        monkeypatch.setattr(module, "parse_texts", counted)
    return parsed


def compiled(emitter: str) -> fxwrap.Compiled:
    graph = make_fx(lambda x, weight: (torch.nn.functional.gelu(x @ weight + 1).softmax(-1),))
    inputs = [batch(), Small().weight.detach()]
    return fxwrap.compile_graph(graph(*inputs), inputs, options=fxwrap.Options(emitter=emitter))


def content_of(program: fxwrap.Program, emitter: str, options: str = "") -> bytes:
    """The content of a cache's entry."""
    emitted, call = emit(program, emitter), {"of": "a test"}
    return program_content(SavedContent(program, emitter, options), emitted, "entry", call, has_bridge=True)


def compiled_content(emitter: str) -> tuple[fxwrap.Compiled, bytes]:
    subject = compiled(emitter)
    return subject, content_of(subject.program, emitter, subject.options.text())


def check_results(loaded: LoadedProgram) -> None:
    """Checks the results of fresh inputs beside float64."""
    x, weight = torch.randn(4, 16), torch.randn(16, 16)
    (result,) = loaded.flat(x, weight)
    wanted = torch.nn.functional.gelu(x.double() @ weight.double() + 1).softmax(-1)
    assert (result - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("emitter", TEXTS)
def test_a_program_is_read_when_it_is_asked_for(emitter: str, parses: list[str]) -> None:
    subject, content = compiled_content(emitter)
    loaded = load_content(content, "entry")
    check_results(loaded)
    assert parses == [] and loaded.emitter == emitter and loaded.metadata["call"] == {"of": "a test"}
    assert loaded.source == subject.source
    assert loaded.program == subject.program and loaded.key == subject.key
    assert len(parses) == 1


def _of_any_size() -> fxwrap.Program:
    """A program with a window that is inside of its memory for some sizes only, as memory planning makes them."""
    return fxwrap.parse("""
program @halves(s0: int, n0: int, %x: borrowed f32[s0]@cpu) {
  %pool = memory.pool() : u8[8*n0]@cpu
  %y = memory.pool_slice(%pool) offset=4*n0 : f32[s0]@cpu
  extern.call @aten.neg.out(%x) outs=(%y)
  control.return(%y)
}
""")


@pytest.mark.parametrize("is_same_version", [True, False])
def test_the_code_of_a_cache_is_that_of_the_compile(is_same_version: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of windows, as in files that others may write, would be emitted and compiled again for the entry."""
    program, compiles = _of_any_size(), []
    emitted = emit(program, "cpp")
    x = torch.randn(3)
    assert torch.equal(emitted.flat(3, 3, x)[0], -x)
    monkeypatch.setattr("fxwrap.runtime.native.build.run_compiler", lambda *arguments, **_: compiles.append(arguments))
    content = program_content(SavedContent(program, "cpp"), emitted, "entry", {}, has_bridge=True)
    if not is_same_version:
        monkeypatch.setattr("fxwrap.artifact.emitted_code.code_identity", lambda: "of another version")
    loaded = load_content(content, "entry")
    assert torch.equal(loaded.flat(3, 3, x)[0], -x) and not compiles
    assert loaded.source == emitted.source and loaded.program == program


@pytest.mark.parametrize("emitter", TEXTS)
def test_a_process_of_another_version_reads_the_program(
    emitter: str, parses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, content = compiled_content(emitter)
    monkeypatch.setattr("fxwrap.artifact.emitted_code.code_identity", lambda: "of another version")
    loaded = load_content(content, "entry")
    assert len(parses) == 1
    check_results(loaded)


@pytest.mark.parametrize("emitter", TEXTS)
def test_damaged_text(emitter: str) -> None:
    _, content = compiled_content(emitter)
    text = entries_of(content)[TEXTS[emitter]]
    place = content.index(text) + len(text) // 2
    damaged = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    with pytest.raises(ArtifactError, match=f"entry '{TEXTS[emitter]}': it is damaged: its hash is"):
        load_content(damaged, "entry")


@pytest.mark.parametrize(
    ("field", "value"),
    (("operators", 3), ("entry", "missing.py"), ("constant_devices", {"weight": "no device"}), ("identity", None)),
)
def test_descriptions_that_are_not_of_emitted_code(field: str, value: object, parses: list[str]) -> None:
    entries = entries_of(content_of(SAMPLES["mutated_inputs_and_constants"].program(), "python"))
    content = archive_of(with_manifest(entries, lambda manifest: manifest["emitted"].update({field: value})))
    if field == "identity":
        load_content(content, "entry")
        assert len(parses) == 1
        return
    with pytest.raises(ArtifactError):
        load_content(content, "entry")


@pytest.mark.parametrize("emitter", TEXTS)
def test_operators_that_are_not_registered(emitter: str) -> None:
    _, content = compiled_content(emitter)

    def add_operator(manifest: dict[str, Any]) -> None:
        manifest["emitted"]["operators"].append("vendor.absent.default")

    changed = archive_of(with_manifest(entries_of(content), add_operator))
    with pytest.raises(ArtifactError, match=r"operators that are not registered: vendor\.absent\.default"):
        load_content(changed, "entry")


def collectives() -> fxwrap.Program:
    return fxwrap.parse("""
program @reduced(%x: borrowed f32[8]@cpu) {
  %sum = collective.start @_c10d_functional.all_reduce.default(%x, "sum", "0") group="0" : f32[8]@cpu
  %ready = collective.wait(%sum) group="0" : f32[8]@cpu
  control.return(%ready)
}
""")


def extension_lines() -> fxwrap.Program:
    return fxwrap.parse("""
program @copied(%x: borrowed f32[4]@cpu) {
  %staging = memory.alloc() : f32[4]@cpu
  %y = abacus.copy(%staging, %x) channel=1 : f32[4]@cpu
  control.return(%y)
}
""", extensions=(AbacusCopy,))  # fmt: skip


@pytest.fixture
def _vendor_lines() -> Iterator[None]:
    with scoped_registration(DeviceSpec("privateuseone", ""), lines={AbacusCopy: {}}):
        yield


CASES = [
    (collectives, "python"), (collectives, "cpp"), (extension_lines, "python"), (extension_lines, "cpp"),
    (partitioned, "cpp"),
]  # fmt: skip


@pytest.mark.usefixtures("_vendor_lines")
@pytest.mark.parametrize(("program", "emitter"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES])
def test_programs_that_their_text_alone_does_not_define(
    program: Callable[[], fxwrap.Program], emitter: str, parses: list[str]
) -> None:
    subject = program()
    content = content_of(subject, emitter)
    assert TEXTS[emitter] not in entries_of(content)
    loaded = load_content(content, "entry")
    assert len(parses) == 1 and loaded.program == subject
    if program is extension_lines:
        x = torch.randn(4)
        assert torch.equal(loaded.flat(x)[0], x)
    if program is partitioned:
        torch.testing.assert_close(loaded.flat(batch()), fxwrap.run(subject, [batch()]))
