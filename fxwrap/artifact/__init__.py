"""Programs as files: the container, what is in it, and what is loaded from it."""

from fxwrap.artifact.loaded import Loaded
from fxwrap.artifact.loading import load_program
from fxwrap.artifact.saving import save_program

__all__ = ["Loaded", "load_program", "save_program"]
