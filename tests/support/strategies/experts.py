"""Random layers of experts as models write them: loops over experts, grouped matmuls on sorted rows, dense forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.support.strategies.functions import RandomFunction

DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
TOKENS = (7, 1, 16, 40, 3, 0)
EXPERTS = (3, 2, 4, 6, 1)
WIDTHS = (16, 8, 24, 32)
SELECTS = ("where", "one_hot", "nonzero", "columns", "any", "mask")
STORES = ("index_add", "assign", "scatter_add", "index_put", "index_add_")
LOOPS = ("loop", "loop", "sorted", "dense", "masked writes", "capacity", "repeated")
WEIGHTS = ("stacked", "transposed", "separate", "unbind", "packed")
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (functional.silu, functional.gelu, torch.relu, torch.sigmoid)


class _Layer:
    """How a layer is written: its routing, its weights, and how rows are read and written."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.choice = lambda options: draw(st.sampled_from(options))
        self.count, self.width, self.inner = self.choice(EXPERTS), self.choice(WIDTHS), self.choice(WIDTHS)
        self.chosen = min(self.count, self.choice((2, 1, 3)))
        self.dtype = self.choice(DTYPES)
        self.form, self.weights = self.choice(LOOPS), self.choice(WEIGHTS)
        if self.form == "sorted":  # torch's fake rule accepts no other dtype
            self.dtype = torch.bfloat16
        self.select, self.store = self.choice(SELECTS), self.choice(STORES)
        self.is_gated, self.has_bias = self.choice((True, False)), self.choice((False, True))
        self.activation = self.choice(ACTIVATIONS)
        self.routing = self.choice(("random", "one", "few", "fixed", "random"))
        self.weighs_before = self.choice((False, False, True))
        self.shares_routing = self.choice((False, False, True))
        self.skips = self.choice((False, False, True))

    def __str__(self) -> str:
        items = {**vars(self), "activation": self.activation.__name__}
        return ", ".join([f"{name} {value}" for name, value in items.items() if name != "choice"])

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Returns tokens, scores of experts, the experts of tokens, and weights."""
        rows = torch.randn(tokens, self.width)
        ranks = torch.rand(tokens, self.count).argsort(-1).float()  # apart, so that every dtype has the same order
        scores = ranks / 2 + torch.rand(tokens, self.count) / 8
        if self.routing in ("one", "few"):
            scores[:, : self.chosen if self.routing == "one" else -1] += 8
        chosen = torch.randint(0, self.count, (tokens, self.chosen))
        factor = 2 if self.is_gated else 1
        if self.weights == "transposed":
            shapes = [(self.count, self.width, factor * self.inner), (self.count, self.inner, self.width)]
        else:
            shapes = [(self.count, factor * self.inner, self.width), (self.count, self.width, self.inner)]
        biases = [(self.count, factor * self.inner), (self.count, self.width)] if self.has_bias else []
        stacked = [torch.randn(shape) / shape[-1] ** 0.5 for shape in (*shapes, *biases)]
        if self.weights == "separate":
            stacked = [item.clone() for stack in stacked for item in stack]
        return rows.to(self.dtype), scores, chosen, *[item.to(self.dtype) for item in stacked]

    def run(self, tokens: Tensor, scores: Tensor, indices: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """The layer."""
        probabilities = scores.softmax(-1)
        if self.routing == "fixed":
            chosen, factors = indices, probabilities.gather(1, indices)
        else:
            factors, chosen = probabilities.topk(self.chosen, dim=-1)
            factors = factors / factors.sum(-1, keepdim=True)
        factors = factors.to(tokens.dtype)
        stacks = self._stacks(weights)
        layers = {
            "loop": self._loop, "sorted": self._sorted, "dense": self._dense, "capacity": self._capacity,
            "masked writes": self._masked_writes, "repeated": self._repeated,
        }  # fmt: skip
        result = layers[self.form](tokens, chosen, factors, stacks)
        if self.skips:
            result = result + tokens
        return (result, factors) if self.shares_routing else (result,)

    def _stacks(self, weights: tuple[Tensor, ...]) -> list[Any]:
        """Returns for each kind of weight the stack, or a list of those of each expert."""
        if self.weights == "separate":
            return [weights[at : at + self.count] for at in range(0, len(weights), self.count)]
        return [item.unbind() for item in weights] if self.weights == "unbind" else list(weights)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight if self.weights == "transposed" else weight.t()

    def _gate(self, hidden: Tensor) -> Tensor:
        if not self.is_gated:
            return self.activation(hidden)
        if self.weights == "packed":
            gate, up = hidden[..., ::2], hidden[..., 1::2]
        else:
            gate, up = hidden.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _expert(self, rows: Tensor, number: int, stacks: list[Any]) -> Tensor:
        hidden = rows @ self._matrix(stacks[0][number])
        hidden = self._gate(hidden + stacks[2][number] if self.has_bias else hidden)
        result = hidden @ self._matrix(stacks[1][number])
        return result + stacks[3][number] if self.has_bias else result

    def _loop(self, tokens: Tensor, chosen: Tensor, factors: Tensor, stacks: list[Any]) -> Tensor:
        result = torch.zeros_like(tokens)
        encoded = functional.one_hot(chosen, self.count).permute(2, 1, 0)
        for number in range(self.count):
            match self.select:
                case "where":
                    token, position = torch.where(chosen == number)
                case "one_hot":
                    position, token = torch.where(encoded[number])
                case "nonzero":
                    token, position = (chosen == number).nonzero().unbind(1)
                case "columns":
                    places = torch.eq(chosen, number).nonzero()
                    token, position = places[:, 0], places[:, 1]
                case "any":
                    own = chosen == number
                    token, position = own.any(-1).nonzero().squeeze(-1), None
                case _:
                    token, position = (chosen == number).any(-1), None
            if position is None:
                weight = (factors * (chosen == number)).sum(-1)[token].unsqueeze(-1)
            else:
                weight = factors[token, position].unsqueeze(-1)
            rows = tokens[token]
            values = self._expert(rows * weight if self.weighs_before else rows, number, stacks)
            values = (values if self.weighs_before else values * weight).to(result.dtype)
            result = self._stored(result, token, values)
        return result

    def _stored(self, result: Tensor, token: Tensor, values: Tensor) -> Tensor:
        if self.store == "assign" or token.dtype is torch.bool:
            result[token] += values
            return result
        match self.store:
            case "scatter_add":
                return result.scatter_add(0, token[:, None].expand(-1, result.shape[1]), values)
            case "index_put":
                return result.index_put((token,), values, accumulate=True)
            case "index_add_":
                return result.index_add_(0, token, values)
            case _:
                return result.index_add(0, token, values)

    def _masked_writes(self, tokens: Tensor, chosen: Tensor, factors: Tensor, stacks: list[Any]) -> Tensor:
        rows = tokens.repeat_interleave(self.chosen, dim=0)
        flat, results = chosen.reshape(-1), torch.empty_like(rows)
        for number in range(self.count):
            results[flat == number] = self._expert(rows[flat == number], number, stacks).to(results.dtype)
        return (results.view(*factors.shape, -1) * factors.unsqueeze(-1)).sum(1)

    def _capacity(self, tokens: Tensor, chosen: Tensor, factors: Tensor, stacks: list[Any]) -> Tensor:
        encoded = functional.one_hot(chosen[:, 0], self.count)
        encoded = encoded * (encoded.cumsum(0) <= 3)
        result = tokens.clone()
        for number in range(self.count):
            own = encoded[:, number].bool()
            result[own] = self._expert(tokens[own], number, stacks)
        return result * factors[:, :1]

    def _dense(self, tokens: Tensor, chosen: Tensor, factors: Tensor, stacks: list[Any]) -> Tensor:
        mixing = torch.zeros(tokens.shape[0], self.count, dtype=factors.dtype).scatter_add(1, chosen, factors)
        results = torch.stack([self._expert(tokens, number, stacks) for number in range(self.count)], dim=1)
        return torch.einsum("te,tec->tc", mixing, results)

    def _repeated(self, tokens: Tensor, chosen: Tensor, factors: Tensor, stacks: list[Any]) -> Tensor:
        """All experts compute all tokens, which those weigh by zero that did not choose them."""
        mixing = torch.zeros(tokens.shape[0], self.count, dtype=factors.dtype).scatter(1, chosen, factors)
        rows = tokens.repeat(self.count, 1).view(self.count, -1, self.width) * mixing.t().unsqueeze(-1)
        results = [self._expert(rows[number], number, stacks) for number in range(self.count)]
        return torch.stack(results).sum(0)

    def _sorted(self, tokens: Tensor, chosen: Tensor, factors: Tensor, stacks: list[Any]) -> Tensor:
        """Grouped matmuls on rows that are sorted by their expert."""
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        rows = tokens[order // self.chosen]
        if self.select in ("where", "one_hot"):
            counts = functional.one_hot(flat, self.count).sum(0)
        elif self.select == "any":
            counts = torch.zeros(self.count, dtype=torch.int64).scatter_add(0, flat, torch.ones_like(flat))
        else:
            counts = torch.histc(flat.float(), self.count, 0, self.count - 1).long()
        ends = counts.cumsum(0).to(torch.int32)
        up, down, *biases = [item if isinstance(item, Tensor) else torch.stack(list(item)) for item in stacks]
        if self.weights != "transposed":
            up, down = up.transpose(-2, -1), down.transpose(-2, -1)

        def matmul(rows: Tensor, weights: Tensor) -> Tensor:
            if rows.dtype is torch.float64:  # which `_grouped_mm` refuses
                return (rows.unsqueeze(1) @ weights[flat[order]]).squeeze(1)
            return torch._grouped_mm(rows, weights, offs=ends)

        hidden = matmul(rows, up)
        hidden = self._gate(hidden + biases[0][flat[order]] if biases else hidden)
        values = matmul(hidden, down)
        values = values + biases[1][flat[order]] if biases else values
        values = values * factors.reshape(-1)[order].unsqueeze(-1)
        if self.store == "assign":
            results = torch.zeros_like(values)
            results[order] = values
            return results.view(-1, self.chosen, self.width).sum(1)
        if self.store == "scatter_add":
            return values[order.argsort()].view(-1, self.chosen, self.width).sum(1)
        return torch.zeros_like(tokens).index_add(0, order // self.chosen, values)


@st.composite
def experts(draw: st.DrawFn) -> RandomFunction:
    """Draws a layer of experts and its inputs for several numbers of tokens, perhaps none."""
    layer = _Layer(draw)
    runs = [layer.inputs(tokens) for tokens in draw(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3))]
    return RandomFunction(layer.run, runs, f"experts: {layer}", is_training=draw(st.sampled_from((True, True, False))))
