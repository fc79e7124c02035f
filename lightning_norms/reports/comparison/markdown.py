"""A comparison as one Markdown table, to be cited: scores, gaps to the baseline and the verdict; or exponents."""

from __future__ import annotations

from lightning_norms.reports.comparison.data import Comparison
from lightning_norms.reports.comparison.tables import exponents_table, overview_table


def comparison_markdown(comparison: Comparison) -> str:
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
    table = exponents_table(comparison) or overview_table(comparison)
    return table.markdown()
