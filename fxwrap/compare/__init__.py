"""The comparison of eager PyTorch, a float64 reference, the interpreter and the emitters, on the same inputs."""

from fxwrap.compare.copies import copy_inputs
from fxwrap.compare.driver import COMPARED_EMITTERS, capture, compare
from fxwrap.compare.measure import peak_bytes
from fxwrap.compare.observe import GRADIENT_NORM_FLOOR, TOLERANCES, tensor_error
from fxwrap.compare.report import DISAGREEMENT_KINDS, Deviation, Disagreement, Report, RunOutcome
from fxwrap.compare.subjects import CapturedGraph, CompiledFunction

__all__ = [
    "COMPARED_EMITTERS",
    "DISAGREEMENT_KINDS",
    "GRADIENT_NORM_FLOOR",
    "TOLERANCES",
    "CapturedGraph",
    "CompiledFunction",
    "Deviation",
    "Disagreement",
    "Report",
    "RunOutcome",
    "capture",
    "compare",
    "copy_inputs",
    "peak_bytes",
    "tensor_error",
]
