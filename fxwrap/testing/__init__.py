"""Assertions for tests of models, emitters, passes and lowering rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxwrap.comparison import COMPARED_EMITTERS, Report, compare
from fxwrap.options import Options
from fxwrap.wrapper_ir import Program


def assert_emitters_agree(
    fn: object,
    inputs: object,
    *,
    options: Options | Mapping[str, object] | None = None,
    training: bool = False,
    emitters: Sequence[str] = COMPARED_EMITTERS,
    tolerance: float | None = None,
    seed: int = 0,
    dynamic: bool | None = False,
) -> Report:
    """Asserts that every emitter agrees with eager PyTorch, and returns the report.

    Takes the arguments of `fxwrap.compare`, and compares values, mutations, aliasing, strides, dtypes, devices and,
    with `training`, gradients. Raises AssertionError with the table and every difference.
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
    inputs: Sequence[object],
    *,
    emitters: Sequence[str] = COMPARED_EMITTERS[1:],
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Asserts that every emitter agrees with the interpreter on a program, and returns the report.

    `inputs` are the program's flat inputs. Compares outputs, mutations of inputs and constants, aliasing, strides,
    dtypes and devices. Raises VerifyError for an invalid program, and AssertionError with every difference.
    """
    report = compare(program, tuple(inputs), emitters=emitters, tolerance=tolerance, repeats=0, seed=seed)
    if not report.agrees:
        raise AssertionError(f"{report}\n\n{program}")
    return report
