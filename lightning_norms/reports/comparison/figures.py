"""Pictures of a comparison as SVG: scores as bars, learning curves, gradients by depth."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from xml.etree.ElementTree import Element

from lightning_norms.reports.axes import Frame, Scale, line, log_limits, text, thinned, tick
from lightning_norms.reports.comparison.console import spread
from lightning_norms.reports.comparison.data import Comparison, Run
from lightning_norms.reports.elements import Content, element, figure

COLOURS = 8
"""Line colours of the page, ``s1`` to ``s8``; beyond, they begin again, dashed."""
BAR = 22
"""Height of a row of the bars, in pixels."""
LONGEST = 26
"""Letters of a name beside the bars; a longer one loses its middle."""


def score_figures(found: Comparison) -> Iterator[Element]:
    """One plot a validation set: mean over seeds as a dot, standard deviation as a bar, each seed as a ring."""
    for score in found.scores:
        yield figure(score, _dots(found, score), _dots_caption(found, score))


def _dots(found: Comparison, score: str) -> Element:
    runs = {name: [run for run in found.finished(name) if score in (run.scores or {})] for name in found.titles}
    values = {name: [_of(run, score) for run in each] for name, each in runs.items()}
    every = [value for each in values.values() for value in each]
    pad = 0.08 * (max(every) - min(every)) or 0.05
    names = [name for name in found.titles if values[name]]
    letters = max(len(_shortened(name)) for name in names)
    frame = Frame(height=len(names) * BAR + 44, left=max(60, round(6.3 * letters) + 8))
    x = frame.x(min(every) - pad, max(every) + pad)
    base = fmean(values[found.baseline]) if values[found.baseline] else None
    bottom = frame.height - frame.bottom
    content: list[Content] = list(_scale_below(frame, x, found.unit))
    if base is not None:
        content.append(element("line", x1=x(base), x2=x(base), y1=frame.top, y2=bottom, class_="reference"))
    order = list(found.titles)
    for at, name in enumerate(names):
        content += _bar(values[name], name, order.index(name), frame.top + BAR * (at + 0.5), x)
    meaning = f"{found.unit} on {score}. " + " ".join(f"{name} {fmean(values[name]):.3f}." for name in names)
    return frame.picture(meaning, content)


def _bar(values: list[float], name: str, index: int, y: float, x: Scale) -> Iterator[Element]:
    mean, low, high = fmean(values), min(values), max(values)
    yield text(x.start - 8, y + 4, _shortened(name), "end")
    yield element("line", x1=x(low), x2=x(high), y1=y, y2=y, class_=_line(index))
    yield from (element("circle", cx=x(value), cy=y, r=2.5, class_=f"{_line(index)} again") for value in values)
    yield element("line", x1=x(mean), x2=x(mean), y1=y - 7, y2=y + 7, class_=f"{_line(index)} thick")


def _shortened(name: str) -> str:
    # Names often differ in their ends: "warmup 30, lr 0.0003".
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 11]}…{name[-10:]}"


def _scale_below(frame: Frame, x: Scale, title: str) -> Iterator[Element]:
    bottom = frame.height - frame.bottom
    for value in x.ticks(4):
        yield element("line", x1=x(value), x2=x(value), y1=frame.top, y2=bottom, class_="grid")
        yield text(x(value), bottom + 15, tick(value), "middle")
    yield text((x.start + x.end) / 2, frame.height - 4, title, "middle")


def _dots_caption(found: Comparison, score: str) -> str:
    rows = {row.variant: row for row in found.rows()}
    base = rows[found.baseline].scores.get(score)
    given = f" Dotted: mean of {found.baseline}, {spread(base)}." if base is not None else ""
    return f"Upright: mean over seeds; rings: the seeds. Further left is better.{given}"


def _of(run: Run, score: str) -> float:
    return (run.scores or {})[score]


# --- learning curves --------------------------------------------------------------------------------------------------

FRAME = Frame(height=270)
SMOOTH = 20
"""Batches that a point of the training curve is a mean of, at most; a twentieth of a short run."""


def curve_figures(found: Comparison) -> Iterator[Element]:
    """Training loss, and the score of every validation set, against steps; one line a seed."""
    losses = [(run, _smooth(run.losses)) for run in found.runs if run.losses]
    drawn = _curves(found, "Training loss, nats", [(run, _points(run, values)) for run, values in losses])
    if drawn is not None:
        width = max(_window(run.losses) for run, _ in losses)
        yield figure("Training loss", drawn, f"Nats; each point is the mean of {width} batches. One line a seed.")
    for score in found.scores:
        points = [(run, [(p["step"], p[score]) for p in run.curve if score in p]) for run in found.runs]
        several = [(run, line_) for run, line_ in points if len(line_) > 1]
        drawn = _curves(found, f"{found.unit} on {score}", several)
        if drawn is not None:
            yield figure(f"{score} while training", drawn, f"{found.unit} at each validation. One line a seed.")


def _curves(found: Comparison, meaning: str, runs: Sequence[tuple[Run, list[tuple[float, float]]]]) -> Element | None:
    values = [value for _, points in runs for _, value in points if math.isfinite(value)]
    if not values:
        return None
    ends = [value for _, points in runs for _, value in points[-1:] if math.isfinite(value)]
    firsts = [next((v for _, v in points if math.isfinite(v)), values[0]) for _, points in runs]
    high = max([*firsts, *ends])
    pad = 0.04 * (high - min(values)) or 0.05
    y = FRAME.y(min(values) - pad, high + pad)
    x = FRAME.x(0, max(at for _, points in runs for at, _ in points))
    order = list(found.titles)
    lines = [line(points, x, y, _line(order.index(run.variant))) for run, points in runs if points]
    return FRAME.picture(f"{meaning}, by optimizer step.", FRAME.axes(x, y, "optimizer step"), lines)


def _points(run: Run, losses: Sequence[float]) -> list[tuple[float, float]]:
    return [(at * run.loss_stride, loss) for at, loss in thinned(losses)]


def _window(values: Sequence[float]) -> int:
    return max(1, min(SMOOTH, len(values) // 20))


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over the batches up to each one."""
    width = _window(values)
    return [fmean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


# --- gradients by depth -----------------------------------------------------------------------------------------------


def depth_figures(found: Comparison) -> Iterator[Element]:
    """Gradient norm block by block, at the first and at the last step that was measured; the first seed."""
    for name, title in (("gradient_first", "Gradient by depth, first step"), ("gradient_last", "the same, last step")):
        profiles = []
        for variant in found.titles:
            run = next((run for run in found.runs if run.variant == variant and getattr(run, name)), None)
            if run is not None:
                profiles.append((variant, _blocks(getattr(run, name))))
        drawn = _profiles(found, title, [(variant, values) for variant, values in profiles if len(values) > 1])
        if drawn is not None:
            yield figure(title, drawn, "L2 norm before clipping, by block from the bottom up; the first seed.")


def _blocks(profile: dict[str, float]) -> list[float]:
    return [value for group, value in profile.items() if "block_" in group]


def _profiles(found: Comparison, title: str, profiles: Sequence[tuple[str, list[float]]]) -> Element | None:
    limits = log_limits(value for _, values in profiles for value in values)
    if limits is None:
        return None
    y = FRAME.y(*limits, log=True)
    most = max(len(values) for _, values in profiles)
    x = FRAME.x(0, most - 1)
    order = list(found.titles)
    marks = [mark for mark in x.ticks() if mark == int(mark)]
    lines = [line(list(enumerate(values)), x, y, _line(order.index(name))) for name, values in profiles]
    return FRAME.picture(f"{title}.", FRAME.axes(x, y, "block, from the bottom up", marks), lines)


def legend(found: Comparison, drawn: Collection[str]) -> Element:
    """Which line is which variant, of those that are drawn."""
    items = []
    for index, name in [(index, name) for index, name in enumerate(found.titles) if name in drawn]:
        stroke = element("path", d="M0 5h26", class_=_line(index))
        sample = element("svg", stroke, viewBox="0 0 26 10", width=26, height=10, aria_hidden="true", class_="sample")
        items.append(element("li", sample, f" {name}"))
    return element("ul", items, class_="legend")


def _line(index: int) -> str:
    return f"line s{1 + index % COLOURS}{' dashed' if index >= COLOURS else ''}"
