"""Causal self-attention with grouped key/value heads, slots for inner norms, and an optional memory."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_norms.model.positions import Rotation
from lightning_norms.model.residual import Inner, Site


class Memory(Protocol):
    """Keys and values of the tokens seen so far, of one block."""

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, time, head_width]``; return all that is remembered."""
        ...


class CausalSelfAttention(nn.Module):
    """``softmax(q k^T / sqrt(head_width)) v`` over the past, then the writer.

    ::

        x -+- query - norm - turn -+
           +- key --- norm - turn -+- attend - norm - writer - y
           +- value - norm --------+

    Args:
        site: width, heads and kv_heads (query heads share keys and values in groups, Ainslie et al. 2023,
            arXiv:2305.13245).
        inner: norms on queries, keys, values and before the writer.
        bias: of the four projections.
        dropout: on attention weights and on the output, while training.
    """

    def __init__(self, site: Site, inner: Inner, bias: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads = site.heads, site.kv_heads
        self.head_width = site.inner_width // site.heads
        self.query = nn.Linear(site.width, self.heads * self.head_width, bias=bias)
        self.key = nn.Linear(site.width, self.kv_heads * self.head_width, bias=bias)
        self.value = nn.Linear(site.width, self.kv_heads * self.head_width, bias=bias)
        self.writer = nn.Linear(self.heads * self.head_width, site.width, bias=bias)
        self.query_norm, self.key_norm, self.value_norm = inner.query, inner.key, inner.value
        self.writer_norm = inner.writer
        self.dropout = dropout

    @property
    def value_path(self) -> tuple[nn.Linear, ...]:
        """The matrices that the branch's output is linear in: DeepNorm's v_proj and out_proj."""
        return (self.value, self.writer)

    def forward(self, x: Tensor, rotate: Rotation, memory: Memory | None = None) -> Tensor:
        """``[batch, time, width]`` to the same; with a ``memory``, ``x`` holds only the new tokens."""
        batch, time, _ = x.shape
        split = (batch, time, -1, self.head_width)
        query = rotate(self.query_norm(self.query(x).view(split))).transpose(1, 2)
        key = rotate(self.key_norm(self.key(x).view(split))).transpose(1, 2)
        value = self.value_norm(self.value(x).view(split)).transpose(1, 2)
        if memory is not None:
            key, value = memory.extend(key, value)
        mixed = self._attend(query, key, value).transpose(1, 2).reshape(batch, time, -1)
        return F.dropout(self.writer(self.writer_norm(mixed)), self.dropout, self.training)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=new == total and new > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
