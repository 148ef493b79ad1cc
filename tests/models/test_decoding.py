"""One token of a model of `transformers` with static caches: the launches and calls of a layer."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import fxwrap
from fxwrap.lines import Alloc, ExternCall, Launch, Mutate

LAYERS, LENGTH, KEY_HEADS, WIDTH = 2, 16, 2, 8
CONFIG = LlamaConfig(
    hidden_size=8 * WIDTH, intermediate_size=96, num_attention_heads=8, num_key_value_heads=KEY_HEADS,
    num_hidden_layers=LAYERS, vocab_size=50, max_position_embeddings=64,
)  # fmt: skip


class Decoder(nn.Module):
    """Returns the logits of a token after a prompt, which is in the caches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(CONFIG).eval()
        self.cache = StaticCache(config=CONFIG, max_cache_len=LENGTH)
        with torch.no_grad():
            self.model(torch.arange(5)[None], past_key_values=self.cache)

    def forward(self, token: Tensor) -> Tensor:
        logits: Tensor = self.model(token, past_key_values=self.cache).logits
        return logits


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_has_one_kernel_between_its_calls() -> None:
    """Rotation and update of both caches are one kernel, keys are not repeated, and masks are computed once."""
    token, options = torch.tensor([[7]]), {"fallback": "error", "matmul_kernels": "library"}
    with torch.no_grad():
        expected = Decoder()(token)
        decoder = Decoder()
        compiled = torch.compile(decoder, backend="fxwrap", options=options, fullgraph=True)
        torch.testing.assert_close(compiled(token), expected)
    (graph,) = fxwrap.inspect(compiled)
    lines = graph.compiled.program.body.lines
    calls = Counter(line.target for line in lines if isinstance(line, ExternCall | Mutate))
    assert calls == {
        "aten.mm.default": 7 * LAYERS + 1, "aten._scaled_dot_product_flash_attention_for_cpu.default": LAYERS,
    }  # fmt: skip
    # In a layer: query, caches, two of residual and norm, SwiGLU, counter of tokens. Once: embedding, angles, mask.
    assert len([line for line in lines if isinstance(line, Launch)]) == 6 * LAYERS + 3
    sizes = [line.result.tensor_type.sizes for line in lines if isinstance(line, Alloc)]
    assert not [size for size in sizes if LENGTH in size[:-1]]
