"""What README.md shows is what fxwrap prints."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ w + b).t()


def program() -> fxwrap.Program:
    inputs = [torch.randn(4, 8), torch.randn(8, 16), torch.randn(16)]
    return fxwrap.lower(make_fx(layer)(*inputs), inputs, name="layer")


def block(start: str) -> str:
    """The first block of the file that has a text in it."""
    return next(text for _, text in BLOCKS if start in text)


def shortened(text: str) -> str:
    """A text with hashes cut and without what FX adds behind calls, as the file shows it."""
    text = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1...", text)
    return re.sub(r";  [\w= ]+ = None$", "", text, flags=re.MULTILINE)


def assert_shown(shown: str, printed: str) -> None:
    assert shortened(shown).rstrip("\n") in shortened(printed)


def test_the_example_is_this_one() -> None:
    assert "def layer(x, w, b):\n    return torch.nn.functional.gelu(x @ w + b).t()" in block("def layer")


def test_the_program_is_shown() -> None:
    assert_shown(block("program @layer"), str(program()))


def test_what_the_emitters_give_is_shown() -> None:
    lowered = program()
    assert_shown(block("    mm = torch.mm(x_1, w_1)"), fxwrap.to_python(lowered).source)
    assert_shown(block("CALL(f, aten_mm"), fxwrap.to_cpp(lowered).source)
    assert_shown(block("kernels.add_gelu_0(b_1, mm)"), fxwrap.to_fx(lowered).source)


def test_a_triton_kernel_is_shown() -> None:
    x = torch.randn(64, 1024)
    graph = make_fx(lambda x: torch.softmax(x * 0.5, -1))(x)
    lowered = fxwrap.lower(graph, [x], options=fxwrap.Options(cpu_kernels="triton"))
    assert_shown(block("largest = tl.reduce"), lowered.kernels[0].source)
