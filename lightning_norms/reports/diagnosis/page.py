"""A diagnosis as one page of HTML: nothing is loaded from anywhere, so it works offline, in a mail and on a phone.

::

    verdict    one line, one sentence, the losses to hold it against
    why        causes, each with its numbers
    fix        what to change, as YAML
    pictures   losses of the trials; gradients by depth over time, as given and fixed; sizes by depth at step 0
    tables     trials, popular sentences against what was measured, growth from block to block, the run
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from xml.etree.ElementTree import Element

import yaml

from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Facts, Fix, Trial
from lightning_norms.reports.diagnosis.figures import depth_figures, loss_figure
from lightning_norms.reports.diagnosis.heat_maps import heat_figures
from lightning_norms.reports.diagnosis.summary import HEADLINES
from lightning_norms.reports.diagnosis.tables import (
    MARKS,
    claims_table,
    end_loss,
    facts_table,
    growths_table,
    parts_table,
    rate,
    trial_order,
    trials_table,
)
from lightning_norms.reports.elements import Content, element
from lightning_norms.reports.page import listed, page, pictures


def diagnosis_page(found: Diagnosis) -> str:
    """The whole page.

    Args:
        found: any diagnosis; parts that it does not have are left out or said to be missing.

    Example:
        >>> from lightning_norms.reports.diagnosis.data import Look, Verdict
        >>> facts = Facts(module="Net", parameters=9, trainable=9)
        >>> page = diagnosis_page(Diagnosis(facts=facts, look=Look(first_loss=1.5), verdict=Verdict.UNDECIDED))
        >>> "Only the first step was looked at" in page, "://" in page
        (True, False)
    """
    headline = _headline(found)
    title = f"{headline} - diagnosis of {found.facts.module}"
    return page(title, _top(found, headline), _sections(found))


def _sections(found: Diagnosis) -> Iterator[tuple[str, list[Content]]]:
    order = trial_order(found)
    yield "Why" if not found.trains else "What stands out", [listed("ol", [c.sentence for c in found.causes])]
    if found.trials:
        yield "The fix", list(_fix(found))
        yield "Short trials", [_losses(found, order), trials_table(found, order)]
    yield "Gradient by depth over time", [pictures(heat_figures(_given_and_best(found)))]
    yield "At the first step, by depth", [pictures(depth_figures(found)), growths_table(found), parts_table(found)]
    yield "Also seen", [listed("ul", [flag.sentence + "." for flag in found.look.flags])]
    yield "Popular sentences, held against these numbers", [claims_table(found)]
    yield "The run", [facts_table(found.facts)]
    yield "Not tried, not measured", [listed("ul", found.notes)]
    yield "The same as on the console", [_folded("In plain words", listed("ul", found.summary))]


def _losses(found: Diagnosis, order: list[str]) -> Content:
    drawn = loss_figure(found, order)
    if drawn is not None:
        drawn.set("class", "large")
    return drawn


def _folded(title: str, content: Content) -> Content:
    return element("details", element("summary", title), content) if content is not None else None


# --- verdict ----------------------------------------------------------------------------------------------------------


def _headline(found: Diagnosis) -> str:
    if not found.trials and found.facts.trainable:
        return "No verdict yet"
    return HEADLINES[found.verdict]


def _top(found: Diagnosis, headline: str) -> Element:
    sign, colour = MARKS.get(found.verdict, ("✗", "bad"))
    box = element(
        "div",
        element("h1", element("b", sign, class_=colour, aria_hidden="true"), f" {headline}"),
        element("p", _lead(found), class_="lead"),
        class_=f"verdict {colour}",
    )
    return element("header", element("p", _run_in_a_line(found.facts), class_="kicker"), box, _numbers(found))


def _lead(found: Diagnosis) -> str:
    """The verdict's sentence."""
    if not found.facts.trainable:
        return "No parameter is trainable, so nothing can be learnt."
    if not found.trials:
        return "Only the first step was looked at; nothing was tried, so there is no verdict."
    given = next((t for t in found.trials if t.name == AS_GIVEN and t.verdict is found.verdict), None)
    if given is None:
        return f"The verdict is: {found.verdict.value}."
    return f"{given.reason[:1].upper()}{given.reason[1:]}."


def _run_in_a_line(facts: Facts) -> str:
    blocks = sum(facts.blocks.values())
    warmup = "no warmup" if facts.warmup_steps is None else f"warmup of {facts.warmup_steps} steps"
    parts = (
        facts.module,
        f"{blocks} blocks",
        f"{facts.parameters:,} parameters",
        f"{facts.optimizer} at {rate(facts)}",
    )
    return " · ".join((*parts, warmup))


def _numbers(found: Diagnosis) -> Content:
    """What the losses are to be held against."""
    look = found.look
    given = [t.end_loss for t in found.trials if t.name == AS_GIVEN and t.end_loss is not None]
    best = None if found.trains else found.best
    classes = "" if look.classes is None else f", ln\u00a0{look.classes}"
    pairs = (
        ("first loss, nats", look.first_loss, ".3f"),
        (f"loss of knowing nothing{classes}", look.uniform_loss, ".3f"),
        ("loss of the best constant prediction", look.constant_loss, ".3f"),
        ("loss at the end of the trial as given", fmean(given) if given else None, ".3f"),
        ("the same with the fix", fmean(best.end_losses) if best and best.end_losses else None, ".3f"),
        ("RMS of the logits at the start", look.logits_rms, ".3g"),
        ("RMS change of these logits by the first update", look.logit_change, ".3g"),
    )
    boxes = [
        element("div", element("dt", name), element("dd", format(value, form)))
        for name, value, form in pairs
        if value is not None
    ]
    return element("dl", boxes, class_="numbers") if boxes else None


# --- fix and trials ---------------------------------------------------------------------------------------------------


def _fix(found: Diagnosis) -> Iterator[Content]:
    if found.trains:
        yield element("p", "Nothing needs to be fixed: the configuration trains as it is.")
    elif not found.fixes:
        yield element("p", "No change was tried.")
    elif found.best is None:
        names = ", ".join(fix.name for fix in found.fixes)
        yield element("p", f"None of the changes that were tried makes it train: {names}.")
    else:
        yield from _best(found.best)


def _best(best: Fix) -> Iterator[Content]:
    yield element(
        "p", element("strong", best.name), f": {best.change}. End loss {end_loss(best.end_losses)}, ", _gain(best), "."
    )
    if not best.keeps_model:
        yield element("p", "This is another architecture than the one that was given.")
    if best.patch:
        yield element("p", "For your YAML file (callbacks are added to the list):")
        yield element("pre", element("code", yaml.safe_dump(best.patch, sort_keys=False)), tabindex=0)
    else:
        yield element("p", "There is no fragment of YAML for it: the change is made in your own code.")


def _gain(fix: Fix) -> str:
    if fix.gain is None:
        return "not to be compared with that as given"
    spread = "one seed" if fix.spread is None else f"± {fix.spread:.3f} over {len(fix.verdicts)} seeds"
    return f"{-fix.gain:+.3f} nats against the run as given ({spread})"


def _given_and_best(found: Diagnosis) -> list[Trial]:
    names = [AS_GIVEN] + ([found.best.name] if found.best is not None and not found.trains else [])
    return [
        next(trial for trial in found.trials if trial.name == n) for n in names if n in {t.name for t in found.trials}
    ]
