"""Grids with two axes: a score as a map, and how gradients at the start go with the second axis.

::

                  lr 0.0003  lr 0.001  lr 0.003
    warmup 0        4.64       4.64      4.65       dead
    warmup 100      3.71       3.63      4.65
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from xml.etree.ElementTree import Element

from rich import box
from rich.table import Table
from rich.text import Text

from lightning_norms.reports.axes import text
from lightning_norms.reports.comparison.console import spread
from lightning_norms.reports.comparison.data import Comparison, Run, Spread
from lightning_norms.reports.elements import Content, element, figure, table

WIDTH, LEFT, TOP, CELL = 330, 74, 22, 30
"""Of a map, in pixels of a picture as wide as a phone."""


@dataclass(frozen=True)
class Exponent:
    """How the first gradient of a block goes with the number on the second axis: ``gradient ~ number ** exponent``.

    Attributes:
        label: of the first axis.
        block: "top" or "bottom".
        fitted: least squares in logarithms, one a seed; mean and standard deviation.
        published: of the top block; None where there is none.
    """

    label: str
    block: str
    fitted: Spread
    published: float | None


def exponents(found: Comparison) -> tuple[Exponent, ...]:
    """For every label of the first axis, where the second one is of numbers and gradients were measured."""
    if not found.published:
        return ()
    rows = dict.fromkeys(labels[0] for labels in found.labels.values())
    fits = ((row, block, _fits(found, row, at)) for row in rows for block, at in (("top", -1), ("bottom", 0)))
    return tuple(
        Exponent(row, block, Spread.of(slopes), found.published.get(row) if block == "top" else None)
        for row, block, slopes in fits
        if slopes
    )


def slope(points: list[tuple[float, float]]) -> float | None:
    """Exponent of a power law through points, by least squares in logarithms; None from fewer than two places.

    Example:
        >>> slope([(2.0, 3.0), (8.0, 1.5), (32.0, 0.75)])
        -0.5
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and 0 < y < math.inf]
    if len({x for x, _ in logs}) < 2:
        return None
    middle, level = fmean(x for x, _ in logs), fmean(y for _, y in logs)
    rise = sum((x - middle) * (y - level) for x, y in logs) / sum((x - middle) ** 2 for x, _ in logs)
    return round(rise, 12)


def _fits(found: Comparison, row: str, at: int) -> list[float]:
    """One exponent a seed."""
    points: dict[int, list[tuple[float, float]]] = {}
    for run in found.runs:
        labels = found.labels.get(run.variant, ())
        blocks = [value for group, value in (run.gradient_first or {}).items() if "block_" in group]
        if len(labels) == 2 and labels[0] == row and blocks and run.finished and _number(labels[1]) is not None:
            points.setdefault(run.seed, []).append((_number(labels[1]) or 0.0, blocks[at]))
    slopes = (slope(each) for each in points.values())
    return [each for each in slopes if each is not None]


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None


# --- for the console --------------------------------------------------------------------------------------------------


def map_tables(found: Comparison) -> Iterator[Table]:
    """One table a validation set, and one of exponents; 80 columns."""
    for score in found.scores if found.axes else ():
        made = _table(f"{score}, {found.unit}: {found.axes[0]} down, {found.axes[1]} across; mean over seeds")
        rows, columns, cells = _cells(found, score)
        made.add_column("")
        for column in columns:
            made.add_column(column, justify="right")
        for row in rows:
            values = [cells.get((row, column)) for column in columns]
            made.add_row(row, *("-" if value is None else f"{value:.3f}" for value in values))
        yield made
    fits = exponents(found)
    if fits:
        made = _table(f"first gradient ~ {found.axes[1]} ^ exponent")
        for name in (found.axes[0], "block", "fitted", "published"):
            made.add_column(name, justify="right" if name in ("fitted", "published") else "left")
        for each in fits:
            made.add_row(*(Text(cell) for cell in exponent_cells(each)))
        yield made


def exponent_cells(each: Exponent) -> tuple[str, str, str, str]:
    """One fit as a row: label, block, fitted, published."""
    return each.label, each.block, spread(each.fitted), "" if each.published is None else f"{each.published:g}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, min_width=min(len(title), 79))


def _cells(found: Comparison, score: str) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Labels down, labels across, and the mean over finished seeds of each pair that has one."""
    rows, columns = (list(dict.fromkeys(labels[axis] for labels in found.labels.values())) for axis in (0, 1))
    cells: dict[tuple[str, str], float] = {}
    for variant, (row, column) in found.labels.items():
        values = [_of(run, score) for run in found.finished(variant) if score in (run.scores or {})]
        if values:
            cells[row, column] = fmean(values)
    return rows, columns, cells


def _of(run: Run, score: str) -> float:
    return (run.scores or {})[score]


# --- for the page -----------------------------------------------------------------------------------------------------


def map_figures(found: Comparison) -> Iterator[Element]:
    """One map a validation set: the fuller the colour, the worse; a missing one is grey."""
    for score in found.scores if found.axes else ():
        where = f"{found.axes[0]} down, {found.axes[1]} across"
        words = f"{found.unit}, mean over seeds; {where}. Pale is good; grey: no run finished."
        yield figure(score, _map(found, score), words)


def _map(found: Comparison, score: str) -> Element:
    rows, columns, cells = _cells(found, score)
    low, high = min(cells.values(), default=0.0), max(cells.values(), default=1.0)
    width = (WIDTH - LEFT - 4) / len(columns)
    content: list[Content] = [
        text(LEFT + width * (i + 0.5), TOP - 8, column, "middle") for i, column in enumerate(columns)
    ]
    for down, row in enumerate(rows):
        y = TOP + CELL * down
        content.append(text(LEFT - 6, y + CELL / 2 + 4, row, "end"))
        for across, column in enumerate(columns):
            content += _cell(cells.get((row, column)), low, high, LEFT + width * across, y, width)
    height = TOP + CELL * len(rows) + 4
    words = " ".join(f"{row}, {column}: {value:.3f}." for (row, column), value in cells.items())
    label = f"{found.unit} on {score}. {words}"
    return element("svg", content, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label, class_="plot")


def _cell(value: float | None, low: float, high: float, x: float, y: float, width: float) -> Iterator[Element]:
    place = {"x": round(x + 1, 1), "y": y + 1, "width": round(width - 2, 1), "height": CELL - 2}
    if value is None:
        yield element("rect", class_="missing", **place)
        return
    share = (value - low) / (high - low) if high > low else 0.0
    yield element("rect", style="fill: var(--s2)", fill_opacity=round(0.06 + 0.6 * share, 2), **place)
    yield text(x + width / 2, y + CELL / 2 + 4, f"{value:.2f}", "middle")


def exponents_table(found: Comparison) -> Content:
    """Fitted beside published."""
    fits = exponents(found)
    if not fits:
        return None
    head = (found.axes[0], "block", "fitted exponent", "published")
    words = (
        f"L2 norm of the first step's gradient of a whole block ~ {found.axes[1]} ^ exponent; least squares in "
        "logarithms for each seed, mean ± standard deviation over seeds. A published bound is for one matrix of the "
        "top block."
    )
    return [table(head, [exponent_cells(each) for each in fits], numbers=(2, 3)), element("p", words, class_="soft")]
