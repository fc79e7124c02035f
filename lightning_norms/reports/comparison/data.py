"""A grid of runs as plain data, and the rules that turn it into a table, differences and verdicts.

::

    runs (variant x seed)  ->  rows: mean and spread over seeds        what each variant reached
                           ->  differences to the baseline, by seed    is the gap a result, or seeds?
                           ->  verdicts                                keep the change, or revert it?

A score is a number of a validation set, bits per byte unless the module logs none; lower is better.
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass, field, fields
from statistics import fmean, stdev

from lightning_norms.reports.comparison.differences import Difference, Verdict, difference, verdict
from lightning_norms.reports.typed_json import as_plain, as_typed


@dataclass(frozen=True)
class Run:
    """One variant with one seed: what it ended with, or why it did not."""

    variant: str
    seed: int
    failure: str | None = None
    """Why there are no numbers; None for a run that finished."""
    scores: dict[str, float] | None = None
    """Validation set -> bits per byte (or the module's own loss) at the end."""
    _: KW_ONLY
    steps: int = 0
    parameters: int | None = None
    """Number of trainable parameters; tied ones count once."""
    seconds_per_step: float | None = None
    """Median over the steps, without validation."""
    kv_cache_bytes: int | None = None
    """Size of the key/value cache for 4,096 positions in bfloat16; None if the module is not ours."""
    spike_score: float | None = None
    """Share of steps whose loss is beyond 6 standard deviations of the 128 before; None for a shorter run."""
    events: dict[str, int] | None = None
    """Action of LRFallback -> count; None without it."""
    losses: tuple[float, ...] = ()
    """Training loss of every ``loss_stride``-th batch."""
    loss_stride: int = 1
    curve: tuple[dict[str, float], ...] = ()
    """Scores at each validation, with their ``step``."""
    gradient_first: dict[str, float] | None = None
    """Gradient norm by depth at the first step that DepthMonitor measured; None without it."""
    gradient_last: dict[str, float] | None = None
    """Gradient norm by depth at the last step that it measured."""

    @property
    def finished(self) -> bool:
        """Whether the run has numbers that count."""
        return self.failure is None and self.scores is not None


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with its standard deviation.

    Example:
        >>> Spread.of([1.0, 2.0, 3.0])
        Spread(mean=2.0, deviation=1.0, count=3)
    """

    mean: float
    deviation: float | None
    """Sample standard deviation; None for one seed."""
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Mean and deviation of at least one value."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant over its seeds."""

    variant: str
    title: str
    seeds: int
    """Number of seeds that finished."""
    failed: int
    """Number of seeds that did not."""
    scores: dict[str, Spread]
    parameters: int | None
    seconds_per_step: float | None
    kv_cache_bytes: int | None
    spike_score: float | None
    events: int | None
    """Number of acts of LRFallback over all seeds."""
    failures: tuple[str, ...]
    """Why runs are missing, with their seeds."""
    verdict: Verdict | None
    """None for the baseline, and without a seed that both finished."""


@dataclass(frozen=True)
class Comparison:
    """The results of a grid: the runs are the data, all else follows from them.

    Args:
        name: name of the grid.
        baseline: the variant that the others are compared to.
        titles: variant -> what it is, in the order of the table.
        runs: all planned runs, finished or not.
        unit: unit of the scores.
        axes: names of the two axes of a map; empty for a plain list of variants.
        labels: variant -> its place on the two axes.
        published: label of the first axis -> published exponent of the top block's first gradient against the second.
    """

    name: str
    baseline: str
    titles: dict[str, str]
    runs: tuple[Run, ...]
    _: KW_ONLY
    unit: str = "bits/byte"
    axes: tuple[str, ...] = ()
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every run finished."""
        return all(run.finished for run in self.runs)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the validation sets, in the order in which they were logged."""
        return tuple(dict.fromkeys(name for run in self.runs if run.finished for name in run.scores or {}))

    def finished(self, variant: str) -> tuple[Run, ...]:
        """The runs of a variant that have numbers."""
        return tuple(run for run in self.runs if run.variant == variant and run.finished)

    def values(self, variant: str, score: str) -> dict[int, float]:
        """Seed -> score of a variant on one validation set."""
        return {run.seed: run.scores[score] for run in self.finished(variant) if run.scores and score in run.scores}

    def rows(self) -> tuple[Row, ...]:
        """One row a variant, in the order of the titles."""
        return tuple(self._row(variant, title) for variant, title in self.titles.items())

    def differences(self) -> tuple[Difference, ...]:
        """Every other variant against the baseline on each validation set, over the seeds that both finished."""
        others = (variant for variant in self.titles if variant != self.baseline)
        return tuple(gap for variant in others for gap in self._differences(variant))

    def to_json(self) -> str:
        """Strict JSON: the runs, and the rows and differences that follow from them."""
        whole = {**as_plain(self), "rows": as_plain(self.rows()), "differences": as_plain(self.differences())}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read what :meth:`to_json` wrote; what follows from the runs is worked out anew."""
        data = json.loads(text)
        return as_typed({entry.name: data[entry.name] for entry in fields(cls)}, cls)

    def _row(self, variant: str, title: str) -> Row:
        runs = self.finished(variant)
        failed = [run for run in self.runs if run.variant == variant and not run.finished]
        scores = {score: list(self.values(variant, score).values()) for score in self.scores}
        events = [sum(run.events.values()) for run in runs if run.events is not None]
        return Row(
            variant=variant,
            title=title,
            seeds=len(runs),
            failed=len(failed),
            scores={name: Spread.of(values) for name, values in scores.items() if values and len(values) == len(runs)},
            parameters=next((run.parameters for run in runs if run.parameters is not None), None),
            seconds_per_step=_mean([run.seconds_per_step for run in runs]),
            kv_cache_bytes=next((run.kv_cache_bytes for run in runs if run.kv_cache_bytes is not None), None),
            spike_score=_mean([run.spike_score for run in runs]),
            events=sum(events) if events else None,
            failures=_reasons(failed),
            verdict=self._verdict(variant, whole=not failed),
        )

    def _verdict(self, variant: str, whole: bool) -> Verdict | None:
        gaps = [] if variant == self.baseline else self._differences(variant)
        return verdict([gap.result for gap in gaps], whole) if gaps else None

    def _differences(self, variant: str) -> list[Difference]:
        gaps = (self._difference(variant, score) for score in self.scores)
        return [gap for gap in gaps if gap is not None]

    def _difference(self, variant: str, score: str) -> Difference | None:
        ours, theirs = self.values(variant, score), self.values(self.baseline, score)
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds:
            return None
        return difference(variant, score, [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def _mean(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _reasons(failed: list[Run]) -> tuple[str, ...]:
    """One line a reason, with the seeds that it holds for."""
    seeds: dict[str, list[str]] = {}
    for run in failed:
        seeds.setdefault(run.failure or "no numbers", []).append(str(run.seed))
    words = {reason: f"seed{'s' * (len(numbers) > 1)} {', '.join(numbers)}" for reason, numbers in seeds.items()}
    return tuple(f"{which}: {reason}" for reason, which in words.items())
