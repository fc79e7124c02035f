"""The tables of a diagnosis: trials, first step by depth, claims, growth from block to block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from lightning_norms.reports.console import loss_text, number, spaced, with_deviation
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Fix, Look, Trial, Verdict
from lightning_norms.reports.diagnosis.mechanisms import bottom_over_top
from lightning_norms.reports.table import Cell, Column, Table

LOOK_COLUMNS = {
    "stream_rms": "stream\nRMS",
    "block_change": "block\nchange",
    "branch_ratio": "branch/\nstream",
    "parameter_gradient": "gradient\n(weights)",
    "stream_gradient": "gradient\n(stream)",
    "first_update": "first\nupdate",
}


class Mark(NamedTuple):
    """Sign and tone of a verdict."""

    sign: str
    tone: str


MARKS = {Verdict.TRAINS: Mark("✓", "good"), Verdict.UNDECIDED: Mark("?", "open")}
BAD = Mark("✗", "bad")
CLAIM_MARKS = {
    True: Cell("✓\u00a0holds", "good"),
    False: Cell("✗\u00a0does\u00a0not\u00a0hold", "bad"),
    None: Cell("?\u00a0not\u00a0decided", "open"),
}


def trial_order(diagnosis: Diagnosis) -> list[str]:
    """Names of the trials: as given is number 0, then the fixes in their order, then any other."""
    fixes, trials = (fix.name for fix in diagnosis.fixes), (trial.name for trial in diagnosis.trials)
    return list(dict.fromkeys([AS_GIVEN, *fixes, *trials]))


def trials_table(diagnosis: Diagnosis) -> Table:
    """One row a change, as given first, with the number that its curve has, too."""
    titles = ("end loss", "gain", "bottom/top\ngradient", "steps")
    columns = (
        Column("trial", "text"),
        Column("verdict", "word"),
        *(Column(title, "number") for title in titles),
        Column("why this verdict", "text", only_page=True),
    )
    fixes = {fix.name: fix for fix in diagnosis.fixes}
    runs = {name: [t for t in diagnosis.trials if t.name == name] for name in trial_order(diagnosis)}
    rows = [_trial_row(i, trials, fixes.get(name)) for i, (name, trials) in enumerate(runs.items()) if trials]
    steps = diagnosis.trials[0].planned_steps if diagnosis.trials else 0
    return Table(f"Short trials of {steps} steps, same batches", columns, rows)


def _trial_row(index: int, trials: Sequence[Trial], fix: Fix | None) -> list[str | Cell]:
    first, verdicts = trials[0], list(dict.fromkeys(trial.verdict for trial in trials))
    ratio, end = bottom_over_top(first, -1), mean_end(trials)
    marks = " ".join(f"{MARKS.get(v, BAD).sign} {v.value}".replace(" ", "\u00a0") for v in verdicts)
    worst = next((v for v in verdicts if v not in MARKS), verdicts[-1])
    return [
        Cell(f"{index} {first.name}", note=first.change or "nothing is changed", brief=first.name),
        Cell(marks, MARKS.get(worst, BAD).tone, brief="/".join(v.value for v in verdicts)),
        "-" if end is None else loss_text(end),
        "" if fix is None else "-" if fix.gain is None else with_deviation(fix.gain, fix.spread, signed=True),
        "-" if ratio is None else number(ratio),
        "/".join(dict.fromkeys(str(len(trial.losses)) for trial in trials)),
        first.reason,
    ]


def mean_end(trials: Iterable[Trial]) -> float | None:
    """Mean end loss of those that have one."""
    losses = [trial.end_loss for trial in trials if trial.end_loss is not None]
    return fmean(losses) if losses else None


def look_table(look: Look) -> Table:
    """A few blocks of every stack by what was measured at the first step, the top block first."""
    profiles = {title: profile for name, title in LOOK_COLUMNS.items() if (profile := look.profile(name)) is not None}
    values = [dict(zip(profile.groups, profile.values, strict=True)) for profile in profiles.values()]
    groups = list(dict.fromkeys(group for column in values for group in column if "block_" in group))
    rows = [
        (groups[i], *(number(column[groups[i]]) if groups[i] in column else "" for column in values))
        for i in reversed(spaced(range(len(groups)), 6))
    ]
    columns = (Column("depth"), *(Column(title, "number") for title in profiles))
    return Table("At the first step, by depth", columns, rows)


def parts_table(look: Look) -> Table:
    """Where there are no blocks, the quantities of what there is."""
    flat = [profile for profile in look.profiles if not profile.of_blocks() and profile.name != "norm_input"]
    values = [dict(zip(profile.groups, profile.values, strict=True)) for profile in flat]
    groups = dict.fromkeys(group for column in values for group in column)
    rows = [(group, *(number(column[group]) if group in column else "" for column in values)) for group in groups]
    columns = (Column("part"), *(Column(profile.name.replace("_", " "), "number") for profile in flat))
    return Table("At the first step", columns, rows)


def claims_table(diagnosis: Diagnosis) -> Table:
    """Each popular sentence, whether it holds, and what was measured."""
    columns = (Column("popular sentence", "text"), Column("here"), Column("measured here", "text"))
    rows = [(claim.popular, CLAIM_MARKS[claim.holds], claim.measured) for claim in diagnosis.claims]
    return Table("Popular explanations", columns, rows)


def growths_table(look: Look) -> Table:
    """The growth of each quantity from block to block."""
    meanings = {profile.name: profile.meaning for profile in look.profiles}
    columns = [Column(title, "number") for title in ("factor", "95 % interval", "blocks")]
    rows = [
        (
            meanings.get(growth.name, growth.name.replace("_", " ")) + (f", {growth.stack}" if growth.stack else ""),
            f"x {growth.factor:.3f}",
            f"{growth.low:.3f} to {growth.high:.3f}",
            str(growth.blocks),
        )
        for growth in look.growths
    ]
    return Table("Growth by depth", (Column("from one block to the next"), *columns), rows)
