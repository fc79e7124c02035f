"""Matplotlib plots as small inline SVG in the colours of the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lightning_norms.reports.pages import printable, stylesheet

WIDTH = 330
"""Pixels of a plot: that of a phone, and it grows with the page."""
STYLE = Path(__file__).parent / "templates" / "plots.mplstyle"
COLOURS = 8
"""Number of line colours in the style sheet, ``s1`` to ``s8``."""
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Line:
    """How a line looks, in a plot and in its legend."""

    colour: str = "ink"
    """Name of a colour in the style sheet."""
    dashed: bool = False
    width: float = 1.6
    opacity: float = 1.0

    def key(self, words: str) -> Key:
        """The entry of a legend."""
        return Key(words, f"var(--{self.colour})", "dashed" if self.dashed else "line")


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a sample in a CSS colour and its meaning."""

    words: str
    colour: str
    shape: str
    """CSS class: ``line``, ``dashed`` or ``swatch``."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot with its title above, and its legend and caption below."""

    title: str
    svg: Markup
    caption: str
    legend: Sequence[Key] = ()


def line_of(index: int) -> Line:
    """The line of the series with this index: colours repeat dashed after the eighth."""
    return Line(f"s{1 + index % COLOURS}", dashed=index >= COLOURS)


@cache
def palette() -> Mapping[str, str]:
    """Name -> colour of the light page."""
    return dict(re.findall(r"--(\w+): (#\w{6})", stylesheet().partition("@media")[0]))


