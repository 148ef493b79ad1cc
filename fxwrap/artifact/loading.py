"""`fxwrap.load`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

import torch

from fxwrap.artifact.archive import MANIFEST, Archive
from fxwrap.artifact.binaries import has_binaries, load_binaries, program_sources
from fxwrap.artifact.constants import ENTRY, ConstantLayout, check_no_objects, read_constants
from fxwrap.artifact.devices import device_map, move_program, program_devices
from fxwrap.artifact.emitted_code import read_emitted
from fxwrap.artifact.loaded import DeferredProgram, LoadedProgram
from fxwrap.artifact.program_text import parse_texts, read_program, read_texts
from fxwrap.artifact.saving import PLAN
from fxwrap.artifact.signing import check_signature, is_public_key
from fxwrap.artifact.trust import TRUST_LEVELS
from fxwrap.converters.emitted_program import kernel_texts
from fxwrap.errors import ArgumentError, OptionError, PlanningError
from fxwrap.lines import ExtensionLine
from fxwrap.memory_planning import MemoryPlan, plan_from_json
from fxwrap.options import EMITTERS
from fxwrap.passes.window_checks import check_windows
from fxwrap.signature import CallingConvention, convention_from_json
from fxwrap.wrapper_ir import ConstantStore, Program

DeviceLike = torch.device | str

log = logging.getLogger("fxwrap.artifact")

BINARIES = ("auto", "required", "ignored")
"""The values of `fxwrap.load(binaries=...)`."""


def load(
    path: str | Path,
    *,
    emitter: str | None = None,
    device: DeviceLike | Mapping[DeviceLike, DeviceLike] | None = None,
    binaries: str = "auto",
    extensions: Iterable[type[ExtensionLine]] = (),
    mmap: bool = True,
    trust: str = "full",
) -> LoadedProgram:
    """Loads a program that `save` wrote; call the result with the arguments of the model.

    Types of its arguments and result that are not registered in this process become dicts and tuples.

    The hash of every entry is checked before its use. The kernels in the file are code: with trust="full", load only
    files whose authors you trust as those of packages that you install.

    Args:
        path: the file.
        emitter: the emitter to run with: "python", "cpp", "fx" or "interpreter"; by default the saved one.
        device: another device of the same type for the program ("cuda:1"), or a mapping for several devices.
        binaries: "auto" uses compiled code in the file if it is for this machine and these versions, else compiles, and
            logs why (`fxwrap.artifact`); "required" raises ArtifactError instead of compiling; "ignored" compiles all.
        extensions: vendors' line classes in the program.
        mmap: whether to map constants on the CPU from the file, which is fast and shares memory between processes. The
            file must not change while they are used; `save` and renames replace files, but some tools copy in place.
        trust: "full"; a public key, "ed25519:...", which must have signed the file (`fxwrap.sign`), and whose owner is
            then trusted; or "none" for a file from a stranger: it runs in the interpreter, may have no kernels, and may
            call only operators that check their operands; compiled code in it is not used.

    Raises ArtifactError for a damaged, truncated or foreign file, for a newer format, and for what `trust` does not
    allow; OptionError for an unknown value of `emitter`, `binaries` or `trust`; ArgumentError for another object than a
    path.
    """
    ArgumentError.check("fxwrap.load", "path", path, (str, PathLike), "Pass the path of a file that fxwrap.save wrote")
    _check_choices(emitter, binaries, trust)
    if trust == "none":
        if emitter not in (None, "interpreter") or binaries == "required":
            raise OptionError("trust='none' runs no code from a file: use emitter='interpreter', binaries='ignored'")
        emitter, binaries, mmap = "interpreter", "ignored", False
    with Archive(Path(path)) as archive:
        if is_public_key(trust):
            check_signature(archive, trust)
            trust = "full"
        loaded = _read_program(archive, emitter, device, binaries, extensions, mmap, trust)
    if not loaded.missing_constants:
        # Compile now: errors show at load time, and the first call is as fast as others. A graph may be rewritten.
        _ = loaded.emitted if loaded.emitter == "fx" else loaded.boxed
    return loaded


def read_saved(path: str | Path) -> LoadedProgram:
    """Reads a program to look at it: nothing is emitted, and no module is imported that its trees name.

    Raises ArtifactError for damaged, truncated or foreign files and for a newer format.
    """
    with Archive(Path(path)) as archive:
        return _read_program(archive, None, None, "ignored", (), True, "full", known_types=False)


def load_content(content: bytes, label: str) -> LoadedProgram:
    """Loads a program from the content of a file; `label` names it in errors. Nothing is emitted yet.

    The content has code that runs, so its program is not checked more than that code.
    Raises ArtifactError for damaged, truncated or foreign content and for a newer format.
    """
    with tempfile.TemporaryFile() as file:  # an archive reads at offsets, also from several threads
        file.write(content)
        file.seek(0)
        with Archive(Path(label), file) as archive:
            deferred = _read_deferred(archive)
            return deferred or _read_program(archive, None, None, "auto", (), False, "full", checked=False)


def _read_deferred(archive: Archive) -> LoadedProgram | None:
    """Returns a program that runs by the emitted code of its file, and is read when it is first asked for."""
    ready = read_emitted(archive)
    if ready is None:
        return None
    emitted, layout, tensors = ready
    texts, plan_text = read_texts(archive), archive.read_text(PLAN) if archive.has(PLAN) else None

    def read() -> tuple[Program, MemoryPlan | None]:
        program = parse_texts(archive, texts)
        _layout(archive, program)
        return program.replace(store=ConstantStore(tensors)), _plan(archive, plan_text)

    deferred = DeferredProgram(emitted, read, plan_text is not None)
    return LoadedProgram(str(archive.path), deferred, str(archive.manifest["emitter"]), layout, archive.manifest)


def _read_program(
    archive: Archive,
    emitter: str | None,
    device: DeviceLike | Mapping[DeviceLike, DeviceLike] | None,
    binaries: str,
    extensions: Iterable[type[ExtensionLine]],
    mmap: bool,
    trust: str,
    known_types: bool = True,
    checked: bool = True,
) -> LoadedProgram:
    """Returns the program of a file; with `checked`, it has the checks of windows that a hostile text needs."""
    manifest = archive.manifest
    emitter = emitter or str(manifest.get("emitter"))
    if emitter not in EMITTERS or not isinstance(manifest.get("options"), str):
        raise archive.error(MANIFEST, f"it names no known emitter, or has no options: emitter {emitter!r}")
    program = read_program(archive, extensions, trust)
    program = check_windows(program) if checked else program
    try:
        devices = device_map(program_devices(program), device)
    except (ValueError, RuntimeError) as error:
        raise archive.error("", str(error), "Load it for its own device, or compile it for another") from None
    program = move_program(program, devices)
    recompile_reason = "binaries='ignored'"
    if binaries != "ignored":
        recompile_reason = load_binaries(archive, emitter, kernel_texts(program), lambda: program_sources(program))
    if binaries == "required" and recompile_reason:
        raise archive.error(
            "", recompile_reason, "Save it again on this kind of machine, or compile when loading: binaries='auto'"
        )
    if binaries == "auto" and recompile_reason:
        level = logging.WARNING if has_binaries(archive, emitter) else logging.INFO
        log.log(level, "%s: compiling its code: %s", archive.path, recompile_reason)
    layout, inside = _layout(archive, program)
    if inside:
        tensors = read_constants(archive, layout, _devices(program), mmap)
        program = program.replace(store=ConstantStore(tensors))
    plan = _plan(archive, archive.read_text(PLAN) if archive.has(PLAN) else None)
    convention = _convention(archive, program, known_types and trust == "full")
    archive.check_unread_entries()
    return LoadedProgram(
        str(archive.path), program, emitter, layout, manifest, plan, recompile_reason, trust, convention
    )


def _check_choices(emitter: str | None, binaries: str, trust: str) -> None:
    """Raises OptionError for an unknown value."""
    choices = (
        (emitter, EMITTERS, "emitter"),
        (binaries, BINARIES, "choice of binaries"),
        (trust, (*TRUST_LEVELS, "a public key, 'ed25519:...'"), "trust"),
    )
    for value, known, what in choices:
        if value is not None and value not in known and not (value is trust and is_public_key(trust)):
            raise OptionError(f"unknown {what} {value!r}; known: {', '.join(known)}")


def _layout(archive: Archive, program: Program) -> tuple[ConstantLayout, bool]:
    """Returns the memory layout of constants, checked against the program, and whether the file has them."""
    described = archive.manifest.get("constants")
    try:
        layout = ConstantLayout.from_json(described)  # type: ignore[arg-type]  # raises for other types
        inside = described["inside"] and bool(program.constants)  # type: ignore[index]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise archive.error(MANIFEST, f"it does not describe the constants: {error!r}") from None
    check_no_objects(program, str(archive.path))
    types = {item.value.name: item.value.tensor_type for item in program.constants}
    if [window.name for window in layout.views] != list(types):
        raise archive.error(MANIFEST, "it describes other constants than the program has")
    for window in layout.views:
        type_ = types[window.name]
        long = [place for place, size in enumerate(window.sizes) if size > 1]
        strides = [(window.strides[place], type_.strides[place]) for place in long if len(type_.strides) > place]
        if (window.dtype, window.sizes) != (type_.dtype, type_.sizes) or any(a != b for a, b in strides):
            raise archive.error(ENTRY, f"constant '{window.name}' does not have the type that the program declares")
    return layout, bool(inside)


def _convention(archive: Archive, program: Program, trusted: bool) -> CallingConvention:
    try:
        return convention_from_json(archive.manifest.get("signature"), program, trusted=trusted)
    except Exception as error:  # noqa: BLE001  a registered type may raise anything
        raise archive.error(MANIFEST, f"it does not describe the inputs and outputs: {error!r}") from None


def _devices(program: Program) -> dict[str, torch.device]:
    return {item.value.name: item.value.tensor_type.device for item in program.constants}


def _plan(archive: Archive, text: str | None) -> MemoryPlan | None:
    if text is None:
        return None
    try:
        return plan_from_json(text)
    except PlanningError as error:
        raise archive.error(PLAN, str(error)) from None
