"""The tables of a comparison: scores, gaps to the baseline, sizes and costs, maps of two axes, exponents."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from lightning_norms.reports.comparison.data import Comparison, Row, Spread
from lightning_norms.reports.comparison.differences import Difference, Result, Verdict
from lightning_norms.reports.comparison.exponents import exponents
from lightning_norms.reports.console import with_deviation
from lightning_norms.reports.table import Cell, Column, Table
from lightning_norms.reports.table import Row as Cells

MEBIBYTE = 2**20
TONES: dict[Result | Verdict | None, str] = {
    Result.BETTER: "good", Result.WORSE: "bad", Result.UNDECIDED: "open", Result.SAME: "soft",
    Verdict.KEEP: "good", Verdict.REVERT: "bad", Verdict.MIXED: "open", Verdict.UNDECIDED: "open",
    Verdict.SAME: "soft",
}  # fmt: skip
RULE = (
    "95 % intervals by paired t. A gap is called better or worse only if its interval\n"
    "leaves 0 out and it is larger than the standard deviation over seeds; one seed\n"
    "is never enough. Keep: better on a set, worse on none, and every run finished.\n"
    "Revert: worse on a set, better on none. Mixed: both. Many gaps at once are not\n"
    "corrected for: about one of twenty that are none looks like one."
)


def scores_table(comparison: Comparison) -> Table:
    """Mean and standard deviation over seeds of every validation set."""
    title = f"{comparison.name}: {comparison.unit}, mean ± standard deviation over seeds (* baseline)"
    scores = (Column(score, "number") for score in comparison.scores)
    rows: list[Cells] = [
        [_name(comparison, row), *(spread(row.scores.get(score)) for score in comparison.scores), seeds(row)]
        for row in comparison.rows()
    ]
    return Table(title, (Column("variant"), *scores, Column("seeds", "number")), rows)


def overview_table(comparison: Comparison) -> Table:
    """Scores, gaps and verdict of a variant in one row, to be cited."""
    scores = comparison.scores
    columns = ["variant", "seeds", *(f"{score}, {comparison.unit}" for score in scores)]
    columns += [*(f"gap on {score}" for score in scores), "verdict"]
    gaps = {(gap.variant, gap.score): f"{signed(gap.mean)} ({interval(gap)})" for gap in comparison.differences()}
    rows: list[Cells] = [
        [
            Cell(row.variant, note=_title(row)),
            seeds(row),
            *(spread(row.scores.get(score)) for score in scores),
            *(gaps.get((row.variant, score), "") for score in scores),
            _last_word(comparison, row),
        ]
        for row in comparison.rows()
    ]
    return Table(comparison.name, [Column(title) for title in columns], rows)


def differences_table(comparison: Comparison) -> Table:
    """A row a validation set with its interval; on the console the verdict stands on a variant's first row."""
    numbers = (Column(name, "number") for name in ("gap", "95 % interval", "pairs"))
    columns = (Column("variant"), Column("set"), *numbers, Column("result", "word"), Column("verdict", "word"))
    verdicts = {row.variant: row.verdict for row in comparison.rows()}
    rows: list[Cells] = []
    above = ""
    for gap in comparison.differences():
        brief = "" if gap.variant == above else None
        above, decided = gap.variant, gap.result in (Result.BETTER, Result.WORSE)
        verdict = verdicts[gap.variant]
        rows.append(
            [
                Cell(gap.variant, brief=brief),
                gap.score,
                signed(gap.mean),
                interval(gap),
                str(gap.seeds),
                Cell(gap.result.value, TONES[gap.result], brief=None if decided else "-"),
                Cell(verdict.value if verdict else "", TONES.get(verdict, ""), brief=brief),
            ]
        )
    return Table(f"gap to {comparison.baseline}, {comparison.unit}: below 0 is better", columns, rows)


