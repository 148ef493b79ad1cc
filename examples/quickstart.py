"""A small transformer, compiled: its program with fused kernels, its three emitted forms, and a comparison with eager.

Run it with `python examples/quickstart.py`, or `make demo`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxwrap


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_output(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Transformer(nn.Module):
    """A language model: token and position embeddings, blocks, and a head that shares the token embedding's weight."""

    def __init__(
        self, vocabulary: int = 256, width: int = 64, heads: int = 4, layers: int = 2, length: int = 64
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


def show(title: str, text: str, start: str, lines: int = 24) -> None:
    """Prints, under a title, the first lines of a text, and some from the first line that contains `start`."""
    all_lines = text.strip("\n").splitlines()
    first = next((number for number, line in enumerate(all_lines) if start in line), 0)
    end = ["..."] if first + lines < len(all_lines) else []
    shown = [*all_lines[: min(6, first)], *(["..."] if first > 6 else []), *all_lines[first : first + lines], *end]
    print(f"\n=== {title} ({len(all_lines)} lines)\n")
    print("\n".join(line if len(line) <= 140 else line[:137] + "..." for line in shown))


def main() -> None:
    torch.manual_seed(0)
    model = Transformer().eval()
    tokens = torch.randint(0, 256, (2, 32))

    # torch.compile finds the backend by its name. `options={"emitter": "cpp"}` would run C++.
    with torch.no_grad():
        logits = torch.compile(model, backend="fxwrap")(tokens)
    print(f"torch.compile(model, backend='fxwrap') returned logits of shape {tuple(logits.shape)}")

    # compile_graph lowers an exported program to the Wrapper IR: plain data that can be printed and parsed.
    compiled = fxwrap.compile_graph(torch.export.export(model, (tokens,)), name="transformer")
    show("the program", str(compiled.program), start="program", lines=40)
    assert fxwrap.parse(str(compiled.program)) == compiled.program

    # Fused kernels are C++ on a CPU and Triton on a GPU. Equal layers share kernels.
    kernels = compiled.program.kernels
    fused = sum(outcome.kind == "fused" for outcome in compiled.coverage)
    print(f"\n{fused} operators are fused into {len(kernels)} kernels: {', '.join(kernel.name for kernel in kernels)}")
    kernel = next(kernel for kernel in kernels if kernel.name.startswith("gelu"))
    show(f"the kernel {kernel.name}", kernel.source, start="#include")

    # Three converters emit it. Each result is a callable from flat inputs to flat outputs.
    show("as an FX graph", fxwrap.to_fx(compiled.program).source, start="addmm = ")
    show("as Python", fxwrap.to_python(compiled.program).source, start="def transformer")
    show("as C++", fxwrap.to_cpp(compiled.program).source, start="static void run")

    # The same inputs through eager PyTorch, float64, the interpreter and the three forms, forward and backward.
    report = fxwrap.compare(model.train(), (tokens,), training=True)
    print(f"\n=== compared with eager, forward and backward\n\n{report}")
    assert report.agrees


if __name__ == "__main__":
    main()
