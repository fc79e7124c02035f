"""A diagnosis as one page of HTML: nothing is loaded from anywhere, so it works offline, in a mail and on a phone.

::

    verdict    one line, one sentence, the losses to hold it against
    why        causes, each with its numbers
    fix        what to change, as YAML
    pictures   losses of the trials; gradients by depth over time, as given and fixed; sizes by depth at step 0
    tables     trials, popular sentences against what was measured, growth from block to block, the run
"""

from __future__ import annotations

from lightning_norms.reports.diagnosis import tables
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis
from lightning_norms.reports.diagnosis.summary import HEADLINES


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The whole page.

    Args:
        diagnosis: any diagnosis; parts that it does not have are left out or said to be missing.

    Example:
        >>> from lightning_norms.reports.diagnosis.data import Facts, Look, Verdict
        >>> facts = Facts(module="Net", parameters=9, trainable=9)
        >>> page = diagnosis_page(Diagnosis(facts=facts, look=Look(first_loss=1.5), verdict=Verdict.UNDECIDED))
        >>> "Only the first step was looked at" in page, "://" in page
        (True, False)
    """
    from lightning_norms.reports.diagnosis import figures  # matplotlib and jinja2 take time to import
    from lightning_norms.reports.pages import render

    tried = bool(diagnosis.trials) or not diagnosis.facts.trainable
    given = [trial for trial in diagnosis.trials if trial.name == AS_GIVEN]
    best = None if diagnosis.trains else diagnosis.best
    fixed = [trial for trial in diagnosis.trials if best is not None and trial.name == best.name]
    return render(
        "diagnosis.html",
        diagnosis=diagnosis,
        headline=HEADLINES[diagnosis.verdict] if tried else "No verdict yet",
        mark=tables.MARKS.get(diagnosis.verdict, tables.BAD),
        lead=_lead(diagnosis),
        best=best,
        end_as_given=tables.mean_end(given),
        end_with_fix=tables.mean_end(fixed),
        losses=figures.loss_plot(diagnosis),
        trials=tables.trials_table(diagnosis),
        heat_maps=figures.heat_maps([*given[:1], *fixed[:1]]),
        profiles=list(figures.depth_plots(diagnosis)),
        growths=tables.growths_table(diagnosis.look),
        parts=tables.parts_table(diagnosis.look),
        claims=tables.claims_table(diagnosis),
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
