"""Matmuls: padding, packing, epilogues, and weights that are packed, quantised or frozen."""
