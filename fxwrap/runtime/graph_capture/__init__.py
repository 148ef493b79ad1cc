"""Capture and replay of a program's functions, with a capturer for CUDA graphs."""
