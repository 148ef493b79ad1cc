"""Six models at realistic sizes, and small ones of the same architecture, with random weights.

They are built on the CPU from configurations, without downloads.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.models import ModelCase

_library: Any = transformers  # its configurations accept more keywords than their types declare


@dataclass(frozen=True)
class Size:
    """Layers, width, heads (of keys and values too), width of the inner layer, words; batch, length or pixels."""

    layers: int
    width: int
    heads: int
    inner: int
    words: int
    batch: int
    length: int
    key_heads: int = 0


FULL = {
    "gpt2": Size(12, 768, 12, 3072, 50257, 8, 512),
    "llama": Size(8, 2048, 16, 5632, 32000, 4, 512, 4),
    "bert": Size(12, 768, 12, 3072, 30522, 8, 512),
    "t5": Size(6, 512, 8, 2048, 32128, 8, 512),
    "vit": Size(12, 768, 12, 3072, 1000, 16, 224),
    "resnet": Size(0, 64, 0, 0, 1000, 32, 224),
}
SMALL = {
    "gpt2": Size(2, 64, 4, 128, 256, 2, 16),
    "llama": Size(2, 64, 4, 128, 256, 2, 16, 2),
    "bert": Size(2, 64, 4, 128, 256, 2, 16),
    "t5": Size(2, 64, 4, 128, 256, 2, 16),
    "vit": Size(2, 64, 4, 128, 16, 2, 32),
    "resnet": Size(0, 16, 0, 0, 16, 2, 64),
}


def full_case(name: str, small: bool = False) -> ModelCase:
    """Returns a model by name, full-size or small. Raises KeyError for an unknown name."""
    size = (SMALL if small else FULL)[name]

    def make_model(dropout: float, layers: int) -> nn.Module:
        return _MODELS[name](size, dropout, layers)

    def make_inputs(generator: torch.Generator, training: bool) -> dict[str, Tensor]:
        return _inputs(name, size, generator, training)

    return ModelCase(name, make_model, make_inputs, layers=size.layers, has_dropout=name != "resnet")


def _gpt2(size: Size, dropout: float, layers: int) -> nn.Module:
    config = _library.GPT2Config(
        vocab_size=size.words, n_positions=max(64, size.length), n_embd=size.width, n_layer=layers, n_head=size.heads,
        n_inner=size.inner, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = _library.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else the look-up by class name fails with a warning: a graph break
    return model


def _llama(size: Size, dropout: float, layers: int) -> nn.Module:
    config = _library.LlamaConfig(
        vocab_size=size.words, hidden_size=size.width, num_hidden_layers=layers, num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads, intermediate_size=size.inner, max_position_embeddings=2048,
        attention_dropout=dropout, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return _library.LlamaForCausalLM(config)


def _bert(size: Size, dropout: float, layers: int) -> nn.Module:
    config = _library.BertConfig(
        vocab_size=size.words, hidden_size=size.width, num_hidden_layers=layers, num_attention_heads=size.heads,
        intermediate_size=size.inner, max_position_embeddings=max(64, size.length), hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, use_cache=False,
    )  # fmt: skip
    return _library.BertForMaskedLM(config)


def _t5(size: Size, dropout: float, layers: int) -> nn.Module:
    config = _library.T5Config(
        vocab_size=size.words, d_model=size.width, d_kv=size.width // size.heads, d_ff=size.inner, num_layers=layers,
        num_decoder_layers=layers, num_heads=size.heads, dropout_rate=dropout, use_cache=False, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return _library.T5ForConditionalGeneration(config)


def _vit(size: Size, dropout: float, layers: int) -> nn.Module:
    config = _library.ViTConfig(
        hidden_size=size.width, num_hidden_layers=layers, num_attention_heads=size.heads, intermediate_size=size.inner,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, image_size=size.length, patch_size=16,
        num_labels=size.words,
    )  # fmt: skip
    return _library.ViTForImageClassification(config)


def _resnet(size: Size, _dropout: float, _layers: int) -> nn.Module:
    """ResNet-50: `width` channels after the first convolution, 32 times as many after the last."""
    config = _library.ResNetConfig(
        embedding_size=size.width, hidden_sizes=[size.width * factor for factor in (4, 8, 16, 32)],
        depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=size.words,
    )  # fmt: skip
    return _library.ResNetForImageClassification(config)


_MODELS = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5, "vit": _vit, "resnet": _resnet}


def _inputs(name: str, size: Size, generator: torch.Generator, training: bool) -> dict[str, Tensor]:
    """Returns images, or words without padding; for training also labels: the words, or random classes."""
    if name in ("vit", "resnet"):
        images = torch.randn(size.batch, 3, size.length, size.length, generator=generator)
        labels = torch.randint(size.words, (size.batch,), generator=generator)
        return {"pixel_values": images, **({"labels": labels} if training else {})}
    words = torch.randint(2, size.words, (size.batch, size.length), generator=generator)
    inputs = {"input_ids": words}
    if name == "bert":
        inputs["attention_mask"] = torch.ones_like(words)
    if training:
        return {**inputs, "labels": words.clone()}
    return {**inputs, "decoder_input_ids": words.clone()} if name == "t5" else inputs
