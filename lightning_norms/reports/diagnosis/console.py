"""A diagnosis for a terminal of 80 columns: the trials as a table, depth as a few numbers, and the answer in words."""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table

from lightning_norms.reports.console import number
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Fix, Trial

LOOK_COLUMNS = (
    ("stream_rms", "stream\nRMS"),
    ("block_change", "block\nchange"),
    ("branch_ratio", "branch/\nstream"),
    ("parameter_gradient", "gradient\n(weights)"),
    ("stream_gradient", "gradient\n(stream)"),
    ("first_update", "first\nupdate"),
)


def diagnosis_text(found: Diagnosis) -> Iterator[RenderableType]:
    """The parts of the report, in the order in which they are read."""
    if found.look.profiles:
        yield look_table(found)
    if found.trials:
        yield trials_table(found)
    for paragraph in found.summary:
        yield ""
        yield paragraph
    yield from _patch(found)


def look_table(found: Diagnosis) -> Table:
    """A few blocks of every stack by what was measured at the first step, the top block first."""
    table = Table(title="At the first step, by depth", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("depth", no_wrap=True, overflow="ellipsis", max_width=16)
    shown = [(profile, title) for name, title in LOOK_COLUMNS if (profile := found.look.profile(name)) is not None]
    for _, title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    groups = list(dict.fromkeys(group for profile, _ in shown for group in profile.groups if "block_" in group))
    if len(groups) > 6:
        last = len(groups) - 1
        groups = [groups[round(i * last / 5)] for i in range(6)]
    for group in reversed(groups):
        values = [dict(zip(profile.groups, profile.values, strict=True)).get(group) for profile, _ in shown]
        table.add_row(group, *("" if value is None else number(value) for value in values))
    return table


def trials_table(found: Diagnosis) -> Table:
    """One row a change: as given first, then the fixes in order."""
    steps = found.trials[0].planned_steps
    table = Table(title=f"Short trials of {steps} steps, same batches", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trial", overflow="fold", max_width=20)
    table.add_column("verdict", no_wrap=True)
    table.add_column("end loss", justify="right")
    table.add_column("gain", justify="right")
    table.add_column("bottom/top\ngradient", justify="right")
    table.add_column("steps", justify="right")
    given = [trial for trial in found.trials if trial.name == AS_GIVEN]
    table.add_row(AS_GIVEN, found.verdict.value, _mean(given), "", _ratio(given[0]), str(len(given[0].losses)))
    for fix in found.fixes:
        runs = [trial for trial in found.trials if trial.name == fix.name]
        verdicts = list(dict.fromkeys(verdict.value for verdict in fix.verdicts))
        steps_taken = str(max(len(trial.losses) for trial in runs))
        table.add_row(fix.name, "/".join(verdicts), _mean(runs), _gain(fix), _ratio(runs[0]), steps_taken)
    return table


def _patch(found: Diagnosis) -> Iterator[RenderableType]:
    """The smallest change of the YAML file that helps."""
    best = found.best
    if best is None or found.trains or not best.patch:
        return
    yield ""
    yield f"The change ({best.name}), for your YAML file (callbacks are added to the list):"
    yield ""
    yield Padding(yaml.safe_dump(best.patch, sort_keys=False).rstrip(), (0, 0, 0, 2))


def _mean(trials: list[Trial]) -> str:
    ends = [trial.end_loss for trial in trials if trial.end_loss is not None]
    return f"{sum(ends) / len(ends):.3f}" if ends else "-"


def _gain(fix: Fix) -> str:
    if fix.gain is None:
        return "-"
    return f"{fix.gain:+.3f}" if fix.spread is None else f"{fix.gain:+.3f} ± {fix.spread:.3f}"


def _ratio(trial: Trial) -> str:
    """Bottom block's gradient norm over the top block's, at the last recorded step."""
    rows = next(iter(trial.gradients.stacks().values()), ())
    if len(rows) < 2 or not trial.gradients.steps:
        return "-"
    bottom, top = trial.gradients.values[rows[0]][-1], trial.gradients.values[rows[-1]][-1]
    return number(bottom / top) if top else "-"
