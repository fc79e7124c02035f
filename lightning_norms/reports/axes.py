"""A small plot as SVG: scales, ticks and a frame. Colours are those of the page, so that it follows light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from lightning_norms.reports.elements import Content, element

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POINTS = 400
"""Most points of a line; a longer one keeps the lowest and the highest of every stretch."""


@dataclass(frozen=True)
class Scale:
    """Values to pixels, straight or logarithmic; what is outside stands at the edge."""

    low: float
    high: float
    start: float
    """Pixel of ``low``."""
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value.

        Example:
            >>> Scale(1e-4, 1.0, 100.0, 0.0, log=True)(1e-2), Scale(0.0, 10.0, 0.0, 50.0)(99.0)
            (50.0, 50.0)
        """
        share = (self._of(max(value, self.low)) - self._of(self.low)) / (self._of(self.high) - self._of(self.low))
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside, about ``count``.

        Example:
            >>> Scale(0, 79, 0, 1).ticks(), Scale(0.3, 4.0, 0, 1, log=True).ticks()
            ([0.0, 20.0, 40.0, 60.0], [0.5, 1.0, 2.0])
        """
        if not self.log:
            step = _round_step((self.high - self.low) / count)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [i * step for i in range(first, last + 1)]
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            return [10.0**power for power in range(first, last + 1, math.ceil((last - first) / count))]
        marks = (digit * 10.0**power for power in range(first - 1, last + 1) for digit in (1, 2, 5))
        inside = [mark for mark in marks if self.low <= mark <= self.high]
        return inside[:: max(1, math.ceil(len(inside) / count))]


@dataclass(frozen=True)
class Frame:
    """Where a plot stands in its picture, in pixels of a picture as wide as a phone."""

    width: int = 330
    height: int = 220
    left: int = 44
    right: int = 10
    top: int = 8
    bottom: int = 34

    def x(self, low: float, high: float) -> Scale:
        """Scale from left to right."""
        return Scale(low, high if high > low else low + 1, self.left, self.width - self.right)

    def y(self, low: float, high: float, log: bool = False) -> Scale:
        """Scale from the bottom up."""
        return Scale(low, high, self.height - self.bottom, self.top, log)

    def picture(self, meaning: str, *content: Content) -> Element:
        """The SVG; ``meaning`` is read out in its place."""
        return element(
            "svg", content, viewBox=f"0 0 {self.width} {self.height}", role="img", aria_label=meaning, class_="plot"
        )

    def axes(self, x: Scale, y: Scale, title_x: str, marks_x: Iterable[float] | None = None) -> Iterator[Element]:
        """Grid lines, ticks and the title of the horizontal axis; what stands on the vertical is said above."""
        bottom, end = self.height - self.bottom, self.width - self.right
        for value in y.ticks():
            yield element("line", x1=self.left, x2=end, y1=y(value), y2=y(value), class_="grid")
            yield text(self.left - 5, y(value) + 4, tick(value), "end")
        for value in x.ticks() if marks_x is None else marks_x:
            yield element("line", x1=x(value), x2=x(value), y1=bottom, y2=bottom + 4, class_="axis")
            yield text(x(value), bottom + 15, tick(value), "middle")
        yield element("line", x1=self.left, x2=end, y1=bottom, y2=bottom, class_="axis")
        yield text((self.left + end) / 2, self.height - 4, title_x, "middle")


def text(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Element:
    """Words at a place."""
    return element("text", words, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=class_)


def line(points: Sequence[tuple[float, float]], x: Scale, y: Scale, class_: str) -> Element:
    """A line through (x, y); NaN breaks it, infinity stands at the upper edge. A point between two breaks is a dot."""
    parts, pen = [], "M"
    for i, (a, b) in enumerate(points):
        if math.isnan(b):
            pen = "M"
            continue
        alone = pen == "M" and (i + 1 == len(points) or math.isnan(points[i + 1][1]))
        parts.append(f"{pen}{x(a):g} {y(b):g}{'h0' if alone else ''}")
        pen = "L"
    return element("path", d="".join(parts), class_=class_)


def thinned(values: Sequence[float]) -> list[tuple[float, float]]:
    """(index, value) of at most about ``POINTS`` of them, with every peak and every hole."""
    indexed = [(float(i), value) for i, value in enumerate(values)]
    if len(values) <= POINTS:
        return indexed
    width = math.ceil(2 * len(values) / POINTS)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(values), width):
        part = indexed[at : at + width]
        finite = [point for point in part if not math.isnan(point[1])]
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])} if finite else set()
        kept += sorted(ends) if len(finite) == len(part) else [*sorted(ends), (part[-1][0], math.nan)]
    return kept


def log_limits(values: Iterable[float], fewest: float = 1.0, margin: float = 0.05) -> tuple[float, float] | None:
    """Range around the positive finite values, ``fewest`` decades at the least so that noise looks like noise.

    Example:
        >>> log_limits([0.01, 0.0, 100.0], margin=0.0), log_limits([float("nan")])
        ((0.01, 100.0), None)
    """
    good = [value for value in values if 0 < value < math.inf]
    if not good:
        return None
    low, high = math.log10(max(min(good), 1e-300)), math.log10(min(max(good), 1e300))
    pad = max(margin * (high - low), (fewest - (high - low)) / 2)
    return 10 ** (low - pad), 10 ** (high + pad)


def tick(value: float) -> str:
    """Short: very large and very small ones as powers of ten.

    Example:
        >>> tick(1e-7), tick(0.005), tick(20.0), tick(2e5)
        ('10⁻⁷', '0.005', '20', '2·10⁵')
    """
    if 0.001 <= abs(value) < 10000 or value == 0:
        return f"{value:.4g}"
    digit, _, power = f"{value:.0e}".partition("e")
    ten = "10" + str(int(power)).translate(SUPERSCRIPT)
    return ten if digit == "1" else f"{digit}·{ten}"


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, ..."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)
