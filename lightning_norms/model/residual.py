"""The one equation of every sublayer, the site at which it stands, and the recipe that fills the equation in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_norms.model.norms import Norm

Branch = Callable[[Tensor], Tensor]
"""A sublayer as its residual sees it: ``[batch, time, width]`` to the same shape. The cache travels in its closure."""


@dataclass(frozen=True)
class Site:
    """Where a sublayer stands: everything that a placement may depend on.

    Args:
        kind: "attention" or "feed_forward".
        width: of the residual stream, ``d_model``.
        layer: the block's number, 1-based as in the papers.
        layers: number of blocks, L. There are 2L sublayers.
        inner_width: width of the writer's input: all heads side by side, or the hidden width of the feed-forward.
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
    """Norms and gains inside a sublayer; an unused slot is the identity.

    Args:
        query: applied to queries ``[..., heads, head_width]`` before rotary positions turn them.
        key: applied to keys ``[..., kv_heads, head_width]`` before the rotation.
        value: applied to values.
        turned_query: applied to queries after the rotation.
        turned_key: applied to keys after the rotation.
        hidden: applied to the feed-forward's features ``[..., inner_width]`` before the activation.
        gate: applied to the features of SwiGLU's gate.
        writer: applied to the writer's input ``[..., inner_width]``.
    """

    query: nn.Module = field(default_factory=nn.Identity)
    key: nn.Module = field(default_factory=nn.Identity)
    value: nn.Module = field(default_factory=nn.Identity)
    turned_query: nn.Module = field(default_factory=nn.Identity)
    turned_key: nn.Module = field(default_factory=nn.Identity)
    hidden: nn.Module = field(default_factory=nn.Identity)
    gate: nn.Module = field(default_factory=nn.Identity)
    writer: nn.Module = field(default_factory=nn.Identity)


class Residual(nn.Module):
    r"""The one equation; an unused slot is ``nn.Identity``.

    ::

        y = closing( skip * x + scale * after( branch( before(x) ) ) )

        x --+-- before -- branch -- after -- * scale --+
            |                                          v
            +------------------ * skip -------------- add -- closing -- y

    Args:
        before: norm on the branch's input (pre-norm).
        after: norm or gain on the branch's output (output norm, ReZero).
        closing: norm on the sum (post-norm).
        skip: constant on the stream (DeepNorm's alpha), or a module that scales it (Admin's omega).
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
        skip: float | nn.Module = 1.0,
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
        y = torch.add(y, x, alpha=self.skip) if isinstance(self.skip, (int, float)) else self.skip(x) + y
        result: Tensor = self.closing(y)
        return result

    def extra_repr(self) -> str:
        """The constants, where they differ from 1."""
        constants = {"skip": self.skip, "scale": self.scale}
        return ", ".join(
            f"{name}={value:.6g}" for name, value in constants.items() if isinstance(value, float) and value != 1.0
        )


class Times(nn.Module):
    """``constant * x``, the constant neither learned nor part of the state.

    Example:
        >>> Times(0.5)(torch.ones(2))
        tensor([0.5000, 0.5000])
    """

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        """Multiply a tensor of any shape."""
        return self.constant * x

    def extra_repr(self) -> str:
        """The constant."""
        return f"{self.constant:.6g}"


@dataclass(frozen=True)
class Placement(ABC):
    """A recipe that says where norms sit; the decoder calls its methods and knows no placement by name.

    A new placement is one class, a frozen dataclass with a :meth:`wrap`. Its equation, trade-off and source stand on
    it, and the catalogue, ``--help`` and YAML find it once its module is imported.

    The decoder treats the stream between ``entry`` and ``exit`` as opaque: a design with several streams makes it a
    tuple or a stacked tensor. What a block's attention residual returns need only suit the same block's feed-forward
    residual, so a design may span a block.
    """

    equation: ClassVar[str] = ""
    """The sublayer in one line: N is a norm, f a sublayer, L the number of blocks, l a block's number."""
    trade_off: ClassVar[str] = ""
    """What it gains and what it costs, in a few words."""
    final_norm = False  # a class attribute, so that a placement may also make it an option
    """Whether the stack ends with a norm."""

    @abstractmethod
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Build the residual around one sublayer, called as ``residual(x, branch)``."""

    def entry(self, width: int, norm: Norm) -> nn.Module:
        """Build the module from the embedding to the stream."""
        return nn.Identity()

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """Build the module from the stream to the head's input: the final norm, if there is one."""
        return norm(width) if self.final_norm else nn.Identity()

    def inner(self, site: Site, norm: Norm) -> Inner:
        """Build norms and gains inside the sublayer: on queries, keys, values, hidden features, the writer's input."""
        return Inner()

    @property
    def wants_qk_norm(self) -> bool:
        """Whether queries and keys come from a stream that no norm bounds; the decoder then warns without qk-norm."""
        return False

    def gain(self, site: Site) -> float:
        """Factor on the value path's weights at initialization."""
        return 1.0

    def query_key_gain(self, site: Site) -> float:
        """Factor on the weights of queries and keys at initialization."""
        return 1.0
