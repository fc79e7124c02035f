"""Plots of a comparison: scores over seeds, learning curves, gradients by depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from lightning_norms.reports import plots
from lightning_norms.reports.comparison.data import Comparison, Run
from lightning_norms.reports.comparison.tables import spread
from lightning_norms.reports.pages import printable
from lightning_norms.reports.plots import Key, Line, Picture, line_of, palette, tick, to_svg

ROW = 22
"""Height of a variant beside the scores, in pixels."""
LONGEST = 26
"""Letters of a name beside the scores; a longer one loses its middle."""
LETTER = 6.8
"""Width of a letter in pixels."""
SMOOTH = 20
"""Most batches that a point of the training curve is a mean of; fewer in a short run."""
Curve = tuple[Run, Sequence[tuple[float, float]]]
"""A run with its (step, value)."""


def score_plots(comparison: Comparison) -> Iterator[Picture]:
    """One plot a validation set: the seeds of each variant as dots, an upright bar at their mean."""
    for score in comparison.scores:
        values = {name: list(comparison.values(name, score).values()) for name in comparison.titles}
        yield _score_plot(comparison, score, {name: seeds for name, seeds in values.items() if seeds})


def _score_plot(comparison: Comparison, score: str, values: dict[str, list[float]]) -> Picture:
    every = [value for seeds in values.values() for value in seeds]
    margin = 0.08 * (max(every) - min(every)) or 0.05
    names = [_shortened(printable(name)) for name in values]
    left = max(60, round(LETTER * max(map(len, names))) + 8)
    order = list(comparison.titles)
    caption = "Upright: mean over seeds; dots: the seeds. Further left is better."
    meaning = " ".join(f"{name} {fmean(seeds):.3f}." for name, seeds in values.items())
    with plots.plot(len(names) * ROW + 44, left) as axes:
        axes.set(xlim=(min(every) - margin, max(every) + margin), ylim=(len(names) - 0.5, -0.5), xlabel=comparison.unit)
        axes.set_yticks(range(len(names)), names)
        axes.xaxis.set_major_formatter(tick)
        axes.grid(axis="y", visible=False)
        if comparison.baseline in values:
            base = values[comparison.baseline]
            axes.axvline(fmean(base), color=palette()["ink"], linewidth=1.5, linestyle=(0, (1, 2)))
            mean = spread(
                next(row for row in comparison.rows() if row.variant == comparison.baseline).scores.get(score)
            )
            caption += f" Dotted: mean of {comparison.baseline}, {mean}."
        for at, (name, seeds) in enumerate(values.items()):
            line = line_of(order.index(name))
            colour = palette()[line.colour]
            axes.hlines(at, min(seeds), max(seeds), color=colour, linewidth=1.6)
            axes.vlines(fmean(seeds), at - 0.32, at + 0.32, color=colour, linewidth=2.3)
            plots.draw_dots(axes, seeds, [at] * len(seeds), Line(line.colour, width=6, opacity=0.5))
        return Picture(title=score, svg=to_svg(axes, f"{comparison.unit} on {score}. {meaning}"), caption=caption)


def _shortened(name: str) -> str:
    # Names often differ in their ends: "warmup 30, lr 0.0003".
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 11]}…{name[-10:]}"


# --- learning curves --------------------------------------------------------------------------------------------------


def curve_plots(comparison: Comparison) -> Iterator[Picture]:
    """Training loss, and the score of every validation set, against steps; one line a seed."""
    trained = [run for run in comparison.runs if run.losses]
    losses = [(run, [(at * run.loss_stride, loss) for at, loss in enumerate(_smooth(run.losses))]) for run in trained]
    width = max((_window(run.losses) for run in trained), default=1)
    caption = f"Nats; each point is the mean of {width} batches. One line a seed."
    yield from _curves(comparison, "Training loss", "Training loss, nats", caption, losses)
    for score in comparison.scores:
        points = [(run, [(p["step"], p[score]) for p in run.curve if score in p]) for run in comparison.runs]
        several = [(run, curve) for run, curve in points if len(curve) > 1]
        caption = f"{comparison.unit} at each validation. One line a seed."
        yield from _curves(comparison, f"{score} while training", f"{comparison.unit} on {score}", caption, several)


def _curves(comparison: Comparison, title: str, meaning: str, caption: str, runs: Sequence[Curve]) -> Iterator[Picture]:
    finite = [[value for _, value in points if math.isfinite(value)] for _, points in runs]
    finite = [values for values in finite if values]
    if not finite:
        return
    # A spike in the middle must not flatten everything else.
    low, high = min(map(min, finite)), max(max(values[0], values[-1]) for values in finite)
    margin = 0.04 * (high - low) or 0.05
    order = list(comparison.titles)
    with plots.plot(270) as axes:
        axes.set(xlim=(0, max(points[-1][0] for _, points in runs) or 1), ylim=(low - margin, high + margin))
        axes.set_xlabel("optimizer step")
        axes.yaxis.set_major_formatter(tick)
        for run, points in runs:
            plots.draw_line(axes, points, line_of(order.index(run.variant)))
        yield Picture(title=title, svg=to_svg(axes, f"{meaning}, by optimizer step."), caption=caption)


def _window(values: Sequence[float]) -> int:
    return max(1, min(SMOOTH, len(values) // 20))


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over the batches up to each one."""
    width = _window(values)
    return [fmean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


# --- gradients by depth -----------------------------------------------------------------------------------------------


def depth_plots(comparison: Comparison) -> Iterator[Picture]:
    """Gradient norm by block of the first seed that has it, at the first and at the last step that was measured."""
    for name, when in (("gradient_first", "first step"), ("gradient_last", "last step")):
        profiles: dict[str, list[float]] = {}
        for run in comparison.runs:
            blocks = [norm for group, norm in (getattr(run, name) or {}).items() if "block_" in group]
            if len(blocks) > 1:
                profiles.setdefault(run.variant, blocks)
        title = f"Gradient by depth, {when}"
        lines = [(line_of(i), profiles[variant]) for i, variant in enumerate(comparison.titles) if variant in profiles]
        svg = plots.depth_plot(220, f"{title}.", lines)
        if svg is not None:
            caption = "L2 norm before clipping, by block from the bottom up; the first seed."
            yield Picture(title=title, svg=svg, caption=caption)


def keys(comparison: Comparison, attribute: str) -> list[Key]:
    """The legend of the variants whose runs have the attribute that is drawn."""
    drawn = {run.variant for run in comparison.runs if getattr(run, attribute)}
    return [line_of(i).key(name) for i, name in enumerate(comparison.titles) if name in drawn]
