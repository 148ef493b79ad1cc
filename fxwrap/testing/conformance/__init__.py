"""The conformance suite: programs that a vendor runs on a registered device, compared with eager PyTorch on the CPU.

`python -m fxwrap conformance --device npu --import vendor_package` prints its table.
"""

from fxwrap.testing.conformance.case import GROUPS, ConformanceCase
from fxwrap.testing.conformance.cases import CASES
from fxwrap.testing.conformance.runner import CaseResult, ConformanceReport, merge_reports, run_case, run_conformance

__all__ = [
    "CASES",
    "GROUPS",
    "CaseResult",
    "ConformanceCase",
    "ConformanceReport",
    "merge_reports",
    "run_case",
    "run_conformance",
]
