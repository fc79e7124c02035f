"""A comparison as one page of HTML: nothing is loaded from anywhere, so it works offline, in a mail and on a phone.

::

    what differs    what to keep and what to revert, with the gaps, in sentences; how many are undecided
    scores          the table, and the seeds as a picture
    differences     to the baseline, with intervals and verdicts
    curves          training loss and validation, gradients by depth
    costs           parameters, key/value cache, time, spikes, fallback events
    missing         which runs have no numbers, and why
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from lightning_norms.reports.comparison.console import RULE, costs, gap, interval, spread
from lightning_norms.reports.comparison.data import Comparison
from lightning_norms.reports.comparison.differences import Result, Verdict
from lightning_norms.reports.comparison.figures import curve_figures, depth_figures, legend, score_figures
from lightning_norms.reports.comparison.maps import exponents_table, map_figures
from lightning_norms.reports.elements import Content, element, table
from lightning_norms.reports.page import listed, page, pictures

SPACED = ".wide + .pictures { margin-top: 16px; }"
CLASSES: dict[Result | Verdict, str] = {
    Result.BETTER: "good", Result.WORSE: "bad", Result.UNDECIDED: "open", Result.SAME: "soft",
    Verdict.KEEP: "good", Verdict.REVERT: "bad", Verdict.MIXED: "open", Verdict.UNDECIDED: "open",
    Verdict.SAME: "soft",
}  # fmt: skip


MEANINGS = {Verdict.KEEP: "better", Verdict.REVERT: "worse", Verdict.MIXED: "better here and worse there"}
RESULTS = (Result.BETTER, Result.WORSE)


def comparison_page(found: Comparison) -> str:
    """The whole page.

    Args:
        found: any comparison; parts that it does not have are left out.

    Example:
        >>> from lightning_norms.reports.comparison.data import Run
        >>> runs = (Run("pre", 1, None, {"code": 2.5}), Run("post", 1, "it <crashed>"))
        >>> page = comparison_page(Comparison("one", "pre", {"pre": "as it was", "post": "moved"}, runs))
        >>> "it &lt;crashed&gt;" in page, "://" in page
        (True, False)
    """
    return page(f"{found.name} - comparison", _top(found), _sections(found), SPACED)


def _sections(found: Comparison) -> Iterator[tuple[str, list[Content]]]:
    missing = [f"{row.variant}, {reason}" for row in found.rows() for reason in row.failures]
    yield "Missing", [listed("ul", missing)]
    yield f"Scores, {found.unit}", [_scores(found), pictures(score_figures(found))]
    yield "Map", [pictures(map_figures(found))]
    yield "Gradient at the start against the axis", [exponents_table(found)]
    yield f"Difference to {found.baseline}", [_differences(found)]
    curves = pictures(curve_figures(found))
    trained = {run.variant for run in found.runs if run.losses}
    yield "Learning curves", [legend(found, trained) if curves is not None else None, curves]
    profiles = pictures(depth_figures(found))
    measured = {run.variant for run in found.runs if run.gradient_first}
    yield "Gradient by depth", [legend(found, measured) if profiles is not None else None, profiles]
    yield "Sizes and costs", [_costs(found)]


def _top(found: Comparison) -> Element:
    seeds = sorted({run.seed for run in found.runs})
    finished = sum(run.finished for run in found.runs)
    facts = f"{len(found.titles)} variants, seeds {', '.join(map(str, seeds))}; {finished} of {len(found.runs)} runs"
    sentences = [element("p", sentence, class_="lead") for sentence in results(found)]
    box = element("div", sentences, class_="verdict")
    return element("header", element("p", facts, class_="kicker"), element("h1", found.name), box)


def results(found: Comparison) -> Iterator[str]:
    """What to keep, what to revert and what is both, with the gaps; and how many variants are undecided."""
    judged = {row.variant: row.verdict for row in found.rows() if row.verdict is not None}
    for word, meaning in MEANINGS.items():
        gaps = [f"{variant}: {_gaps(found, variant)}" for variant, verdict in judged.items() if verdict is word]
        if gaps:
            meant = f"{meaning} than {found.baseline}, in {found.unit}"
            yield f"{word.value.capitalize()} ({meant}): {'; '.join(gaps)}."
    undecided = [variant for variant, verdict in judged.items() if verdict is Verdict.UNDECIDED]
    if undecided:
        alone = any(each.seeds == 1 for each in found.differences())
        why = "one seed is no result" if alone else "not shown to be more than what seeds alone make"
        why += " or runs are missing" if any(row.failed for row in found.rows() if row.variant in undecided) else ""
        yield f"Undecided: {len(undecided)} of {len(judged)} variants, {why}."
    if not judged:
        yield "There is nothing to hold against the baseline yet."


def _gaps(found: Comparison, variant: str) -> str:
    """Those that are results, in words."""
    results = (each for each in found.differences() if each.variant == variant and each.result in RESULTS)
    return ", ".join(f"{gap(each.mean)} on {each.score}" for each in results)


def _scores(found: Comparison) -> Content:
    said = any(row.title != row.variant for row in found.rows())  # not of the pairs of a map
    rows = [
        [
            row.variant + (" (baseline)" if row.variant == found.baseline else ""),
            *([row.title if row.title != row.variant else ""] if said else []),
            *(spread(row.scores.get(score)) for score in found.scores),
            f"{row.seeds} of {row.seeds + row.failed}",
        ]
        for row in found.rows()
    ]
    head = ["variant", *(["what it is"] if said else []), *found.scores, "seeds"]
    return table(head, rows, numbers=range(1 + said, len(head)), texts=(1,) if said else ())


def _differences(found: Comparison) -> Content:
    verdicts = {row.variant: row.verdict for row in found.rows()}
    rows: list[list[Content]] = [
        [each.variant, each.score, gap(each.mean), interval(each), str(each.seeds), _word(each.result), _word(verdict)]
        for each in found.differences()
        if (verdict := verdicts[each.variant]) is not None
    ]
    if not rows:
        return None
    head = ("variant", "set", f"difference, {found.unit}", "95 % interval", "pairs", "result", "verdict")
    return [table(head, rows, numbers=(2, 3, 4)), element("p", "Below 0 is better. " + RULE, class_="soft")]


def _word(found: Result | Verdict) -> Element:
    return element("b", found.value, class_=CLASSES[found])


def _costs(found: Comparison) -> Content:
    head = ("variant", "parameters", "KV cache of 4,096 positions in bf16, MiB", "s/step", "SpikeScore", "fallback")
    return table(head, [[row.variant, *costs(row)] for row in found.rows()], numbers=range(1, 6))
