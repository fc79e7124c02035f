"""Healthy runs of the zoo that a protection may take for sick: here it must do nothing, or nothing that hurts."""

from __future__ import annotations

from benchmarks.faults.goals import Near
from benchmarks.faults.rows import Row
from benchmarks.faults.yardsticks import held_out
from benchmarks.zoo.kinds import Kind
from benchmarks.zoo.zoo import HEALTHY

STEPS = 500
NAMES = (
    "decoder, pre-norm", "decoder, GradScaler", "mixture of experts", "residual CNN", "random loss weights",
    "regression, batch 1", "short last batch, epochs of 20", "four domains in turn", "six domains in turn",
    "task weight x5 at step 200", "gradients x12 from step 200", "discriminator alone", "DQN", "policy gradient",
)  # fmt: skip


def healthy(kind: Kind) -> Row:
    """A row that is its own twin."""
    return Row(
        name=kind.name, group="healthy", kind=kind, twin=kind, steps=STEPS, seeds=3, goal=Near(), yardstick=held_out
    )


BY_NAME = {kind.name: kind for kind in HEALTHY}
ROWS = tuple(healthy(BY_NAME[name]) for name in NAMES)
