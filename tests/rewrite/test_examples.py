"""The examples of rewriting run, and print the expected texts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.printers.test_triton_printer_compile import compiled

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("custom_kernel", ["kernel.launch @linear_gelu(", "the largest difference is"]),
        ("profiling_ranges", ["0.attention: ", "1.attention: "]),
        ("vendor_operator", ["rewrite_graph: 2 calls of the vendor's operator, 0 of ATen's",
                             "rewrite_program: 2 calls of the vendor's operator, 0 of ATen's",
                             "rewrite_emitted_graph: 2 calls of the vendor's operator, 0 of ATen's"]),
        ("quantised_linear", ["int8: 11280 bytes of constants", "the result changed by 0."]),
        ("serving_passes", [f"{form}: all_reduce + add + RMSNorm + quantise: 1, add + RMSNorm + quantise: 1, "
                            "attention + quantise: 1, linear: 3" for form in ("ATen", "functional", "in_place")]),
        ("split_program", ["1 tensors of 512 bytes go from the first device to the second"]),
    ],
)  # fmt: skip
def test_an_example_runs(name: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"rewrite_{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed


def test_the_custom_kernel_runs_in_triton_too(capsys: pytest.CaptureFixture[str]) -> None:
    """On the GPU where there is one, else in Triton's interpreter; and it compiles for an H100."""
    example = runpy.run_path(str(EXAMPLES / "rewrite_custom_kernel.py"))
    example["main"]("triton")
    assert "in triton, the largest difference is" in capsys.readouterr().out
    assert ".target sm_90" in compiled(example["KERNELS"]["triton"]).asm["ptx"]
