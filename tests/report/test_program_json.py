"""Programs as JSON, which `fxwrap show --json` prints."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.loop_ir import parse_kernel
from fxwrap.report import program_to_json


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_kernels_have_the_text_of_their_loop_ir(language: str) -> None:
    x = torch.randn(4, 8)
    graph = make_fx(lambda x: torch.softmax(x, -1))(x)
    program = fxwrap.lower(graph, (x,), options=Options(cpu_kernels=language))
    (kernel,) = program_to_json(program)["kernels"]
    assert kernel["language"] == language
    assert parse_kernel(kernel["loops"]) == program.kernels[0].loop_ir
