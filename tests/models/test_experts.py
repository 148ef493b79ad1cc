"""Mixtral of `transformers` with grouped matmuls as kernels."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from fxwrap.comparison import capture
from fxwrap.lines import ExternCall, Launch

CONFIG = MixtralConfig(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
    vocab_size=64, num_local_experts=4,
)  # fmt: skip


@pytest.mark.long  # its kernels take 8 s to compile; tests of grouped matmuls have smaller ones
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_experts_are_kernels() -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(CONFIG).eval().bfloat16()
    model.set_experts_implementation("grouped_mm")
    tokens = torch.randint(64, (1, 24))
    with torch.no_grad():
        options = {"matmul_kernels": "generated"}
        compiled = torch.compile(model, backend="fxwrap", options=options, fullgraph=True)
        torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits, atol=2e-2, rtol=2e-2)
        (graph,) = capture(lambda x: model(x).logits, (tokens,), options=options)
    lines = list(graph.compiled.program.lines())
    assert not [line for line in lines if isinstance(line, ExternCall) and "_mm" in line.target]
    kernels = [line.kernel for line in lines if isinstance(line, Launch) and "grouped_mm" in line.kernel]
    assert kernels == ["grouped_mm_0", "grouped_mm_silu_mul_0", "grouped_mm_1"]  # the groups of rows, and two matmuls
