"""The comparison of eager PyTorch, a float64 reference, the interpreter and the emitters, on the same inputs."""

from fxwrap.compare.driver import COMPARED, capture, compare
from fxwrap.compare.observe import TOLERANCES
from fxwrap.compare.report import KINDS, Disagreement, Error, Outcome, Report
from fxwrap.compare.subjects import CapturedGraph

__all__ = [
    "COMPARED",
    "KINDS",
    "TOLERANCES",
    "CapturedGraph",
    "Disagreement",
    "Error",
    "Outcome",
    "Report",
    "capture",
    "compare",
]
