"""Causal attention of half-precision numbers on a CPU, where torch's own takes up to five times as long to train.

Times are in `benchmarks/README.md`; errors against float64 stay within 1.4 times those of torch's kernel (tested).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 64
"""Queries at a time: few enough that little is computed above the diagonal, many enough for fast products."""
SHORT = 128
"""Tokens up to which float32 kernels are faster than bands, and more exact than both."""


def wants(query: Tensor, key: Tensor, dropout: float) -> bool:
    """Whether :func:`attend` computes these: training on a CPU in bfloat16 or float16, all tokens, no dropout."""
    half = torch.is_grad_enabled() and query.dtype in (torch.bfloat16, torch.float16)
    return half and type(query) is Tensor and query.device.type == "cpu" and query.shape == key.shape and not dropout


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(head_width)) v`` over the past, a band of queries at a time.

    ::

                keys                 a band reads the keys up to its last query and no others; its probabilities are
        queries ##                   computed again for the gradient, so that nothing of size time x time is kept
                ####
                ######

    Args:
        query: ``[batch, heads, time, head_width]``; so are the others.
        key: as many heads as queries.
        value: likewise.

    Returns:
        The same shape and dtype.

    Source: bands and recomputation are those of Dao et al. 2022 (FlashAttention), arXiv:2205.14135.
    """
    with _as_they_are():
        if query.shape[2] <= SHORT:
            q, k, v = (x.float() for x in (query, key, value))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).to(query.dtype)
        result: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]  # of torch
        return result


def _as_they_are() -> torch.autocast:
    """Autocast would take float32 back to half precision."""
    return torch.autocast("cpu", enabled=False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (query, key, value))
        mixed = torch.empty_like(v)
        for first, end in _bands(q):
            mixed[:, first:end] = _probabilities(q, k, first, end) @ v[:, :end]
        return mixed.view(query.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors
        with _as_they_are():
            gradients = _gradients(*(x.flatten(0, 1) for x in (query, key, value, gradient)))
        of_query, of_key, of_value = (x.view(query.shape) for x in gradients)
        return of_query, of_key, of_value


def _gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, all ``[batch x heads, time, head_width]``; ``g`` is that of the result."""
    of_query, of_key, of_value = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first, end in _bands(q):
        weights, incoming = _probabilities(q, k, first, end), g[:, first:end]
        of_value[:, :end].baddbmm_(weights.transpose(1, 2), incoming)
        towards = incoming @ v[:, :end].transpose(1, 2)
        # through the softmax: weights * (towards - sum(weights * towards)), by torch's kernel
        towards = torch._softmax_backward_data(towards, weights, -1, weights.dtype)
        of_query[:, first:end] = towards @ k[:, :end]
        of_key[:, :end].baddbmm_(towards.transpose(1, 2), q[:, first:end], alpha=_scale(q))
    return of_query.mul_(_scale(q)), of_key, of_value


def _bands(q: Tensor) -> list[tuple[int, int]]:
    time = q.shape[1]
    return [(first, min(first + ROWS, time)) for first in range(0, time, ROWS)]


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _probabilities(q: Tensor, k: Tensor, first: int, end: int) -> Tensor:
    """Of queries ``first`` to ``end`` over the keys up to ``end``, ``[batch x heads, end - first, end]``.

    In float32: rounded to bfloat16, a logit of 20 would be off by 0.06 and its probability by 6 %.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q[:, first:end].to(kind), k[:, :end].transpose(1, 2).to(kind)
    future = torch.full((end - first, end), -torch.inf, dtype=kind).triu(first + 1)
    return torch.baddbmm(future, queries, keys, alpha=_scale(q)).softmax(-1).to(q.dtype)
