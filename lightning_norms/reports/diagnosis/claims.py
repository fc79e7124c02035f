"""Popular statements about norms and depth, checked against the numbers of this model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import linear_regression

from lightning_norms.reports.console import number
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Claim, Look, Trial, Verdict

CONFIRMED, REFUTED = 1.25, 1.6
"""Within 1.25x a claim counts as confirmed, beyond 1.6x as refuted; in between a single batch cannot decide."""
NEAR_IDENTITY = 0.2
"""A block is nearly the identity if it changes the stream by less than this share of it."""
REMEDIES = (
    ("warmup alone", "It only needs a warmup.", ("warmup",)),
    ("lower learning rate alone", "It only needs a lower learning rate.", ("lr/3", "lr/10")),
    ("rescale alone", "It only needs the 1/sqrt(2L) rescale.", ("rescale",)),
)


def claims(
    look: Look, trials: Sequence[Trial], rescaled: Look | None = None, shallow: Look | None = None
) -> tuple[Claim, ...]:
    """Check every statement for which there are numbers.

    Args:
        look: measurements at the first step as given.
        trials: all trials.
        rescaled: measurements after the residual rescale.
        shallow: measurements with fewer blocks.
    """
    return (
        *_gradients(look),
        *_against_depth(look, shallow),
        *_stream(look),
        *_identity(look, rescaled),
        *_remedies(trials),
    )


def _gradients(look: Look) -> Iterator[Claim]:
    values = _blocks(look, "parameter_gradient")
    if len(values) < 2 or not values[-1] > 0 or look.post_norm is None:
        return
    ratio = values[0] / values[-1]
    measured = f"the bottom/top gradient ratio at the first step is {number(ratio)}"
    growth = next((growth for growth in look.growths if growth.name == "parameter_gradient"), None)
    if growth is not None:
        measured += f" (x {growth.factor:.3f} per block, 95 % interval {growth.low:.3f} to {growth.high:.3f})"
    if look.post_norm:
        name, popular, holds = (
            "bottom gradients at init",
            "Post-norm gradients vanish at the bottom at init.",
            ratio < 0.1,
        )
    else:
        name, holds = "gradient by depth", 0.5 < ratio < 2
        popular = "With norms inside the branches all blocks get equal gradients."
    yield Claim(name=name, popular=popular, holds=holds, measured=measured, evidence={"bottom_over_top": ratio})


def _against_depth(look: Look, shallow: Look | None) -> Iterator[Claim]:
    """The gradient of the top block against depth: Xiong et al. 2020, arXiv:2002.04745, theorem 1."""
    deep, few = _blocks(look, "parameter_gradient"), _blocks(shallow, "parameter_gradient")
    if not deep or not few or not few[-1] > 0 or len(deep) == len(few):
        return
    ratio, root = deep[-1] / few[-1], math.sqrt(len(few) / len(deep))
    if look.post_norm:
        popular, expected = "The gradient near the output of a post-norm stack does not depend on its depth L.", 1.0
    else:
        popular, expected = "Pre-norm gradients near the output shrink like 1/sqrt(L).", root
    miss = math.exp(abs(math.log(ratio / expected))) if ratio > 0 else math.inf
    yield Claim(
        name="gradient against depth",
        popular=popular,
        holds=True if miss < CONFIRMED else False if miss > REFUTED else None,
        measured=(
            f"the gradient of the top block is {number(deep[-1])} with {len(deep)} blocks and {number(few[-1])} with "
            f"{len(few)}: x {ratio:.2f}, where 1/sqrt(L) predicts x {root:.2f}"
        ),
        evidence={"ratio": ratio, "one_over_root": root},
    )


def _stream(look: Look) -> Iterator[Claim]:
    values = _blocks(look, "stream_rms")
    if len(values) < 6 or look.post_norm is None or not all(0 < value < math.inf for value in values):
        return
    grows = values[-1] > 1.5 * values[0]
    measured = f"the RMS of the stream goes from {number(values[0])} to {number(values[-1])} over {len(values)} blocks"
    if look.post_norm:
        popular, holds, evidence = "Activations grow with depth.", grows, {"ratio": values[-1] / values[0]}
    else:
        popular = "The residual stream grows exponentially with depth at init."
        exponential = _misfit(values, range(len(values)))
        power = _misfit(values, [math.log(layer) for layer in range(1, len(values) + 1)])
        holds, evidence = grows and exponential < power, {"exponential_misfit": exponential, "power_misfit": power}
        measured += f"; an exponential misses its logarithm by {exponential:.2g}, a power of depth by {power:.2g} (RMS)"
    yield Claim(name="amplification", popular=popular, holds=holds, measured=measured, evidence=evidence)


def _identity(look: Look, rescaled: Look | None) -> Iterator[Claim]:
    before, after = _median_change(look), _median_change(rescaled)
    if before is not None and after is not None:
        yield Claim(
            name="near-identity blocks",
            popular="The 1/sqrt(2L) rescale makes every block nearly the identity.",
            holds=after < NEAR_IDENTITY,
            measured=f"the median block changes the stream by {after:.2g} of its size, {before:.2g} before the rescale",
            evidence={"before": before, "after": after},
        )


def _remedies(trials: Sequence[Trial]) -> Iterator[Claim]:
    baseline = [trial for trial in trials if trial.name == AS_GIVEN]
    if not baseline or _trains(baseline):
        return
    for title, popular, names in REMEDIES:
        runs = [trial for trial in trials if trial.name in names]
        if not runs:
            continue
        holds: bool | None = any(_trains([run for run in runs if run.name == name]) for name in {r.name for r in runs})
        if not holds and any(trial.verdict is Verdict.UNDECIDED for trial in [*baseline, *runs]):
            holds = None
        ends = "; ".join(f"{trial.name}: {trial.verdict.value}" for trial in runs)
        yield Claim(
            name=title,
            popular=popular,
            holds=holds,
            measured=f"{ends} (as given: {baseline[0].verdict.value})",
            evidence={f"end loss, {trial.name}": trial.end_loss for trial in runs if trial.end_loss is not None},
        )


def _trains(runs: Sequence[Trial]) -> bool:
    return all(run.verdict is Verdict.TRAINS for run in runs)


def _blocks(look: Look | None, name: str) -> tuple[float, ...]:
    """Values of the blocks of the first stack, lowest first; empty if the profile was not measured."""
    profile = look.profile(name) if look else None
    return next(iter(profile.of_blocks().values()), ()) if profile else ()


def _median_change(look: Look | None) -> float | None:
    profile = look.profile("block_change") if look else None
    values = sorted(value for values in profile.of_blocks().values() for value in values) if profile else []
    return values[len(values) // 2] if values else None


def _misfit(values: Sequence[float], against: Sequence[float]) -> float:
    """Root mean square by which a straight line misses the logarithms of ``values``."""
    logs = [math.log(value) for value in values]
    slope, intercept = linear_regression(against, logs)
    return math.sqrt(sum((y - intercept - slope * x) ** 2 for x, y in zip(against, logs, strict=True)) / len(logs))
