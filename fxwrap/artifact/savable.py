"""Programs that can be saved: compiled and loaded ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxwrap.artifact.saving import save_program
from fxwrap.memory_planning import MemoryPlan
from fxwrap.signature import StructuredProgram
from fxwrap.wrapper_ir import Program


@dataclass(frozen=True)
class SavedParts:
    """What a file has of a program besides its calling convention.

    Fields: `emitter` runs it when it is loaded; `options` is their text; `group_sizes` and `step` as `save_program`
    takes them.
    """

    program: Program
    emitter: str
    options: str
    plan: MemoryPlan | None
    group_sizes: Mapping[str, int] | None = None
    step: Mapping[str, object] | None = None


class SavableProgram(StructuredProgram):
    """A program that can be saved."""

    @abstractmethod
    def _parts_to_save(self, constants: bool) -> SavedParts:
        """Returns the parts. Raises ArtifactError where the program must not be saved, or not with its `constants`."""

    def save(
        self,
        path: str | Path,
        *,
        constants: bool = True,
        emitters: Collection[str] | None = None,
        target: str = "any",
        architectures: Sequence[str] = (),
    ) -> None:
        """Saves the program, its compiled code and its constants into a file; see `fxwrap.save`."""
        parts = self._parts_to_save(constants)
        save_program(
            parts.program, path, emitter=parts.emitter, emitters=(parts.emitter,) if emitters is None else emitters,
            options=parts.options, plan=parts.plan, constants=constants, group_sizes=parts.group_sizes, step=parts.step,
            convention=self.convention, target=target, architectures=architectures,
        )  # fmt: skip
