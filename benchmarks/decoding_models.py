"""The models of `decoding.py`: a Llama with weights of bfloat16, int8 or int4, and its logits in float64."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from benchmarks.distributed_models import DecodingLlama, rotation_angles
from benchmarks.quantised import GROUP, int4_linear, int4_packed, int8_linear


class Int8Linear(nn.Module):
    """A linear layer without bias of int8 weights with a scale for each output: torchao's weight-only int8."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = _constant(plain.weight.shape, torch.int8, plain.weight)
        self.scale = _constant(plain.weight.shape[:1], plain.weight.dtype, plain.weight)

    def reset(self) -> None:
        """Draws random weights of about unit norm."""
        self.weight.random_(-127, 128)
        self.scale.fill_(1 / (73 * self.weight.shape[1] ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scale)


class Int4Linear(nn.Module):
    """The same of int4 weights, two in a byte, with a scale and a zero for each group of a row: torchao's formula."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        rows, columns = plain.weight.shape
        self.weight = _constant((rows, columns // 2), torch.uint8, plain.weight)
        self.scale, self.zero = [
            _constant((rows, columns // GROUP), plain.weight.dtype, plain.weight) for _ in range(2)
        ]

    def reset(self) -> None:
        """Draws random weights of about unit norm."""
        self.weight.random_(0, 256)
        self.scale.fill_(1 / (4.6 * (2 * self.weight.shape[1]) ** 0.5))
        self.zero.fill_(7.5)

    def forward(self, x: Tensor) -> Tensor:
        return int4_linear(x, self.weight, self.scale, self.zero)


class PackedInt4Linear(nn.Module):
    """The same of int4 weights in the layout of `_weight_int4pack_mm`, for tensor cores: torchao's on NVIDIA GPUs."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        rows, columns = plain.weight.shape
        self.weight = _constant((rows // 8, columns // 128, 32, 4), torch.int32, plain.weight)
        self.scale_and_zero = _constant((columns // GROUP, rows, 2), plain.weight.dtype, plain.weight)
        self.bytes = _constant((rows, columns // 2), torch.uint8, plain.weight)

    def reset(self) -> None:
        """Draws random weights of about unit norm, and packs them."""
        self.bytes.data = torch.randint(0, 256, self.bytes.shape, dtype=torch.uint8, device=self.weight.device)
        self.weight.data = torch._convert_weight_to_int4pack(self.bytes.data, 8)
        scale = 1 / (4.6 * (2 * self.bytes.shape[1]) ** 0.5)
        self.scale_and_zero[..., 0].fill_(scale)
        self.scale_and_zero[..., 1].fill_(scale / 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float64:
            return int4_packed(x.flatten(0, -2), self.weight, self.scale_and_zero).unflatten(0, x.shape[:-1])
        halves = torch.stack([self.bytes >> 4, self.bytes & 15], -1).flatten(1).to(x.dtype) - 8
        scale, zero = self.scale_and_zero.to(x.dtype).repeat_interleave(GROUP, 0).unbind(-1)
        return x @ (halves.t() * scale + zero)


def _constant(sizes: torch.Size | tuple[int, ...], dtype: torch.dtype, like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(sizes, dtype=dtype, device=like.device), requires_grad=False)


WEIGHTS: Mapping[str, Callable[[nn.Linear], nn.Module] | None] = {
    "plain": None, "int8": Int8Linear, "int4": Int4Linear, "int4-packed": PackedInt4Linear,
}  # fmt: skip
"""The layer of each kind of weights; "plain" ones have the dtype of the activations."""


class Decoder(DecodingLlama):
    """Returns the next tokens and their logits: the most probable ones, or samples of the `top` most probable ones."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__(chosen)
        self.top: int = chosen.top

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.logits(tokens)
        return (sample(logits, self.top) if self.top else logits.argmax(-1)), logits

    def exact_logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits in float64, one block of weights in float64 at a time; the caches are not changed."""
        position = self.get_buffer("position")
        x = self.tokens(tokens).double()
        cosine, sine = rotation_angles(position, self.head_width, x.dtype)
        for number, block in enumerate(self.blocks):
            cache = self.get_buffer(f"cache_{number}").double()
            x = self._block(copy.deepcopy(block).double(), x, cosine, sine, cache)
        logits: Tensor = copy.deepcopy(self.head).double()(copy.deepcopy(self.norm).double()(x))
        return logits


def sample(logits: Tensor, top: int) -> Tensor:
    """Returns random tokens by the probabilities of the `top` largest logits, without waiting for the device."""
    least = logits.topk(top).values[..., -1:]
    probabilities = logits.float().masked_fill(logits < least, -torch.inf).softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def build_model(chosen: argparse.Namespace, weights: str) -> Decoder:
    """Returns the model with random weights and caches on a device; `chosen` has the shape, dtype and device."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(chosen.dtype)
    try:
        with torch.device("meta"):
            model = Decoder(chosen).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    layer = WEIGHTS[weights]
    if layer is not None:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, layer(child))
    model.to_empty(device=chosen.device)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.weight.shape[1] ** -0.5)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_()
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1)
            elif isinstance(module, Int8Linear | Int4Linear | PackedInt4Linear):
                module.reset()
        for name, buffer in model.named_buffers():
            if name.startswith("cache"):
                buffer.normal_()
        model.get_buffer("position").fill_(chosen.length // 2)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of the weights that a token reads as a whole: without the embedding."""
    items = model.named_parameters()
    return sum([item.nbytes for name, item in items if name != "tokens.weight" and not name.endswith(".bytes")])
