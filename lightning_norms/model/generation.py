"""Sampling text with a key/value cache, through the same forward as training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_norms.model.cpu.token_by_token import lay_out
from lightning_norms.model.decoder import Decoder

WORTH_LAYING_OUT = 8
"""Number of new tokens from which laying the decoder out saves time."""


class KeyValueMemory:
    """Keys and values of one block, in buffers that are allocated once.

    Args:
        context_length: largest number of tokens to hold.
    """

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.length = 0
        self.buffers: tuple[Tensor, Tensor] | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, time, head_width]`` and return views of all keys and values so far."""
        if self.buffers is None:
            batch, heads, _, width = key.shape
            shape = (batch, heads, self.context_length, width)
            self.buffers = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self.buffers
        start, new = self.length, key.shape[2]
        keys.narrow(2, start, new).copy_(key)
        values.narrow(2, start, new).copy_(value)
        self.length = end = start + new
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    Args:
        temperature: logits are divided by it; 0 is greedy.
        top_k: draw from the k most likely tokens; null for all.
        top_p: draw from the smallest set of tokens that holds this share of the probability; 1 for all.

    Raises:
        ValueError: one sentence on what is wrong.

    Source: top-p from Holtzman et al. 2020, arXiv:1904.09751.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature!r}, but it must be a finite number >= 0 (0 is greedy).")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k!r}, but it must be a whole number >= 1, or null for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}, but it is a share of the probability: 0 < top_p <= 1.")

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one token ``[batch]`` for logits ``[batch, vocab_size]``."""
        if self.temperature == 0 or self.top_k == 1:
            return logits.argmax(dim=-1)
        kept = self._keep_top_p(self._keep_top_k(logits.float() / self.temperature))
        return torch.multinomial(kept.softmax(dim=-1), 1, generator=generator).squeeze(-1)

    def _keep_top_k(self, logits: Tensor) -> Tensor:
        if self.top_k is None or self.top_k >= logits.shape[-1]:
            return logits
        values, tokens = logits.topk(self.top_k, dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, values)

    def _keep_top_p(self, logits: Tensor) -> Tensor:
        if self.top_p == 1:
            return logits
        ordered, tokens = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(dim=-1)
        likelier = probability.cumsum(dim=-1) - probability  # 0 for the first, which is always kept
        kept = ordered.masked_fill(likelier >= self.top_p, -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, kept)


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue a prompt to ``[batch, time + new]``.

    Stops after ``max_new_tokens``, or when prompt and new tokens together fill ``context_length``, whichever is first:
    positions beyond it were never trained.

    Args:
        decoder: network, in eval mode.
        prompt: ``[batch, time]``, at least one token and fewer than ``context_length``.
        max_new_tokens: largest number of tokens to add.
        sampling: how to draw; the default samples from the model's own distribution.
        generator: random generator on the decoder's device, for repeatable draws.

    Raises:
        ValueError: if the prompt is empty or leaves no room.

    Example:
        >>> from lightning_norms.model.decoder import DecoderConfig
        >>> decoder = Decoder(DecoderConfig(vocab_size=9, context_length=8)).eval()
        >>> generate(decoder, torch.zeros(1, 2, dtype=torch.long), max_new_tokens=20).shape
        torch.Size([1, 8])
    """
    context_length = decoder.config.context_length
    if not 1 <= prompt.shape[1] < context_length:
        raise ValueError(
            f"the prompt has {prompt.shape[1]} tokens, but it must have at least 1 and leave room for one more in "
            f"context_length, {context_length}."
        )
    sampling = sampling or Sampling()
    memories = [KeyValueMemory(context_length) for _ in decoder.blocks]
    steps = min(max_new_tokens, context_length - prompt.shape[1])
    fast = lay_out(decoder) if steps >= WORTH_LAYING_OUT else decoder
    tokens, new, start = prompt, prompt, 0
    for _ in range(steps):
        logits = fast(new, memories, start)[:, -1]
        start += new.shape[1]
        new = sampling.draw(logits, generator)[:, None]
        tokens = torch.cat((tokens, new), dim=1)
    return tokens
