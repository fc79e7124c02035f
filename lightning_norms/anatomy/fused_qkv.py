"""Where query, key and value stand in a matrix that holds several of them.

::

thirds   [ q q q q | k k k k | v v v v ]      GPT-2, nn.MultiheadAttention, timm
by head  [ q k v | q k v | q k v | q k v ]    GPT-NeoX, BLOOM
grouped  [ q q q q | k | v ]                  Phi-3: fewer key and value heads
halves   [ k k k k | v v v v ]                cross-attention of GPT-2
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_norms.anatomy.matrices import width_in_and_out

FUSED = re.compile(r"c_attn|in_proj_weight|qkv|kqv|query_key_value|to_kv|(^|\.)kv(_proj)?\.")
MIXED = re.compile(r"query_key_value|kqv")
"""Names that stand for several orders, which only the class of the attention tells apart."""
QUERY, KEY, VALUE = range(3)


@dataclass(frozen=True)
class Fused:
    """Sizes of query, key and value, and how often the three come one after the other."""

    repeats: int
    sizes: tuple[int, int, int]

    def rows(self, part: int) -> Tensor:
        """Output numbers of ``QUERY``, ``KEY`` or ``VALUE``, rising."""
        once, start = sum(self.sizes), sum(self.sizes[:part])
        within = torch.arange(start, start + self.sizes[part])
        return (torch.arange(self.repeats)[:, None] * once + within).flatten()


def _by_head(attention: Any) -> Fused:
    heads = getattr(attention, "num_heads", None) or attention.config.num_attention_heads
    size = attention.query_key_value.out_features // (3 * heads)
    return Fused(heads, (size, size, size))


def _grouped(attention: Any) -> Fused:
    config, size = attention.config, attention.head_dim
    keys = config.num_key_value_heads * size
    return Fused(1, (config.num_attention_heads * size, keys, keys))


FAMILIES: dict[str, Callable[[Any], Fused]] = {
    "GPTNeoXAttention": _by_head,
    "BloomAttention": _by_head,
    "Phi3Attention": _grouped,
}
"""Attention classes whose order their names or shapes do not tell."""


def is_fused(name: str) -> bool:
    """Whether a matrix of this name holds a value part and other parts."""
    return FUSED.search(name) is not None


def layout_of(name: str, parameter: Tensor, owner: nn.Module, attention: nn.Module) -> Fused:
    """The layout of a fused matrix that ``owner`` holds inside ``attention``; a ValueError if its order is unknown."""
    if parameter.ndim != 2:
        raise ValueError(f"{name} is a flat shard, in which the value part cannot be found: use FSDP2, or ddp.")
    family = FAMILIES.get(type(attention).__name__)
    if family is not None:
        return family(attention)
    embed = getattr(owner, "embed_dim", None)
    inputs, outputs = width_in_and_out(owner) or ((embed, 3 * embed) if isinstance(embed, int) else (0, 0))
    for parts, sizes in ((3, (inputs, inputs, inputs)), (2, (0, inputs, inputs))):
        if outputs == parts * inputs > 0 and not MIXED.search(name):
            return Fused(1, sizes)
    raise ValueError(
        f"cannot find the value third of {name} {list(parameter.shape)}: expected query, key, value of equal sizes, "
        f"or one of {', '.join(sorted(FAMILIES))}. Leave it out: give pattern= and value_pattern=."
    )
