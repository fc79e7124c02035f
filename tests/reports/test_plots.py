"""Plots as SVG: values where they belong, in the colours of the page, and nothing that a page may not hold."""

import math
import re
from xml.etree import ElementTree

import pytest

from lightning_norms.reports.plots import Line, draw_dots, draw_line, line_of, log_axis, plot, to_svg

NAN, INF = math.nan, math.inf


def drawn(points, line=Line(), limits=(0.0, 10.0)):  # noqa: B008
    """The points of the one line in a plot of 0 to 4 by ``limits``, as (x, y) of the picture; a list a stroke."""
    with plot(108, left=10, right=0, top=0, bottom=8) as axes:  # 320 by 100 pixels
        axes.set(xlim=(0, 4), ylim=limits)
        axes.grid(visible=False)
        draw_line(axes, points, line)
        svg = to_svg(axes, "a line")
    paths = [node.get("d") for node in ElementTree.fromstring(svg).iter("path") if line.colour in node.get("style")]
    strokes = [stroke for path in paths for stroke in path.split("M") if "L" in stroke]
    return [[tuple(map(float, point.split())) for point in stroke.split("L")] for stroke in strokes]


def test_a_line_goes_through_its_points():
    assert drawn([(0, 10.0), (1, 5.0), (2, 7.5)]) == [[(10, 0), (90, 50), (170, 25)]]


def test_a_line_is_broken_where_nothing_was_measured_and_a_lonely_point_is_a_dot():
    line, dot = drawn([(0, 10.0), (1, 5.0), (2, NAN), (3, 2.0), (4, NAN)])
    assert line == [(10, 0), (90, 50)]
    assert dot[0] == pytest.approx((250, 80))
    assert set(dot) == {dot[0]}


def test_what_is_beyond_the_limits_stands_at_the_edge():
    assert drawn([(0, INF), (2, -3.0)]) == [[(10, 0), (170, 100)]]


def test_long_lines_keep_their_peaks_and_stay_short():
    values = [5 + 0.001 * math.sin(i) for i in range(5000)]
    values[1234], values[4321] = 9.0, 1.0
    ((*points,),) = drawn([(i * 4 / 5000, value) for i, value in enumerate(values)])
    assert len(points) < 2000
    heights = [y for _, y in points]
    assert (min(heights), max(heights)) == (10, 90)


def svg_of(draw):
    with plot(200) as axes:
        draw(axes)
        return to_svg(axes, 'a "plot" & <more>')


def test_a_plot_follows_the_page_and_brings_nothing_along():
    def draw(axes):
        draw_line(axes, [(0, 1.0), (1, 2.0)], line_of(0))
        draw_dots(axes, [0.5], [1.5], line_of(9))
        axes.text(0, 1, "$cost$ <b>\x00漢", color="#123456")

    svg = svg_of(draw)
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == 'a "plot" & <more>'
    assert {"ink", "edge", "soft", "s1", "s2"} <= set(re.findall(r"var\(--(\w+)\)", svg))
    assert re.findall(r"#\w{6}", svg) == ["#123456"]
    assert "$cost$ <b>漢" in [node.text for node in root]
    assert not re.search(r"://|url\(|font-family| id=|<style|<defs", svg)
    assert svg == svg_of(draw)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.3, 4.0, ["0.5", "1", "2"]),
        (1e-8, 10.0, ["10⁻⁸", "10⁻⁶", "10⁻⁴", "0.01", "1"]),
        (2e4, 3e5, ["2·10⁴", "5·10⁴", "10⁵", "2·10⁵"]),
    ],
)
def test_logarithmic_ticks_are_few_and_round(low, high, labels):
    svg = svg_of(lambda axes: (log_axis(axes, low, high), axes.set_xticks([])))
    assert [node.text for node in ElementTree.fromstring(svg) if node.tag == "text"] == labels
