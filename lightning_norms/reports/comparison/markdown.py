"""A comparison as one Markdown table, to be cited: scores, gaps to the baseline and the verdict; or exponents."""

from __future__ import annotations

from lightning_norms.reports.comparison.console import gap, interval, spread
from lightning_norms.reports.comparison.data import Comparison, Row
from lightning_norms.reports.comparison.maps import exponent_cells, exponents


def comparison_markdown(found: Comparison) -> str:
    """A row a variant: mean ± standard deviation over seeds, paired gap with its 95 % interval.

    For a grid that publishes exponents against its second axis: a row a curve, fitted beside published.

    Example:
        >>> from lightning_norms.reports.comparison.data import Run
        >>> runs = (Run("pre", 1, None, {"code": 2.5}), Run("post", 1, None, {"code": 2.75}))
        >>> print(comparison_markdown(Comparison("one", "pre", {"pre": "as it was", "post": "moved"}, runs)), end="")
        | variant | seeds | code, bits/byte | gap on code | verdict |
        | --- | --- | --- | --- | --- |
        | pre: as it was | 1 | 2.500 |  | baseline |
        | post: moved | 1 | 2.750 | +0.250 (one seed) | undecided |
    """
    if fits := exponents(found):
        head = [found.axes[0], "block", f"fitted exponent of {found.axes[1]}", "published"]
        return _table(head, [list(exponent_cells(each)) for each in fits])
    scores = found.scores
    head = ["variant", "seeds", *(f"{score}, {found.unit}" for score in scores)]
    head += [*(f"gap on {score}" for score in scores), "verdict"]
    gaps = {(each.variant, each.score): f"{gap(each.mean)} ({interval(each)})" for each in found.differences()}
    return _table(head, [_cells(found, row, gaps) for row in found.rows()])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(_line(cells) for cells in (head, ["---"] * len(head), *rows))


def _cells(found: Comparison, row: Row, gaps: dict[tuple[str, str], str]) -> list[str]:
    verdict = row.verdict.value if row.verdict is not None else "; ".join(row.failures)
    return [
        row.variant if row.title == row.variant else f"{row.variant}: {row.title}",
        f"{row.seeds} of {row.seeds + row.failed}" if row.failed else str(row.seeds),
        *(spread(row.scores.get(score)) for score in found.scores),
        *(gaps.get((row.variant, score), "") for score in found.scores),
        "baseline" if row.variant == found.baseline and not row.failures else verdict,
    ]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
