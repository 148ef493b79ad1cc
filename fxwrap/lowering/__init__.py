"""From FX graphs to programs."""

from fxwrap.lowering.decompositions import decomposition_table, default_decompositions
from fxwrap.lowering.define import Outcome
from fxwrap.lowering.graph import Lowered, lower, lower_with_coverage

__all__ = ["Lowered", "Outcome", "decomposition_table", "default_decompositions", "lower", "lower_with_coverage"]
