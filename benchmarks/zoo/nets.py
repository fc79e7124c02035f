"""The small networks that the kinds share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

SYMBOLS, LENGTH, WIDTH = 32, 16, 32


class Block(nn.Module):
    """Attention and a feed-forward network, with the norm before the branch or after the sum.

    Args:
        width: of the residual stream.
        post: norm after the sum instead of before the branch.
        causal: no position sees a later one.
        alpha: factor on the skip path (DeepNorm).
    """

    def __init__(self, width: int, *, post: bool = False, causal: bool = True, alpha: float = 1.0) -> None:
        super().__init__()
        self.post, self.causal, self.alpha = post, causal, alpha
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        """Two heads."""
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.query_key_value(x).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended

    def feed_forward(self, x: Tensor) -> Tensor:
        """Two matrices with a GELU between them."""
        transformed: Tensor = self.down(F.gelu(self.up(x)))
        return transformed

    def residual(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        """The skip path and one branch."""
        added: Tensor = norm(self.alpha * x + branch(x)) if self.post else x + branch(norm(x))
        return added

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.residual(self.residual(x, self.attention, self.norm_1), self.feed_forward, self.norm_2)


class Transformer(nn.Module):
    """Tokens [batch, time] to logits [batch, time, symbols]."""

    def __init__(
        self, blocks: int = 2, *, width: int = WIDTH, symbols: int = SYMBOLS, post: bool = False, causal: bool = True,
        alpha: float = 1.0, length: int = LENGTH,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, post=post, causal=causal, alpha=alpha) for _ in range(blocks))
        self.exit = nn.Identity() if post else nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def features(self, tokens: Tensor) -> Tensor:
        """The residual stream after the last block."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.exit(x)
        return features

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(tokens))
        return logits


class EncoderStack(nn.Module):
    """A causal language model out of torch's own encoder layers, as people write it by hand."""

    def __init__(self, blocks: int, *, xavier: bool = False, norm_first: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=norm_first)
            for _ in range(blocks)
        )
        self.exit = nn.LayerNorm(WIDTH) if norm_first else nn.Identity()
        self.head = nn.Linear(WIDTH, SYMBOLS)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if causal else torch.zeros(LENGTH, LENGTH)
        self.register_buffer("mask", mask, persistent=False)
        if xavier:
            for weight in self.layers.parameters():
                if weight.dim() > 1:
                    nn.init.xavier_uniform_(weight)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        logits: Tensor = self.head(self.exit(x))
        return logits


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """x + branch(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)
