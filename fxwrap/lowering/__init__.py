"""Lowering: a prepared FX graph becomes a program of the Wrapper IR."""

from fxwrap.lowering.builder import NodeCoverage
from fxwrap.lowering.program import Lowered, lower, lower_prepared, lower_with_coverage
from fxwrap.lowering.rules import RULES

__all__ = ["RULES", "Lowered", "NodeCoverage", "lower", "lower_prepared", "lower_with_coverage"]
