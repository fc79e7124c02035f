"""The decoder: embed -> entry -> blocks -> exit -> head. One forward, no placement names in it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_norms.model.attention import CausalSelfAttention, Memory, Passage, QKNorm
from lightning_norms.model.feed_forward import GELU, FeedForward
from lightning_norms.model.initialization import GPT2, Initialization, draw, initialize_sublayer
from lightning_norms.model.norms import LayerNorm, Norm
from lightning_norms.model.placements.single_stream import PreNorm
from lightning_norms.model.positions import Learned, LearnedPositions, Positions
from lightning_norms.model.residual import Placement, Site


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that shapes a decoder; each key is an argument, a YAML key and a word of the field.

    Args:
        vocab_size: number of tokens; null takes it from the data module.
        context_length: most tokens that the model sees at once.
        d_model: width of the residual stream.
        n_heads: attention heads; ``d_model`` must be a multiple.
        n_kv_heads: key/value heads: null for ``n_heads``, 1 for multi-query, between for grouped-query attention.
        n_layers: number of blocks, L; each holds two sublayers.
        ff_multiplier: hidden width of the feed-forward / d_model (SwiGLU takes 2/3 of it for equal parameters).
        dropout: probability, on embeddings, attention weights and both branches.
        bias: of the linear layers in the blocks.
        tied_head: the head is the embedding's matrix.
        placement: where norms sit.
        norm: what a norm computes.
        qk_norm: QKNorm to normalise queries and keys; null for none.
        value_residual: share of block 1's values in every later block's: 0 for none, 0.5 as in ResFormer.
        positions: Learned, Sinusoidal or Rotary.
        feed_forward: GELU, ReLU or SwiGLU.
        initialization: Normal, GPT2 or Xavier; the table is in ``lightning_norms/model/initialization.py``.
        draw_by_name: the first numbers of a matrix depend on the seed, its name and its shape alone, so that two
            variants start with the same weights where shapes match; ``compare`` turns it on. Without it, they are the
            next ones of torch's generator.
        activation_checkpointing: keep only the stream between blocks while training, and compute each block again
            for its gradient: less memory for half as much time again, or a little more. On a CPU under Linux, set
            `MALLOC_MMAP_THRESHOLD_=65536` in the environment: memory that was freed then does go back.

    Raises:
        ValueError: one sentence that names the key, the value given and what is allowed.
    """

    vocab_size: int | None = None
    context_length: int = 64
    d_model: int = 64
    n_heads: int = 4
    n_kv_heads: int | None = None
    n_layers: int = 4
    ff_multiplier: float = 4.0
    dropout: float = 0.0
    bias: bool = False
    tied_head: bool = True
    placement: Placement = field(default_factory=PreNorm)
    norm: Norm = field(default_factory=LayerNorm)
    qk_norm: QKNorm | None = None
    value_residual: float = 0.0
    positions: Positions = field(default_factory=Learned)
    feed_forward: FeedForward = field(default_factory=GELU)
    initialization: Initialization = field(default_factory=GPT2)
    draw_by_name: bool = False
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for key in ("vocab_size", "context_length", "d_model", "n_heads", "n_kv_heads", "n_layers"):
            value = getattr(self, key)
            optional = key in ("vocab_size", "n_kv_heads")
            if not (isinstance(value, int) and value >= 1) and not (optional and value is None):
                raise ValueError(f"{key} is {value!r}, but it must be a whole number >= 1.")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model is {self.d_model}, which is not a multiple of n_heads, {self.n_heads}.")
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}, which is not a multiple of n_kv_heads, {self.kv_heads}.")
        if not (isinstance(self.dropout, (int, float)) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout is {self.dropout!r}, but it is a probability: 0 <= dropout < 1.")
        if not (isinstance(self.value_residual, (int, float)) and 0 <= self.value_residual < 1):
            raise ValueError(f"value_residual is {self.value_residual!r}, but it is a share: 0 <= value_residual < 1.")
        if not (isinstance(self.ff_multiplier, (int, float)) and 1 / self.d_model <= self.ff_multiplier < float("inf")):
            raise ValueError(f"ff_multiplier is {self.ff_multiplier!r}, but it must be a number > 0, usually 4.")

    @property
    def kv_heads(self) -> int:
        """``n_kv_heads`` with its default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def attention_site(self, layer: int) -> Site:
        """Where block ``layer`` (1-based) has its attention."""
        return Site("attention", self.d_model, layer, self.n_layers, self.d_model, self.n_heads, self.kv_heads)

    def feed_forward_site(self, layer: int) -> Site:
        """Where block ``layer`` (1-based) has its feed-forward."""
        hidden = self.feed_forward.hidden_width(round(self.d_model * self.ff_multiplier))
        return Site("feed_forward", self.d_model, layer, self.n_layers, hidden)


class Block(nn.Module):
    """Two sublayers, each in its residual.

    ::

        x -- attention_residual( attention ) -- feed_forward_residual( feed_forward ) -- y

    Args:
        config: of the decoder.
        layer: number of the block, 1-based.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        placement, norm = config.placement, config.norm
        first, second = config.attention_site(layer), config.feed_forward_site(layer)
        inner = placement.inner(first, norm)
        if config.qk_norm is not None:
            inner = config.qk_norm.fill(inner, first, norm)
        self.attention = CausalSelfAttention(first, inner, config.bias, config.dropout, config.value_residual)
        self.feed_forward = config.feed_forward(second, placement.inner(second, norm), config.bias, config.dropout)
        self.attention_residual = placement.wrap(first, norm)
        self.feed_forward_residual = placement.wrap(second, norm)
        initialize_sublayer(self.attention, first, config.initialization, placement, config.draw_by_name)
        initialize_sublayer(self.feed_forward, second, config.initialization, placement, config.draw_by_name)

    def forward(self, x: Tensor, passage: Passage, memory: Memory | None = None) -> Tensor:
        """The stream after this block; a memory travels in the closure, so no residual knows of it."""
        x = self.attention_residual(x, lambda h: self.attention(h, passage, memory))
        y: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return y


class Decoder(nn.Module):
    """A causal language model: tokens ``[batch, time]`` to logits ``[batch, time, vocab_size]``.

    Args:
        config: its shape; ``vocab_size`` must be known by now.

    Raises:
        ValueError: if ``vocab_size`` is missing, or more tokens come than ``context_length``.

    Example:
        >>> import torch
        >>> decoder = Decoder(DecoderConfig(vocab_size=256))
        >>> decoder(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not given: set it, or fit with a data module that has a vocab_size.")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = config.positions(config.context_length, config.d_model, config.d_model // config.n_heads)
        self.entry = config.placement.entry(config.d_model, config.norm)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(1, config.n_layers + 1))
        self.exit = config.placement.exit(config.d_model, config.norm)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialize_outside_blocks()
        if config.placement.wants_qk_norm and config.qk_norm is None:
            warnings.warn(
                f"{type(config.placement).__name__} makes queries and keys of a stream that no norm has bounded: give "
                "`qk_norm: QKNorm`, or gradients may grow a thousandfold toward the bottom of a deep stack.",
                stacklevel=2,
            )

    def _initialize_outside_blocks(self) -> None:
        recipe = self.config.initialization
        embedding, positions, head = ("embedding", "positions", "head") if self.config.draw_by_name else (None,) * 3
        draw(self.embedding.weight, recipe.embedding(), embedding)
        if isinstance(self.positions, LearnedPositions):
            draw(self.positions.weight, recipe.embedding(), positions)
        if self.config.tied_head:
            self.head.weight = self.embedding.weight
        else:
            draw(self.head.weight, recipe.head(self.config.d_model), head)

    def forward(self, tokens: Tensor, memories: Sequence[Memory] | None = None, start: int = 0) -> Tensor:
        """Logits of the token after each one.

        Args:
            tokens: ``[batch, time]``; with ``memories``, only the new ones.
            memories: keys and values of earlier tokens, one a block: ``KeyValueMemory``.
            start: number of earlier tokens.
        """
        length = tokens.shape[1]
        if start + length > self.config.context_length:
            raise ValueError(f"{start + length} tokens, but context_length is {self.config.context_length}.")
        passage = Passage(self.positions.rotation(start, length))
        x = self.positions(self.embedding(tokens), start)
        x = self.entry(F.dropout(x, self.config.dropout, self.training))
        for index, block in enumerate(self.blocks):
            if self.config.activation_checkpointing and self.training:
                x = checkpoint(block, x, passage, use_reentrant=False)
            else:
                x = block(x, passage, memories[index] if memories else None)
        logits: Tensor = self.head(self.exit(x))
        return logits
