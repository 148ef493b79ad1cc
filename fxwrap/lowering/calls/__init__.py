"""Extern calls, mutations, in-place writes and launches of user kernels."""
