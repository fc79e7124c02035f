"""The one equation of every sublayer, and the site at which it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

Branch = Callable[[Tensor], Tensor]
"""A sublayer as its residual sees it: ``[batch, time, width]`` to the same shape. The cache travels in its closure."""


@dataclass(frozen=True)
class Site:
    """Where a sublayer stands: all that a placement may want to know of it.

    Args:
        kind: which sublayer.
        width: of the residual stream, ``d_model``.
        layer: the block's number, 1-based as in the papers.
        layers: number of blocks, L. There are 2L sublayers.
        inner_width: what the writer reads: all heads side by side, or the hidden width of the feed-forward.
        heads: attention heads (1 for a feed-forward).
        kv_heads: heads of keys and values.
    """

    kind: Literal["attention", "feed_forward"]
    width: int
    layer: int
    layers: int
    inner_width: int = 0
    heads: int = 1
    kv_heads: int = 1

    @property
    def sublayer(self) -> int:
        """The sublayer's number in the stack, 1-based: 2l - 1 for attention, 2l for the feed-forward."""
        return 2 * self.layer - (self.kind == "attention")


@dataclass
class Inner:
    """Norms inside a sublayer: on queries, keys and values (``[..., heads, head_width]``), and before the writer."""

    query: nn.Module = field(default_factory=nn.Identity)
    key: nn.Module = field(default_factory=nn.Identity)
    value: nn.Module = field(default_factory=nn.Identity)
    writer: nn.Module = field(default_factory=nn.Identity)


class Residual(nn.Module):
    r"""The one equation; an unused slot is ``nn.Identity``.

    ::

        y = closing( skip * x + scale * after( branch( before(x) ) ) )

        x --+-- before -- branch -- after -- * scale --+
            |                                          v
            +------------------ * skip -------------- add -- closing -- y

    Args:
        before: norm of the branch's input (pre-norm).
        after: norm or gain of the branch's output (output norm, ReZero).
        closing: norm of the sum (post-norm).
        skip: constant on the stream (DeepNorm's alpha).
        scale: constant on the branch (CompleteP's 1/m).

    Example:
        >>> double = Residual(skip=3.0)
        >>> double(torch.ones(2), lambda x: 2 * x)
        tensor([5., 5.])
    """

    def __init__(
        self,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        closing: nn.Module | None = None,
        skip: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.after = after or nn.Identity()
        self.closing = closing or nn.Identity()
        self.skip = skip
        self.scale = scale

    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        """The equation above: ``x`` is the residual stream, ``branch`` the sublayer."""
        y = self.after(branch(self.before(x)))
        if self.scale != 1.0:
            y = self.scale * y
        # One kernel for the sum and for the constant on the stream.
        result: Tensor = self.closing(torch.add(y, x, alpha=self.skip))
        return result

    def extra_repr(self) -> str:
        """The constants, where they differ from 1."""
        return ", ".join(f"{name}={value:.6g}" for name in ("skip", "scale") if (value := getattr(self, name)) != 1.0)
