"""Models of `distributed.py` and their forms of parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of (batch, length, heads, width) tensors, with groups of query heads for each key head."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = [item[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for item in (key, value)]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Gpt2Block(nn.Module):
    """A block of GPT-2. Heads are those of this rank."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__()
        width = chosen.width
        self.head_width = width // chosen.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.normed_1, self.normed_2 = nn.Identity(), nn.Identity()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.normed_1(self.norm_1(x))
        query, key, value = [
            layer(y).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value)
        ]
        x = x + self.projection(_attention(query, key, value))
        return x + self.down(F.gelu(self.up(self.normed_2(self.norm_2(x))), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 with random weights, without dropout; returns the loss."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(chosen.vocabulary, chosen.width)
        self.embedded = nn.Identity()
        self.positions = nn.Embedding(chosen.length, chosen.width)
        self.blocks = nn.ModuleList([Gpt2Block(chosen) for _ in range(chosen.layers)])
        self.norm = nn.LayerNorm(chosen.width)
        self.head = nn.Linear(chosen.width, chosen.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class LlamaBlock(nn.Module):
    """A block of Llama. Heads are those of this rank."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__()
        width, hidden = chosen.width, chosen.hidden
        self.head_width = width // chosen.heads
        key_width = chosen.key_heads * self.head_width
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.normed_1, self.normed_2 = nn.Identity(), nn.Identity()
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, key_width, bias=False) for _ in range(2))
        self.projection = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y = self.normed_1(self.norm_1(x))
        query, key, value = [
            layer(y).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value)
        ]
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        x = x + self.projection(_attention(query, key, value))
        y = self.normed_2(self.norm_2(x))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def rotation_angles(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the rotations at some positions."""
    frequencies = 500_000.0 ** (-torch.arange(0, width, 2, device=positions.device) / width)
    angles = positions[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Llama(nn.Module):
    """Llama with random weights; returns the loss."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__()
        self.head_width = chosen.width // chosen.heads
        self.tokens = nn.Embedding(chosen.vocabulary, chosen.width)
        self.embedded = nn.Identity()
        self.blocks = nn.ModuleList([LlamaBlock(chosen) for _ in range(chosen.layers)])
        self.norm = nn.RMSNorm(chosen.width)
        self.head = nn.Linear(chosen.width, chosen.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(self.tokens(tokens))
        cosine, sine = rotation_angles(torch.arange(tokens.shape[1], device=tokens.device), self.head_width, x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class DecodingLlama(Llama):
    """Llama that reads one token of each sequence and returns the next one. The caches have this rank's heads."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__(chosen)
        sizes = (2, chosen.batch, chosen.length, chosen.key_heads // chosen.ranks, self.head_width)
        for number in range(chosen.layers):
            self.register_buffer(f"cache_{number}", torch.zeros(sizes))
        self.register_buffer("position", torch.full((1,), chosen.length // 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens).argmax(-1)

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next tokens; the caches hold the keys and values of these."""
        position = self.get_buffer("position")
        x = self.tokens(tokens)
        cosine, sine = rotation_angles(position, self.head_width, x.dtype)
        for number, block in enumerate(self.blocks):
            x = self._block(block, x, cosine, sine, self.get_buffer(f"cache_{number}"))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _block(self, block: Any, x: Tensor, cosine: Tensor, sine: Tensor, cache: Tensor) -> Tensor:
        y, width, position = block.norm_1(x), self.head_width, self.get_buffer("position")
        query, key, value = [layer(y).unflatten(-1, (-1, width)) for layer in (block.query, block.key, block.value)]
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        cache.index_copy_(2, position, torch.stack([key, value]))
        mask = torch.arange(cache.shape[2], device=x.device) <= position
        keys, values = [item.transpose(1, 2) for item in cache]
        groups = query.shape[2] // key.shape[2]
        query = query.transpose(1, 2).unflatten(1, (-1, groups)).flatten(2, 3)  # the heads of one key are rows
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask.expand(groups, -1))
        x = x + block.projection(attended.flatten(1, 2).unflatten(1, (-1, 1)).transpose(1, 2).flatten(2))
        y = block.norm_2(x)
        return x + block.down(F.silu(block.gate(y)) * block.up(y))


MODELS: dict[str, Callable[[argparse.Namespace], nn.Module]] = {
    "gpt2": Gpt2, "llama": Llama, "decoding-llama": DecodingLlama
}  # fmt: skip

# --- parallelism ------------------------------------------------------------------------------------------------------


def fsdp2(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shards blocks with hooks, as eager code does."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards parameters by parametrisation, so that their collectives are in the graph."""
    for module in list(model.modules()):
        names = list(dict(module.named_parameters(recurse=False)))
        for name in names:
            shard = distribute_tensor(module.get_parameter(name).detach(), mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(shard)
        getters = {name: property(partial(_gathered, name)) for name in names}
        module.__class__ = type(f"Fsdp{type(module).__name__}", (type(module),), getters)
    return model


def _gathered(name: str, module: nn.Module) -> Tensor:
    parameter: Any = module._parameters[name]
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def tensor_parallel(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Splits attention by heads, and the MLP by columns and rows."""
    for block in model.blocks:
        columns = [name for name in ("query", "key", "value", "gate", "up") if hasattr(block, name)]
        plan = {**dict.fromkeys(columns, ColwiseParallel()), "projection": RowwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def tensor_and_sequence_parallel(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism that splits tokens between matmuls: reduce_scatters and all_gathers, no all_reduces."""
    part, whole = Shard(1), Replicate()
    for block in model.blocks:
        columns = [name for name in ("query", "key", "value", "gate", "up") if hasattr(block, name)]
        plan = {
            **dict.fromkeys(columns, ColwiseParallel()),
            **dict.fromkeys(("projection", "down"), RowwiseParallel(output_layouts=part)),
            **dict.fromkeys(("norm_1", "norm_2"), SequenceParallel(use_local_output=True)),
            **{name: PrepareModuleInput(input_layouts=part, desired_input_layouts=whole, use_local_output=False)
               for name in ("normed_1", "normed_2")},
        }  # fmt: skip
        parallelize_module(block, mesh, plan)
    ends = {
        "embedded": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=part),
        "norm": SequenceParallel(use_local_output=True),
        "head": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole, use_local_output=True),
    }
    return parallelize_module(model, mesh, ends)


def fsdp_and_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 times tensor parallelism, on a mesh with the dimensions "data" and "model"."""
    return fsdp2(tensor_parallel(model, mesh["model"]), mesh["data"])


@dataclass(frozen=True)
class Parallelism:
    """A form of parallelism: the model in eager and compiled, and the size of the second dimension of its mesh."""

    eager: Callable[[nn.Module, DeviceMesh], nn.Module]
    compiled: Callable[[nn.Module, DeviceMesh], nn.Module]
    inner: int = 1


PARALLELISMS = {
    "FSDP": Parallelism(fsdp2, simple_fsdp),
    "TP": Parallelism(tensor_parallel, tensor_parallel),
    "TP+SP": Parallelism(tensor_and_sequence_parallel, tensor_and_sequence_parallel),
    "FSDP+TP": Parallelism(fsdp_and_tensor_parallel, fsdp_and_tensor_parallel, inner=2),
}


def randomise(model: nn.Module) -> None:
    """Fills parameters with random numbers, without communication."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(std=0.02)
