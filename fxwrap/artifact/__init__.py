"""Saved programs: the file format, saving and loading."""

from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.artifact.loading import load_program
from fxwrap.artifact.saving import save_program

__all__ = ["LoadedProgram", "load_program", "save_program"]
