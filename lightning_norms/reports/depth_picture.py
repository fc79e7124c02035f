"""Plain numbers to pictures, without a display and without matplotlib's global state."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.console import spaced

MOST_DECADES, FEWEST_DECADES = 12, 4
ZERO, INFINITE, MISSING = "hotpink", "red", "lightgrey"


def depth_heat_map(profile: Profile, title: str, unit: str) -> Figure:
    """Depth (block 0 at the bottom) by optimizer step, colour on a log scale.

    ::

        head     ▒▒▒▒▒▒▒▒   top
        47       ▓▓▓▓▓▓▓▓
        ...
        0        ▓▒░░····   a bottom that goes dark has stopped learning
        embedding▓▒░░····
                 0  30  90  optimizer step

    Args:
        profile: values [groups][steps]. Exact zeros are pink, infinities red, NaN grey.
        title: what is shown.
        unit: label of the colour bar, with the unit.
    """
    figure = Figure(figsize=(9.5, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    mesh = draw_depth_map(axes, profile, range(len(profile.steps) + 1), colour_limits([profile]))
    figure.colorbar(mesh, ax=axes, label=unit, pad=0.02)
    axes.set_title(title)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_ylabel("depth (block, from the bottom up)")
    axes.set_xlabel("optimizer step")
    _label_steps(axes, profile.steps)
    patches = [Patch(color=colour, label=label) for colour, label in strange_values(profile)]
    if patches:
        figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), frameon=False)
    return figure


def draw_depth_map(
    axes: Axes,
    profile: Profile,
    edges: Sequence[float],
    limits: tuple[float, float],
    shades: int = 256,
    names: int = 12,
) -> QuadMesh:
    """Draw the values of a profile as colours, depth upwards, and name about a dozen depths.

    Args:
        axes: empty axes.
        profile: values [groups][steps].
        edges: where each step begins on the horizontal axis, and where the last one ends.
        limits: lowest and highest value on the colour scale.
        shades: number of colours.
        names: how many blocks are named, over all stacks.
    """
    low, high = limits
    values = _values(profile)
    colours = colormaps["viridis"].resampled(shades).with_extremes(bad=MISSING, under=ZERO, over=INFINITE)
    # Outside the colour range means zero or infinite, so what is merely tiny is shown as the lowest colour.
    shown = np.select([values <= 0, np.isposinf(values)], [low / 10, high * 10], np.clip(values, low, high))
    rows = _edges(profile)
    mesh = axes.pcolormesh(edges, rows, np.ma.masked_invalid(shown), norm=LogNorm(low, high), cmap=colours)
    _label_depth(axes, profile, rows, names)
    return mesh


def colour_limits(profiles: Iterable[Profile]) -> tuple[float, float]:
    """Colour range: from the largest down to the least positive finite value, but 4 to 12 decades.

    Four at the least, so that a calm run looks calm: its noise must not fill the colours of a dying one.
    """
    values = np.concatenate([_values(profile).ravel() for profile in profiles])
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 0.1, 1.0
    high = float(np.clip(positive.max(), 1e-60, 1e60))  # matplotlib's logarithms end at the ends of float64
    low = float(np.clip(positive.min(), high * 10.0**-MOST_DECADES, high * 10.0**-FEWEST_DECADES))
    return low, high


def strange_values(profile: Profile) -> list[tuple[str, str]]:
    """Colour and meaning of what is in the picture but not on its colour scale."""
    values = _values(profile)
    kinds = (
        (ZERO, "exactly 0", values <= 0),
        (INFINITE, "infinite", np.isposinf(values)),
        (MISSING, "NaN or not measured", np.isnan(values)),
    )
    return [(colour, label) for colour, label, where in kinds if where.any()]


def png(figure: Figure) -> bytes:
    """Return ``figure`` as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def pixels(figure: Figure) -> NDArray[np.uint8]:
    """The picture as uint8 [height, width, 3], for a logger's ``add_image``."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=figure.dpi)
    width, height = (int(side) for side in figure.canvas.get_width_height())
    rgba: NDArray[np.uint8] = np.frombuffer(buffer.getvalue(), dtype=np.uint8).reshape(height, width, 4)
    return np.ascontiguousarray(rgba[:, :, :3])


def _values(profile: Profile) -> NDArray[np.float64]:
    return np.array(profile.values, dtype=np.float64).reshape(len(profile.groups), len(profile.steps))


def _edges(profile: Profile) -> NDArray[np.float64]:
    """Row borders; in a deep network everything but blocks gets more height, so that its name has room."""
    blocks = {row for rows in profile.stacks().values() for row in rows}
    extra = max(1.0, len(profile.groups) / 24)
    return np.cumsum([0.0, *(1.0 if row in blocks else extra for row in range(len(profile.groups)))])


def _label_depth(axes: Axes, profile: Profile, edges: NDArray[np.float64], names: int) -> None:
    """Name every group that is not a block, and a few blocks of each stack."""
    stacks = profile.stacks()
    blocks = {row for rows in stacks.values() for row in rows}
    labels = {row: group for row, group in enumerate(profile.groups) if row not in blocks}
    for label, rows in stacks.items():
        for row in spaced(rows, max(2, names // len(stacks))):
            labels[row] = label + str(int(profile.groups[row].rpartition("_")[2]))
    axes.set_yticks([(edges[row] + edges[row + 1]) / 2 for row in labels], list(labels.values()))
    for row in range(1, len(profile.groups)):
        if (row in blocks) != (row - 1 in blocks):
            axes.axhline(edges[row], color="white", linewidth=1.5)


def _label_steps(axes: Axes, steps: Sequence[int]) -> None:
    shown = spaced(range(len(steps)), 11)
    axes.set_xticks([column + 0.5 for column in shown], [str(steps[column]) for column in shown])
