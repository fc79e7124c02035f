import itertools
import math

import numpy as np
import pytest

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.depth_picture import depth_heat_map, pixels, png


def deep(blocks=48, columns=31):
    groups = ("embedding", *(f"block_{i:02d}" for i in range(blocks)), "final_norm", "head")
    values = tuple(tuple(10.0 ** -(7 * (1 - row / 50)) for _ in range(columns)) for row in range(len(groups)))
    return Profile(groups, tuple(range(0, 10 * columns, 10)), values)


def draw(profile):
    figure = depth_heat_map(profile, "Gradient norm by depth", "L2 norm")
    figure.draw_without_rendering()
    return figure


def test_deep_run_has_block_0_at_the_bottom_and_readable_labels():
    figure = draw(deep())
    axes, bar = figure.axes
    ticks = {label.get_text(): label.get_position()[1] for label in axes.get_yticklabels()}
    assert {"embedding", "0", "47", "final_norm", "head"} <= set(ticks)
    assert ticks["embedding"] < ticks["0"] < ticks["47"] < ticks["final_norm"] < ticks["head"]
    boxes = sorted((label.get_window_extent() for label in axes.get_yticklabels()), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 2 for below, above in itertools.pairwise(boxes))
    assert not axes.yaxis_inverted()
    steps = [label.get_text() for label in axes.get_xticklabels()]
    assert steps[0] == "0"
    assert steps[-1] == "300"
    assert (axes.get_xlabel(), axes.get_title()) == ("optimizer step", "Gradient norm by depth")
    assert bar.get_ylabel() == "L2 norm"


def test_zero_infinite_and_nan_have_their_own_colours_and_a_legend():
    nan, inf = math.nan, math.inf
    values = ((0.0, 1.0, inf), (1e-3, nan, 1e-30))
    figure = draw(Profile(("block_00", "block_01"), (0, 1, 2), values))
    mesh = figure.axes[0].collections[0]
    colours = mesh.to_rgba(mesh.get_array()).reshape(2, 3, 4)
    pink, red, grey = (1.0, 0.41, 0.71), (1.0, 0.0, 0.0), (0.83, 0.83, 0.83)
    for cell, colour in zip((colours[0, 0], colours[0, 2], colours[1, 1]), (pink, red, grey), strict=True):
        assert cell[:3] == pytest.approx(colour, abs=0.01)
    assert colours[1, 2, :3] == pytest.approx((0.267, 0.005, 0.329), abs=0.01)  # tiny, not zero
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("exactly 0", "infinite", "NaN or not measured"),
    ]


@pytest.mark.parametrize(
    "values", [((0.0,),), ((math.nan,),), ((math.inf,),), ((2.0,),), ((5e-324,),), ((1e308,),), ((-1.0,),)]
)
def test_one_strange_value_still_draws(values):
    low, high = draw(Profile(("block_00",), (0,), values)).axes[0].collections[0].get_clim()
    assert 0 < low < high < float("inf")


@pytest.mark.parametrize("groups", [(), ("other",), ("encoder.block_00", "encoder.block_01", "decoder.block_00")])
def test_unusual_depths_still_draw(groups):
    axes = draw(Profile(groups, (0, 10), tuple((1.0, 2.0) for _ in groups))).axes[0]
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == [group.replace("block_0", "") for group in groups]


def test_file_and_pixels():
    figure = depth_heat_map(deep(4, 3), "t", "u")
    assert png(figure).startswith(b"\x89PNG")
    image = pixels(figure)
    assert image.shape == (720, 1140, 3)
    assert image.dtype == np.uint8
    assert len(np.unique(image)) > 20
