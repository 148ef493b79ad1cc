"""From FX graphs to programs."""

from .decompositions import default_decompositions
from .lower import lower

__all__ = ["default_decompositions", "lower"]
