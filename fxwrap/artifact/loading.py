"""Programs out of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fxwrap.artifact.archive import MANIFEST, Archive
from fxwrap.artifact.binaries import use_binaries
from fxwrap.artifact.constants import ENTRY, ConstantLayout, read_constants
from fxwrap.artifact.devices import device_map, moved, program_devices
from fxwrap.artifact.loaded import Loaded
from fxwrap.artifact.parts import read_program
from fxwrap.artifact.saving import PLAN
from fxwrap.errors import OptionError, PlanningError
from fxwrap.lines import ExtensionLine
from fxwrap.memory_planning import MemoryPlan, plan_from_json
from fxwrap.options import EMITTERS
from fxwrap.wrapper_ir import ConstantStore, Program

BINARIES = ("auto", "required", "ignored")
"""What `load` may be told about compiled code in a file."""


def load_program(
    path: str | Path,
    *,
    emitter: str | None = None,
    device: torch.device | str | Mapping[Any, Any] | None = None,
    binaries: str = "auto",
    extensions: Iterable[type[ExtensionLine]] = (),
    mmap: bool = True,
) -> Loaded:
    """Loads a program; see `fxwrap.load`."""
    for given, known, what in ((emitter, EMITTERS, "emitter"), (binaries, BINARIES, "choice of binaries")):
        if given is not None and given not in known:
            raise OptionError(f"there is no {what} {given!r}; the known ones are {', '.join(known)}")
    with Archive(Path(path)) as archive:
        manifest = archive.manifest
        chosen = emitter or str(manifest.get("emitter"))
        if chosen not in EMITTERS or not isinstance(manifest.get("options"), str):
            raise archive.error(MANIFEST, f"it does not say how the program runs: emitter {chosen!r}")
        program = read_program(archive, extensions)
        try:
            devices = device_map(program_devices(program), device)
        except (ValueError, RuntimeError) as error:
            raise archive.error("", str(error), "Load it for the device it is for, or compile it for another") from None
        program = moved(program, devices)
        rebuilt = "they were not asked for" if binaries == "ignored" else use_binaries(archive, program, chosen)
        if binaries == "required" and rebuilt:
            raise archive.error("", rebuilt, "Save it again on such a machine, or let load compile it: binaries='auto'")
        layout, inside = _layout(archive, program)
        if inside:
            tensors = read_constants(archive, layout, _devices(program), mmap)
            program = program.replace(store=ConstantStore(tensors))
        plan = _plan(archive)
        archive.check_others()
        loaded = Loaded(str(path), program, chosen, layout, manifest, plan, rebuilt)
    if inside or not program.constants:
        # What cannot run here fails now, and the first call takes no longer than others; a graph may be rewritten.
        _ = loaded.emitted if chosen == "fx" else loaded.boxed
    return loaded


def _layout(archive: Archive, program: Program) -> tuple[ConstantLayout, bool]:
    """Returns how constants lie in memory, as far as it agrees with the program, and whether the file has them."""
    described = archive.manifest.get("constants")
    try:
        layout = ConstantLayout.from_json(described)  # type: ignore[arg-type]  # what is no mapping raises
        inside = described["inside"] and bool(program.constants)  # type: ignore[index]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise archive.error(MANIFEST, f"it does not describe the constants: {error!r}") from None
    wanted = {item.value.name: item.value.tensor_type for item in program.constants}
    if [window.name for window in layout.windows] != list(wanted):
        raise archive.error(MANIFEST, "it describes other constants than the program has")
    for window in layout.windows:
        type_ = wanted[window.name]
        long = [place for place, size in enumerate(window.sizes) if size > 1]
        strides = [(window.strides[place], type_.strides[place]) for place in long if len(type_.strides) > place]
        if (window.dtype, window.sizes) != (type_.dtype, type_.sizes) or any(a != b for a, b in strides):
            raise archive.error(ENTRY, f"constant '{window.name}' is not of the type that the program says")
    return layout, bool(inside)


def _devices(program: Program) -> dict[str, torch.device]:
    return {item.value.name: item.value.tensor_type.device for item in program.constants}


def _plan(archive: Archive) -> MemoryPlan | None:
    if not archive.has(PLAN):
        return None
    try:
        return plan_from_json(archive.read_text(PLAN))
    except PlanningError as error:
        raise archive.error(PLAN, str(error)) from None
