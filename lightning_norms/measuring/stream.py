"""The residual stream: how large it is after every block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_norms.anatomy.sharding import to_local
from lightning_norms.anatomy.stacks import Stack


def mean_square(stream: Tensor) -> Tensor:
    """Mean of the squared entries in float32: a scalar on the stream's device. Its root is the stream's RMS."""
    return to_local(stream.detach()).float().square().mean()


def stream_of(output: Any) -> Tensor | None:
    """The residual stream in a block's output; None if the output holds no floating-point tensor.

    In a tuple, list or mapping (two streams, or hidden states beside a cache) it is the first of these tensors; n
    streams stacked in one tensor are measured as a whole.
    """
    values = output.values() if hasattr(output, "values") and not isinstance(output, Tensor) else output
    for value in values if not isinstance(values, Tensor) and hasattr(values, "__iter__") else [values]:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            return value
    return None


class StreamMeter:
    """Root mean square of the residual stream after every block of some stacks, in one device vector.

    Hooks are on the blocks only between :meth:`attach` and :meth:`detach`. The first pass with gradients of each batch
    counts: activation checkpointing runs a block twice, and evaluation is no training. A compiled stack is left out.
    """

    DID_NOT_RUN = -1.0
    """The value of a block that did not run; an RMS is never negative."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        blocks = [(stack, block) for stack in stacks if not stack.compiled for block in stack.blocks]
        self._blocks = {stack.group(block.index): block.module for stack, block in blocks}
        self._squares: dict[str, list[Tensor]] = {}
        self._ran: set[str] = set()
        self._hooks = ExitStack()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the blocks, in depth order."""
        return tuple(self._blocks)

    def attach(self) -> None:
        """Measure the batch that comes next; several batches before :meth:`take` are averaged."""
        self.detach()
        self._ran.clear()
        for group, block in self._blocks.items():
            self._hooks.callback(block.register_forward_hook(partial(self._hook, group)).remove)

    def detach(self) -> None:
        """Take the hooks off."""
        self._hooks.close()

    def take(self, device: torch.device) -> Tensor:
        """Mean squares, and whether each block ran: [2, blocks], may be summed over ranks. Starts afresh."""
        squares, self._squares = self._squares, {}
        if not self._blocks:
            return torch.zeros(2, 0, device=device)
        zero = torch.zeros((), device=device)
        means = [torch.stack(squares.get(group, [zero])).to(device).mean() for group in self._blocks]
        ran = torch.tensor([float(group in squares) for group in self._blocks], device=device)
        return torch.stack([torch.stack(means), ran])

    def rms(self, sums: Tensor) -> Tensor:
        """RMS by block [blocks], from the result of :meth:`take` on this rank, or its sum over ranks."""
        square, share = sums.unbind()
        return torch.where(share > 0, (square / share).sqrt(), torch.full_like(share, self.DID_NOT_RUN))

    def _hook(self, group: str, block: nn.Module, arguments: Any, output: Any) -> None:
        stream = stream_of(output)
        if torch.is_grad_enabled() and group not in self._ran and stream is not None:
            self._ran.add(group)
            self._squares.setdefault(group, []).append(mean_square(stream))
