"""Saved programs: the file format, saving and loading."""

from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.artifact.loading import load
from fxwrap.artifact.program_text import parse
from fxwrap.artifact.saving import save_program

__all__ = ["LoadedProgram", "load", "parse", "save_program"]
