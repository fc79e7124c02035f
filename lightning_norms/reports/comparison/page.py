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

from lightning_norms.reports.comparison import tables
from lightning_norms.reports.comparison.data import Comparison
from lightning_norms.reports.comparison.differences import Result, Verdict

MEANINGS = {Verdict.KEEP: "better", Verdict.REVERT: "worse", Verdict.MIXED: "better here and worse there"}


def comparison_page(comparison: Comparison) -> str:
    """The whole page.

    Args:
        comparison: any comparison; parts that it does not have are left out.

    Example:
        >>> from lightning_norms.reports.comparison.data import Run
        >>> runs = (Run("pre", 1, None, {"code": 2.5}), Run("post", 1, "it <crashed>"))
        >>> page = comparison_page(Comparison("one", "pre", {"pre": "as it was", "post": "moved"}, runs))
        >>> "it &lt;crashed&gt;" in page, "://" in page
        (True, False)
    """
    from lightning_norms.reports.comparison import figures  # matplotlib and jinja2 take time to import
    from lightning_norms.reports.pages import render

    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in comparison.runs}))
    finished = sum(run.finished for run in comparison.runs)
    return render(
        "comparison.html",
        comparison=comparison,
        facts=f"{len(comparison.titles)} variants, seeds {seeds}; {finished} of {len(comparison.runs)} runs",
        results=list(results(comparison)),
        missing=[f"{row.variant}, {reason}" for row in comparison.rows() for reason in row.failures],
        scores=tables.scores_table(comparison),
        score_plots=list(figures.score_plots(comparison)),
        maps=list(tables.map_tables(comparison)),
        exponents=tables.exponents_table(comparison),
        differences=tables.differences_table(comparison),
        rule=tables.RULE,
        curves=list(figures.curve_plots(comparison)),
        curve_keys=figures.keys(comparison, "losses"),
        profiles=list(figures.depth_plots(comparison)),
        profile_keys=figures.keys(comparison, "gradient_first"),
        costs=tables.costs_table(comparison),
    )


def results(comparison: Comparison) -> Iterator[str]:
    """What to keep, what to revert and what is both, with the gaps; and how many variants are undecided."""
    rows = [row for row in comparison.rows() if row.verdict is not None]
    for verdict, meaning in MEANINGS.items():
        gaps = [f"{row.variant}: {_gaps(comparison, row.variant)}" for row in rows if row.verdict is verdict]
        if gaps:
            against = f"{meaning} than {comparison.baseline}, in {comparison.unit}"
            yield f"{verdict.value.capitalize()} ({against}): {'; '.join(gaps)}."
    undecided = [row for row in rows if row.verdict is Verdict.UNDECIDED]
    if undecided:
        single = any(gap.seeds == 1 for gap in comparison.differences())
        why = "one seed is no result" if single else "not shown to be more than what seeds alone make"
        why += " or runs are missing" if any(row.failed for row in undecided) else ""
        yield f"Undecided: {len(undecided)} of {len(rows)} variants, {why}."
    if not rows:
        yield "There is nothing to compare to the baseline yet."


def _gaps(comparison: Comparison, variant: str) -> str:
    """The gaps that are results, in words."""
    decided = (Result.BETTER, Result.WORSE)
    gaps = (gap for gap in comparison.differences() if gap.variant == variant and gap.result in decided)
    return ", ".join(f"{tables.signed(gap.mean)} on {gap.score}" for gap in gaps)
