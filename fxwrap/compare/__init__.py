"""The comparison of eager PyTorch, a float64 reference, the interpreter and the emitters, on the same inputs."""

from fxwrap.compare.copies import copied
from fxwrap.compare.driver import COMPARED, capture, compare
from fxwrap.compare.measure import peak_bytes
from fxwrap.compare.observe import SMALL_SHARE, TOLERANCES, tensor_error
from fxwrap.compare.report import KINDS, Disagreement, Error, Outcome, Report
from fxwrap.compare.subjects import CapturedGraph, CompiledFunction

__all__ = [
    "COMPARED",
    "KINDS",
    "SMALL_SHARE",
    "TOLERANCES",
    "CapturedGraph",
    "CompiledFunction",
    "Disagreement",
    "Error",
    "Outcome",
    "Report",
    "capture",
    "compare",
    "copied",
    "peak_bytes",
    "tensor_error",
]
