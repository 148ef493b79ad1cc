"""Layers of experts, written as loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxwrap.devices import CPU

EXPERTS, CHOSEN, WIDTH, INNER = 3, 2, 16, 24
CAPACITY = 4
"""The most tokens of a sequence that an expert of `Switch` computes."""
SORTING = dataclasses.replace(
    CPU,
    matmuls=dataclasses.replace(
        CPU.matmuls,
        sorted_expert_dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        stacked_expert_bytes=1,
    ),
)
"""A CPU on which loops without grouped matmuls become matmuls of each expert on sorted rows, as on GPUs."""
Rows = tuple[Any, ...]
"""The indices of an expert's rows: tokens and, where there are several choices, the positions among these."""


class Expert(nn.Module):
    """One expert with weights of its own, perhaps with biases."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias), nn.Linear(WIDTH, INNER, bias)
        self.down = nn.Linear(INNER, WIDTH, bias)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(rows)) * self.up(rows))
        return result


class Experts(nn.Module):
    """A layer of experts. The parameters choose how its loop is written; weights may be modules for each expert."""

    def __init__(self, select: str = "where", weights: str = "stacked", store: str = "index_add") -> None:
        super().__init__()
        self.select, self.weights, self.store = select, weights, store
        if weights in ("modules", "biased modules"):
            self.experts = nn.ModuleList([Expert(weights == "biased modules") for _ in range(EXPERTS)])
            return
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        pairs = list(zip(self.up, self.down, strict=True)) if self.weights == "unbind" else []
        mask = None
        if "one_hot" in self.select:
            encoded = functional.one_hot(chosen[None] if self.select == "reshaped one_hot" else chosen, EXPERTS)
            mask = encoded.reshape(-1, CHOSEN, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            rows, factor = self._rows(number, chosen, factors, mask)
            if "modules" in self.weights:
                values = self.experts[number](tokens[None, rows[0]].reshape(-1, WIDTH)) * factor
            else:
                up, down = pairs[number] if pairs else (self.up[number], self.down[number])
                values = self._expert(tokens, rows[0], up, down, number) * factor
            result = self._store(result, rows[0], values.to(result.dtype))
        return result

    def _rows(self, number: int, chosen: Tensor, factors: Tensor, mask: Tensor | None) -> tuple[Rows, Tensor]:
        if mask is not None:
            position, token = torch.where(mask[number])
        elif self.select == "nonzero":
            token, position = (chosen == number).nonzero().unbind(1)
        elif self.select == "columns":
            tokens = torch.eq(chosen, number).nonzero()
            token, position = tokens[:, 0], tokens[:, 1]
        else:
            token, position = torch.where(chosen == number)
        return (token, position), factors[token, position, None]

    def _expert(self, tokens: Tensor, token: Tensor, up: Tensor, down: Tensor, number: int) -> Tensor:
        match self.weights:
            case "sliced":
                rows = tokens[token]
                gate, inner = functional.linear(rows, up[:INNER]), functional.linear(rows, up[INNER:])
            case "transposed":
                gate, inner = (tokens[token] @ up.t()).chunk(2, dim=-1)
            case "selected":
                gate, inner = functional.linear(tokens.index_select(0, token), up).chunk(2, dim=-1)
            case "reshaped":
                rows = tokens[None, token].reshape(-1, WIDTH)
                gate, inner = functional.linear(rows, up).chunk(2, dim=-1)
            case _:
                gate, inner = functional.linear(tokens[token], up).chunk(2, dim=-1)
        values = functional.silu(gate) * inner
        if self.weights == "addmm":
            return functional.linear(values, down, self.bias[number])
        values = functional.linear(values, down)
        return values + self.bias[number] if self.weights == "bias" else values

    def _store(self, result: Tensor, token: Tensor, values: Tensor) -> Tensor:
        match self.store:
            case "assign":
                result[token] += values
                return result
            case "scatter_add":
                return result.scatter_add(0, token[:, None].expand(-1, WIDTH), values)
            case "index_put":
                return result.index_put((token,), values, accumulate=True)
            case _:
                return result.index_add(0, token, values)


def routed(layer: Callable[..., Tensor], known: bool = True) -> Callable[..., Tensor]:
    """Returns the layer after a router; with `known`, the compiler knows that the router's indices are experts."""

    def run(tokens: Tensor, scores: Tensor) -> Tensor:
        factors, chosen = torch.topk(scores.softmax(-1), CHOSEN, dim=-1)
        return layer(tokens, chosen if known else chosen + scores.isnan().sum(), factors)

    return run


def inputs_of(count: int, experts: int = EXPERTS, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    scores = torch.randn(count, experts)
    scores[:, 1] = -torch.inf  # an expert without tokens
    return torch.randn(count, WIDTH).to(dtype), scores


class MaskedWrites(nn.Module):
    """The loop of DeepSeek's training: each choice of an expert is a row, which a mask reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        rows = tokens.repeat_interleave(CHOSEN, dim=0)
        flat, results = chosen.view(-1), torch.full_like(rows, 7)
        for number in range(EXPERTS):
            inner = functional.relu(functional.linear(rows[flat == number], self.up[number]))
            results[flat == number] = functional.linear(inner, self.down[number])
        weighted = results.view(*factors.shape, -1) * factors.to(rows.dtype).unsqueeze(-1)
        return weighted.sum(dim=1) + self.shared(tokens)


class Switch(nn.Module):
    """The loop of Switch Transformers: a mask of tokens reads the tokens, and writes into a copy of them.

    Tokens are two sequences; those beyond an expert's capacity in a sequence stay as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{number}": Expert(bias=False) for number in range(EXPERTS)})

    def forward(self, tokens: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        sequences = tokens.view(2, -1, WIDTH)
        mask = functional.one_hot(chosen[:, 0].view(2, -1), EXPERTS)
        mask, result = mask * (torch.cumsum(mask, 1) <= CAPACITY), sequences.clone()
        for number, expert in enumerate(self.experts.values()):
            own = mask[:, :, number].bool()
            result[own] = expert(sequences[own])
        return result.view(tokens.shape) * factors[:, :1].to(tokens.dtype)
