"""The page: what every column reached, from the results on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.faults.columns import COLUMNS, NONE, OURS
from benchmarks.faults.goals import Ending, NotDoubled
from benchmarks.faults.rows import Row
from benchmarks.faults.store import TWIN, Store

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
TITLES = {
    "transient": "Transient faults",
    "persistent": "Persistent bad data",
    "eight": "Eight faults of an existing project",
    "organic": "Runs that die of their own settings",
    "healthy": "Healthy runs",
}
WORSE = 1.1
"""Factor between two losses from which on one is worse, where as many runs end well."""


@dataclass(frozen=True)
class Cell:
    """All runs of a row under one protection, each with its twin."""

    row: Row
    pairs: tuple[tuple[Ending, Ending], ...]

    @property
    def met(self) -> int:
        """Runs that reached the row's goal."""
        return sum(self.row.goal.is_met(run, twin) for run, twin in self.pairs)

    @property
    def alive(self) -> int:
        """Runs whose loss has at most doubled since the fault."""
        return sum(NotDoubled().is_met(run, twin) for run, twin in self.pairs)

    @property
    def good(self) -> list[Ending]:
        """Endings of the runs that reached the goal."""
        return [run for run, twin in self.pairs if self.row.goal.is_met(run, twin)]

    @property
    def loss(self) -> float:
        """Mean loss of all runs."""
        return fmean(run.loss for run, _ in self.pairs)

    @property
    def touched(self) -> int:
        """Runs in which something was done."""
        return sum(bool(run.counts) or run.error is not None for run, _ in self.pairs)

    def is_better_than(self, other: Cell) -> bool:
        """More runs end well, or as many and all of them, at a clearly lower loss."""
        if len(self.pairs) != len(other.pairs) or self.met != other.met:
            return self.met / len(self.pairs) > other.met / len(other.pairs)
        return 0 < self.met == len(self.pairs) and other.loss > WORSE * self.loss > 0

    def __str__(self) -> str:
        count = f"{self.met} of {len(self.pairs)}"
        notes = [f"{self.loss:.3g}" if math.isfinite(self.loss) else "not finite"]
        if lost := fmean([run.lost for run, _ in self.pairs]):
            notes.append(f"lost {lost:.0f}")
        if stopped := sum(run.error is not None for run, _ in self.pairs):
            notes.append(f"{stopped} stopped")
        return f"{count}; {', '.join(notes)}"


Table = dict[str, dict[str, Cell]]


def collect(store: Store, rows: Sequence[Row]) -> Table:
    """Row -> column -> its runs, as far as they and their twins are on disk."""
    table: Table = {}
    for row in rows:
        seeds = range(row.seeds)
        twins = store.endings(row, TWIN, seeds)
        for column in COLUMNS:
            endings = store.endings(row, column.name, seeds)
            pairs = tuple((endings[seed], twins[seed]) for seed in seeds if seed in endings and seed in twins)
            if pairs:
                table.setdefault(row.name, {})[column.name] = Cell(row, pairs)
    return table


def write_page(path: Path, store: Store, rows: Sequence[Row]) -> None:
    """Replace the tables between the two marks of the page."""
    table = collect(store, rows)
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    tables = [_versions(store), "## In total", _totals(table)]
    for group, title in TITLES.items():
        cells = {name: columns for name, columns in table.items() if next(iter(columns.values())).row.group == group}
        if cells:
            tables += [f"## {title}", _rows(cells)]
    text = "\n\n".join([before.rstrip(), BEGIN, *tables, END])
    path.write_text(text + rest.partition(END)[2].rstrip() + "\n", encoding="utf-8")


def lost_rows(table: Table) -> list[str]:
    """Rows in which another column is better than ours."""
    return [
        name
        for name, cells in table.items()
        if OURS in cells and any(cell.is_better_than(cells[OURS]) for cell in cells.values())
    ]


def _rows(table: Table) -> str:
    lost = lost_rows(table)
    lines = [_line(["", *(column.name for column in COLUMNS)]), "|---" * (len(COLUMNS) + 1) + "|"]
    for name, cells in table.items():
        shown = [str(cells[column.name]) if column.name in cells else "not run" for column in COLUMNS]
        lines.append(_line([f"**{name}**" if name in lost else name, *shown]))
    return "\n".join(lines)


def _totals(table: Table) -> str:
    lines = [_line(["", *(column.name for column in COLUMNS)]), "|---" * (len(COLUMNS) + 1) + "|"]
    for group, title in TITLES.items():
        for label, number in MEASURES.items():
            shown = [
                number([cells[column.name] for cells in table.values() if _is_in(cells, column.name, group)])
                for column in COLUMNS
            ]
            if any(shown):
                lines.append(_line([f"{title}: {label}", *(text or "not run" for text in shown)]))
    return "\n".join(lines)


def _is_in(cells: dict[str, Cell], column: str, group: str) -> bool:
    return column in cells and cells[column].row.group == group


def _met(cells: list[Cell]) -> str:
    return f"{sum(cell.met for cell in cells)} of {sum(len(cell.pairs) for cell in cells)}" if cells else ""


def _alive(cells: list[Cell]) -> str:
    if not any(cell.row.group == "transient" for cell in cells):
        return ""
    return f"{sum(cell.alive for cell in cells)} of {sum(len(cell.pairs) for cell in cells)}"


def _lost(cells: list[Cell]) -> str:
    good = [run.lost for cell in cells for run in cell.good]
    return f"{fmean(good):.1f}" if good else ("-" if cells else "")


def _touched(cells: list[Cell]) -> str:
    return f"{sum(cell.touched for cell in cells)}" if cells else ""


def _seconds(cells: list[Cell]) -> str:
    return f"{fmean(run.seconds for cell in cells for run, _ in cell.pairs):.1f} s" if cells else ""


MEASURES = {
    "end well": _met,
    "loss not doubled": _alive,
    "steps lost by those that end well, mean": _lost,
    "runs with an intervention": _touched,
    "wall time of a run": _seconds,
}


def _versions(store: Store) -> str:
    versions = dict.fromkeys(filter(None, (store.version(column.name) for column in COLUMNS)))
    return f"{', '.join(versions)}; one thread a run. Rows that ours loses are bold; {NONE} is the baseline."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