def costs_table(comparison: Comparison) -> Table:
    """Sizes, time, spikes and what the fallback did."""
    numbers = ("parameters", "KV cache, MiB", "s/step", "SpikeScore", "fallback")
    columns = (Column("variant"), *(Column(name, "number") for name in numbers))
    rows = [
        (
            row.variant,
            "-" if row.parameters is None else f"{row.parameters:,}",
            "-" if row.kv_cache_bytes is None else f"{row.kv_cache_bytes / MEBIBYTE:g}",
            "-" if row.seconds_per_step is None else f"{row.seconds_per_step:.3g}",
            "-" if row.spike_score is None else f"{row.spike_score:.2%}",
            "-" if row.events is None else str(row.events),
        )
        for row in comparison.rows()
    ]
    return Table("sizes and costs (KV cache: 4,096 positions in bf16)", columns, rows)


def map_tables(comparison: Comparison) -> Iterator[Table]:
    """For a grid with two axes, one table a validation set: the fuller the colour, the worse."""
    for score in comparison.scores if comparison.axes else ():
        down, across = (list(dict.fromkeys(labels[axis] for labels in comparison.labels.values())) for axis in (0, 1))
        seeds = {labels: comparison.values(variant, score) for variant, labels in comparison.labels.items()}
        means = {labels: fmean(values.values()) for labels, values in seeds.items() if values}
        low, high = min(means.values(), default=0.0), max(means.values(), default=0.0)
        shades = {labels: round(6 + 60 * (mean - low) / ((high - low) or 1)) for labels, mean in means.items()}
        cells = {labels: Cell(f"{mean:.3f}", shade=shades[labels]) for labels, mean in means.items()}
        rows = [[row, *(cells.get((row, column), "-") for column in across)] for row in down]
        where = f"{comparison.axes[0]} down, {comparison.axes[1]} across"
        columns = (Column(""), *(Column(label, "number") for label in across))
        yield Table(f"{score}, {comparison.unit}: {where}; mean over seeds", columns, rows)


def exponents_table(comparison: Comparison) -> Table | None:
    """Exponents of the first gradient, fitted beside published; None for a grid without them."""
    rows = [
        (fit.label, fit.block, spread(fit.fitted), "" if fit.published is None else f"{fit.published:g}")
        for fit in exponents(comparison)
    ]
    if not rows:
        return None
    fitted = f"fitted exponent of {comparison.axes[1]}"
    columns = (Column(comparison.axes[0]), Column("block"), Column(fitted, "number"), Column("published", "number"))
    return Table(f"first gradient ~ {comparison.axes[1]} ^ exponent", columns, rows)


def spread(value: Spread | None) -> str:
    """Mean and standard deviation over seeds, or a dash."""
    return "-" if value is None else with_deviation(value.mean, value.deviation)


def signed(gap: float) -> str:
    """A gap with its sign; an exact zero has none."""
    return "0" if gap == 0 else f"{gap:+.3f}"


def interval(gap: Difference) -> str:
    """The 95 % interval of the mean difference."""
    return "one seed" if gap.low is None or gap.high is None else f"{signed(gap.low)} to {signed(gap.high)}"


def seeds(row: Row) -> str:
    """How many seeds finished, and of how many if some did not."""
    return f"{row.seeds} of {row.seeds + row.failed}" if row.failed else str(row.seeds)


def _name(comparison: Comparison, row: Row) -> Cell:
    title = _title(row)
    if row.variant != comparison.baseline:
        return Cell(row.variant, note=title)
    return Cell(f"{row.variant} (baseline)", note=title, brief=f"{row.variant} *" + (f": {title}" if title else ""))


def _title(row: Row) -> str:
    """The title where it says more than the name."""
    return "" if row.title == row.variant else row.title


def _last_word(comparison: Comparison, row: Row) -> str:
    if row.variant == comparison.baseline and not row.failures:
        return "baseline"
    return row.verdict.value if row.verdict is not None else "; ".join(row.failures)
