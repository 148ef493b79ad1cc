"""Files whose hashes are right and whose programs are hostile: windows outside of memory, and files from strangers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact.trust import SAFE_OPERATORS
from fxwrap.errors import ArtifactError, FxwrapError, InputError, OptionError
from fxwrap.signature import CallingConvention, signature_to_json
from tests.artifact.archives import archive_of, entries_of, with_manifest, with_manifest_entry
from tests.artifact.programs import batch, compiled

CHECKED = 'program @p(%x: mutable f32[4]@cpu) {\n  check.layout(%x) name="x" : f32[4]@cpu\n'


def hostile(text: str, tmp_path: Path) -> Path:
    """A file with this program, re-signed, valid or not."""
    path = tmp_path / "hostile.fxw"
    fxwrap.save(fxwrap.parse(f"{CHECKED}  control.return()\n}}\n"), path)
    entries = with_manifest_entry(entries_of(path.read_bytes()), "program.ir", text.encode())
    with suppress(FxwrapError, KeyError):  # of a text that is no program
        program = fxwrap.parse(text)
        signature = signature_to_json(program, CallingConvention.of_flat(program))
        entries = with_manifest(entries, lambda manifest: manifest.update(signature=signature))
    lines = text.count("\n") - 2
    origins = json.dumps({"fields": [], "sources": [], "lines": [None] * lines}).encode()
    path.write_bytes(archive_of(with_manifest_entry(entries, "origins.json", origins)))
    return path


def body(*lines: str, head: str = CHECKED) -> str:
    return head + "".join([f"  {line}\n" for line in lines]) + "}\n"


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", ["full", "none"])
def test_static_windows_are_inside_of_their_memory(trust: str, tmp_path: Path) -> None:
    """It crashed, or returned memory behind the input."""
    for type_ in ("f32[1000000]", "f32[4 | 1 | 1]", "f32[2 | 1000000]", "f32[4 | 1 | 1000000]"):
        path = hostile(body(f"%v = memory.view(%x) : {type_}@cpu", "control.return(%v)"), tmp_path)
        with pytest.raises(ArtifactError, match=r"it is not a program: \[bounds\] %v is bytes \d+ to \d+"):
            fxwrap.load(path, trust=trust)


SYMBOLIC = """program @p(%x: borrowed f32[s0, 8]@cpu) {
  s0 = symbol.size(%x) dim=0 rank=2 range=(0, 3)
  check.layout(%x) name="x" : f32[s0, 8]@cpu
  %t = memory.view(%x) : f32[8, s0 | 1, 8]@cpu
  %w = memory.view(%x) : f32[s0 + SIZE, 8]@cpu
  %y = extern.call @aten.clone.default(%w) : f32[s0 + SIZE, 8]@cpu
  control.return(%y)
}
"""


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_symbolic_windows_are_checked_at_run_time(emitter: str, tmp_path: Path) -> None:
    path = hostile(SYMBOLIC.replace("SIZE", "10000000"), tmp_path)
    with pytest.raises(InputError, match="%w is not inside of its memory"):
        fxwrap.load(path, emitter=emitter)(torch.ones(3, 8))


def test_windows_that_are_inside_for_all_sizes_are_not_checked(tmp_path: Path) -> None:
    loaded = fxwrap.load(hostile(SYMBOLIC.replace(" + SIZE", ""), tmp_path))
    assert "symbol.assert" not in str(loaded.program)
    torch.testing.assert_close(loaded(torch.ones(3, 8)), (torch.ones(3, 8),))


def test_saved_programs_have_the_checks_that_loading_adds(tmp_path: Path) -> None:
    """So that their compiled code is used."""
    program = fxwrap.verify(fxwrap.parse(SYMBOLIC.replace("+ SIZE", "- 1")))
    fxwrap.save(
        fxwrap.verify(fxwrap.parse(str(program).replace("s0 - 1, 8]", "2*s0 - 3, 8]"))),
        tmp_path / "p.fxw",
        emitters=["cpp"],
    )
    loaded = fxwrap.load(tmp_path / "p.fxw", emitter="cpp", binaries="required")
    assert str(loaded.program).count("symbol.assert") == 1
    torch.testing.assert_close(loaded(torch.ones(3, 8)), (torch.ones(3, 8),))
    with pytest.raises(InputError, match="%w is not inside of its memory"):
        loaded(torch.ones(4, 8))


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_as_strided_beyond_an_input_is_checked_against_its_storage(emitter: str) -> None:
    """Dynamo does not guard the size of an input's storage: another call read behind it."""
    run = torch.compile(
        lambda x: torch.as_strided(x, (8, 8), (8, 1)) + 1, backend="fxwrap", options={"emitter": emitter}
    )
    whole = torch.arange(64.0).reshape(8, 8)
    torch.testing.assert_close(run(whole[:, :4]), whole + 1)
    small = torch.empty_strided((8, 4), (8, 1)).fill_(0)
    with pytest.raises(RuntimeError, match="out of bounds"):
        run(small)


