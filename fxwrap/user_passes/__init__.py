"""Runs the user's passes, and finds out what is wrong with what they leave."""

from fxwrap.user_passes.graph import run_emitted_pass, run_source_passes
from fxwrap.user_passes.program import run_program_pass

__all__ = ["run_emitted_pass", "run_program_pass", "run_source_passes"]
