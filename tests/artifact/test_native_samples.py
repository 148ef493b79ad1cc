"""Lines of the Wrapper IR in the C runtime: samples have the results of the interpreter, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.artifact import SavedContent, save_program
from fxwrap.errors import ArtifactError
from tests.artifact.native_host import drive, read_result, tensor_commands
from tests.support.long_form import LONG
from tests.support.samples import SAMPLES

REFUSED = {
    "generator": "the input 'g' is an object of Generator",
    "generators_of_a_function": "the input 'g' is an object of Generator",
    "objects": "the operator 'fxwrap_tests::add_count' is implemented in Python",
    "objects_of_a_function": "the operator 'fxwrap_tests::add_count' is implemented in Python",
    "objects_of_blocks": "the operator 'fxwrap_tests::add_count' is implemented in Python",
    "object_as_constant": "constant 'k' is an object of",
}
"""The samples that need Python, with the reason."""

NOT_OF_THE_DRIVER = {
    "exact_scalars": "complex inputs", "aliases": "complex inputs", "symbols_of_all_kinds": "strided inputs",
    "random_state": "a seed",
}  # fmt: skip
"""The samples that need what the test driver cannot pass."""

RUN = [
    name for name, sample in SAMPLES.items()
    if sample.cpu_runnable and sample.languages <= {"cpp"} and name not in REFUSED and name not in NOT_OF_THE_DRIVER
]  # fmt: skip
BRIEFLY = ["pool_and_workspace", "cond_nested", "while_loops", "scan_and_map", "unbacked_results", "shared_function"]


def has_gaps(tensor: torch.Tensor) -> bool:
    """Returns whether there is memory between the elements of a tensor, which the driver would write too."""
    extent = 1 + sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return tensor.numel() > 0 and extent != tensor.numel()


def in_memory(result: Path, like: torch.Tensor) -> torch.Tensor:
    """Returns a result that the driver wrote in the order of its memory."""
    return read_result(result, like.new_empty(like.numel())).as_strided(like.shape, like.stride())


def commands(inputs: Sequence[Any], folder: Path) -> list[str]:
    words: list[str] = []
    for item in inputs:
        is_tensor = isinstance(item, torch.Tensor)
        words += tensor_commands(folder, [item]) if is_tensor else [type(item).__name__, str(item).lower()]
    return words


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUN if LONG else BRIEFLY)
def test_results_are_those_of_the_interpreter(name: str, tmp_path: Path) -> None:
    program, inputs = SAMPLES[name].program(), SAMPLES[name].inputs(seed=3)
    save_program(SavedContent(program, "cpp"), tmp_path / "sample.fxw", target="native")
    data = tmp_path / "data"
    data.mkdir()
    words = commands(inputs, data)  # before the program writes its inputs
    wanted = fxwrap.run(program, inputs)
    done = drive("open", tmp_path / "sample.fxw", *words, "run", data / "out", "alive")
    assert done.code == 0 and done.lines[-1] == "alive 0", done
    for index, item in enumerate(wanted):
        if isinstance(item, torch.Tensor) and not has_gaps(item):
            torch.testing.assert_close(in_memory(data / f"out.{index}", item), item, equal_nan=True)
        elif type(item) is int:
            assert f"result {index} int {item}" in done.lines


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_need_python_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=REFUSED[name]):
        save_program(SavedContent(SAMPLES[name].program(), "cpp"), tmp_path / "sample.fxw", target="native")
    assert not list(tmp_path.iterdir())
