"""A comparison for the console, of 80 columns, and as CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from lightning_norms.reports.comparison import tables
from lightning_norms.reports.comparison.data import Comparison
from lightning_norms.reports.table import Table

NUMBERS = ("steps", "parameters", "seconds_per_step", "kv_cache_bytes", "spike_score")


def comparison_text(comparison: Comparison) -> Iterator[Table | str]:
    """What is printed: maps, scores, gaps, sizes and costs, and why rows are missing; each fits 80 columns."""
    yield from tables.map_tables(comparison)
    fits = tables.exponents_table(comparison)
    if fits is not None:
        yield fits
    yield tables.scores_table(comparison)
    if comparison.differences():
        yield tables.differences_table(comparison)
        yield tables.RULE
    yield tables.costs_table(comparison)
    yield from (f"{row.variant}, {reason}" for row in comparison.rows() for reason in row.failures)


def comparison_csv(comparison: Comparison) -> str:
    """One line a run, in full digits; the verdict is the variant's.

    Example:
        >>> from lightning_norms.reports.comparison.data import Run
        >>> runs = (Run("pre", 1, None, {"code": 2.5}), Run("post", 1, "it crashed"))
        >>> print(comparison_csv(Comparison("one", "pre", {"pre": "pre", "post": "post"}, runs)), end="")
        variant,seed,code,steps,parameters,seconds_per_step,kv_cache_bytes,spike_score,events,verdict,failure
        pre,1,2.5,0,,,,,,,
        post,1,,0,,,,,,,it crashed
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "seed", *comparison.scores, *NUMBERS, "events", "verdict", "failure"])
    verdicts = {row.variant: row.verdict.value for row in comparison.rows() if row.verdict is not None}
    for run in comparison.runs:
        scores = [(run.scores or {}).get(name) for name in comparison.scores]
        numbers = [getattr(run, name) for name in NUMBERS]
        events = None if run.events is None else sum(run.events.values())
        writer.writerow([run.variant, run.seed, *scores, *numbers, events, verdicts.get(run.variant), run.failure])
    return text.getvalue()
