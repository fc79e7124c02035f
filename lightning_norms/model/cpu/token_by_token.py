"""A decoder laid out to generate token by token: the same forward and the same numbers, in fewer and faster calls.

One new token is one row for every matrix. A processor's library multiplies one row on a single core, and reads long
rows of weights faster than short ones::

    y = x W^T        W in bands of rows, one a core:        [ y1 | y2 ] = x [ W1^T | W2^T ]

Three changes, none to what is computed: matrices are multiplied in bands; queries, keys and values are one product; and
a block calls functions where it would call modules. Times are in ``benchmarks/README.md``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_norms.model.attention import CausalSelfAttention
from lightning_norms.model.decoder import Block, Decoder
from lightning_norms.model.feed_forward import SwiGLUFeedForward, TwoLayerFeedForward
from lightning_norms.model.residual import Residual

Function = Callable[..., Any]
AnyModule = TypeVar("AnyModule", bound=nn.Module)

CALLERS = (Block, Residual, CausalSelfAttention, TwoLayerFeedForward, SwiGLUFeedForward)
"""Modules that do nothing with their children but call them."""
BAND = 24_000
"""Least numbers of a matrix for a band; a matrix with fewer is left to torch."""


def lay_out(decoder: Decoder) -> Decoder:
    """Copy a decoder so that it is faster for one text and one new token at a time.

    The copy shares the weights, but lays joint and widening matrices out anew, about half of a block's weights: it does
    not follow weights that change later. A decoder with hooks, compiled or sharded is returned as it is, because there
    a module's call is more than its forward.

    Example:
        >>> from lightning_norms.model.decoder import DecoderConfig
        >>> decoder = Decoder(DecoderConfig(vocab_size=9)).eval()
        >>> tokens = torch.zeros(1, 3, dtype=torch.long)
        >>> torch.allclose(lay_out(decoder)(tokens), decoder(tokens), atol=1e-6)
        True
    """
    if not _is_plain(decoder):
        return decoder
    return _replace(decoder, blocks=[as_function(block) for block in decoder.blocks], head=as_function(decoder.head))


def as_function(module: nn.Module) -> Function:
    """A function that computes what a call of ``module`` computes, and is called without torch's machinery of hooks."""
    if type(module) in FASTER:
        return FASTER[type(module)](module)
    if type(module) not in CALLERS:
        return module.forward
    functions = {name: as_function(child) for name, child in module._modules.items() if child is not None}
    if isinstance(module, CausalSelfAttention):
        functions["project"] = _joint_product(module)
    return _replace(module, **functions).forward


def _replace(module: AnyModule, **attributes: object) -> AnyModule:
    """Copy a module, not its tensors, with other attributes in place of children or methods."""
    twin = copy.copy(module)
    twin._modules = {name: child for name, child in module._modules.items() if name not in attributes}
    for name, attribute in attributes.items():
        setattr(twin, name, attribute)
    return twin


def product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Build the function ``x W^T + b``, in bands where ``x`` is one row.

    Args:
        weight: ``[out, width]``.
        bias: ``[out]``.

    Example:
        >>> product(torch.eye(200)[:100], None)(torch.arange(200.0))[:3]
        tensor([0., 1., 2.])
    """
    out, width = weight.shape
    usual: Callable[[Tensor], Tensor] = functools.partial(F.linear, weight=weight, bias=bias)
    bands = _count_bands(weight)
    if not bands:
        return usual
    tiles = weight.detach().reshape(bands, out // bands, width).transpose(1, 2)
    if out > width:
        tiles = tiles.contiguous()
    if bands == 1:
        return functools.partial(F.linear, weight=tiles[0].T, bias=bias)
    added = None if bias is None else bias.detach().view(bands, 1, -1)

    def multiply(x: Tensor) -> Tensor:
        if x.numel() != width:
            return usual(x)
        rows = x.view(1, 1, width).expand(bands, 1, width)
        y = torch.bmm(rows, tiles) if added is None else torch.baddbmm(added, rows, tiles)
        return y.view(*x.shape[:-1], out)

    return multiply


def _count_bands(weight: Tensor) -> int:
    """The number of bands; 0 where torch's own product is as fast."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return 0
    most = min(torch.get_num_threads(), weight.numel() // BAND)
    return max((bands for bands in range(1, most + 1) if weight.shape[0] % bands == 0), default=0)


def _joint_product(attention: CausalSelfAttention) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Compute queries, keys and values as one product."""
    linears = (attention.query, attention.key, attention.value)
    if any(type(linear) is not nn.Linear for linear in linears):
        return attention.project
    # Parameters, because autocast keeps their half-precision form from token to token.
    weights: list[Tensor] = [linear.weight for linear in linears]
    weight = nn.Parameter(torch.cat(weights))
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    whole = product(weight, nn.Parameter(torch.cat(biases)) if biases else None)
    widths = [linear.out_features for linear in linears]
    return lambda x: torch.split_with_sizes(whole(x), widths, -1)


def _layer_norm(norm: nn.LayerNorm) -> Function:
    shape, weight, bias, epsilon = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return functools.partial(torch.layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=epsilon)


def _gelu(x: Tensor) -> Tensor:
    # A row twice is no contiguous tensor, and torch's kernel for those starts sooner than oneDNN's.
    if x.numel() != x.shape[-1] or x.device.type != "cpu":
        return F.gelu(x)
    return F.gelu(x.expand(2, *x.shape))[0]


FASTER: dict[type[nn.Module], Callable[[Any], Function]] = {
    nn.Linear: lambda linear: product(linear.weight, linear.bias),
    nn.LayerNorm: _layer_norm,
    nn.GELU: lambda gelu: _gelu if gelu.approximate == "none" else gelu.forward,
}
"""Builders of a function that is quicker than the module's forward, for exactly these types."""


def _is_plain(decoder: Decoder) -> bool:
    return (
        type(decoder) is Decoder
        and all(type(parameter) is nn.Parameter for parameter in decoder.parameters())
        and not any(_is_more_than_its_forward(module) for module in decoder.modules())
    )


def _is_more_than_its_forward(module: nn.Module) -> bool:
    marks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
    return type(module).__module__.startswith("torch.distributed.") or any(getattr(module, mark) for mark in marks)
