"""Gradients by depth over time as SVG, runs in the same colours: a bottom that goes dark has stopped learning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from lightning_norms.reports.axes import Frame, Scale, log_limits, text, tick
from lightning_norms.reports.console import number, spaced
from lightning_norms.reports.diagnosis.data import Trial
from lightning_norms.reports.diagnosis.mechanisms import weakest_share
from lightning_norms.reports.elements import Content, element, figure

VIRIDIS = (
    *((68, 1, 84), (72, 40, 120), (62, 73, 137), (49, 104, 142), (38, 130, 142)),
    *((31, 158, 137), (53, 183, 121), (110, 206, 88), (181, 222, 43), (253, 231, 37)),
)
SHADES = 32
MOST_ROWS, MOST_COLUMNS = 100, 60
STRANGE = (("zero", "exactly 0"), ("infinite", "infinite"), ("missing", "NaN"))


def heat_figures(trials: Sequence[Trial]) -> Iterator[Element]:
    """Gradient norm of every block over the steps of each trial, all in the same colours."""
    drawn = [trial for trial in trials if trial.gradients.groups and trial.gradients.steps]
    limits = log_limits((v for trial in drawn for row in trial.gradients.values for v in row), fewest=4.0, margin=0.0)
    if limits is None:
        return
    low, high = max(limits[0], limits[1] * 1e-12), limits[1]
    end = max(_end(trial) for trial in drawn)
    for trial in drawn:
        shade = Scale(low, high, 0, SHADES - 1, log=True)
        yield figure(trial.name, [_heat_map(trial, shade, end), _colour_bar(trial, low, high)], _heat_caption(trial))


def _end(trial: Trial) -> int:
    return trial.gradients.steps[-1] + 1


def _heat_map(trial: Trial, shade: Scale, end: int) -> Element:
    """One path a colour: a cell is as wide as the steps until the next recorded one."""
    profile = trial.gradients
    labels = [label for label in profile.stacks() if label]
    frame = Frame(height=230, left=70 if labels else 44)  # room for names such as "decoder 47"
    rows = spaced(range(len(profile.groups)), MOST_ROWS)
    columns = spaced(range(len(profile.steps)), MOST_COLUMNS)
    edges = [*(profile.steps[column] for column in columns), _end(trial)]
    x, y = frame.x(0, end), frame.y(0, len(rows))
    height = round(y(0) - y(1) + 0.3, 1)
    cells: dict[str, list[str]] = {}
    for at, row in enumerate(rows):
        for i, column in enumerate(columns):
            left, right = x(edges[i]), x(edges[i + 1])
            wide = round(right - left + 0.3, 1)
            key = _key(profile.values[row][column], shade)
            cells.setdefault(key, []).append(f"M{left:g} {y(at + 1):g}h{wide:g}v{height:g}h-{wide:g}z")
    paths = [
        element("path", d="".join(parts), **({"fill": key} if key[0] == "#" else {"class_": key}))
        for key, parts in cells.items()
    ]
    names = [
        text(frame.left - 5, (y(at) + y(at + 1)) / 2 + 4, _row_name(profile.groups[rows[at]]), "end")
        for at in spaced(range(len(rows)), 8)
    ]
    axis = [element("line", x1=x(v), x2=x(v), y1=y(0), y2=y(0) + 4, class_="axis") for v in x.ticks()]
    words = [text(x(v), y(0) + 15, tick(v), "middle") for v in x.ticks()]
    title = text((frame.left + frame.width - frame.right) / 2, frame.height - 4, "optimizer step", "middle")
    return frame.picture(
        f"{trial.name}: gradient norm by block and step. {_heat_words(trial)}", paths, names, axis, words, title
    )


def _row_name(group: str) -> str:
    label, _, index = group.rpartition("block_")
    return f"{label.rstrip('.')[-8:]} {int(index)}".strip() if index.isdigit() else group[:6]


def _key(value: float, shade: Scale) -> str:
    if math.isnan(value):
        return "missing"
    if value <= 0:
        return "zero"
    return "infinite" if math.isinf(value) else _viridis(round(shade(value)) / (SHADES - 1))


def _viridis(share: float) -> str:
    at = min(int(share * (len(VIRIDIS) - 1)), len(VIRIDIS) - 2)
    rest = share * (len(VIRIDIS) - 1) - at
    return "#" + "".join(f"{round(a + rest * (b - a)):02x}" for a, b in zip(VIRIDIS[at], VIRIDIS[at + 1], strict=True))


def _colour_bar(trial: Trial, low: float, high: float) -> Element:
    """From dark to bright, and those of the other colours that are in the picture."""
    frame = Frame(height=34, top=0, bottom=0)
    x = Scale(low, high, frame.left, frame.width - frame.right, log=True)
    width = (x.end - x.start) / SHADES
    shades = [
        element(
            "rect",
            x=round(x.start + i * width, 1),
            y=2,
            width=round(width + 0.3, 1),
            height=10,
            fill=_viridis(i / (SHADES - 1)),
        )
        for i in range(SHADES)
    ]
    ticks = [text(x(value), 26, tick(value), "middle") for value in x.ticks()]
    flat = [value for row in trial.gradients.values for value in row]
    seen = {_key(value, x) for value in flat if not 0 < value < math.inf}
    legend: list[Content] = [
        [element("span", class_=f"swatch {name}"), f" {words} "] for name, words in STRANGE if name in seen
    ]
    bar = frame.picture(f"colours: dark {number(low)} to bright {number(high)}", shades, ticks)
    return element("div", bar, element("div", legend, class_="legend") if legend else None)


def _heat_caption(trial: Trial) -> Iterator[Content]:
    yield f"Gradient norm of every block, on a log scale. {_heat_words(trial)}"
    if len(trial.gradients.groups) > MOST_ROWS:
        yield f" {MOST_ROWS} of {len(trial.gradients.groups)} blocks are drawn."


def _heat_words(trial: Trial) -> str:
    steps, first, last = trial.gradients.steps, weakest_share(trial, 0), weakest_share(trial, -1)
    if first is None or last is None:
        return "No block has a gradient."
    return (
        f"The weakest block has {number(first[0])} of the strongest block's gradient at step {steps[0]}, "
        f"{number(last[0])} at step {steps[-1]} ({last[1]})."
    )
