"""The tables of a diagnosis, as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from xml.etree.ElementTree import Element

from lightning_norms.reports.console import number
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Facts, Fix, Trial, Verdict
from lightning_norms.reports.diagnosis.mechanisms import bottom_over_top
from lightning_norms.reports.elements import Content, element, table

MARKS = {Verdict.TRAINS: ("✓", "good"), Verdict.UNDECIDED: ("?", "open")}
"""Sign and colour of a verdict; all others are a cross."""


def trial_order(found: Diagnosis) -> list[str]:
    """Names of the trials: as given is number 0, then the fixes in their order, then any other."""
    return list(dict.fromkeys([AS_GIVEN, *(fix.name for fix in found.fixes), *(trial.name for trial in found.trials)]))


def trials_table(found: Diagnosis, order: Sequence[str]) -> Content:
    """One row a change, with its number in ``order``, which the curves have too."""
    head = ("trial", "verdict", "end loss", "gain", "bottom/top gradient", "steps", "why this verdict")
    fixes = {fix.name: fix for fix in found.fixes}
    rows = [
        _trial_row(i, name, [trial for trial in found.trials if trial.name == name], fixes.get(name))
        for i, name in enumerate(order)
        if any(trial.name == name for trial in found.trials)
    ]
    return table(head, rows, numbers=(2, 3, 4, 5), texts=(0, 6))


def _trial_row(index: int, name: str, runs: Sequence[Trial], fix: Fix | None) -> list[Content]:
    ratio = bottom_over_top(runs[0], -1)
    gain = (
        ""
        if fix is None or fix.gain is None
        else f"{fix.gain:+.3f}" + ("" if fix.spread is None else f" ± {fix.spread:.3f}")
    )
    return [
        [f"{index} {name}", element("div", runs[0].change or "nothing is changed", class_="soft")],
        [[_badge(verdict), " "] for verdict in dict.fromkeys(trial.verdict for trial in runs)],
        end_loss([trial.end_loss for trial in runs if trial.end_loss is not None]),
        gain,
        "-" if ratio is None else number(ratio),
        "/".join(dict.fromkeys(str(len(trial.losses)) for trial in runs)),
        runs[0].reason,
    ]


def _badge(verdict: Verdict) -> Element:
    sign, colour = MARKS.get(verdict, ("✗", "bad"))
    return element("b", f"{sign} {verdict.value}".replace(" ", "\u00a0"), class_=colour)


def end_loss(losses: Sequence[float]) -> str:
    """Mean over seeds."""
    return f"{fmean(losses):.3f}" if losses else "-"


def claims_table(found: Diagnosis) -> Content:
    """Each popular sentence, whether it holds, and what was measured."""
    words = {True: ("✓ holds", "good"), False: ("✗ does not hold", "bad"), None: ("? not decided", "open")}
    rows = [
        (
            claim.popular,
            element("b", words[claim.holds][0].replace(" ", "\u00a0"), class_=words[claim.holds][1]),
            claim.measured,
        )
        for claim in found.claims
    ]
    return table(("popular sentence", "here", "measured here"), rows, texts=(0, 2)) if rows else None


def growths_table(found: Diagnosis) -> Content:
    """By how much each quantity grows from block to block."""
    named = {profile.name: profile.meaning for profile in found.look.profiles}
    rows = [
        (
            named.get(each.name, each.name.replace("_", " ")) + (f", {each.stack}" if each.stack else ""),
            f"x {each.factor:.3f}",
            f"{each.low:.3f} to {each.high:.3f}",
            str(each.blocks),
        )
        for each in found.look.growths
    ]
    return table(("from one block to the next", "factor", "95 % interval", "blocks"), rows, (1, 2, 3)) if rows else None


def parts_table(found: Diagnosis) -> Content:
    """Where there are no blocks, the quantities of what there is."""
    flat = [profile for profile in found.look.profiles if not profile.of_blocks() and profile.name != "norm_input"]
    groups = list(dict.fromkeys(group for profile in flat for group in profile.groups))
    values = [dict(zip(profile.groups, profile.values, strict=True)) for profile in flat]
    rows = [(group, *(number(each[group]) if group in each else "" for each in values)) for group in groups]
    head = ("part", *(profile.name.replace("_", " ") for profile in flat))
    return table(head, rows, range(1, len(head))) if rows else None


def facts_table(facts: Facts) -> Content:
    """The run as it was configured."""
    blocks = ", ".join(f"{label.rstrip('.')} {count}".strip() for label, count in facts.blocks.items())
    pairs = (
        ("module", facts.module),
        ("parameters", f"{facts.parameters:,}, of them {facts.trainable:,} trainable"),
        ("blocks", blocks or "none found"),
        ("optimizer", facts.optimizer + ("" if facts.beta2 is None else f", beta2 {facts.beta2:g}")),
        ("learning rate", rate(facts) if math.isfinite(facts.learning_rate) else "none"),
        ("scheduler", facts.scheduler or "none"),
        ("warmup", "none" if facts.warmup_steps is None else f"{facts.warmup_steps} steps"),
        ("steps of the run", "unlimited" if facts.total_steps is None else str(facts.total_steps)),
        ("precision, ranks, accumulation", f"{facts.precision or '-'}, {facts.ranks}, {facts.accumulate}"),
        ("optimization", "manual" if facts.manual else "automatic"),
        ("callbacks in the trials", ", ".join(facts.callbacks) or "none"),
        ("callbacks left out", ", ".join(facts.left_out) or "none"),
    )
    return table(("fact", ""), pairs)


def rate(facts: Facts) -> str:
    """The learning rate."""
    return f"{facts.learning_rate:g}"
