"""Loops over experts become grouped matmuls."""
