"""A comparison as tables: of 80 columns for the console, and as CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from lightning_norms.reports.comparison.data import Comparison, Row, Spread
from lightning_norms.reports.comparison.differences import Difference, Result, Verdict

MEBIBYTE = 2**20
STYLES: dict[Result | Verdict | None, str] = {
    Result.BETTER: "green", Result.WORSE: "red", Verdict.KEEP: "green", Verdict.REVERT: "red",
    Verdict.MIXED: "yellow", Verdict.UNDECIDED: "yellow", Verdict.SAME: "dim",
}  # fmt: skip


def comparison_text(found: Comparison) -> Iterator[Table | str]:
    """What is printed: scores, differences, sizes and costs, and why rows are missing; each fits 80 columns."""
    yield scores_table(found)
    if found.differences():
        yield differences_table(found)
        yield RULE
    yield costs_table(found)
    yield from (f"{row.variant}, {reason}" for row in found.rows() for reason in row.failures)


RULE = (
    "95 % intervals by paired t. A gap is called better or worse only if its interval\n"
    "leaves 0 out and it is larger than the standard deviation over seeds; one seed\n"
    "is never enough. Keep: better on a set, worse on none, and every run finished.\n"
    "Revert: worse on a set, better on none. Mixed: both. Many gaps at once are not\n"
    "corrected for: about one of twenty that are none looks like one."
)


def scores_table(found: Comparison) -> Table:
    """Mean and standard deviation over seeds of every validation set."""
    table = _table(f"{found.name}: {found.unit}, mean ± standard deviation over seeds (* baseline)")
    table.add_column("variant", ratio=1)
    for score in found.scores:
        table.add_column(score, justify="right", no_wrap=True)
    table.add_column("seeds", justify="right", no_wrap=True)
    for row in found.rows():
        cells = (spread(row.scores.get(score)) for score in found.scores)
        star = " *" if row.variant == found.baseline else ""
        title = "" if row.title == row.variant else f": {row.title}"
        _add(table, f"{row.variant}{star}{title}", *cells, _seeds(row))
    return table


def differences_table(found: Comparison) -> Table:
    """To the baseline: a line a validation set with its interval; the verdict stands on a variant's first line."""
    table = _table(f"gap to {found.baseline}, {found.unit}: below 0 is better")
    table.add_column("variant", overflow="fold", min_width=12, ratio=1)
    table.add_column("set", overflow="fold")
    for name in ("gap", "95 % interval", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    verdicts = {row.variant: row.verdict for row in found.rows()}
    for each in found.differences():
        verdict = verdicts.pop(each.variant, None)
        words = (result(each), Text(verdict.value if verdict else "", STYLES.get(verdict, "")))
        name = each.variant if verdict else ""
        _add(table, name, each.score, gap(each.mean), interval(each), str(each.seeds), *words)
    return table


def result(each: Difference) -> Text:
    """Better or worse; what is neither has no word of its own."""
    shown = each.result in (Result.BETTER, Result.WORSE)
    return Text(each.result.value if shown else "-", STYLES.get(each.result, "dim"))


def costs_table(found: Comparison) -> Table:
    """Sizes, time, spikes and what the fallback did."""
    table = _table("sizes and costs (KV cache: 4,096 positions in bf16)")
    table.add_column("variant", overflow="fold", min_width=12, ratio=1)
    for name in ("parameters", "KV cache, MiB", "s/step", "SpikeScore", "fallback"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows():
        _add(table, row.variant, *costs(row))
    return table


def costs(row: Row) -> tuple[str, str, str, str, str]:
    """Parameters, key/value cache, seconds a step, SpikeScore, fallback events; a dash where there is none."""
    return (
        "-" if row.parameters is None else f"{row.parameters:,}",
        "-" if row.kv_cache_bytes is None else f"{row.kv_cache_bytes / MEBIBYTE:g}",
        "-" if row.seconds_per_step is None else f"{row.seconds_per_step:.3g}",
        "-" if row.spike_score is None else f"{row.spike_score:.2%}",
        "-" if row.events is None else str(row.events),
    )


def comparison_csv(found: Comparison) -> str:
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
    numbers = ("steps", "parameters", "seconds_per_step", "kv_cache_bytes", "spike_score")
    writer.writerow(["variant", "seed", *found.scores, *numbers, "events", "verdict", "failure"])
    verdicts = {row.variant: row.verdict.value for row in found.rows() if row.verdict is not None}
    for run in found.runs:
        scores = [(run.scores or {}).get(name, "") for name in found.scores]
        events = "" if run.events is None else sum(run.events.values())
        rest = ["" if getattr(run, name) is None else getattr(run, name) for name in numbers]
        writer.writerow(
            [run.variant, run.seed, *scores, *rest, events, verdicts.get(run.variant, ""), run.failure or ""]
        )
    return text.getvalue()


def spread(value: Spread | None) -> str:
    """Mean and standard deviation.

    Example:
        >>> spread(Spread(2.5, 0.05, 3)), spread(Spread(2.5, None, 1)), spread(None)
        ('2.500 ± 0.050', '2.500', '-')
    """
    if value is None:
        return "-"
    return f"{value.mean:.3f}" + ("" if value.deviation is None else f" ± {value.deviation:.3f}")


def gap(value: float) -> str:
    """With its sign, but a zero that is exact has none."""
    return "0" if value == 0 else f"{value:+.3f}"


def interval(each: Difference) -> str:
    """Of the mean difference."""
    if each.low is None or each.high is None:
        return "one seed"
    return f"{gap(each.low)} to {gap(each.high)}"


def _seeds(row: Row) -> str:
    return f"{row.seeds} of {row.seeds + row.failed}" if row.failed else str(row.seeds)


def _add(table: Table, *cells: str | Text) -> None:
    """A row in which a bracket is a bracket."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), width=79)