# --- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_of_400_digits(tmp_path: Path) -> None:
    """In emitted C++ they were errors of the compiler."""
    digits = "9" * 400
    for text in (
        body(f"%v = extern.call @aten.add.Scalar(%x, {digits[:30]}) : f32[4]@cpu", "control.return(%v)"),
        body(f"n0 = symbol.let expr={digits[:30]}", "control.return(%x)"),
        body(f"%v = extern.call @aten.neg.default(%x) : f32[{digits}]@cpu", "control.return(%v)"),
        body(f"%v = extern.call @aten.add.Scalar(%x, {digits}) : f32[4]@cpu", "control.return(%v)"),
        body(f"%v = memory.view(%x) : f32[4 | 1 | s0 + {digits}]@cpu", "control.return(%v)"),
        body("n0 = symbol.let expr=9**9**9**9", "control.return(%x)"),
    ):
        with pytest.raises(ArtifactError):
            fxwrap.load(hostile(text, tmp_path), emitter="cpp")
    saved = tmp_path / "constants.fxw"
    compiled("python").save(saved)
    entries = entries_of(saved.read_bytes())
    for field in ("start", "sizes", "strides"):
        number = int(digits) if field == "start" else [int(digits)]
        window = {field: number}
        changed = with_manifest(entries, lambda manifest, window=window: first_window(manifest).update(window))
        saved.write_bytes(archive_of(changed))
        with pytest.raises(ArtifactError, match="does not describe the constants"):
            fxwrap.load(saved)


