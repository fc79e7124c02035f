"""The numbers that a run ended with, as a table: key, value, unit."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.table import Table

from lightning_norms.metrics import KEYS


def results_table(values: Mapping[str, float], title: str = "at the end of the run") -> Table:
    """One row a number, in the order of the keys; fits 80 columns.

    Args:
        values: what a run has logged, by key.
        title: above the table.
    """
    table = Table(title=title)
    table.add_column("key", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for name in sorted(values):
        table.add_row(name, f"{values[name]:.4f}", unit(name))
    return table


def unit(name: str) -> str:
    """The unit of a logged key, empty for a key that is not ours.

    Example:
        >>> unit("val/code/bits_per_byte")
        'bits/byte'
    """
    for key in KEYS:
        if re.fullmatch(re.escape(key.name).replace(re.escape("{}"), ".+"), name):
            return "" if key.unit == "1" else key.unit
    return ""
