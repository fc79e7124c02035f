"""One forward and one backward pass seen from inside: stream, branches, norms and the gradient on the stream.

Hooks are on the modules only while the probe is attached; they read, and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_norms.anatomy.depth import is_norm
from lightning_norms.anatomy.names import clean_name
from lightning_norms.anatomy.stacks import Stack
from lightning_norms.anatomy.writers import Matrix
from lightning_norms.measuring.stream import mean_square, stream_of


class DepthProbe:
    """What every block and every norm does in the next pass with gradients.

    ::

        x --> [ block ] --> y       stream_rms |y|, block_change |y - x| / |x|, stream_gradient |dL/dy|
                 writer: f          branch_ratio |f| / |x|, root mean square over the writers of the block
        h --> [ norm ]              norm_input sigma(h); a norm's Jacobian is 1 / sigma

    Args:
        module: whose norms are watched.
        stacks: whose blocks are watched; a compiled stack is left out, as hooks do not fire inside.
        writers: matrices whose output is added to the stream; may be empty.
    """

    def __init__(self, module: nn.Module, stacks: Sequence[Stack], writers: Sequence[Matrix]) -> None:
        seen = [stack for stack in stacks if not stack.compiled]
        self.blocks = {stack.group(block.index): block.module for stack in seen for block in stack.blocks}
        group_of = {id(block): group for group, block in self.blocks.items()}
        self._writers = [(group_of[id(m.block)], m.owner) for m in writers if m.writer and id(m.block) in group_of]
        self._norms = [
            (clean_name(name), part)
            for name, part in module.named_modules()
            if is_norm(part) and "norm" in type(part).__name__.lower()
        ]
        self.squares: dict[str, dict[str, Tensor]] = {
            key: {} for key in ("input", "stream", "change", "branch", "gradient", "norm", "variance")
        }
        self.order: list[str] = []
        """Names of blocks and norms in the order in which they ended."""
        self.closed: dict[str, Tensor] = {}
        """Spread of the per-position RMS of a block's output over its mean: 0 if the block ends in a norm."""
        self._branches: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Watch the pass that comes next."""
        for group, block in self.blocks.items():
            self._handles.append(block.register_forward_hook(partial(self._on_block, group), with_kwargs=True))
        for group, owner in self._writers:
            self._handles.append(owner.register_forward_hook(partial(self._on_writer, group)))
        for name, norm in self._norms:
            self._handles.append(norm.register_forward_hook(partial(self._on_norm, name)))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def vector(self, key: str, names: Sequence[str], device: torch.device) -> Tensor:
        """What was seen under ``key``, for each of ``names``: float32 [names], NaN where nothing was seen."""
        missing = torch.full((), math.nan, device=device)
        values = [self.squares[key].get(name, missing).to(device).float() for name in names]
        return torch.stack(values) if values else torch.zeros(0, device=device)

    @property
    def norm_names(self) -> list[str]:
        """Norms that ran, in the order of the pass."""
        return [name for name in dict.fromkeys(self.order) if name in self.squares["norm"]]

    @property
    def smallest_eps_ratio(self) -> tuple[float, str] | None:
        """The least variance of a norm's input against its eps, and that norm; a host copy."""
        found = []
        for name, norm in self._norms:
            eps, variance = getattr(norm, "eps", None), self.squares["variance"].get(name)
            if eps and variance is not None:
                found.append((float(variance) / eps, name))
        return min(found, default=None)

    def _on_block(self, group: str, block: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        y = stream_of(output)
        if not torch.is_grad_enabled() or group in self.squares["stream"] or y is None:
            return
        self.order.append(group)
        self.squares["stream"][group] = mean_square(y)
        if y.ndim > 1:
            by_position = y.detach().float().square().mean(-1).sqrt()
            self.closed[group] = by_position.std(correction=0) / by_position.mean()
        x = stream_of([*arguments, *keywords.values()])
        if x is not None:
            self.squares["input"][group] = mean_square(x)
            if x.shape == y.shape:
                self.squares["change"][group] = mean_square(y.detach().float() - x.detach().float())
        if y.requires_grad:
            y.register_hook(partial(self._on_gradient, group))  # type: ignore[no-untyped-call]

    def _on_gradient(self, group: str, gradient: Tensor) -> None:
        self.squares["gradient"].setdefault(group, gradient.detach().float().square().sum())

    def _on_writer(self, group: str, owner: nn.Module, arguments: Any, output: Any) -> None:
        branch = stream_of(output)
        if torch.is_grad_enabled() and branch is not None and group not in self.squares["stream"]:
            before = self.squares["branch"].get(group)
            square = mean_square(branch)
            # The root mean square over the branches of a block is taken when it is read.
            self.squares["branch"][group] = square if before is None else before + square
            self._branches[group] = self._branches.get(group, 0) + 1

    def branches(self, group: str) -> int:
        """How many branches of a block were seen."""
        return self._branches.get(group, 0)

    def _on_norm(self, name: str, norm: nn.Module, arguments: Any, output: Any) -> None:
        h = stream_of(arguments)
        if h is None or not torch.is_grad_enabled() or name in self.squares["norm"]:
            return
        self.order.append(name)
        h = h.detach().float()
        centred = "rms" not in type(norm).__name__.lower()
        variance = h.var(-1, correction=0) if centred else h.square().mean(-1)
        self.squares["norm"][name] = variance.mean()
        self.squares["variance"][name] = variance.min()