def first_window(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["constants"]["windows"][0]  # type: ignore[no-any-return]


# --- files from strangers -------------------------------------------------------------------------------------------


def test_a_program_without_kernels_runs(tmp_path: Path) -> None:
    saved = compiled("python", fuse=False)
    saved.save(tmp_path / "calls.fxw")
    loaded = fxwrap.load(tmp_path / "calls.fxw", trust="none")
    assert loaded.emitter == "interpreter" and loaded.trust == "none"
    trusted = fxwrap.load(tmp_path / "calls.fxw")
    torch.testing.assert_close(loaded(batch()), trusted(batch()))
    with pytest.raises(ArtifactError, match="loaded with trust='none'"):
        loaded.save(tmp_path / "again.fxw")
    with pytest.raises(ArtifactError, match="loaded with trust='none'"):
        _ = loaded.graph_module


def test_a_program_with_kernels_is_refused(tmp_path: Path) -> None:
    compiled("python").save(tmp_path / "kernels.fxw")
    with pytest.raises(ArtifactError, match=r"it has code of its own: the kernel @.*fuse=False"):
        fxwrap.load(tmp_path / "kernels.fxw", trust="none")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (('%y = extern.call @aten.from_file.default("FILE", true, 4) : f32[4]@cpu',), "may not call 'aten.from_file"),
        (("%y = extern.call @aten.as_strided.default(%x, [4], [1]) : f32[4]@cpu",), "may not call 'aten.as_strided"),
        (("%y = extern.call @prims.sin.default(%x) : f32[4]@cpu",), "may not call 'prims.sin"),
        (("%y = extern.call @aten.add_.Tensor(%x, %x) aliases=(%x) : f32[4]@cpu",), "does not declare what"),
        (("extern.mutate @aten.add_.Tensor(%x, %x) writes=()", "%y = extern.call @aten.neg.default(%x) : f32[4]@cpu"),
         "does not declare what"),
        (("%y = extern.call @aten.ones_like.default(%x, dtype=-7) : f32[4]@cpu",), "the argument 'dtype' is a number"),
        (("%y = extern.call @aten.remainder.default(1, 0) : f32[4]@cpu",), "it computes no tensors"),
        (('note.enter_range() name="x"', 'note.exit_range() name="x"',
          "%y = extern.call @aten.neg.default(%x) : f32[4]@cpu"), "may not contain the line 'note.enter_range'"),
    ],
)  # fmt: skip
def test_hostile_programs_are_refused(lines: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    path = hostile(body(*lines, "control.return(%y)").replace("FILE", str(tmp_path / "written")), tmp_path)
    with pytest.raises(ArtifactError, match=reason):
        fxwrap.load(path, trust="none")
    assert not (tmp_path / "written").exists()


def test_unchecked_inputs_are_refused(tmp_path: Path) -> None:
    head = "program @p(%x: borrowed f32[4]@cpu) {\n"
    call, check = "%y = extern.call @aten.neg.default(%x) : f32[4]@cpu", 'check.layout(%x) name="x" : f32[4]@cpu'
    for lines in ((call,), (call, check), ('check.layout(%x) name="x" : f32[1]@cpu', call)):
        with pytest.raises(ArtifactError, match="it does not check its input %x"):
            fxwrap.load(hostile(body(*lines, "control.return(%y)", head=head), tmp_path), trust="none")


def test_wrong_declarations_raise_when_the_program_runs(tmp_path: Path) -> None:
    path = hostile(body("%y = extern.call @aten.neg.default(%x) : f32[5]@cpu", "control.return(%y)"), tmp_path)
    with pytest.raises(FxwrapError, match="a result does not have the type"):
        fxwrap.load(path, trust="none")(torch.ones(4))
    alias = "%y = extern.call @aten.view.default(%x, [4]) : f32[4]@cpu"
    path = hostile(body(alias, "extern.mutate @aten.zero_.default(%y) writes=(%y)", "control.return(%y)"), tmp_path)
    with pytest.raises(FxwrapError, match="returned memory of an operand as %y"):
        fxwrap.load(path, trust="none")(torch.ones(4))


def test_new_memory_is_zero(tmp_path: Path) -> None:
    lines = ("%m = memory.alloc() : f32[4]@cpu", "%h = memory.view(%m) : f32[1]@cpu",
             "extern.mutate @aten.fill_.Scalar(%h, 7) writes=(%h)", "control.return(%m)")  # fmt: skip
    for _ in range(3):
        torch.full((4,), 9.0)  # its memory is used again
        (result,) = fxwrap.load(hostile(body(*lines), tmp_path), trust="none")(torch.ones(4))
        assert result.tolist() == [7, 0, 0, 0]


def test_unknown_trust(tmp_path: Path) -> None:
    path = hostile(body("control.return(%x)"), tmp_path)
    with pytest.raises(OptionError, match="unknown trust 'some'; known: full, none"):
        fxwrap.load(path, trust="some")
    with pytest.raises(OptionError, match="runs no code from a file"):
        fxwrap.load(path, trust="none", emitter="python")


def test_an_untrusted_program_is_not_saved(tmp_path: Path) -> None:
    """Saving emits its text as code."""
    loaded = fxwrap.load(hostile(body("control.return(%x)"), tmp_path), trust="none")
    for save in (loaded.save, lambda path: fxwrap.save(loaded, path)):
        with pytest.raises(ArtifactError, match="was loaded with trust='none', and its text becomes no code"):
            save(tmp_path / "again.fxw")


def test_safe_operators_exist() -> None:
    missing = [name for name in SAFE_OPERATORS if not hasattr(torch.ops.aten, name)]
    assert not missing
