"""Programs with a method `save`."""

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
class SavedContent:
    """A program and what a file says about it; the fields are the parameters of `save_program`."""

    program: Program
    emitter: str
    options: str
    plan: MemoryPlan | None
    group_sizes: Mapping[str, int] | None = None
    step: Mapping[str, object] | None = None


class SavableProgram(StructuredProgram):
    """A program that can be saved."""

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
        content = self._content_to_save(constants)
        chosen = (content.emitter,) if emitters is None else emitters
        save_program(
            content.program, path, emitter=content.emitter, emitters=chosen, options=content.options, plan=content.plan,
            constants=constants, group_sizes=content.group_sizes, step=content.step, convention=self.convention,
            target=target, architectures=architectures,
        )  # fmt: skip

    @abstractmethod
    def _content_to_save(self, constants: bool) -> SavedContent:
        """Returns the content of a file with or without constants. Raises ArtifactError if it cannot be saved."""
