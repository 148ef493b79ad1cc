"""torch's DebugMode shows the operators that kernels compute, with hashes of their results."""

from __future__ import annotations

import re

import torch
from torch.utils._debug_mode import DebugMode


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.nn.functional.gelu(x @ w) + 1, -1)


def logged(call: object, *inputs: torch.Tensor) -> str:
    """The calls of a function in DebugMode, with hashes."""
    with torch.no_grad(), DebugMode() as mode, DebugMode.log_tensor_hashes():
        call(*inputs)  # type: ignore[operator]
    return str(mode.debug_string(show_stack_trace=False))


def hashes(text: str) -> dict[str, str]:
    return dict(re.findall(r"(aten::\w+)\S*\(.*'hash': ([\d.]+)", text))


def test_fused_operators_are_shown_as_their_decomposed_calls_with_hashes() -> None:
    inputs = (torch.randn(4, 8), torch.randn(8, 8))
    options = {"kernels": "subgraph", "emitter": "fx", "profile_ranges": True}
    compiled = torch.compile(function, backend="fxwrap", options=options)
    with torch.no_grad():
        compiled(*inputs)
    text, eager = logged(compiled, *inputs), logged(function, *inputs)
    expected = hashes(eager)
    assert expected.keys() == {"aten::mm", "aten::gelu", "aten::add", "aten::_softmax"}
    assert expected.items() <= hashes(text).items()
    assert re.search(r"\[record function\] gelu_add_softmax_0:1 .*\n(.*\n)*.*aten::gelu", text)
