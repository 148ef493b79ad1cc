"""Random functions of normalisations, as models write them: residuals, shared inputs, several dtypes, odd layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.support.strategies.functions import RandomFunction

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDTHS = (16, 8, 33, 64, 5, 100, 1, 257)
ROWS = ((64,), (4, 19), (130,), (3, 5, 7), (1,), (2, 1), (33, 2), (0, 3))
SCALES = (1.0, 1e-3, 100.0, 1e-6)
NORMS = ("layer", "rms", "wide rms", "late rms", "offset rms", "group", "l2", "whole", "softmax")
LAYOUTS = ("contiguous", "contiguous", "transposed", "sliced", "expanded", "strided")
LAYERS = ("residual", "scaled", "gated", "shared", "parallel", "biased", "dropped")


@dataclass(frozen=True)
class _Norm:
    """One norm: its kind, the positions of its parameters among the inputs, and its number of groups."""

    kind: str
    weight: int | None
    bias: int | None
    groups: int

    def __call__(self, x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        weight = None if self.weight is None else inputs[self.weight]
        bias = None if self.bias is None else inputs[self.bias]
        width, eps = x.shape[-1], 1e-5
        match self.kind:
            case "layer":
                weight, bias = [None if item is None else item.to(x.dtype) for item in (weight, bias)]
                return functional.layer_norm(x, (width,), weight, bias, eps)
            case "rms":
                return functional.rms_norm(x, (width,), None if weight is None else weight.to(x.dtype), eps)
            case "whole":
                return functional.layer_norm(x, x.shape[-2:], eps=eps) if x.dim() > 2 else x
            case "group":
                rows = x.reshape(-1, width)
                if rows.shape[0] == 1 and self.groups == width:  # torch refuses one value in each group
                    return x
                weight, bias = [None if item is None else item.to(x.dtype) for item in (weight, bias)]
                return functional.group_norm(rows, self.groups, weight, bias, eps).view(x.shape)
            case "l2":
                return functional.normalize(x, dim=-1) * (1 if weight is None else weight.to(x.dtype))
            case "softmax":
                return x.softmax(-1) * (1 if weight is None else weight.to(x.dtype))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        hidden = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight is None:
            return hidden.to(x.dtype)
        if self.kind == "late rms":
            return (weight * hidden.to(x.dtype)).to(x.dtype)
        if self.kind == "offset rms":
            return (hidden * (1 + weight.to(hidden.dtype))).to(x.dtype)
        return (hidden * weight.to(hidden.dtype)).to(x.dtype)


@st.composite
def norms(draw: st.DrawFn) -> RandomFunction:
    """Draws a function of some norms of one tensor, and its inputs for one or several numbers of rows."""
    choice: Callable = lambda options: draw(st.sampled_from(options))  # noqa: E731
    dtype, width, layout = choice(DTYPES), choice(WIDTHS), choice(LAYOUTS)
    weight_dtype = choice((dtype, dtype, torch.float32))
    parameters: list[tuple[int, torch.dtype]] = []

    def parameter() -> int:
        parameters.append((width, weight_dtype))
        return len(parameters)

    steps = []
    for _ in range(choice((1, 2, 3))):
        kind = choice(NORMS)
        groups = choice([number for number in range(1, width + 1) if width % number == 0])
        members = {"layer": width, "group": width // groups}
        if dtype.itemsize == 2 and members.get(kind) == 1:
            kind = "rms"  # on CPUs, the mean of one element is rounded in half precision, unlike the element
        norm = _Norm(
            kind,
            (choice((True, True, False)) and parameter()) or None,
            (choice((True, False)) and parameter()) or None,
            groups,
        )
        layer = choice(LAYERS)
        steps.append((norm, layer, parameter() if layer in ("biased", "gated", "dropped") else 0))

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        hidden, results = inputs[0], []
        for norm, layer, own in steps:
            match layer:
                case "residual":
                    hidden = hidden + norm(hidden, inputs)
                case "scaled":
                    hidden = norm(hidden, inputs) * 0.5
                case "gated":
                    hidden = norm(hidden, inputs) * torch.sigmoid(hidden * inputs[own].to(hidden.dtype))
                case "shared":
                    results.append(norm(hidden, inputs))
                case "parallel":
                    results.append(norm(hidden, inputs).tanh())
                    hidden = hidden * 2
                case "biased":
                    hidden = norm(hidden + inputs[own].to(hidden.dtype), inputs)
                case _:
                    hidden = norm(hidden, inputs)
                    results.append((hidden * inputs[own].to(hidden.dtype)).sum(-1))
        return (hidden, *results)

    scale, is_constant = choice(SCALES), choice((False, False, False, True))
    if dtype is torch.float16:  # whose quotients by smaller norms overflow, in eager mode too
        scale = min(max(scale, 1e-3), 1.0)
    first = choice(ROWS)
    sizes = [first, *draw(st.lists(st.sampled_from([item for item in ROWS if len(item) == len(first)]), max_size=2))]
    runs = []
    for rows in sizes:
        x = _laid_out((torch.randn(*rows, width, dtype=torch.float64) * scale).to(dtype), layout)
        if is_constant and x.numel():
            x = x.clone().copy_(x[..., :1].expand(x.shape))
        vectors = [(torch.randn(size, dtype=torch.float64)).to(own) for size, own in parameters]
        runs.append((x, *vectors))
    text = f"norms of {width} columns, {layout}, times {scale}, constant rows {is_constant}: {steps}"
    return RandomFunction(run, runs, text)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """Returns the tensor's elements in another layout."""
    match layout:
        case "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case "sliced":
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
        case "strided":
            return torch.stack([x, x], -1)[..., 0]
        case "expanded":
            return x[..., :1].expand(x.shape)
        case _:
            return x
