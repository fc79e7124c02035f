"""The answer in plain words: the verdict, why, what fixes it, and which popular statements do not hold here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lightning_norms.reports.console import loss_text
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Fix, Verdict
from lightning_norms.reports.diagnosis.mechanisms import FAULTS

HEADLINES = {
    Verdict.TRAINS: "This configuration trains",
    Verdict.STALLS: "Dead on arrival: this configuration stalls silently",
    Verdict.SPIKES: "This configuration spikes",
    Verdict.DIVERGES: "This configuration diverges",
    Verdict.NON_FINITE: "This configuration ends in NaN or infinity",
    Verdict.UNDECIDED: "Undecided: so few steps do not show whether this configuration trains",
}


def summarize(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Write a few paragraphs, the verdict first."""
    return tuple(paragraph for paragraph in _paragraphs(diagnosis) if paragraph)


def _paragraphs(diagnosis: Diagnosis) -> Iterator[str]:
    trials = (t for t in diagnosis.trials if t.name == AS_GIVEN and t.verdict is diagnosis.verdict)
    baseline = next(trials, None)
    if baseline is not None:
        yield f"{HEADLINES[diagnosis.verdict]}. {baseline.reason[:1].upper()}{baseline.reason[1:]}."
    elif not diagnosis.facts.trainable:
        yield f"{HEADLINES[diagnosis.verdict]}."
    else:
        yield "Only the first step was measured and no trial was run, so there is no verdict."
    yield _first_losses(diagnosis)
    word = "Noticed" if diagnosis.trains else "Why"
    yield from (f"{word}: {cause.sentence}" for cause in diagnosis.causes)
    yield _fixes(diagnosis)
    yield from (f"Noticed: {flag.sentence}." for flag in diagnosis.look.flags if flag.name not in FAULTS)
    if diagnosis.facts.norms:
        yield "Norms: " + "; ".join(f"{count} {kind}" for kind, count in diagnosis.facts.norms.items()) + "."
    refuted = [claim for claim in diagnosis.claims if claim.holds is False]
    yield from (f'Not true here: "{claim.popular}" Measured: {claim.measured}.' for claim in refuted)
    yield from (f"Note: {note}." for note in diagnosis.notes)


def _first_losses(diagnosis: Diagnosis) -> str:
    look = diagnosis.look
    if look.first_loss is None:
        return ""
    text = f"The first loss is {loss_text(look.first_loss)}"
    if look.uniform_loss is not None:
        text += f"; uniform predictions cost ln {look.classes} = {look.uniform_loss:.3f}"
    if look.constant_loss is not None:
        text += f", the best constant prediction {loss_text(look.constant_loss)}"
    if look.logit_change is not None and look.logits_rms and math.isfinite(look.logit_change):
        text += (
            f". The first update changes the logits of its own batch by {look.logit_change:.2g} (RMS), "
            f"{look.logit_change / look.logits_rms:.2g} times their size"
        )
    return text + "."


def _fixes(diagnosis: Diagnosis) -> str:
    """What fixes the run, what does not, and what these steps do not decide."""
    if diagnosis.trains or not diagnosis.fixes:
        return ""
    working = [fix for fix in diagnosis.fixes if fix.trains]
    if not working:
        unknown = [fix for fix in diagnosis.fixes if Verdict.UNDECIDED in fix.verdicts]
        useless = [fix for fix in diagnosis.fixes if fix not in unknown]
        none = "Does not help" if unknown else "No change that was tried makes it train"
        lists = ((none, useless), ("Undecided in so few steps", unknown))
        return " ".join(f"{title}: {_names(fixes)}." for title, fixes in lists if fixes)
    undecided = [fix for fix in diagnosis.fixes if not fix.trains and Verdict.UNDECIDED in fix.verdicts]
    useless = [fix for fix in diagnosis.fixes if not fix.trains and fix not in undecided]
    text = f"Fix: {working[0].name} ({working[0].change}){_gain(working[0])}."
    for title, fixes in (("Also trains", working[1:]), ("Does not help", useless), ("Undecided", undecided)):
        text += f" {title}: {_names(fixes)}." if fixes else ""
    return text


def _names(fixes: Sequence[Fix]) -> str:
    return ", ".join(fix.name for fix in fixes)


def _gain(fix: Fix) -> str:
    if fix.gain is None:
        return ""
    spread = "one seed" if fix.spread is None else f"± {fix.spread:.3f} over {len(fix.verdicts)} seeds"
    return f", end loss {'-' if fix.gain > 0 else '+'}{loss_text(abs(fix.gain))} ({spread})"
