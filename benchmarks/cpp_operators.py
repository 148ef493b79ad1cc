"""Every overload that torch's own operator samples reach, called from emitted C++ and compared with eager.

For each operator of `op_db` its sample inputs run under a recorder, in place and backward too where there is such a
form. Each overload that they reach is then called again through the C++ emitter, once for each combination of argument
classes and element types, many calls in one translation unit, and must give eager's result bit for bit. Prints what
failed. Run from the project's folder; torch's warnings go to the standard error:

    python -m benchmarks.cpp_operators [SAMPLES_PER_OPERATOR] 2>/dev/null
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from benchmarks.recorded_calls import RecordedCall, Recorder, program_of, replay, tensors_in
from fxwrap.converters.cpp import to_cpp
from fxwrap.errors import Unsupported

BATCH = 64
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.float64, torch.bfloat16)

Row = tuple[str, str]
"""An overload, and what is the matter with it."""


def record(samples: int) -> tuple[list[RecordedCall], int]:
    """Runs the samples; returns the calls, and how many samples raised an error of their own."""
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
            except Exception:  # noqa: BLE001  some samples need what this machine has not; their number is printed
                failed += 1
    return list(recorder.calls.values()), failed


def run_sample(info: Any, sample: Any) -> None:
    """Calls an operator of op_db, its backward, and its form that works in place."""
    given = info(sample.input, *sample.args, **sample.kwargs)
    wanted = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
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
    """Replays calls in one translation unit; halves it to find the calls that raise."""
    try:
        return [(calls[position].target, reason) for position, reason in replay(calls, to_cpp).items()]
    except Exception as failure:  # noqa: BLE001  any failure is a row of the table
        if len(calls) == 1:
            reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0][:120]}"
            return [(calls[0].target, reason)]
    half = len(calls) // 2
    return run(calls[:half]) + run(calls[half:])


def refusal(call: RecordedCall) -> str | None:
    """Why the emitter refuses a call, or None."""
    try:
        to_cpp(program_of([call], [call.copied().run()])[0])
    except Unsupported as refused:
        return refused.reason
    return None


def main() -> None:
    """Prints the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that no kernel writes holds NaN on both sides
    start = time.perf_counter()
    calls, failed = record(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    print(f"{len(calls)} calls recorded in {time.perf_counter() - start:.0f} s; {failed} samples raised errors")
    start = time.perf_counter()
    repeatable = [call for call in calls if runs_in_eager(call)]
    reasons = [refusal(call) for call in repeatable]
    refused = [(call.target, reason) for call, reason in zip(repeatable, reasons) if reason is not None]
    tried = [call for call, reason in zip(repeatable, reasons) if reason is None]
    failures: list[Row] = []
    for first in range(0, len(tried), BATCH):
        failures += run(tried[first : first + BATCH])
    for title, rows in (("refused", refused), ("failed", failures)):
        for target, reason in sorted(set(rows)):
            print(f"{title:<8} {target:<56} {reason}")
    good = {call.target for call in tried} - {target for target, _ in [*failures, *refused]}
    print(
        f"{len(good)} of {len({call.target for call in repeatable})} overloads equal eager's results from C++, in "
        f"{len(tried) - len(failures)} of {len(repeatable)} calls; {len(calls) - len(repeatable)} calls cannot be "
        f"made by themselves in eager; {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
