"""The progress of a grid on the console."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_norms.comparing.grid import Grid, PlannedRun
from lightning_norms.reports.comparison.data import Run


class GridProgress:
    """A bar over the grid and a line for every run that has ended; on stderr, so that stdout holds only results.

    Args:
        grid: The grid that runs.
    """

    def __init__(self, grid: Grid) -> None:
        columns = (TextColumn("{task.description:<34.34}"), BarColumn(18), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(file=sys.stderr))
        self._task = self._bar.add_task(grid.name, total=len(grid.runs()))

    def __enter__(self) -> GridProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, run: PlannedRun) -> None:
        """Show which run is under way."""
        self._bar.update(self._task, description=f"{run.variant}, seed {run.seed}")

    def wait(self, run: PlannedRun) -> None:
        """Show which run is waited for."""
        self._bar.update(self._task, description=f"waits for {run.variant}, seed {run.seed}")

    def end(self, run: Run) -> None:
        """Print one line on the result of a run."""
        line = f"{run.variant}, seed {run.seed}: {run.failure or _numbers(run)}"
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._bar.advance(self._task)


def _numbers(run: Run) -> str:
    scores = ", ".join(f"{name} {value:.3f}" for name, value in (run.scores or {}).items())
    return scores + ("" if run.seconds_per_step is None else f"; {run.seconds_per_step:.3g} s/step")
