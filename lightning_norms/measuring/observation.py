"""What one optimizer step looks like before it is taken, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Observation:
    """One optimizer step before it is taken, the same on every rank.

    Args:
        loss: mean over the accumulation window and the ranks, undivided and unscaled; None if there is none.
        grad_norm: L2 norm of the whole gradient, unscaled, before clipping.
        non_finite: number of losses and gradient groups that are NaN or infinite.
        stacks: gradient norms of the blocks, the lowest block first, one tuple for each stack.
        parameters_changed: whether parameters were frozen or unfrozen since the last observation.
    """

    loss: float | None
    grad_norm: float
    non_finite: int = 0
    stacks: tuple[tuple[float, ...], ...] = ()
    parameters_changed: bool = field(default=False, kw_only=True)

    @property
    def lacks_loss(self) -> bool:
        """Whether there was no loss at all, finite or not."""
        return self.loss is None and not self.non_finite
