"""The models of `dashboard.py`: classes of `transformers` and models of `timm`, at base size, with random weights.

A model of `transformers` has the default sizes of its configuration unless its row names others; dropout has the
probability 1e-30, as in PyTorch's own dashboard, so that its operators remain and results are comparable. Small models
have the sizes of `sweep_models.py`. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.sweep_models import BATCH, LENGTH, LIMITS, OVERRIDES, Inputs, small_config

DROPOUT = 1e-30
SMALL_PIXELS = 128


@dataclass(frozen=True)
class LanguageModel:
    """A class of `transformers`: its inputs are words of `batch` x `length`, with labels.

    Fields:
        fields: those of the configuration that differ from its defaults; sizes among them do not apply to small models.
        name: of the class, if the model has another name.
    """

    batch: int
    length: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def _sizes(width: int, layers: int, heads: int, inner: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        **others,
    }  # fmt: skip


def _bart_base() -> dict[str, Any]:
    """Returns the sizes of BART's base model; its configuration's defaults are the large one's."""
    sizes = {"layers": 6, "attention_heads": 12, "ffn_dim": 3072}
    return {
        "d_model": 768,
        **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()},
    }


DECODER = {"is_decoder": True}
OFFSET_POSITIONS = {"max_position_embeddings": 514}
"""Positions of words begin at 2."""

TRANSFORMERS: Mapping[str, LanguageModel] = {
    "BertForMaskedLM": LanguageModel(8, 512),
    "DistilGPT2": LanguageModel(8, 512, {"n_layer": 6}, "GPT2LMHeadModel"),
    "T5Small": LanguageModel(8, 512, name="T5ForConditionalGeneration"),
    "AlbertForMaskedLM": LanguageModel(8, 512, _sizes(768, 12, 12, 3072)),
    "BartForConditionalGeneration": LanguageModel(4, 256, _bart_base()),
    "LlamaForCausalLM": LanguageModel(
        2, 512, _sizes(2048, 16, 32, 8192, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True)
    ),
    "DistilBertForMaskedLM": LanguageModel(16, 256),
    "ElectraForCausalLM": LanguageModel(16, 512, DECODER),
    "DebertaForMaskedLM": LanguageModel(8, 256),
    "GPTNeoForCausalLM": LanguageModel(
        8, 512, {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}
    ),
    "ModernBertForMaskedLM": LanguageModel(8, 512),
    "OPTForCausalLM": LanguageModel(4, 512),
    "BlenderbotSmallForCausalLM": LanguageModel(32, 128),
    "ConvBertForMaskedLM": LanguageModel(8, 512),
    "Gemma3ForCausalLM": LanguageModel(
        2, 512, _sizes(640, 18, 4, 2048, num_key_value_heads=1, head_dim=256, vocab_size=262144)
    ),
    "MPNetForMaskedLM": LanguageModel(8, 512, OFFSET_POSITIONS),
    "PLBartForCausalLM": LanguageModel(8, 512),
    "GPTNeoXForCausalLM": LanguageModel(4, 512, _sizes(768, 12, 12, 3072)),
    "TrOCRForCausalLM": LanguageModel(8, 256, {"d_model": 256, "decoder_layers": 6}),
    "MT5ForConditionalGeneration": LanguageModel(4, 128),
    "RoFormerForMaskedLM": LanguageModel(8, 512),
    "Qwen2ForCausalLM": LanguageModel(4, 512, _sizes(896, 24, 14, 4864, num_key_value_heads=2)),
    "BartForCausalLM": LanguageModel(4, 512, _bart_base()),
    "FNetForMaskedLM": LanguageModel(8, 512),
    "SqueezeBertForMaskedLM": LanguageModel(8, 512),
    "RobertaForCausalLM": LanguageModel(8, 512, {**DECODER, **OFFSET_POSITIONS}),
    "PhiForCausalLM": LanguageModel(4, 512, _sizes(1024, 12, 16, 4096)),
    "PegasusForCausalLM": LanguageModel(8, 128),
    "GPT2LMHeadModel": LanguageModel(8, 512),
    "DebertaV2ForMaskedLM": LanguageModel(4, 256, _sizes(768, 6, 12, 3072)),
    "M2M100ForConditionalGeneration": LanguageModel(4, 128),
    "XLNetLMHeadModel": LanguageModel(4, 512, {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
    "Qwen3ForCausalLM": LanguageModel(4, 512, _sizes(1024, 28, 16, 3072, num_key_value_heads=8, head_dim=128)),
    "LayoutLMForMaskedLM": LanguageModel(8, 512),
    "GPT2ForSequenceClassification": LanguageModel(4, 1024, {"pad_token_id": 0}),
    "CamembertForMaskedLM": LanguageModel(8, 512, OFFSET_POSITIONS),
    "XGLMForCausalLM": LanguageModel(4, 128),
    "MobileBertForMaskedLM": LanguageModel(16, 128),
    "MBartForCausalLM": LanguageModel(4, 512),
    "MegatronBertForCausalLM": LanguageModel(4, 512, DECODER),
    "T5ForConditionalGeneration": LanguageModel(
        4, 512, {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}
    ),
}
"""Models of different kinds come first, since a run that was stopped has a first part of the list."""

TIMM: Mapping[str, int] = {
    "resnet50": 64, "vit_base_patch16_224": 32, "mobilenetv3_large_100": 64, "swin_tiny_patch4_window7_224": 32,
    "convnextv2_nano": 32, "tf_efficientnet_b0": 64, "deit_small_patch16_224": 64, "regnety_002": 64, "dla34": 64,
    "mixer_b16_224": 32, "coat_lite_mini": 32, "repvgg_a0": 64, "levit_128s": 64, "ese_vovnet19b_dw": 64,
    "poolformer_s12": 64, "beit_base_patch16_224": 32, "botnet26t_256": 32, "gernet_s": 64, "twins_pcpvt_small": 32,
    "ghostnet_100": 64, "convit_tiny": 32, "visformer_tiny": 64, "mobilevit_xs": 32, "resmlp_12_224": 64,
    "crossvit_9_240": 64, "rexnet_100": 64, "gmlp_s16_224": 32, "inception_v3": 64, "hrnet_w18_small": 32,
    "cspresnet50": 32, "xcit_nano_12_p16_224": 32, "res2net50_14w_8s": 32, "fbnetv3_b": 32, "mixnet_s": 64,
    "dm_nfnet_f0": 16, "resnest14d": 32, "volo_d1_224": 16,
}  # fmt: skip
"""Batch size by model."""


@dataclass(frozen=True)
class DashboardModel:
    """A model by library and name.

    Fields:
        batch: the batch size, a dimension of every input.
        build: returns the model on the CPU, in float32.
        inputs: returns random inputs of the model, with labels if it computes a loss, drawn by a seed.
    """

    library: str
    name: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int], Inputs]


