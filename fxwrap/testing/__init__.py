"""Assertions for the tests of those who use fxwrap, and of those who write emitters, passes and lowerings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxwrap.compare import COMPARED, Report, compare
from fxwrap.options import Options
from fxwrap.wrapper_ir import Program


def assert_emitters_agree(
    fn: Any,
    inputs: Any,
    *,
    options: Options | Mapping[str, Any] | None = None,
    training: bool = False,
    emitters: Sequence[str] = COMPARED,
    tolerance: float | None = None,
    seed: int = 0,
    dynamic: bool | None = False,
) -> Report:
    """Asserts that every emitter does what eager PyTorch does, and returns the report.

    Takes what `fxwrap.compare` takes, and compares what it compares: numbers, mutations, aliasing, strides, dtypes,
    devices and, with `training`, gradients. Nothing is timed. Raises AssertionError with the table and every
    difference.
    """
    report = compare(
        fn, inputs, options=options, training=training, emitters=emitters, tolerance=tolerance, repeats=0, seed=seed,
        dynamic=dynamic,
    )  # fmt: skip
    if not report.agrees:
        raise AssertionError(str(report))
    return report


def assert_programs_agree(
    program: Program,
    inputs: Sequence[Any],
    *,
    emitters: Sequence[str] = COMPARED[1:],
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Asserts that a program does the same in every emitter as in the interpreter, and returns the report.

    `inputs` are the program's flat inputs. Outputs, mutations of inputs and of constants, aliasing, strides, dtypes and
    devices are compared. Raises VerifyError for a program that breaks a rule, AssertionError with every difference.
    """
    report = compare(program, tuple(inputs), emitters=emitters, tolerance=tolerance, repeats=0, seed=seed)
    if not report.agrees:
        raise AssertionError(f"{report}\n\n{program}")
    return report
