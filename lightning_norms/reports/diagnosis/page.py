"""A diagnosis as one page of HTML: nothing is loaded from anywhere, so it works offline, in a mail and on a phone.

::

    verdict    one line, one sentence, the losses to hold it against
    why        causes, each with its numbers
    fix        what to change, as YAML
    pictures   losses of the trials; gradients by depth over time, as given and fixed; sizes by depth at step 0
    tables     trials, popular sentences against what was measured, growth from block to block, the run
"""

from __future__ import annotations

from statistics import fmean

from lightning_norms.reports.diagnosis import tables
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Facts, Fix, Trial
from lightning_norms.reports.diagnosis.summary import HEADLINES


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The whole page.

    Args:
        diagnosis: any diagnosis; parts that it does not have are left out or said to be missing.

    Example:
        >>> from lightning_norms.reports.diagnosis.data import Look, Verdict
        >>> facts = Facts("Net", 9, 9, {"": 2}, "AdamW", 1e-3, 0.98, None, None, 300, "32-true", 1, 1, False, (), ())
        >>> page = diagnosis_page(Diagnosis(facts, Look(1.5, 4, 1.386, None, 0, None, None), Verdict.UNDECIDED))
        >>> "Only the first step was looked at" in page, "://" in page
        (True, False)
    """
    from lightning_norms.reports.diagnosis import figures  # matplotlib and jinja2 take time to import
    from lightning_norms.reports.pages import render

    tried = bool(diagnosis.trials) or not diagnosis.facts.trainable
    best = None if diagnosis.trains else diagnosis.best
    return render(
        "diagnosis.html",
        diagnosis=diagnosis,
        headline=HEADLINES[diagnosis.verdict] if tried else "No verdict yet",
        mark=tables.MARKS.get(diagnosis.verdict, tables.BAD),
        run=_run_in_a_line(diagnosis.facts),
        lead=_lead(diagnosis),
        numbers=_numbers(diagnosis),
        effect="" if best is None else _effect(best),
        losses=figures.loss_plot(diagnosis),
        trials=tables.trials_table(diagnosis),
        heat_maps=figures.heat_maps(_given_and_best(diagnosis)),
        profiles=list(figures.depth_plots(diagnosis)),
        growths=tables.growths_table(diagnosis.look),
        parts=tables.parts_table(diagnosis.look),
        claims=tables.claims_table(diagnosis),
        facts=tables.facts_table(diagnosis.facts),
    )


def _lead(diagnosis: Diagnosis) -> str:
    """The verdict's sentence."""
    if not diagnosis.facts.trainable:
        return "No parameter is trainable, so nothing can be learnt."
    if not diagnosis.trials:
        return "Only the first step was looked at; nothing was tried, so there is no verdict."
    reasons = (t.reason for t in diagnosis.trials if t.name == AS_GIVEN and t.verdict is diagnosis.verdict)
    reason = next(reasons, f"the verdict is: {diagnosis.verdict.value}")
    return f"{reason[:1].upper()}{reason[1:]}."


def _run_in_a_line(facts: Facts) -> str:
    warmup = "no warmup" if facts.warmup_steps is None else f"warmup of {facts.warmup_steps} steps"
    optimizer = f"{facts.optimizer} at {facts.learning_rate:g}"
    blocks, parameters = sum(facts.blocks.values()), f"{facts.parameters:,} parameters"
    return " · ".join((facts.module, f"{blocks} blocks", parameters, optimizer, warmup))


def _numbers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The losses that the verdict is held against, and the logits."""
    look = diagnosis.look
    ends = [t.end_loss for t in diagnosis.trials if t.name == AS_GIVEN and t.end_loss is not None]
    best = None if diagnosis.trains else diagnosis.best
    classes = "" if look.classes is None else f", ln\u00a0{look.classes}"
    numbers = (
        ("first loss, nats", look.first_loss, ".3f"),
        (f"loss of knowing nothing{classes}", look.uniform_loss, ".3f"),
        ("loss of the best constant prediction", look.constant_loss, ".3f"),
        ("loss at the end of the trial as given", fmean(ends) if ends else None, ".3f"),
        ("loss at the end with the fix", fmean(best.end_losses) if best and best.end_losses else None, ".3f"),
        ("RMS of the logits at the start", look.logits_rms, ".3g"),
        ("RMS change of these logits by the first update", look.logit_change, ".3g"),
    )
    return [(name, format(value, form)) for name, value, form in numbers if value is not None]


def _effect(fix: Fix) -> str:
    end = f"End loss {tables.end_loss(fix.end_losses)}"
    if fix.gain is None:
        return f"{end}, not comparable with the run as given"
    seeds = "one seed" if fix.spread is None else f"± {fix.spread:.3f} over {len(fix.verdicts)} seeds"
    return f"{end}, {-fix.gain:+.3f} nats against the run as given ({seeds})"


def _given_and_best(diagnosis: Diagnosis) -> list[Trial]:
    names = [AS_GIVEN, *([diagnosis.best.name] if diagnosis.best and not diagnosis.trains else [])]
    first = {trial.name: trial for trial in reversed(diagnosis.trials)}
    return [first[name] for name in names if name in first]
