"""Compilation and launches of Triton kernels, fxwrap's and the user's."""
