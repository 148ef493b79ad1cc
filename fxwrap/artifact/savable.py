"""Programs with a method `save`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path

from fxwrap.artifact.saving import SavedContent, save_program
from fxwrap.signature import StructuredProgram


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
        content = self.content_to_save(constants)
        chosen = (content.emitter,) if emitters is None else emitters
        save_program(content, path, emitters=chosen, constants=constants, target=target, architectures=architectures)

    @abstractmethod
    def content_to_save(self, constants: bool = True) -> SavedContent:
        """Returns the content of a file with or without constants. Raises ArtifactError if it cannot be saved."""
