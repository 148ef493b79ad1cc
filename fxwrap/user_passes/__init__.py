"""Runs the user's passes, and checks their results."""

from fxwrap.user_passes.graph import run_emitted_pass, run_program_pass, run_source_passes

__all__ = ["run_emitted_pass", "run_program_pass", "run_source_passes"]
