"""Small models with random weights of every architecture of `transformers` and every family of `timm`.

A configuration of `transformers` is made small by the names of its fields, the same table for all architectures;
a family of `timm` is its smallest model. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH, INNER, HEADS, HEAD, LAYERS, IMAGE = 2, 16, 256, 64, 128, 4, 16, 2, 32

Inputs: TypeAlias = dict[str, Tensor]

FIELDS: Sequence[tuple[int, str]] = (
    (WIDTH, (
        "hidden_size d_model n_embd embed_dim hidden_dim dim embedding_size text_hidden_size out_hidden_size "
        "lru_width output_hidden_size encoder_hidden_size decoder_hidden_size word_embed_proj_dim embedding_dim "
        "attention_hidden_size projection_dim projector_hidden_size decoder_hidden_dim encoder_hidden_dim"
    )),
    (INNER, (
        "intermediate_size ffn_dim d_ff n_inner mlp_dim d_inner moe_intermediate_size encoder_ffn_dim "
        "decoder_ffn_dim shared_expert_intermediate_size dense_intermediate_size"
    )),
    (HEADS, (
        "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
        "attention_heads index_n_heads linear_num_value_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts window_size time_step_rank num_conv_pos_embedding_groups"
    )),
    (HEAD, (
        "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim linear_key_head_dim "
        "kv_lora_rank linear_value_head_dim q_lora_rank attention_head_size num_mel_bins mamba_d_state "
        "ssm_state_size state_size rotary_dim num_conv_pos_embeddings hidden_size_per_layer_input"
    )),
    (LAYERS, (
        "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers num_hidden_groups num_experts_per_tok num_key_value_heads n_head_kv num_kv_heads "
        "linear_num_key_heads multi_query_group_num"
    )),
    (VOCABULARY, (
        "vocab_size vocab_size_per_layer_input entity_vocab_size text_vocab_size encoder_hash_byte_group_vocab"
    )),
    (64, "max_position_embeddings n_positions max_source_positions n_ctx max_target_positions codebook_size"),
    (IMAGE, "image_size input_size pretrain_image_size"),
    (8, "patch_size sliding_window attention_window num_queries index_topk mamba_n_heads"),
    (1, "n_group topk_group n_groups first_k_dense_replace"),
)  # fmt: skip
LIMITS = {name: limit for limit, names in FIELDS for name in names.split()}
"""The largest value that an integer field of a configuration keeps, by name."""

SMALL_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "albert": {"num_hidden_groups": 1},
    "bamba": {"attn_layer_indices": [1]},
    "canine": {
        "num_hash_buckets": 64, "local_transformer_stride": 8, "downsampling_rate": 4, "upsampling_kernel_size": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    **{name: {"rope_parameters": SMALL_MROPE} for name in ("glm46v", "glm4v", "qwen2_vl", "qwen2_5_vl", "glm_ocr")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "local"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8, "is_decoder": False,
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "xmod": {"default_language": "en_XX"},
    "xlnet": {"d_head": HEAD, "d_inner": INNER},
}  # fmt: skip
"""Fields of architectures whose own rules the limits break."""

EXTENTS = ("depths", "num_blocks", "layers_per_stage", "encoder_depths")
WIDTHS = ("hidden_sizes", "embed_dims", "embedding_hidden_sizes", "channels", "neck_hidden_sizes", "stem_hidden_sizes")


@dataclass(frozen=True)
class SweepModel:
    """A model by library and name: `build()` returns it with dropout off, and its inputs."""

    library: str
    name: str
    build: Callable[[], tuple[nn.Module, Inputs]]


def sweep_models(library: str) -> list[SweepModel]:
    """Returns the models of `"transformers"` or `"timm"`, by name."""
    return _transformers_models() if library == "transformers" else _timm_models()


def _transformers_models() -> list[SweepModel]:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    return [
        SweepModel("transformers", name, functools.partial(_build_transformer, name))
        for name in sorted(CONFIG_MAPPING)
        if CONFIG_MAPPING[name] in MODEL_MAPPING
    ]


def _build_transformer(name: str) -> tuple[nn.Module, Inputs]:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config: Any = small_config(CONFIG_MAPPING[name], OVERRIDES.get(name, {}))
    config._attn_implementation = "sdpa"
    classes = MODEL_MAPPING[type(config)]
    model_class = classes[0] if isinstance(classes, tuple) else classes
    try:
        model = model_class(config)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        config._attn_implementation = "eager"
        model = model_class(config)
    return model, _transformer_inputs(model, config)


def small_config(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    """Returns a configuration with each known field at most its limit, inner configurations likewise."""
    defaults = config_class()
    fields: dict[str, Any] = {}
    for field in inspect.signature(config_class).parameters:
        default = getattr(defaults, field, None)
        if field in config_class.sub_configs:
            if default is not None:
                fields[field] = small_config(type(default), {}).to_dict()
        elif isinstance(default, bool):
            fields.update({field: False} if field == "use_cache" else {})
        elif isinstance(default, int) and (field in LIMITS or field.endswith("_token_id")):
            fields[field] = min(default, LIMITS.get(field, VOCABULARY - 1))
        elif isinstance(default, float) and "drop" in field:
            fields[field] = 0.0
        elif isinstance(default, list | tuple) and LIMITS.get(field) == IMAGE:
            fields[field] = [min(size, IMAGE * (1 + (size > min(default)))) for size in default]
        elif isinstance(default, list | tuple) and field in EXTENTS:
            fields[field] = [1] * len(default)
        elif isinstance(default, list | tuple) and field in WIDTHS:
            fields[field] = [_small_width(width) for width in default]
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = HEADS  # latent attention has no groups
    if isinstance(heads := getattr(defaults, "num_heads", None), list | tuple) and "embed_dim" in fields:
        fields["embed_dim"] = HEAD * heads[0]
    return config_class(**{**fields, **overrides})


def _small_width(width: Any) -> Any:
    """Returns a width of a list of growing widths, divided by a power of two so that heads still divide it."""
    return width // 2 ** max(0, int(math.log2(width / 16)) // 2) if isinstance(width, int) and width > 32 else width


def _transformer_inputs(model: Any, config: Any) -> Inputs:
    """Returns inputs by the names of the parameters of `forward`: words, images, or sound."""
    parameters = inspect.signature(model.forward).parameters
    main, inputs = model.main_input_name, {}
    words = torch.randint(3, _field(config, "vocab_size", VOCABULARY), (BATCH, LENGTH))
    if main == "pixel_values" or "input_ids" not in parameters:
        size, channels = _field(config, "image_size", _free_image_size(model)), _field(config, "num_channels", 3)
        height, width = size if isinstance(size, Sequence) else (size, size)
        if "pixel_values" in parameters:
            inputs["pixel_values"] = torch.randn(BATCH, channels, height, width)
    if "input_ids" in parameters:
        inputs["input_ids"] = words
        if "pixel_values" in parameters and main == "input_ids" and not _takes_images_apart(config):
            size, channels = _field(config, "image_size", IMAGE), _field(config, "num_channels", 3)
            inputs["pixel_values"] = torch.randn(BATCH, channels, size, size)
    if "input_values" in parameters and main == "input_values":
        inputs["input_values"] = torch.randn(BATCH, 2000)
    if "input_features" in parameters and main == "input_features":
        bins, length = _field(config, "num_mel_bins", 16), 2 * _field(config, "max_source_positions", 32)
        inputs["input_features"] = torch.randn(BATCH, bins, length)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = words.clone()
    return inputs


def _free_image_size(model: nn.Module) -> int:
    """Returns the size of images where the configuration sets none.

    A batch norm over two values, one for each image, has gradients that are nothing but rounding errors: its results
    are 1 and -1 whatever the values are. Networks reduce images to a thirty-second, so theirs are twice as large.
    """
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    return 2 * IMAGE if has_batch_norm else IMAGE


def _takes_images_apart(config: Any) -> bool:
    """Whether words without image tokens go with no image (a language model that may look at images)."""
    return hasattr(config, "image_token_id") or hasattr(config, "image_token_index")


def _field(config: Any, name: str, default: Any) -> Any:
    """Returns a field of a configuration or of the first inner configuration that has it."""
    inner = [getattr(config, sub, None) for sub in config.sub_configs]
    return next((getattr(part, name) for part in (config, *inner) if getattr(part, name, None) is not None), default)


def _timm_models() -> list[SweepModel]:
    import timm

    smallest = {module: _smallest(timm.list_models(module=module)) for module in timm.list_modules()}
    return [
        SweepModel("timm", f"{module}/{name}", functools.partial(_build_timm, name))
        for module, name in smallest.items()
        if name is not None
    ]


SMALL_WORDS = (
    "test",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxt",
    "xs",
    "tiny",
    "_t",
    "_s",
    "small",
    "18",
    "b0",
    "050",
)


def _smallest(names: Sequence[str]) -> str | None:
    """Returns the name of the model with the fewest parameters among those whose names promise few."""
    import timm

    def rank(name: str) -> int:
        return next((index for index, word in enumerate(SMALL_WORDS) if word in name), len(SMALL_WORDS))

    def size(name: str) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in timm.create_model(name).parameters())

    sizes = {}
    for name in sorted(names, key=rank)[:3]:
        try:
            sizes[name] = size(name)
        except Exception as error:  # noqa: BLE001 - some models compute numbers while they are built
            print(f"{name}: {error}", file=sys.stderr)
    return min(sizes, key=sizes.__getitem__) if sizes else next(iter(sorted(names, key=rank)), None)


def _build_timm(name: str) -> tuple[nn.Module, Inputs]:
    import timm

    model = timm.create_model(name, num_classes=10, drop_rate=0.0)
    channels, height, width = model.default_cfg["input_size"]
    if not model.default_cfg.get("fixed_input_size"):
        height = width = min(height, 128)
    return model, {"x": torch.randn(BATCH, channels, height, width)}
