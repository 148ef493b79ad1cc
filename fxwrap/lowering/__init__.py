"""From FX graphs to programs."""

from .decompositions import decomposition_table, default_decompositions
from .lower import lower

__all__ = ["decomposition_table", "default_decompositions", "lower"]
