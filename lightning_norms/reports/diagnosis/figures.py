"""Lines of a diagnosis as SVG: sizes by depth at the first step, and the losses of the trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from lightning_norms.reports.axes import Frame, Scale, line, log_limits, text, thinned
from lightning_norms.reports.console import number
from lightning_norms.reports.diagnosis.data import AS_GIVEN, DepthProfile, Diagnosis, Trial, Verdict
from lightning_norms.reports.elements import Content, element, figure

PROFILES = (
    ("stream_rms", "Residual stream, RMS"),
    ("parameter_gradient", "Gradient of the weights"),
    ("stream_gradient", "Gradient of the stream"),
    ("first_update", "First update / weights"),
)
COLOURS = 8
"""Line colours of the page, ``s1`` to ``s8``; ``s0`` is that of the text."""


# --- sizes by depth ---------------------------------------------------------------------------------------------------


def depth_figures(found: Diagnosis) -> Iterator[Element]:
    """One small plot a quantity at the first step: block by block, one line a stack; dashed after the rescale."""
    for name, title in PROFILES:
        profile = found.look.profile(name)
        if profile is None or not profile.of_blocks():
            continue
        after = found.rescaled_look.profile(name) if found.rescaled_look is not None else None
        drawn = _depth_lines(profile, after)
        if drawn is not None:
            yield figure(title, drawn, _depth_caption(profile, after))


def _depth_lines(profile: DepthProfile, after: DepthProfile | None) -> Element | None:
    stacks, later = profile.of_blocks(), after.of_blocks() if after is not None else {}
    limits = log_limits(value for values in [*stacks.values(), *later.values()] for value in values)
    if limits is None:
        return None
    frame = Frame(height=190)
    most = max(len(values) for values in stacks.values())
    x, y = frame.x(0, most - 1), frame.y(*limits, log=True)
    blocks = [mark for mark in x.ticks() if mark == int(mark) and mark < most]
    lines = [
        line(list(enumerate(values)), x, y, f"line s{_colour(i, stacks)}{style}")
        for drawn, style in ((stacks, ""), (later, " dashed"))
        for i, values in enumerate(drawn.values())
    ]
    meaning = f"{profile.meaning}, by block. " + " ".join(_ends(label, values) for label, values in stacks.items())
    return frame.picture(meaning, frame.axes(x, y, "block, from the bottom up", blocks), lines)


def _depth_caption(profile: DepthProfile, after: DepthProfile | None) -> Iterator[Content]:
    yield profile.meaning[:1].upper() + profile.meaning[1:] + ". "
    stacks = profile.of_blocks()
    for i, (label, values) in enumerate(stacks.items()):
        several = len(stacks) > 1 or after is not None
        yield [_sample(f"s{_colour(i, stacks)}") if several else None, " ", _ends(label, values), " "]
    if after is not None and after.of_blocks():
        yield [_sample("s0 dashed"), " Dashed: after the residual rescale. "]
    zeros = sum(value == 0 for values in stacks.values() for value in values)
    strange = sum(not math.isfinite(value) for values in stacks.values() for value in values)
    if zeros or strange:
        yield f"Blocks at exactly 0, drawn at the lower edge: {zeros}. Not finite: {strange}. "
    others = [(g, v) for g, v in zip(profile.groups, profile.values, strict=True) if "block_" not in g]
    if others and profile.name != "norm_input":
        yield "Outside the blocks: " + ", ".join(f"{group} {number(value)}" for group, value in others) + "."


def _ends(label: str, values: Sequence[float]) -> str:
    name = f"{label.rstrip('.')}: " if label else ""
    last = f", {number(values[-1])} in block {len(values) - 1}" if len(values) > 1 else ""
    return f"{name}{number(values[0])} in block 0{last}."


def _colour(index: int, of: Sequence[object] | dict[str, tuple[float, ...]]) -> int:
    return 0 if len(of) == 1 else 1 + index % COLOURS


def _sample(classes: str) -> Element:
    """A piece of line, for a legend."""
    stroke = element("path", d="M0 5h26", class_=f"line {classes}")
    return element("svg", stroke, viewBox="0 0 26 10", width=26, height=10, aria_hidden="true", class_="sample")


FRAME = Frame(height=270, right=24)
"""Of the losses."""


# --- losses -----------------------------------------------------------------------------------------------------------


def loss_figure(found: Diagnosis, order: Sequence[str]) -> Element | None:
    """Loss against step for every trial; dashed if it does not train. ``order`` gives each its number."""
    runs = [trial for trial in found.trials if any(math.isfinite(loss) for loss in trial.losses)]
    if not runs:
        return None
    lines = list(_references(found))
    firsts = [next(loss for loss in trial.losses if math.isfinite(loss)) for trial in runs]
    levels = [loss for trial in runs for loss in trial.losses if math.isfinite(loss)]
    known = [value for _, _, value in lines]
    usual = sorted(levels)[int(0.97 * (len(levels) - 1))]  # a spike must not flatten everything else
    y = _loss_scale(min([*levels, *known]), max([*firsts, *known, usual]))
    x = FRAME.x(0, max(max(len(trial.losses) for trial in runs) - 1, 1))
    curves = [
        line(thinned(trial.losses), x, y, _curve_class(trial, order.index(trial.name), trial.seed == runs[0].seed))
        for trial in sorted(runs, key=lambda trial: trial.name == AS_GIVEN)  # as given on top
    ]
    marks = [_reference(value, x, y) for value in known]
    names = [_name(name, value, x, y) for name, _, value in lines]
    meaning = "Training loss by step, nats. " + " ".join(
        _end_words(trial) for trial in runs if trial.seed == runs[0].seed
    )
    content = (FRAME.axes(x, y, "optimizer step"), marks, curves, names, _end_numbers(runs, order, x, y))
    caption = "Training loss, nats. Solid: trains; dashed: any other verdict. Numbers as in the table of trials."
    if lines:
        caption += " Dotted: " + " and ".join(words for _, words, _ in lines) + "."
    cut = sum(loss > y.high for loss in levels)
    if cut:
        caption += f" Drawn at the upper edge: losses above {number(y.high)} ({cut})."
    return figure("Loss of every trial", [FRAME.picture(meaning, *content), _loss_legend(runs, order)], caption)


def _loss_scale(low: float, high: float) -> Scale:
    """Logarithmic if the losses span much."""
    if low > 0 and high / low > 8:
        return FRAME.y(low / 1.05, high * 1.05, log=True)
    pad = 0.05 * (high - low) or 0.5
    return FRAME.y(low - pad, high + pad)


def _references(found: Diagnosis) -> Iterator[tuple[str, str, float]]:
    """On the plot, in the caption, and where."""
    look = found.look
    if look.uniform_loss is not None and math.isfinite(look.uniform_loss):
        yield "ln V", f"ln V, the loss of knowing nothing ({look.uniform_loss:.3f})", look.uniform_loss
    if look.constant_loss is not None and math.isfinite(look.constant_loss):
        yield "constant", f"the loss of the best constant prediction ({look.constant_loss:.3f})", look.constant_loss


def _reference(value: float, x: Scale, y: Scale) -> Element:
    return element("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="reference")


def _name(words: str, value: float, x: Scale, y: Scale) -> Element:
    """Where the curves are not: low on the left, high on the right."""
    height, left = y(value), words == "constant"
    return text(x.start + 4 if left else x.end - 4, height - 4, words, "start" if left else "end", "onplot")


def _curve_class(trial: Trial, index: int, is_first: bool) -> str:
    name = "s0 thick" if trial.name == AS_GIVEN else f"s{1 + (index - 1) % COLOURS}"
    dashed = "" if trial.verdict is Verdict.TRAINS else " dashed"
    return f"line {name}{dashed}{'' if is_first else ' again'}"


def _end_numbers(runs: Sequence[Trial], order: Sequence[str], x: Scale, y: Scale) -> Iterator[Element]:
    """The number of each trial where its curve ends, moved apart where they would lie on one another."""
    ends = []
    for trial in runs:
        finite = [(i, loss) for i, loss in enumerate(trial.losses) if math.isfinite(loss)]
        if trial.seed == next(each.seed for each in runs if each.name == trial.name):
            ends.append((y(finite[-1][1]), x(finite[-1][0]), order.index(trial.name)))
    used: list[tuple[float, float]] = []
    for height, at, index in sorted(ends):
        while any(abs(height - other) < 10 and abs(at - where) < 12 for other, where in used):
            height += 1
        used.append((height, at))
        yield text(at + 4, height + 4, str(index), "start", f"onplot t{0 if index == 0 else 1 + (index - 1) % COLOURS}")


def _loss_legend(runs: Sequence[Trial], order: Sequence[str]) -> Element:
    seen = {trial.name: trial for trial in reversed(runs)}
    items = [
        element("li", _sample(_curve_class(seen[name], i, True).removeprefix("line ")), f" {i} {name}")
        for i, name in enumerate(order)
        if name in seen
    ]
    return element("ul", items, class_="legend")


def _end_words(trial: Trial) -> str:
    return f"{trial.name} ends at {'no finite loss' if trial.end_loss is None else format(trial.end_loss, '.3f')}."
