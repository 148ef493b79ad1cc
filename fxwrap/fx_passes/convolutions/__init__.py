"""Convolutions: layouts, biases and frozen weights."""
