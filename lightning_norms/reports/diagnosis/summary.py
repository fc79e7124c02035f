"""The answer in plain words, from a finished diagnosis: the verdict, why, what fixes it, and what is not true here."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Fix, Verdict

HEADLINES = {
    Verdict.TRAINS: "This configuration trains",
    Verdict.STALLS: "Dead on arrival: this configuration stalls silently",
    Verdict.SPIKES: "This configuration spikes",
    Verdict.DIVERGES: "This configuration diverges",
    Verdict.NON_FINITE: "This configuration ends in NaN or infinity",
    Verdict.UNDECIDED: "Undecided: these steps do not tell whether this configuration trains",
}


def summarize(found: Diagnosis) -> tuple[str, ...]:
    """A few paragraphs, the verdict first."""
    return tuple(paragraph for paragraph in _paragraphs(found) if paragraph)


def _paragraphs(found: Diagnosis) -> Iterator[str]:
    given = next((t for t in found.trials if t.name == AS_GIVEN and t.verdict is found.verdict), None)
    if given is not None:
        yield f"{HEADLINES[found.verdict]}: {given.reason}."
    elif not found.facts.trainable:
        yield f"{HEADLINES[found.verdict]}."
    else:
        yield "The first step was looked at; nothing was tried, so there is no verdict."
    yield _first_losses(found)
    word = "Seen" if found.trains else "Why"
    yield from (f"{word}: {cause.sentence}" for cause in found.causes)
    yield _fixes(found)
    yield from (f"Seen: {flag.sentence}." for flag in found.look.flags)
    wrong = [claim for claim in found.claims if claim.holds is False]
    yield from (f'Not true here: "{claim.popular}" Measured: {claim.measured}.' for claim in wrong)
    yield from (f"Note: {note}." for note in found.notes)


def _first_losses(found: Diagnosis) -> str:
    look = found.look
    if look.first_loss is None:
        return ""
    text = f"The first loss is {look.first_loss:.3f}"
    if look.uniform_loss is not None:
        text += f"; knowing nothing costs ln {look.classes} = {look.uniform_loss:.3f}"
    if look.constant_loss is not None:
        text += f", and the best constant prediction {look.constant_loss:.3f}"
    if look.logit_change is not None and look.logits_rms and math.isfinite(look.logit_change):
        text += (
            f". The first update moves the logits of its own batch by {look.logit_change:.2g} (RMS), "
            f"{look.logit_change / look.logits_rms:.2g} times their size"
        )
    return text + "."


def _fixes(found: Diagnosis) -> str:
    alive = [fix for fix in found.fixes if fix.trains]
    if found.trains or not found.fixes:
        return ""
    if not alive:
        return "Nothing that was tried makes it train: " + _listed(found.fixes) + "."
    text = f"Fix: {alive[0].name} ({alive[0].change}){_gain(alive[0])}."
    if alive[1:]:
        text += f" Also trains: {_listed(alive[1:])}."
    return text + _not_alive(found.fixes)


def _not_alive(fixes: tuple[Fix, ...]) -> str:
    """What does not help, and what these steps do not decide."""
    others = [fix for fix in fixes if not fix.trains]
    open_ = [fix for fix in others if Verdict.UNDECIDED in fix.verdicts]
    dead = [fix for fix in others if fix not in open_]
    text = f" Does not help: {_listed(dead)}." if dead else ""
    return text + (f" Undecided: {_listed(open_)}." if open_ else "")


def _listed(fixes: list[Fix] | tuple[Fix, ...]) -> str:
    return ", ".join(fix.name for fix in fixes)


def _gain(fix: Fix) -> str:
    if fix.gain is None:
        return ""
    spread = "one seed" if fix.spread is None else f"± {fix.spread:.3f} over {len(fix.verdicts)} seeds"
    return f", end loss {-fix.gain:+.3f} nats ({spread})"
