"""The loss of the best constant prediction under the user's own loss: weighted, scaled, summed, shifted, any other.

A dead run falls to that loss and stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS

from lightning_norms.anatomy.sharding import grad_scaler
from lightning_norms.diagnosing.loss_tail import Cut, Key, Tail, TailRecorder

ITERATIONS, REFINING, FEW = 25, 4, 10
"""Iterations of L-BFGS on a few tails, and then on all of them."""
LARGEST = 4e7
"""Outputs of the network that one evaluation of a fit may have; more tails are left out of the fit."""


@dataclass(frozen=True)
class Micro:
    """One backward pass of a step: its tail, and what makes the user's loss of Lightning's (accumulation, scaler)."""

    tail: Tail
    factor: float

    @property
    def uniform_loss(self) -> float:
        """The loss of outputs that are all zero."""
        with torch.no_grad():
            return self.factor * float(self.tail(lambda cut: torch.zeros(cut.values.shape, device=cut.values.device)))

    def loss(self, constants: dict[Key, Tensor]) -> Tensor:
        """The loss of constant outputs."""
        return self.factor * self.tail(lambda cut: cut.fill(constants[cut.key]))


def read_micro(recorder: TailRecorder, trainer: Any, module: Any, loss: Tensor) -> Micro | None:
    """Return what leads to a loss as ``on_before_backward`` gives it; None if it could not be followed."""
    tail, scaler = recorder.tail(loss), grad_scaler(trainer)
    scale = 1.0 if scaler is None or scaler._scale is None else float(scaler._scale)
    window = trainer.accumulate_grad_batches if module.automatic_optimization else 1
    return None if tail is None else Micro(tail, window / scale)


@dataclass(frozen=True)
class ConstantLosses:
    """What constant predictions cost.

    Attributes:
        by_step: loss of the best constant outputs, the same for all steps, on the labels of each step.
        scale: by how much perfect outputs are better, in the unit of the loss; a yardstick under any scale and shift.
    """

    by_step: tuple[float, ...]
    scale: float

    @property
    def loss(self) -> float:
        """Mean over the steps."""
        return sum(self.by_step) / len(self.by_step)


def constant_losses(steps: Sequence[Sequence[Micro]]) -> ConstantLosses | None:
    """Fit constants to the tails of all steps; None if that does not end in finite numbers.

    A constant fitted to few labels is better on these than it can be on others. Fits on half of the steps measure that
    advantage, and a third of the difference is added: n labels give -k/2n, half of them +k/n on the other half.
    """
    if not steps or not all(steps):
        return None
    try:
        constants = _fit(steps)
        by_step = _evaluate(steps, constants)
        halves = [_evaluate(steps[1 - i :: 2], _refine(steps[i::2], constants)) for i in (0, 1) if len(steps) > 3]
        scale = _scale(steps, constants)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError):
        return None
    other = [loss for half in halves for loss in half] or by_step
    optimism = max(0.0, (sum(other) / len(other) - sum(by_step) / len(by_step)) / 3)
    numbers = [loss + optimism for loss in by_step]
    if not all(map(math.isfinite, [*numbers, scale])) or abs(numbers[0]) > 1e12:
        return None
    return ConstantLosses(tuple(numbers), scale)


def _fit(steps: Sequence[Sequence[Micro]]) -> dict[Key, Tensor]:
    generator = torch.Generator().manual_seed(0)
    cuts = {cut.key: cut for step in steps for micro in step for cut in micro.tail.cuts}
    start = {key: cut.start(generator) for key, cut in cuts.items()}
    return _refine(steps, _refine(steps[:: math.ceil(len(steps) / FEW)], start, ITERATIONS))


def _refine(
    steps: Sequence[Sequence[Micro]], start: dict[Key, Tensor], iterations: int = REFINING
) -> dict[Key, Tensor]:
    micros = [micro for step in steps for micro in step]
    size = sum(cut.values.numel() for micro in micros for cut in micro.tail.cuts)
    fitted = micros[:: max(1, math.ceil(size / LARGEST))]
    constants = {key: values.detach().clone().requires_grad_() for key, values in start.items()}
    _minimize(list(constants.values()), lambda: [micro.loss(constants) for micro in fitted], iterations)
    return constants


def _evaluate(steps: Sequence[Sequence[Micro]], constants: dict[Key, Tensor]) -> list[float]:
    with torch.no_grad():
        return [sum(float(micro.loss(constants)) for micro in step) / len(step) for step in steps]


def _scale(steps: Sequence[Sequence[Micro]], constants: dict[Key, Tensor]) -> float:
    """Mean over three steps of constant loss minus perfect loss; at most ten times what noise of unit size costs."""
    generator, gaps = torch.Generator().manual_seed(0), []
    for step in steps[:: math.ceil(len(steps) / 3)]:
        tail, factor = step[0].tail, step[0].factor
        free: dict[int, Tensor] = {id(cut): cut.fill(constants[cut.key]).detach() for cut in tail.cuts}

        def copy(cut: Cut, free: dict[int, Tensor] = free) -> Tensor:
            return free[id(cut)].clone()

        def noisy(cut: Cut, free: dict[int, Tensor] = free) -> Tensor:
            return free[id(cut)] + torch.randn(cut.values.shape, generator=generator).to(cut.values.device)

        with torch.no_grad():
            start = factor * float(tail(copy))
            noise = factor * float(tail(noisy)) - start
        leaves = [values.requires_grad_() for values in free.values()]
        _minimize(leaves, lambda tail=tail, copy=copy: [tail(copy)], ITERATIONS)  # type: ignore[misc]
        with torch.no_grad():
            perfect = factor * float(tail(copy))
        gaps.append(max(0.0, min(start - perfect, 10 * noise if noise > 0 else math.inf)))
    return sum(gaps) / len(gaps)


@torch.enable_grad()
def _minimize(leaves: list[Tensor], losses: Callable[[], list[Tensor]], iterations: int) -> None:
    optimizer = LBFGS(leaves, max_iter=iterations, line_search_fn="strong_wolfe", tolerance_change=1e-7)

    def closure() -> float:
        optimizer.zero_grad()
        values = [loss for loss in losses() if loss.requires_grad and bool(loss.isfinite())]
        total = torch.stack(values).mean()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    optimizer.step(closure)  # type: ignore[no-untyped-call]
