"""From FX graphs to programs."""

from fxwrap.lowering.decompositions import decomposition_table, default_decompositions
from fxwrap.lowering.graph import lower

__all__ = ["decomposition_table", "default_decompositions", "lower"]
