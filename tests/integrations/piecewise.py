"""A model as vLLM writes it, and its graph split as vLLM splits it.

Attention is a custom operator, at which the graph of Dynamo is cut; parameters are inputs; one symbol is the number of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.passes.split_module import split_module

from tests.support.traced_classes import RedefinedParameter

WIDTH, HEADS = 32, 4


@torch.library.custom_op("fxwrap_hosts::attention", mutates_args={"output"})
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
    """Causal attention over all tokens, written into `output`, as vLLM's `unified_attention_with_output`."""
    heads = [item.unflatten(-1, (HEADS, -1)).transpose(0, 1) for item in (query, key, value)]
    result = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    output.copy_(result.transpose(0, 1).flatten(1))


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
    return None


class Norm(torch.nn.Module):
    """RMSNorm with the addition of the residual, which is returned too, as vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden.float() + residual.float()
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (total * scale).to(hidden.dtype) * self.weight, total.to(hidden.dtype)


class Layer(torch.nn.Module):
    """A decoder layer as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = Norm(), Norm()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.weight = RedefinedParameter(linear.weight.detach(), requires_grad=False)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.norm(hidden, residual)
        query, key, value = self.qkv(hidden).chunk(3, -1)
        query, key = rotate(query, angles), rotate(key, angles)
        output = torch.zeros_like(query)
        attention(query, key, value, output)
        hidden, residual = self.mlp_norm(self.out(output), residual)
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up), residual


def rotate(item: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings."""
    left, right = item.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Decoder(torch.nn.Module):
    """A small Llama over a flat batch of tokens."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, WIDTH)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = Norm()
        self.register_buffer("frequencies", torch.rand(WIDTH // 2))
        self.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        residual = torch.zeros_like(hidden)
        angles = positions[:, None] * self.frequencies
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, angles)
        return self.norm(hidden, residual)[0]


@dataclass(frozen=True)
class Pieces:
    """A split graph: `whole` calls the submodules, `names` are those between the splitting operators."""

    whole: GraphModule
    names: list[str]

    def piece(self, name: str) -> GraphModule:
        return getattr(self.whole, name)

    def fake_inputs(self, name: str) -> list[Any]:
        """Returns the values with which vLLM compiles a range of sizes: those of Dynamo."""
        return [node.meta["example_value"] for node in self.piece(name).graph.find_nodes(op="placeholder")]


def split(graph: GraphModule) -> Pieces:
    """Splits a graph at attention."""
    numbers: dict[torch.fx.Node, int] = {}
    number, cuts = 0, set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target in (torch.ops.fxwrap_hosts.attention, torch.ops.fxwrap_hosts.attention.default):
            cuts.add(number + 1)
            numbers[node] = number + 1
            number += 2
        else:
            numbers[node] = number
    whole = split_module(graph, None, numbers.__getitem__, keep_original_order=True)
    names = [name for name, _ in whole.named_children() if int(name.removeprefix("submod_")) not in cuts]
    return Pieces(whole, sorted(names, key=lambda name: int(name.removeprefix("submod_"))))


def backend(compile_pieces: Callable[[Pieces], None]) -> Callable[[GraphModule, list[Any]], GraphModule]:
    """Returns a backend of torch.compile that lets a host replace the pieces of the split graph."""

    def compile_graph(graph: GraphModule, _example_inputs: list[Any]) -> GraphModule:
        pieces = split(graph)
        compile_pieces(pieces)
        return pieces.whole

    return compile_graph


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and positions; the number of tokens is a symbol under torch.compile."""
    ids, positions = torch.randint(100, (tokens,)), torch.arange(tokens)
    for item in (ids, positions):
        torch._dynamo.mark_dynamic(item, 0)
    return ids, positions
