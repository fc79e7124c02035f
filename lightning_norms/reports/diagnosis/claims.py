"""Popular explanations held against this model's own numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lightning_norms.reports.console import number
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Claim, DepthProfile, Look, Trial, Verdict

SAME, OTHER = 1.25, 1.6
"""Factors within which two gradients of different depths are what was said, and beyond which they are not: one batch
tells no more."""
NEAR_IDENTITY = 0.2
"""A block that changes the stream by less than this share of it."""


def claims(
    look: Look, trials: Sequence[Trial], rescaled: Look | None = None, shallow: Look | None = None
) -> tuple[Claim, ...]:
    """What holds, what does not, and what these numbers do not decide.

    Args:
        look: at the first step as given.
        trials: all of them.
        rescaled: the same look after the residual rescale, if that can be done.
        shallow: the same look at fewer blocks, if the model can be built so.
    """
    return (
        *_gradients(look),
        *_against_depth(look, shallow),
        *_stream(look),
        *_identity(look, rescaled),
        *_remedies(trials),
    )


def _gradients(look: Look) -> Iterator[Claim]:
    ratio = _ends(look.profile("parameter_gradient"))
    if ratio is None:
        return
    measured = f"bottom/top gradient at the first step is {number(ratio)}{_growth(look, 'parameter_gradient')}"
    evidence = {"bottom_over_top": ratio}
    if look.post_norm:
        popular = "Post-norm gradients vanish at the bottom at init."
        yield Claim("bottom gradients at init", popular, ratio < 0.1, measured, evidence)
    else:
        popular = "With norms inside the branches all blocks get equal gradients."
        yield Claim("gradient by depth", popular, 0.5 < ratio < 2, measured, evidence)


def _against_depth(look: Look, shallow: Look | None) -> Iterator[Claim]:
    """What depth does to the gradient of the top block: Xiong et al. 2020, arXiv:2002.04745, theorem 1."""
    deep, other = (_blocks(each.profile("parameter_gradient")) if each else () for each in (look, shallow))
    if not deep or not other or not other[-1] > 0 or len(deep) == len(other):
        return
    ratio, root = deep[-1] / other[-1], math.sqrt(len(other) / len(deep))
    expected = 1.0 if look.post_norm else root
    popular = (
        "The gradient near the output of a post-norm stack does not depend on its depth L."
        if look.post_norm
        else "Pre-norm gradients near the output shrink like 1/sqrt(L)."
    )
    measured = (
        f"the top block's gradient is {number(deep[-1])} at {len(deep)} blocks and {number(other[-1])} at "
        f"{len(other)}: x {ratio:.2f}, where 1/sqrt(L) says x {root:.2f}"
    )
    miss = math.exp(abs(math.log(ratio / expected))) if ratio > 0 else math.inf
    holds = True if miss < SAME else False if miss > OTHER else None
    yield Claim("gradient against depth", popular, holds, measured, {"ratio": ratio, "one_over_root": root})


def _blocks(profile: DepthProfile | None) -> tuple[float, ...]:
    """Values of the blocks of the first stack."""
    return next(iter(profile.of_blocks().values()), ()) if profile else ()


def _stream(look: Look) -> Iterator[Claim]:
    profile = look.profile("stream_rms")
    values = next(iter(profile.of_blocks().values()), ()) if profile else ()
    if len(values) < 6 or not all(0 < value < math.inf for value in values):
        return
    if look.post_norm:
        popular = "Activations grow with depth."
        measured = (
            f"the stream's RMS is {number(values[0])} after the first block and {number(values[-1])} after the last"
        )
        yield Claim("amplification", popular, values[-1] > 1.5 * values[0], measured, {"ratio": values[-1] / values[0]})
        return
    straight, power = (
        _misfit(values, range(len(values))),
        _misfit(values, [math.log(i + 1) for i in range(len(values))]),
    )
    measured = (
        f"the stream's RMS goes from {number(values[0])} to {number(values[-1])} over {len(values)} blocks; "
        f"an exponential misses its logarithm by {straight:.2g}, a power of depth by {power:.2g} (RMS)"
    )
    popular = "The residual stream grows exponentially with depth at init."
    holds = values[-1] > 1.5 * values[0] and straight < power
    yield Claim("amplification", popular, holds, measured, {"exponential_misfit": straight, "power_misfit": power})


def _identity(look: Look, rescaled: Look | None) -> Iterator[Claim]:
    before, after = (
        _median(look.profile("block_change")),
        _median(rescaled.profile("block_change") if rescaled else None),
    )
    if before is not None and after is not None:
        yield Claim(
            "near-identity blocks",
            "The 1/sqrt(2L) rescale makes every block nearly the identity.",
            after < NEAR_IDENTITY,
            f"the median block changes the stream by {after:.2g} of its size after the rescale, {before:.2g} before",
            {"before": before, "after": after},
        )


def _remedies(trials: Sequence[Trial]) -> Iterator[Claim]:
    given = [trial for trial in trials if trial.name == AS_GIVEN]
    if not given or all(trial.verdict is Verdict.TRAINS for trial in given):
        return
    for title, popular, names in (
        ("warmup alone", "It only needs a warmup.", ("warmup",)),
        ("lower learning rate alone", "It only needs a lower learning rate.", ("lr/3", "lr/10")),
        ("rescale alone", "It only needs the 1/sqrt(2L) rescale.", ("rescale",)),
    ):
        runs = [trial for trial in trials if trial.name in names]
        if runs:
            said = "; ".join(f"{trial.name}: {trial.verdict.value}" for trial in runs)
            holds: bool | None = any(
                all(t.verdict is Verdict.TRAINS for t in runs if t.name == name) for name in _names(runs)
            )
            if not holds and any(t.verdict is Verdict.UNDECIDED for t in [*given, *runs]):
                holds = None
            ends = {f"end loss, {trial.name}": trial.end_loss for trial in runs if trial.end_loss is not None}
            yield Claim(title, popular, holds, f"{said} (as given: {given[0].verdict.value})", ends)


def _names(runs: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(trial.name for trial in runs))


def _ends(profile: DepthProfile | None) -> float | None:
    """Value of the lowest block over that of the highest, of the first stack."""
    values = next(iter(profile.of_blocks().values()), ()) if profile else ()
    return values[0] / values[-1] if len(values) > 1 and values[-1] > 0 else None


def _median(profile: DepthProfile | None) -> float | None:
    values = sorted(value for values in profile.of_blocks().values() for value in values) if profile else []
    return values[len(values) // 2] if values else None


def _growth(look: Look, name: str) -> str:
    growth = next((each for each in look.growths if each.name == name), None)
    if growth is None:
        return ""
    return f" (x {growth.factor:.3f} from block to block, 95 % interval {growth.low:.3f} to {growth.high:.3f})"


def _misfit(values: Sequence[float], against: Sequence[float]) -> float:
    """Root mean square of what a straight line through (against, log value) misses."""
    logs, count = [math.log(value) for value in values], len(values)
    x, y = sum(against) / count, sum(logs) / count
    spread = sum((a - x) ** 2 for a in against)
    slope = sum((a - x) * (b - y) for a, b in zip(against, logs, strict=True)) / spread
    return math.sqrt(sum((b - y - slope * (a - x)) ** 2 for a, b in zip(against, logs, strict=True)) / count)
