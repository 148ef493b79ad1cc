"""Saved programs: the file format, saving and loading."""

from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.artifact.loading import load, load_content, read_saved
from fxwrap.artifact.program_text import parse
from fxwrap.artifact.savable import SavableProgram
from fxwrap.artifact.saving import SavedContent, program_content, save_program

__all__ = [
    "LoadedProgram", "SavableProgram", "SavedContent", "load", "load_content", "parse", "program_content", "read_saved",
    "save_program",
]  # fmt: skip
