"""Every overload that torch's own operator samples reach, called from emitted C++ and compared with eager.

The sample inputs of each operator of `op_db` run under a recorder, in place and backward too. Each overload that they
reach is called again through the C++ emitter, once per combination of argument classes and dtypes, many calls in one
translation unit, and must equal eager bit for bit. The script prints failures. Run in the repository's root:

    python -m benchmarks.cpp_operators [SAMPLES_PER_OPERATOR] [--record] 2>/dev/null
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from benchmarks.recorded_calls import RecordedCall, Recorder, program_of, replay, tensors_in
from benchmarks.results import Report, add_record_option
from fxwrap.converters.cpp import to_cpp
from fxwrap.errors import UnsupportedError

BATCH = 64
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.float64, torch.bfloat16)

Row = tuple[str, str]
"""An overload, and why it failed."""


def record(samples: int) -> tuple[list[RecordedCall], int]:
    """Runs the samples; returns the calls, and the number of samples that raise in eager."""
    recorder = Recorder()
    failed = 0
    for info, dtype in itertools.product(op_db, DTYPES):
        if dtype not in info.supported_dtypes("cpu"):
            continue
        gradient = dtype in info.supported_backward_dtypes("cpu")
        for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=gradient), samples):
            try:
                with recorder:
                    run_sample(info, sample)
            except Exception:  # noqa: BLE001  some samples need other hardware; their number is printed
                failed += 1
    return list(recorder.calls.values()), failed


def run_sample(info: Any, sample: Any) -> None:
    """Calls an operator of op_db, its backward, and its in-place form."""
    output = info(sample.input, *sample.args, **sample.kwargs)
    differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
    if info.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
        with torch.no_grad():
            info.inplace_variant(sample.input.detach().clone(), *sample.args, **sample.kwargs)


def runs_in_eager(call: RecordedCall) -> bool:
    """Whether the call can be made by itself: some only make sense inside the composite that made them."""
    try:
        call.copied().run()
    except Exception:  # noqa: BLE001  whatever torch raises, the call is no test of ours
        return False
    return True


def run(calls: Sequence[RecordedCall]) -> list[Row]:
    """Replays calls in one translation unit; bisects it to find the calls that raise."""
    try:
        return [(calls[position].target, reason) for position, reason in replay(calls, to_cpp).items()]
    except Exception as failure:  # noqa: BLE001  any failure is a row of the table
        if len(calls) == 1:
            reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0][:120]}"
            return [(calls[0].target, reason)]
    half = len(calls) // 2
    return run(calls[:half]) + run(calls[half:])


def unsupported_reason(call: RecordedCall) -> str | None:
    """Returns why the emitter does not support a call, or None."""
    try:
        to_cpp(program_of([call], [call.copied().run()])[0])
    except UnsupportedError as error:
        return error.reason
    return None


def main() -> None:
    """Prints the failures and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=int, nargs="?", default=3, help="per operator")
    add_record_option(parser)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN on both sides
    calls, failed_samples = record(chosen.samples)
    repeatable = [call for call in calls if runs_in_eager(call)]
    reasons = [unsupported_reason(call) for call in repeatable]
    unsupported = [(call.target, reason) for call, reason in zip(repeatable, reasons) if reason is not None]
    supported = [call for call, reason in zip(repeatable, reasons) if reason is None]
    failures: list[Row] = []
    for first in range(0, len(supported), BATCH):
        failures += run(supported[first : first + BATCH])
    for title, rows in (("unsupported", unsupported), ("failed", failures)):
        for target, reason in sorted(set(rows)):
            print(f"{title:<12} {target:<56} {reason}")
    equal = {call.target for call in supported} - {target for target, _ in [*failures, *unsupported]}
    note = f"{failed_samples} samples raise in eager; {len(calls) - len(repeatable)} calls cannot be repeated"
    cells = {"overloads": len({call.target for call in repeatable}), "equal overloads": len(equal)}
    counts = {"calls": len(repeatable), "equal calls": len(supported) - len(failures)}
    Report("cpp_operators", chosen, note=note).add({**cells, **counts})


if __name__ == "__main__":
    main()
