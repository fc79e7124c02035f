"""One forward and one backward pass measured from inside: stream, branches, norms and the gradient on the stream.

Hooks are on the modules only while the probe is attached; they only read.
"""

from __future__ import annotations

import math
from collections import Counter
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
    """Measures every block and every norm in the next pass with gradients.

    ::

        x --> [ block ] --> y       stream_rms |y|, block_change |y - x| / |x|, stream_gradient |dL/dy|
                 writer: f          branch_ratio |f| / |x|, root mean square over the writers of the block
        h --> [ norm ]              norm_input sigma(h); a norm's Jacobian is 1 / sigma

    Args:
        module: its norms are measured.
        stacks: their blocks are measured; a compiled stack is left out, as hooks do not fire inside.
        writers: matrices whose output is added to the stream; may be empty.

    Attributes:
        blocks: module of every measured block by group.
        squares: mean squares by kind and by block or norm; for ``gradient``, sums of squares.
        order: names of blocks and norms in the order in which they finished.
        spreads: standard deviation over mean of the per-position RMS of a block's output; 0 if it ends in a norm.
        branches: number of branches of every block.
    """

    def __init__(self, module: nn.Module, stacks: Sequence[Stack], writers: Sequence[Matrix]) -> None:
        open_stacks = [stack for stack in stacks if not stack.compiled]
        self.blocks = {stack.group(block.index): block.module for stack in open_stacks for block in stack.blocks}
        group_of = {id(block): group for group, block in self.blocks.items()}
        self._writers = [(group_of[id(m.block)], m.owner) for m in writers if m.writer and id(m.block) in group_of]
        self._norms = [
            (clean_name(name), part)
            for name, part in module.named_modules()
            if is_norm(part) and "norm" in type(part).__name__.lower()
        ]
        kinds = ("input", "stream", "change", "branch", "gradient", "norm", "variance")
        self.squares: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        self.order: list[str] = []
        self.spreads: dict[str, Tensor] = {}
        self.branches: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Measure the next pass."""
        for group, block in self.blocks.items():
            self._handles.append(block.register_forward_hook(partial(self._on_block, group), with_kwargs=True))
        for group, owner in self._writers:
            self._handles.append(owner.register_forward_hook(partial(self._on_writer, group)))
        for name, norm in self._norms:
            self._handles.append(norm.register_forward_hook(partial(self._on_norm, name)))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def vector(self, kind: str, names: Sequence[str], device: torch.device) -> Tensor:
        """Return the squares of one kind for ``names``: float32 [names], NaN where nothing was measured."""
        missing = torch.full((), math.nan, device=device)
        values = [self.squares[kind].get(name, missing).to(device).float() for name in names]
        return torch.stack(values) if values else torch.zeros(0, device=device)

    @property
    def norm_names(self) -> list[str]:
        """Names of the norms that ran, in the order of the pass."""
        return [name for name in dict.fromkeys(self.order) if name in self.squares["norm"]]

    @property
    def smallest_eps_ratio(self) -> tuple[float, str, float] | None:
        """The smallest variance of a norm's input over its eps, that norm's name and eps; copies to the host."""
        eps = {name: getattr(norm, "eps", None) or 0.0 for name, norm in self._norms}
        variances = self.squares["variance"].items()
        return min(
            ((float(variance) / eps[name], name, eps[name]) for name, variance in variances if eps[name]), default=None
        )

    def _on_block(self, group: str, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        y = stream_of(output)
        if not torch.is_grad_enabled() or group in self.squares["stream"] or y is None:
            return
        self.order.append(group)
        self.squares["stream"][group] = mean_square(y)
        if y.ndim > 1:
            by_position = y.detach().float().square().mean(-1).sqrt()
            self.spreads[group] = by_position.std(correction=0) / by_position.mean()
        x = stream_of([*args, *kwargs.values()])
        if x is not None:
            self.squares["input"][group] = mean_square(x)
            if x.shape == y.shape:
                self.squares["change"][group] = mean_square(y.detach().float() - x.detach().float())
        if y.requires_grad:
            y.register_hook(partial(self._on_gradient, group))  # type: ignore[no-untyped-call]

    def _on_gradient(self, group: str, grad: Tensor) -> None:
        self.squares["gradient"].setdefault(group, grad.detach().float().square().sum())

    def _on_writer(self, group: str, owner: nn.Module, args: Any, output: Any) -> None:
        branch = stream_of(output)
        if torch.is_grad_enabled() and branch is not None and group not in self.squares["stream"]:
            squares, square = self.squares["branch"], mean_square(branch)
            squares[group] = squares[group] + square if group in squares else square
            self.branches[group] += 1

    def _on_norm(self, name: str, norm: nn.Module, args: Any, output: Any) -> None:
        h = stream_of(args)
        if h is None or not torch.is_grad_enabled() or name in self.squares["norm"]:
            return
        self.order.append(name)
        h = h.detach().float()
        is_rms = "rms" in type(norm).__name__.lower()
        variance = h.square().mean(-1) if is_rms else h.var(-1, correction=0)
        self.squares["norm"][name] = variance.mean()
        self.squares["variance"][name] = variance.min()
