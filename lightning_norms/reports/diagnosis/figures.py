"""Plots of a diagnosis: losses of the trials, gradients by depth over time, sizes by depth at the first step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports import plots
from lightning_norms.reports.console import number, spaced
from lightning_norms.reports.depth_picture import colour_limits, draw_depth_map, strange_values
from lightning_norms.reports.diagnosis.data import AS_GIVEN, DepthProfile, Diagnosis, Trial, Verdict
from lightning_norms.reports.diagnosis.reach import FIRST, end_of, weakest
from lightning_norms.reports.diagnosis.tables import trial_order
from lightning_norms.reports.pages import printable
from lightning_norms.reports.plots import Key, Line, Picture, draw_line, line_of, log_axis, palette, tick, to_svg

PROFILES = {
    "stream_rms": "Residual stream, RMS",
    "parameter_gradient": "Gradient of the weights",
    "stream_gradient": "Gradient of the stream",
    "first_update": "First update / weights",
}
SHADES, MOST_ROWS, MOST_COLUMNS = 32, 100, 60
"""Colours, blocks and steps of a map of gradients, at most."""


# --- sizes by depth ---------------------------------------------------------------------------------------------------


def depth_plots(diagnosis: Diagnosis) -> Iterator[Picture]:
    """One small plot a quantity at the first step: block by block, one line a stack; dashed after the rescale."""
    for name, title in PROFILES.items():
        profile = diagnosis.look.profile(name)
        if profile is None or not profile.of_blocks():
            continue
        rescaled = diagnosis.rescaled_look.profile(name) if diagnosis.rescaled_look is not None else None
        stacks, after = profile.of_blocks(), {} if rescaled is None else rescaled.of_blocks()
        lines = {label: Line() if len(stacks) == 1 else line_of(i) for i, label in enumerate(stacks)}
        ends = {label: _ends(label, values) for label, values in stacks.items()}
        legend = [lines[label].key(words) for label, words in ends.items()] if len(stacks) > 1 or after else []
        if after:
            legend.append(Line(dashed=True).key("Dashed: after the residual rescale."))
        dashed = [(replace(line, dashed=True), after[label]) for label, line in lines.items() if label in after]
        drawn = [*((lines[label], values) for label, values in stacks.items()), *dashed]
        svg = plots.depth_plot(190, f"{profile.meaning}, by block. {' '.join(ends.values())}", drawn)
        if svg is not None:
            caption = _caption(profile, [] if legend else ends.values())
            yield Picture(title=title, svg=svg, caption=caption, legend=legend)


def _caption(profile: DepthProfile, ends: Iterable[str]) -> str:
    sentences = [profile.meaning[:1].upper() + profile.meaning[1:] + ".", *ends]
    values = [value for stack in profile.of_blocks().values() for value in stack]
    zeros, strange = values.count(0), sum(not math.isfinite(value) for value in values)
    if zeros or strange:
        sentences.append(f"Blocks at exactly 0, drawn at the lower edge: {zeros}. Not finite: {strange}.")
    outside = [(g, v) for g, v in zip(profile.groups, profile.values, strict=True) if "block_" not in g]
    if outside:
        sentences.append(f"Outside the blocks: {', '.join(f'{group} {number(value)}' for group, value in outside)}.")
    return " ".join(sentences)


def _ends(label: str, values: Sequence[float]) -> str:
    name = f"{label.rstrip('.')}: " if label else ""
    last = f", {number(values[-1])} in block {len(values) - 1}" if len(values) > 1 else ""
    return f"{name}{number(values[0])} in block 0{last}."


# --- losses -----------------------------------------------------------------------------------------------------------


def loss_plot(diagnosis: Diagnosis) -> Picture | None:
    """Loss against step for every trial, with its number at its end; dashed if it does not train."""
    order = trial_order(diagnosis)
    trials = [trial for trial in diagnosis.trials if any(math.isfinite(loss) for loss in trial.losses)]
    if not trials:
        return None
    references = list(_references(diagnosis))
    first = {trial.name: trial for trial in reversed(trials)}  # the first seed's
    meaning = " ".join(_end_in_words(trial) for trial in trials if trial is first[trial.name])
    with plots.plot(270, right=24) as axes:
        losses = [loss for trial in trials for loss in trial.losses if math.isfinite(loss)]
        _limit(axes, trials, losses, [value for *_, value in references])
        axes.set(xlim=(0, max(max(len(trial.losses) for trial in trials) - 1, 1)), xlabel="optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for name, _, value in references:
            axes.axhline(value, color=palette()["ink"], linewidth=1.5, linestyle=(0, (1, 2)))
            # Where the curves are not: low on the left, high on the right.
            x, side = (0.01, "left") if name == "constant" else (0.99, "right")
            axes.text(x, value, name, ha=side, va="bottom", transform=axes.get_yaxis_transform())
        for trial in sorted(trials, key=lambda trial: trial.name == AS_GIVEN):  # as given on top
            line = _line(trial, order)
            repeated = trial is not first[trial.name]
            draw_line(axes, enumerate(trial.losses), replace(line, width=1, opacity=0.5) if repeated else line)
        _number_ends(axes, trials, order)
        svg = to_svg(axes, f"Training loss by step, nats. {meaning}")
        highest = axes.get_ylim()[1]
    caption = "Training loss, nats. Solid: trains; dashed: any other verdict. Numbers as in the table of trials."
    if references:
        caption += f" Dotted: {' and '.join(words for _, words, _ in references)}."
    cut = sum(loss > highest for loss in losses)
    if cut:
        caption += f" Drawn at the upper edge: losses above {number(highest)} ({cut})."
    legend = [_line(first[name], order).key(f"{i} {name}") for i, name in enumerate(order) if name in first]
    return Picture(title="Loss of every trial", svg=svg, caption=caption, legend=legend)


def _limit(axes: Axes, trials: Sequence[Trial], losses: Sequence[float], references: Sequence[float]) -> None:
    """Set the vertical limits: logarithmic if the losses span much."""
    firsts = [next(loss for loss in trial.losses if math.isfinite(loss)) for trial in trials]
    usual = sorted(losses)[int(0.97 * (len(losses) - 1))]  # a spike must not flatten everything else
    low, high = min([*losses, *references]), max([*firsts, *references, usual])
    if low > 0 and high / low > 8:
        log_axis(axes, low / 1.05, high * 1.05)
    else:
        margin = 0.05 * (high - low) or 0.5
        axes.set_ylim(low - margin, high + margin)
        axes.yaxis.set_major_formatter(tick)


def _references(diagnosis: Diagnosis) -> Iterator[tuple[str, str, float]]:
    """Words on the plot, words in the caption, and the loss."""
    uniform, constant = diagnosis.look.uniform_loss, diagnosis.look.constant_loss
    if uniform is not None and math.isfinite(uniform):
        yield "ln V", f"ln V, the loss of knowing nothing ({uniform:.3f})", uniform
    if constant is not None and math.isfinite(constant):
        yield "constant", f"the loss of the best constant prediction ({constant:.3f})", constant


def _line(trial: Trial, order: Sequence[str]) -> Line:
    line = Line(width=2.3) if trial.name == AS_GIVEN else line_of(order.index(trial.name) - 1)
    return replace(line, dashed=trial.verdict is not Verdict.TRAINS)


def _number_ends(axes: Axes, trials: Sequence[Trial], order: Sequence[str]) -> None:
    """The number of each trial where its curve ends, moved apart where they would lie on one another."""
    ends, low, high = [], *axes.get_ylim()
    for trial in {trial.name: trial for trial in reversed(trials)}.values():
        at, loss = max((i, loss) for i, loss in enumerate(trial.losses) if math.isfinite(loss))
        x, y = axes.transData.transform((at, min(max(loss, low), high)))
        ends.append((y, x, trial))
    placed: list[tuple[float, float]] = []
    for y, x, trial in sorted(ends, key=lambda end: -end[0]):
        while any(abs(y - other_y) < 10 and abs(x - other_x) < 12 for other_y, other_x in placed):
            y -= 1
        placed.append((y, x))
        left, bottom = axes.transAxes.inverted().transform((x + 4, y - 4))
        colour = palette()[_line(trial, order).colour]
        words = str(order.index(trial.name))
        axes.text(left, bottom, words, color=colour, fontweight="bold", transform=axes.transAxes)


def _end_in_words(trial: Trial) -> str:
    return f"{trial.name} ends at {'no finite loss' if trial.end_loss is None else format(trial.end_loss, '.3f')}."


# --- gradients by depth over time -------------------------------------------------------------------------------------


def heat_maps(trials: Sequence[Trial]) -> list[Picture]:
    """Gradient norm of every block over the steps of each trial, all in the same colours and to the same step."""
    drawn = [trial for trial in trials if trial.gradients.groups and trial.gradients.steps]
    values = (norm for trial in drawn for row in trial.gradients.values for norm in row)
    if not any(0 < norm < math.inf for norm in values):
        return []
    limits = colour_limits(trial.gradients for trial in drawn)
    end = max(trial.gradients.steps[-1] + 1 for trial in drawn)
    return [_heat_map(trial, limits, end) for trial in drawn]


def _heat_map(trial: Trial, limits: tuple[float, float], end: int) -> Picture:
    profile, words = trial.gradients, _weakest_in_words(trial)
    shown = _fewer(profile)
    with plots.plot(266, left=78 if any(profile.stacks()) else 44, bottom=74) as axes:
        mesh = draw_depth_map(axes, shown, [*shown.steps, profile.steps[-1] + 1], limits, SHADES, names=8)
        mesh.set(edgecolor="face", linewidth=0.5, clip_on=False)  # without edges, seams between the cells
        axes.set(xlim=(0, end), xlabel="optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(visible=False)
        scale = axes.figure.colorbar(mesh, cax=axes.inset_axes((0, -0.28, 1, 0.06)), orientation="horizontal")
        scale.solids.set(edgecolor="face", linewidth=0.5)  # type: ignore[union-attr]
        scale.outline.set_visible(False)
        scale.ax.xaxis.set_major_formatter(tick)
        svg = to_svg(axes, f"{trial.name}: gradient norm by block and step. {words}")
    caption = f"Gradient norm of every block, on a log scale. {words}"
    if len(profile.groups) > MOST_ROWS:
        caption += f" {MOST_ROWS} of {len(profile.groups)} blocks are drawn."
    legend = [Key(meaning, colour, "swatch") for colour, meaning in strange_values(profile)]
    return Picture(title=trial.name, svg=svg, caption=caption, legend=legend)


def _fewer(profile: Profile) -> Profile:
    """Blocks and steps evenly left out where there are too many, with names that a browser can show."""
    rows = spaced(range(len(profile.groups)), MOST_ROWS)
    columns = spaced(range(len(profile.steps)), MOST_COLUMNS)
    values = tuple(tuple(profile.values[row][column] for column in columns) for row in rows)
    names = tuple(printable(profile.groups[row]) for row in rows)
    return Profile(names, tuple(profile.steps[column] for column in columns), values)


def _weakest_in_words(trial: Trial) -> str:
    steps, first, last = (
        trial.gradients.steps,
        weakest(trial.gradients, FIRST),
        weakest(trial.gradients, end_of(trial.gradients)),
    )
    if first is None or last is None:
        return "No block has a gradient."
    return (
        f"The weakest block has {number(first[0])} of the strongest block's gradient at step {steps[0]}, "
        f"{number(last[0])} at step {steps[-1]} ({last[1]})."
    )
