"""The decoder of GPT-2's shape, ours and others' with the same weights, so that speed is compared at equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from x_transformers import Decoder as XDecoder
from x_transformers import TransformerWrapper

from lightning_norms.model.decoder import Decoder, DecoderConfig

LOSS_TOLERANCE = 1e-4
"""Between losses of equal weights in float32; a loss has six or seven digits."""


@dataclass(frozen=True)
class Shape:
    """Of a decoder and its batch.

    Args:
        layers: number of blocks.
        width: of the residual stream.
        heads: of attention.
        context: tokens a window.
        batch: windows a step.
        vocabulary: number of tokens.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        """A step's."""
        return self.context * self.batch

    @property
    def operations(self) -> float:
        """Floating-point operations of a step's matrix products, both ways; attention over the past only."""
        a_token = 24 * self.width**2 * self.layers + 2 * self.width * self.vocabulary
        attention = 2 * self.width * self.context * self.layers
        return 3.0 * self.tokens * (a_token + attention)

    def __str__(self) -> str:
        """As in a table: 6 x 384."""
        return f"{self.layers} x {self.width}"


def ours(shape: Shape) -> Decoder:
    """GPT-2 as a configuration of ours."""
    config = DecoderConfig(
        vocab_size=shape.vocabulary, context_length=shape.context, d_model=shape.width, n_heads=shape.heads,
        n_layers=shape.layers, bias=True,
    )  # fmt: skip
    return Decoder(config)


class HuggingFace(nn.Module):
    """``GPT2LMHeadModel`` with sdpa, the exact GELU and no dropout."""

    def __init__(self, shape: Shape, source: Decoder) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=shape.vocabulary, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
            n_head=shape.heads, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            attn_implementation="sdpa", use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)
        transformer = self.model.transformer
        copy(transformer.wte.weight, source.embedding.weight)
        copy(transformer.wpe.weight, source.positions.weight)
        copy_module(transformer.ln_f, source.exit)
        for mine, block in zip(transformer.h, source.blocks, strict=True):
            copy_module(mine.ln_1, block.attention_residual.before)
            copy_module(mine.ln_2, block.feed_forward_residual.before)
            copy(mine.attn.c_attn.weight, joined(block.attention, "weight").T)
            copy(mine.attn.c_attn.bias, joined(block.attention, "bias"))
            pairs = (
                (mine.attn.c_proj, block.attention.writer),
                (mine.mlp.c_fc, block.feed_forward.up),
                (mine.mlp.c_proj, block.feed_forward.writer),
            )
            for theirs, linear in pairs:
                copy(theirs.weight, linear.weight.T)
                copy(theirs.bias, linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(tokens).logits
        return logits


class TorchLayers(nn.Module):
    """A stack of ``nn.TransformerEncoderLayer`` with a causal mask, as one writes it by hand."""

    def __init__(self, shape: Shape, source: Decoder) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.stack = nn.TransformerEncoder(layer, shape.layers, nn.LayerNorm(shape.width), enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.context), persistent=False)
        copy(self.embedding.weight, source.embedding.weight)
        copy(self.positions, source.positions.weight)
        copy_module(self.stack.norm, source.exit)
        for mine, block in zip(self.stack.layers, source.blocks, strict=True):
            copy_module(mine.norm1, block.attention_residual.before)
            copy_module(mine.norm2, block.feed_forward_residual.before)
            copy(mine.self_attn.in_proj_weight, joined(block.attention, "weight"))
            copy(mine.self_attn.in_proj_bias, joined(block.attention, "bias"))
            copy_module(mine.self_attn.out_proj, block.attention.writer)
            copy_module(mine.linear1, block.feed_forward.up)
            copy_module(mine.linear2, block.feed_forward.writer)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.stack(x, mask=self.mask, is_causal=True))
        return logits


def x_transformers(shape: Shape, _: Decoder) -> nn.Module:
    """Its decoder of the same shape with flash attention; it has no biases in attention, so the loss is its own."""
    layers = XDecoder(
        dim=shape.width, depth=shape.layers, heads=shape.heads, attn_dim_head=shape.width // shape.heads,
        attn_flash=True, ff_mult=4,
    )  # fmt: skip
    model: nn.Module = TransformerWrapper(
        num_tokens=shape.vocabulary, max_seq_len=shape.context, attn_layers=layers, tie_embedding=True
    )
    return model


PEERS: dict[str, Callable[[Shape, Decoder], nn.Module]] = {
    "Hugging Face GPT-2": HuggingFace,
    "nn.TransformerEncoderLayer": TorchLayers,
    "x-transformers": x_transformers,
}
OWN_LOSS = {"x-transformers"}
"""Peers whose network is not quite the same."""


def copy(to: Tensor, source: Tensor) -> None:
    """Values only; the shapes must be equal."""
    if to.shape != source.shape:
        raise ValueError(f"{tuple(source.shape)} does not fit into {tuple(to.shape)}.")
    with torch.no_grad():
        to.copy_(source)


def copy_module(to: Any, source: Any) -> None:
    """Weight and bias."""
    copy(to.weight, source.weight)
    copy(to.bias, source.bias)


def joined(attention: Any, name: str) -> Tensor:
    """Queries, keys and values one below the other, as most libraries keep them."""
    return torch.cat([getattr(linear, name) for linear in (attention.query, attention.key, attention.value)])


def batches(shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """The same random windows for everybody: inputs and targets ``[batch, context]``."""
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:].contiguous()
