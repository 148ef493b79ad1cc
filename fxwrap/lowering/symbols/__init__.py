"""Symbols: those of inputs, unbacked ones, scalars in CPU tensors, and positions of slices."""
