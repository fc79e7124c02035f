"""A decoder laid out to speak token by token: the same forward and the same numbers, in fewer and faster calls.

One new token is one row for every matrix, and a processor's library multiplies one row on a single core, and reads long
rows of weights faster than short ones::

    y = x W^T        W in bands of rows, one a core:        [ y1 | y2 ] = x [ W1^T | W2^T ]

Three changes, none to what is computed: matrices are multiplied in bands; queries, keys and values are one product; and
a module that only calls its children calls their ``forward`` itself. Times are in ``benchmarks/README.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_norms.model.attention import CausalSelfAttention
from lightning_norms.model.decoder import Block, Decoder
from lightning_norms.model.feed_forward import SwiGLUFeedForward, TwoLayerFeedForward
from lightning_norms.model.residual import Residual

Function = Callable[..., Any]

CALLERS = (Block, Residual, CausalSelfAttention, TwoLayerFeedForward, SwiGLUFeedForward)
"""Modules that use their children as functions, and in no other way."""
BAND = 24_000
"""Numbers of a matrix for each band; one with fewer is left to torch."""


def laid_out(decoder: Decoder) -> Decoder:
    """A twin that shares the weights: faster for one text and one new token at a time; all else takes the usual way.

    Joint and widening matrices are laid out anew, about half of a block's weights, and live as long as the twin does;
    it knows nothing of weights that change later. A decoder with hooks, compiled or sharded is its own twin: there, to
    call a module is more than its forward.

    Example:
        >>> from lightning_norms.model.decoder import DecoderConfig
        >>> decoder = Decoder(DecoderConfig(vocab_size=9)).eval()
        >>> tokens = torch.zeros(1, 3, dtype=torch.long)
        >>> torch.allclose(laid_out(decoder)(tokens), decoder(tokens), atol=1e-6)
        True
    """
    if not _is_plain(decoder):
        return decoder
    twin = cast(Decoder, _twin(decoder))
    for module in twin.modules():
        if type(module) in CALLERS:
            vars(module).update({name: _called(child) for name, child in module.named_children()})
        if type(module) is CausalSelfAttention:
            vars(module)["project"] = _joint(module)
    vars(twin).update(head=_called(twin.head), blocks=[block.forward for block in twin.blocks])
    return twin


def product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """``x W^T + b``, in bands where ``x`` is one row.

    Args:
        weight: ``[out, width]``.
        bias: ``[out]``.

    Example:
        >>> product(torch.eye(200)[:100], None)(torch.arange(200.0))[:3]
        tensor([0., 1., 2.])
    """
    out, width = weight.shape
    usual: Callable[[Tensor], Tensor] = functools.partial(F.linear, weight=weight, bias=bias)
    bands = _bands(weight)
    if not bands:
        return usual
    one_row = _one_row(weight.detach(), None if bias is None else bias.detach(), bands)
    return lambda x: one_row(x).view(*x.shape[:-1], out) if x.numel() == width else usual(x)


def _bands(weight: Tensor) -> int:
    """How many; 0 where torch's own product is as fast."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return 0
    most = min(torch.get_num_threads(), weight.numel() // BAND)
    return max((bands for bands in range(1, most + 1) if weight.shape[0] % bands == 0), default=0)


def _one_row(weight: Tensor, bias: Tensor | None, bands: int) -> Callable[[Tensor], Tensor]:
    """``[..., width]`` of one row to all features, in a shape of its own."""
    out, width = weight.shape
    tiles = weight.reshape(bands, out // bands, width).transpose(1, 2)
    if out > width:
        tiles = tiles.contiguous()
    if bands == 1:
        tile = tiles[0]
        if bias is None:
            return lambda x: torch.mm(x.view(1, width), tile)
        return lambda x: torch.addmm(bias, x.view(1, width), tile)
    if bias is None:
        return lambda x: torch.bmm(x.view(1, 1, width).expand(bands, 1, width), tiles)
    added = bias.view(bands, 1, -1)
    return lambda x: torch.baddbmm(added, x.view(1, 1, width).expand(bands, 1, width), tiles)


def _layer_norm(norm: nn.LayerNorm) -> Function:
    shape, weight, bias, epsilon = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return functools.partial(torch.layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=epsilon)


def _gelu(x: Tensor) -> Tensor:
    """A row twice is no contiguous tensor, and torch's kernel for those starts sooner than oneDNN's."""
    if x.numel() != x.shape[-1] or x.device.type != "cpu":
        return F.gelu(x)
    return F.gelu(x.expand(2, *x.shape))[0]


FASTER: dict[type[nn.Module], Callable[[Any], Function]] = {
    nn.Linear: lambda linear: product(linear.weight, linear.bias),
    nn.LayerNorm: _layer_norm,
    nn.GELU: lambda gelu: _gelu if gelu.approximate == "none" else gelu.forward,
}
"""Modules of exactly these types have something quicker than their forward."""


def _called(child: nn.Module) -> Function:
    """What a call of the module comes to."""
    return FASTER[type(child)](child) if type(child) in FASTER else child.forward


def _joint(attention: CausalSelfAttention) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Queries, keys and values of one product."""
    children = (child for name, child in attention.named_children() if name in ("query", "key", "value"))
    linears = [child for child in children if type(child) is nn.Linear]
    if len(linears) < 3:
        return attention.project
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    # A parameter, because autocast keeps its half-precision form from token to token.
    weight = nn.Parameter(torch.cat(weights))
    whole = product(weight, nn.Parameter(torch.cat(biases)) if biases else None)
    widths = [linear.out_features for linear in linears]
    return lambda x: torch.split_with_sizes(whole(x), widths, -1)


def _twin(module: nn.Module) -> nn.Module:
    """Other modules, the same tensors."""
    twin: nn.Module = module.__new__(type(module))
    children = {name: None if child is None else _twin(child) for name, child in module._modules.items()}
    vars(twin).update({**vars(module), "_modules": children})
    return twin


def _is_plain(decoder: Decoder) -> bool:
    return (
        type(decoder) is Decoder
        and all(type(parameter) is nn.Parameter for parameter in decoder.parameters())
        and not any(_is_more_than_its_forward(module) for module in decoder.modules())
    )


def _is_more_than_its_forward(module: nn.Module) -> bool:
    marks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
    return type(module).__module__.startswith("torch.distributed.") or any(getattr(module, mark) for mark in marks)
