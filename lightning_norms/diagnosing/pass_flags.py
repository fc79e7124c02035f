"""What the first pass and the first update showed that matters by itself, each in one sentence with its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.diagnosing.depth_probe import DepthProbe
from lightning_norms.learning_rate import factors_of
from lightning_norms.reports.diagnosis.data import DepthProfile, Flag


def without_gradient(profile: DepthProfile) -> Iterator[Flag]:
    """Trainable groups whose gradient is exactly zero at the first step."""
    dead = [group for group, value in zip(profile.groups, profile.values, strict=True) if value == 0]
    if dead:
        named = ", ".join(dead[:4]) + (", ..." if len(dead) > 4 else "")
        sentence = f"the first gradient is exactly 0 in {len(dead)} of {len(profile.groups)} groups ({named})"
        yield Flag("no gradient", sentence, {"groups": float(len(dead))})


def end_of_stack(depth: DepthMap, probe: DepthProbe) -> Iterator[Flag]:
    """Norms between the last block and the loss: none where one is needed, or one on top of another."""
    for stack in depth.stacks[:1] if len(depth.stacks) == 1 else ():
        last = stack.groups[-1]
        if last not in probe.order or last not in probe.closed:
            continue
        after = [name for name in probe.order[probe.order.index(last) + 1 :] if name in probe.squares["norm"]]
        rms, spread = float(probe.squares["stream"][last].sqrt()), float(probe.closed[last])
        if not after and spread > 0.01:
            yield Flag(
                "no final norm",
                f"no norm runs after the last block, whose output has RMS {rms:.3g} and varies by {spread:.0%} "
                "from position to position: the head reads an unnormalised stream",
                {"stream_rms": rms, "spread": spread},
            )
        if after and spread < 1e-3:
            yield Flag(
                "double final norm",
                f"the last block already ends in a norm (RMS {rms:.3g} at every position), and {after[0]} follows",
                {"stream_rms": rms, "spread": spread},
            )


def ruled_by_eps(probe: DepthProbe) -> Iterator[Flag]:
    """A norm whose input is so small that its eps sets the output."""
    smallest = probe.smallest_eps_ratio
    if smallest is not None and smallest[0] < 10:
        sentence = (
            f"the input of {smallest[1]} has a variance of only {smallest[0]:.2g} x the norm's eps, so eps sets its "
            "output, not the input"
        )
        yield Flag("eps", sentence, {"variance_over_eps": smallest[0]})


def rounded_updates(share: float) -> Iterator[Flag]:
    """Weights kept in half precision that an update cannot move.

    Args:
        share: of these weights that the first update left as they were.
    """
    if share > 0.5:
        sentence = (
            f"{share:.0%} of the half-precision weights did not move in the first update: it is smaller than their "
            "last digit"
        )
        yield Flag("rounded updates", sentence, {"share": share})


def idle_first_step(optimizer: Optimizer) -> Iterator[Flag]:
    """A schedule that starts at 0."""
    used = factors_of(optimizer).used()
    if used and used[0] == 0:
        yield Flag("idle first step", "the learning rate of the first step is 0: that batch is wasted", {"lr": 0.0})