def names() -> list[tuple[str, str]]:
    """Returns library and name of all models, the libraries in turn, so that a part of the list has both."""
    lists = [[("transformers", name) for name in TRANSFORMERS], [("timm", name) for name in TIMM]]
    ordered = sorted((index / len(items), item) for items in lists for index, item in enumerate(items))
    return [item for _, item in ordered]


@dataclass(frozen=True)
class Sizes:
    """The sizes of models and inputs: base or small ones; `batch` and `length` of words replace a row's own."""

    small: bool = False
    batch: int | None = None
    length: int | None = None


def dashboard_model(name: str, sizes: Sizes) -> DashboardModel:
    """Returns a model by name. Raises KeyError for an unknown name."""
    small = sizes.small
    if name in TIMM:
        batch = sizes.batch or (BATCH if small else TIMM[name])
        build = functools.partial(_build_timm, name)
        return DashboardModel("timm", name, batch, build, functools.partial(_images, batch, small))
    row = TRANSFORMERS[name]
    batch, length = (BATCH, LENGTH) if small else (row.batch, row.length)
    build = functools.partial(_build_transformer, row.name or name, row, small)
    inputs = functools.partial(_words, sizes.batch or batch, sizes.length or length)
    return DashboardModel("transformers", name, sizes.batch or batch, build, inputs)


def _build_transformer(class_name: str, row: LanguageModel, small: bool) -> nn.Module:
    import transformers

    model_class = getattr(transformers, class_name)
    config_class = model_class.config_class
    if small:
        flags = {name: value for name, value in row.fields.items() if name not in LIMITS}
        config = small_config(config_class, {**flags, **OVERRIDES.get(config_class.model_type, {})})
    else:
        config = config_class(**row.fields)
    for name in dir(config):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, DROPOUT)
    config.use_cache = False
    return model_class(config)


def _words(batch: int, length: int, model: nn.Module, seed: int) -> Inputs:
    """Returns words without padding and labels: the words, or classes if the model classifies sequences."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    words = torch.randint(3, config.vocab_size, (batch, length), generator=generator)
    inputs = {"input_ids": words}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = torch.randint(3, config.vocab_size, (batch, length), generator=generator)
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    labels = torch.randint(config.num_labels, (batch,), generator=generator) if is_classifier else words.clone()
    return {**inputs, "labels": labels}


def _build_timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name)


def _images(batch: int, small: bool, model: nn.Module, seed: int) -> dict[str, Tensor]:
    config: Any = model.default_cfg
    channels, height, width = config["input_size"]
    if small and not config.get("fixed_input_size"):
        height = width = min(height, SMALL_PIXELS)
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(batch, channels, height, width, generator=generator)}
