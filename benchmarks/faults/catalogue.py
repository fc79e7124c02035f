"""All rows, collected from the groups."""

from __future__ import annotations

from benchmarks.faults import eight, healthy, organic, transient
from benchmarks.faults.rows import Row

ROWS: tuple[Row, ...] = (*transient.ROWS, *eight.ROWS, *organic.ROWS, *healthy.ROWS)
