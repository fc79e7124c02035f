"""Healthy networks of Hugging Face, from small configurations; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from typing_extensions import override

from benchmarks.zoo.kinds import Kind, Learner, adam
from benchmarks.zoo.language import cloze, second_half, sentences
from benchmarks.zoo.losses import classes
from benchmarks.zoo.nets import SYMBOLS, WIDTH
from benchmarks.zoo.vision import album

IDS = {"vocab_size": SYMBOLS, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}


class Logits(nn.Module):
    """A model of Hugging Face, called with the name of its input; only the logits come out."""

    def __init__(self, model: nn.Module, name: str = "input_ids") -> None:
        super().__init__()
        self.model, self.name = model, name

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**{self.name: inputs}).logits
        return logits


class Conditional(nn.Module):
    """T5: the first half of the sentence is the source, the second the decoder's input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens.split(8, 1)
        logits: Tensor = self.model(input_ids=source, decoder_input_ids=target).logits
        return logits


def gpt2() -> nn.Module:
    """GPT-2 with dropout, as it comes."""
    config = GPT2Config(n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2, use_cache=False, **IDS)
    return Logits(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    """BERT for hidden words."""
    return Logits(BertForMaskedLM(BertConfig(max_position_embeddings=16, **SHAPE, **{**IDS, "pad_token_id": 0})))


def llama() -> nn.Module:
    """Llama with grouped keys and values."""
    config = LlamaConfig(num_key_value_heads=1, max_position_embeddings=16, use_cache=False, **SHAPE, **IDS)
    return Logits(LlamaForCausalLM(config))


def vit() -> nn.Module:
    """ViT over sixteen patches."""
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **SHAPE)
    return Logits(ViTForImageClassification(config), "pixel_values")


def t5() -> nn.Module:
    """T5 with one block on each side."""
    config = T5Config(
        vocab_size=SYMBOLS, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Conditional(T5ForConditionalGeneration(config))


def shifted(outputs: Tensor, batch: Any) -> Tensor:
    """Hugging Face's own shift: logits of a token against the next input, as its models compute the loss."""
    return classes(outputs[:, :-1], (None, batch[0][:, 1:].contiguous()))


KINDS = (
    Kind("Hugging Face GPT-2", lambda: Learner(gpt2(), shifted, adam(3e-3)), sentences, tag="Hugging Face"),
    Kind("Hugging Face BERT", lambda: Learner(bert(), classes, adam(3e-3)), cloze, tag="Hugging Face"),
    Kind("Hugging Face Llama", lambda: Learner(llama(), classes, adam(3e-3)), sentences, tag="Hugging Face"),
    Kind("Hugging Face T5", lambda: Learner(t5(), second_half, adam(3e-3)), sentences, tag="Hugging Face"),
    Kind("Hugging Face ViT", lambda: Learner(vit(), classes, adam(2e-3)), album, tag="Hugging Face"),
)