@contextmanager
def plot(height: int, left: int = 44, right: int = 10, top: int = 8, bottom: int = 34) -> Iterator[Axes]:
    """Empty axes of a plot, in the colours of the page; draw on them and call :func:`to_svg` inside.

    Args:
        height: height of the plot in pixels.
        left: margin for the labels of the vertical axis, in pixels.
        right: margin on the right.
        top: margin above.
        bottom: margin below, with room for the labels and the title of the horizontal axis.
    """
    with rc_context(fname=STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has more fonts than matplotlib
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        size = (1 - (left + right) / WIDTH, 1 - (top + bottom) / height)
        axes = figure.add_axes((left / WIDTH, bottom / height, *size))
        axes.locator_params(nbins=5)
        yield axes


def to_svg(axes: Axes, meaning: str) -> Markup:
    """The plot as an SVG element without ids, links, fonts or fixed colours.

    Args:
        axes: what was drawn on inside :func:`plot`.
        meaning: read aloud in place of the plot.
    """
    written = io.StringIO()
    axes.figure.savefig(written, format="svg")  # type: ignore[union-attr]
    root = ElementTree.fromstring(printable(written.getvalue()))
    picture = ElementTree.Element(
        "svg", {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": meaning, "class": "plot"}
    )
    paths: dict[str, ElementTree.Element] = {}
    for parent in root.iter():
        for node in parent if parent.tag != f"{SVG}defs" else ():
            style = _style(node.get("style", ""))
            if node.tag == f"{SVG}text":
                place = {name: _short(node.get(name, "0")) for name in ("x", "y")}
                ElementTree.SubElement(picture, "text", {**place, "style": style}).text = node.text
            elif node.tag == f"{SVG}path" and style != "fill: none":
                # What looks the same is one path: a map of many cells has few colours.
                path = paths.get(style)
                if path is None:
                    path = paths[style] = ElementTree.SubElement(picture, "path", {"d": "", "style": style})
                path.set("d", path.get("d", "") + _short(node.get("d", "")))
    return Markup(ElementTree.tostring(picture, encoding="unicode"))


def _style(style: str) -> str:
    """The style without fonts, and with variables in place of the colours of the light page."""
    kept = [
        part
        for part in style.split("; ")
        if not re.match("font-(size|family)|font:|stroke-dashoffset|stroke-linejoin", part)
    ]
    names = {colour: name for name, colour in palette().items()}
    return re.sub(r"#\w{6}", lambda m: f"var(--{names[m[0]]})" if m[0] in names else m[0], ";".join(kept))


def _short(path: str) -> str:
    """A path with one decimal, without spaces that mean nothing, and with rectangles by their corners."""
    rounded = re.sub(r"\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), path)
    tight = re.sub(r"\s*([MLQCz])\s*", r"\1", rounded).strip()
    return re.sub(r"M(\S+) (\S+?)L(\S+) \2L\3 (\S+?)L\1 \4(L\1 \2|z)", r"M\1 \2H\3V\4H\1z", tight)


def draw_line(axes: Axes, points: Iterable[tuple[float, float]], line: Line) -> None:
    """Draw a line: NaN breaks it, values beyond the limits stand at the edge, and a point between two breaks is a dot.

    Args:
        axes: with its vertical limits set.
        points: (x, y).
        line: how it looks.
    """
    low, high = axes.get_ylim()
    x, y = np.array(list(points), dtype=float).reshape(-1, 2).T
    y = np.clip(y, low, high)
    colour, style = palette()[line.colour], (0, (3.2, 2.5)) if line.dashed else "-"
    axes.plot(x, y, color=colour, linestyle=style, linewidth=line.width, alpha=line.opacity, clip_on=False)
    broken = np.isnan(np.concatenate([[np.nan], y, [np.nan]]))
    alone = broken[:-2] & broken[2:] & ~broken[1:-1]
    draw_dots(axes, x[alone], y[alone], replace(line, width=2 * line.width))


def draw_dots(axes: Axes, x: Sequence[float], y: Sequence[float], line: Line) -> None:
    """Draw dots as wide as the line: lines of no length with round ends, which stay one small path."""
    if len(x):
        both = np.array([x, x, np.full(len(x), np.nan)]).T.ravel(), np.repeat(y, 3)
        axes.plot(*both, color=palette()[line.colour], linewidth=line.width, alpha=line.opacity, clip_on=False)


def log_axis(axes: Axes, low: float, high: float) -> None:
    """Make the vertical axis logarithmic, with about five ticks."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    few = math.log10(high / low) < 2
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=6))
    axes.yaxis.set_major_formatter(tick)
    axes.yaxis.set_minor_locator(NullLocator())


def depth_plot(height: int, meaning: str, lines: Sequence[tuple[Line, Sequence[float]]]) -> Markup | None:
    """Positive values by block on a log scale, one line each; None if there is nothing to draw.

    The scale spans a decade at the least, so that noise looks like noise.

    Args:
        height: height of the plot in pixels.
        meaning: read aloud in place of the plot.
        lines: how each line looks, and its value in each block.
    """
    positive = [value for _, values in lines for value in values if 0 < value < math.inf]
    if not positive:
        return None
    low, high = math.log10(max(min(positive), 1e-300)), math.log10(min(max(positive), 1e300))
    margin = max(0.05 * (high - low), (1 - (high - low)) / 2)
    with plot(height) as axes:
        log_axis(axes, 10 ** (low - margin), 10 ** (high + margin))
        axes.set(xlim=(0, max(max(len(values) for _, values in lines) - 1, 1)), xlabel="block, from the bottom up")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for line, values in lines:
            draw_line(axes, enumerate(values), line)
        return to_svg(axes, meaning)


def tick(value: float, _position: float | None = None) -> str:
    """A short label: very large and very small values as powers of ten.

    Example:
        >>> tick(1e-7), tick(0.005), tick(20.0), tick(2e5)
        ('10⁻⁷', '0.005', '20', '2·10⁵')
    """
    if 0.001 <= abs(value) < 10000 or value == 0:
        return f"{value:.4g}"
    digit, _, power = f"{value:.0e}".partition("e")
    ten = "10" + str(int(power)).translate(SUPERSCRIPT)
    return ten if digit == "1" else f"{digit}·{ten}"
