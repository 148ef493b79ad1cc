"""The six models that fxwrap is tested on, small and with random weights, and one training step.

Each is the architecture as `transformers` defines it, built from a configuration: nothing is downloaded.
Weights are random in every entry, biases and normalisation statistics too, so that no term of a formula is
hidden by a zero or a one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.long_form import long_only

BATCH = 2
LENGTH = 16
VOCABULARY = 128
HIDDEN = 64
HEADS = 4
CLASSES = 10
IMAGE = 32
DROPOUT = 0.1
IGNORED_LABEL = -100

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class ModelCase:
    """One model of the suite.

    `make_model(dropout probability, number of layers)` builds it with `transformers`' own initialisation;
    `make_inputs(generator, training)` draws its keyword arguments, labels included for training. `layers` is
    the number of layers unless asked otherwise, `has_dropout` whether the architecture has any.
    """

    name: str
    make_model: Callable[[float, int], nn.Module]
    make_inputs: Callable[[torch.Generator, bool], Inputs]
    layers: int = 2
    has_dropout: bool = True

    def build(self, seed: int, dropout: bool = False, layers: int | None = None) -> nn.Module:
        """The model in eval mode, float32 weights drawn from `seed`; dropout acts once in train mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make_model(DROPOUT if dropout else 0.0, layers or self.layers)
            _randomise(model)
        return model.eval()

    def inputs(self, seed: int, training: bool = False) -> Inputs:
        """Fresh keyword arguments of the model; with labels for training, so that the output has a loss."""
        return self.make_inputs(torch.Generator().manual_seed(seed), training)

    def loss(self, output: Mapping[str, Tensor]) -> Tensor:
        """The scalar loss in the output of a call with training inputs."""
        return output["loss"]


@dataclass(frozen=True)
class TrainingStep:
    """What one step of SGD left behind: copies by name, which later steps do not change."""

    loss: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train_step(model: nn.Module, compiled: Callable[..., Any], inputs: Inputs, seed: int) -> TrainingStep:
    """One step of SGD in train mode; `compiled` is `model` or compiled from it, and `model` is updated.

    The global random numbers start from `seed`, so two calls that draw the same dropout masks agree.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = compiled(**inputs)["loss"]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return TrainingStep(
        loss.detach().clone(),
        gradients,
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Move every parameter and running statistic off the constants that it was initialised to."""
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.2)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


def _ids(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (BATCH, length), generator=generator)


def _padding_mask(length: int = LENGTH) -> Tensor:
    """A mask of which every row but the first ends in padding."""
    return (torch.arange(length) < length - 3 * torch.arange(BATCH)[:, None]).long()


def _causal_inputs(generator: torch.Generator, training: bool) -> Inputs:
    inputs = {"input_ids": _ids(generator)}
    return {**inputs, "labels": inputs["input_ids"].clone()} if training else inputs


def _masked_inputs(generator: torch.Generator, training: bool) -> Inputs:
    ids = _ids(generator)
    segments = torch.randint(0, 2, (BATCH, LENGTH), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": _padding_mask(), "token_type_ids": segments}
    if not training:
        return inputs
    hidden = torch.rand(BATCH, LENGTH, generator=generator) < 0.5
    return {**inputs, "labels": ids.masked_fill(hidden, IGNORED_LABEL)}


def _sequence_to_sequence_inputs(generator: torch.Generator, training: bool) -> Inputs:
    inputs = {"input_ids": _ids(generator), "attention_mask": _padding_mask()}
    target = _ids(generator, LENGTH - 4)
    return {**inputs, "labels" if training else "decoder_input_ids": target}


def _image_inputs(generator: torch.Generator, training: bool) -> Inputs:
    inputs = {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)}
    if not training:
        return inputs
    return {**inputs, "labels": torch.randint(0, CLASSES, (BATCH,), generator=generator)}


def _gpt2(attention: str) -> Callable[[float, int], nn.Module]:
    def make(dropout: float, layers: int) -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=HIDDEN, n_layer=layers, n_head=HEADS,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
            use_cache=False, attn_implementation=attention,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # else it is looked up by class name, fails, and warns: a graph break
        return model

    return make


def _bert(dropout: float, layers: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN, max_position_embeddings=64, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, use_cache=False,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _llama(dropout: float, layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, intermediate_size=2 * HIDDEN, max_position_embeddings=64,
        attention_dropout=dropout, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _t5(dropout: float, layers: int) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=2 * HIDDEN, num_layers=layers,
        num_decoder_layers=layers, num_heads=HEADS, relative_attention_num_buckets=8, dropout_rate=dropout,
        use_cache=False, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _vit(dropout: float, layers: int) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS, intermediate_size=2 * HIDDEN,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, image_size=IMAGE, patch_size=8,
        num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _resnet(dropout: float, layers: int) -> nn.Module:
    """A ResNet of two stages with `layers` bottleneck blocks each; the architecture has no dropout."""
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[layers, layers], layer_type="bottleneck",
        num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config)


MODELS: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("gpt2", _gpt2("sdpa"), _causal_inputs),
        ModelCase("gpt2_eager_attention", _gpt2("eager"), _causal_inputs),
        ModelCase("bert", _bert, _masked_inputs),
        ModelCase("llama", _llama, _causal_inputs),
        ModelCase("t5", _t5, _sequence_to_sequence_inputs),
        ModelCase("vit", _vit, _image_inputs),
        ModelCase("resnet", _resnet, _image_inputs, layers=1, has_dropout=False),
    )
}

REPRESENTATIVE = ("gpt2", "llama", "resnet")
"""Models whose graphs have most of the operators: views and packed matmuls, grouped heads and tables, convolutions."""


def representative(names: Iterable[str]) -> list[Any]:
    """Returns the names of models as parameters of a test: only the long form runs those of other models."""
    return [name if name in REPRESENTATIVE else long_only(name) for name in names]


SHALLOW = {name: replace(case, layers=1) for name, case in MODELS.items()}
"""The models with one layer, whose captured graphs many tests share."""
