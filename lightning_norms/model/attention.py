"""Causal self-attention with grouped key/value heads, slots for inner norms, and an optional key/value memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_norms.model.cpu import half_precision_attention
from lightning_norms.model.norms import Norm
from lightning_norms.model.positions import Rotation
from lightning_norms.model.residual import Inner, Site


class Memory(Protocol):
    """One block's keys and values of all earlier tokens."""

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, time, head_width]``; return all keys and values so far."""
        ...


@dataclass(frozen=True)
class QKNorm:
    """Norms on queries and keys: they bound the attention logits, whatever the stream does.

    Args:
        norm: norm to apply; null for the decoder's norm.
        over: "head" normalises each head, with one gain for all heads (Qwen 3, Gemma 3); "width" normalises all heads
            together (OLMo 2).
        rotary: normalise "before" (most models) or "after" (Llama 4, nanochat) the rotation by positions.

    Raises:
        ValueError: if ``over`` or ``rotary`` is another word, or the placement normalises queries and keys itself.

    Source: Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442.
    """

    norm: Norm | None = None
    over: Literal["head", "width"] = "head"
    rotary: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        for name, allowed in (("over", ("head", "width")), ("rotary", ("before", "after"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"QKNorm's {name} is {getattr(self, name)!r}: give {' or '.join(map(repr, allowed))}.")

    def fill(self, inner: Inner, site: Site, norm: Norm) -> Inner:
        """Add the norms of queries and keys to a placement's inner norms."""
        slots = (inner.query, inner.key, inner.turned_query, inner.turned_key)
        if not all(isinstance(slot, nn.Identity) for slot in slots):
            raise ValueError("qk_norm is given, but the placement normalises queries and keys itself: leave it out.")
        query, key = (self._over(heads, site.inner_width // site.heads, norm) for heads in (site.heads, site.kv_heads))
        if self.rotary == "before":
            return replace(inner, query=query, key=key)
        return replace(inner, turned_query=query, turned_key=key)

    def _over(self, heads: int, head_width: int, norm: Norm) -> nn.Module:
        recipe = self.norm or norm
        return recipe(head_width) if self.over == "head" else _OverHeads(recipe(heads * head_width))


class _OverHeads(nn.Module):
    """A norm over the last two axes, ``[..., heads, head_width]``."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x.flatten(-2)).view(x.shape)
        return result


@dataclass
class Passage:
    """What one forward carries from block to block beside the stream.

    Args:
        rotate: turns queries and keys by their positions.
        first_value: values of block 1 ``[batch, time, kv_heads, head_width]``, which ``value_residual`` mixes in.
    """

    rotate: Rotation
    first_value: Tensor | None = None


class CausalSelfAttention(nn.Module):
    """``softmax(q k^T / sqrt(head_width)) v`` over the past, then the writer.

    ::

        x -+- query - norm - turn - norm -+
           +- key --- norm - turn - norm -+- attend - norm - writer - y
           +- value - norm ---------------+

    Args:
        site: width, heads and kv_heads (query heads share keys and values in groups, Ainslie et al. 2023,
            arXiv:2305.13245).
        inner: norms on queries, keys, values and before the writer.
        bias: whether the four projections have a bias.
        dropout: probability on attention weights and on the output, while training.
        value_residual: share of block 1's values: ``(1 - share) v + share v_1``; 0.5 in ResFormer (Zhou et al. 2024,
            arXiv:2410.17897).
    """

    def __init__(self, site: Site, inner: Inner, bias: bool, dropout: float, value_residual: float = 0.0) -> None:
        super().__init__()
        self.heads, self.kv_heads = site.heads, site.kv_heads
        self.head_width = site.inner_width // site.heads
        self.query = nn.Linear(site.width, self.heads * self.head_width, bias=bias)
        self.key = nn.Linear(site.width, self.kv_heads * self.head_width, bias=bias)
        self.value = nn.Linear(site.width, self.kv_heads * self.head_width, bias=bias)
        self.writer = nn.Linear(self.heads * self.head_width, site.width, bias=bias)
        self.query_norm, self.key_norm, self.value_norm = inner.query, inner.key, inner.value
        self.turned_query_norm, self.turned_key_norm = inner.turned_query, inner.turned_key
        self.writer_norm = inner.writer
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.dropout, self.value_residual, self.is_first = dropout, value_residual, site.layer == 1

    @property
    def value_path(self) -> tuple[nn.Linear, ...]:
        """The matrices in which the branch's output is linear: DeepNorm's v_proj and out_proj."""
        return (self.value, self.writer)

    def forward(self, x: Tensor, passage: Passage, memory: Memory | None = None) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape; with a ``memory``, ``x`` holds only the new tokens."""
        batch, time, _ = x.shape
        rotate = passage.rotate
        split = (batch, time, -1, self.head_width)
        query, key, value = self.project(x)
        query = self.turned_query_norm(rotate(self.query_norm(query.view(split)))).transpose(1, 2)
        key = self.turned_key_norm(rotate(self.key_norm(key.view(split)))).transpose(1, 2)
        value = self._mix_values(self.value_norm(value.view(split)), passage).transpose(1, 2)
        if memory is not None:
            key, value = memory.extend(key, value)
        mixed = self._attend(query, key, value).transpose(1, 2).reshape(batch, time, -1)
        y: Tensor = self.drop(self.writer(self.writer_norm(mixed)))
        return y

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute queries, keys and values, each ``[batch, time, all heads side by side]``."""
        return self.query(x), self.key(x), self.value(x)

    def _mix_values(self, value: Tensor, passage: Passage) -> Tensor:
        if not self.value_residual:
            return value
        if self.is_first:
            passage.first_value = value
            return value
        if passage.first_value is None:
            raise ValueError("value_residual needs the values of block 1, which did not run in this forward.")
        return value.lerp(passage.first_value, self.value_residual)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if half_precision_attention.wants(query, key, dropout):
            return half_precision_attention.attend(query, key, value)
        new, total = query.shape[2], key.shape[2]
        # torch aligns is_causal to the first key; new tokens behind a memory are aligned to the last.
        mask = None
        if 1 < new < total:
            mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=new == total and new > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
