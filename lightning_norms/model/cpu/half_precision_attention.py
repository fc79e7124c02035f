"""Causal attention in half precision on a CPU, where torch's own kernel takes up to five times as long to train.

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
"""Queries a band: few enough that little is computed above the diagonal, many enough for fast products."""
SHORT = 128
"""Number of tokens up to which torch's float32 kernel is faster than bands, and more exact."""


def wants(query: Tensor, key: Tensor, dropout: float) -> bool:
    """Whether :func:`attend` applies: training on a CPU in bfloat16 or float16, all tokens, no dropout."""
    half = torch.is_grad_enabled() and query.dtype in (torch.bfloat16, torch.float16)
    return half and type(query) is Tensor and query.device.type == "cpu" and query.shape == key.shape and not dropout


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(head_width)) v`` over the past, a band of queries at a time.

    ::

                keys                 a band reads only the keys up to its last query; its probabilities are computed
        queries ##                   again for the gradient, so that nothing of size time x time is kept
                ####
                ######

    Args:
        query: ``[batch, heads, time, head_width]``.
        key: same shape as ``query``.
        value: same shape as ``query``.

    Returns:
        A tensor of the same shape and dtype.

    Source: bands and recomputation are those of Dao et al. 2022 (FlashAttention), arXiv:2205.14135.
    """
    with _no_autocast():
        if query.shape[2] <= SHORT:
            q, k, v = (x.float() for x in (query, key, value))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).to(query.dtype)
        result: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]  # of torch
        return result


def _no_autocast() -> torch.autocast:
    """Keep float32: autocast would turn it back into half precision."""
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
        with _no_autocast():
            gradients = _gradients(*(x.flatten(0, 1) for x in (query, key, value, gradient)))
        query_grad, key_grad, value_grad = (x.view(query.shape) for x in gradients)
        return query_grad, key_grad, value_grad


def _gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, all ``[batch x heads, time, head_width]``; ``g`` is the output's."""
    query_grad, key_grad, value_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first, end in _bands(q):
        weights, incoming = _probabilities(q, k, first, end), g[:, first:end]
        value_grad[:, :end].baddbmm_(weights.transpose(1, 2), incoming)
        towards = incoming @ v[:, :end].transpose(1, 2)
        # through the softmax: weights * (towards - sum(weights * towards)), by torch's kernel
        towards = torch._softmax_backward_data(towards, weights, -1, weights.dtype)
        query_grad[:, first:end] = towards @ k[:, :end]
        key_grad[:, :end].baddbmm_(towards.transpose(1, 2), q[:, first:end], alpha=_scale(q))
    return query_grad.mul_(_scale(q)), key_grad, value_grad


def _bands(q: Tensor) -> list[tuple[int, int]]:
    time = q.shape[1]
    return [(first, min(first + ROWS, time)) for first in range(0, time, ROWS)]


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _probabilities(q: Tensor, k: Tensor, first: int, end: int) -> Tensor:
    """Compute ``[batch x heads, end - first, end]``: queries ``first`` to ``end`` over the keys up to ``end``.

    In float32: rounded to bfloat16, a logit of 20 would be off by 0.06 and its probability by 6 %.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q[:, first:end].to(kind), k[:, :end].transpose(1, 2).to(kind)
    future = torch.full((end - first, end), -torch.inf, dtype=kind).triu(first + 1)
    return torch.baddbmm(future, queries, keys, alpha=_scale(q)).softmax(-1).to(q.dtype)
