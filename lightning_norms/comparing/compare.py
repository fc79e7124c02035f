"""``lightning_norms compare``: variants by seeds in one command, and which of the differences is a result."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_norms import recipes
from lightning_norms.checks import check_whole
from lightning_norms.comparing.grid import Grid, PlannedRun
from lightning_norms.comparing.grid_file import read_grid
from lightning_norms.comparing.grid_runner import Check, GridRunner
from lightning_norms.comparing.options import build_parser, make_launcher
from lightning_norms.files.log_folder import is_url
from lightning_norms.recipes.overlay import to_yaml
from lightning_norms.reports.comparison.console import comparison_csv, comparison_text
from lightning_norms.reports.comparison.data import Comparison, Run
from lightning_norms.reports.comparison.markdown import comparison_markdown
from lightning_norms.reports.comparison.page import comparison_page


def command(arguments: list[str], check: Check) -> int:
    """Run ``lightning_norms compare --config FILE [--folder FOLDER] ...``; return the exit code.

    Args:
        arguments: Words of the command line.
        check: Returns why ``fit`` would refuse a configuration; None if it would not.

    Raises:
        ValueError: If the grid is wrong, or ``fit`` would refuse its base.
    """
    options = build_parser().parse_args(arguments)
    check_whole("compare", "jobs", options.jobs, 1)
    if options.n_seeds is not None:
        check_whole("compare", "n_seeds", options.n_seeds, 1)
    if options.seeds is not None and options.n_seeds is not None:
        raise ValueError("give either --seeds, a list, or --n_seeds, a number of seeds.")
    if is_url(options.folder):
        raise ValueError(f"--folder is {options.folder}, but runs are locked and resumed there: give a path on a disk.")
    launcher = make_launcher(options.launcher, options.launcher_options, options.jobs)
    config = recipes.resolve(options.config, is_grid=True)
    grid = read_grid(config, options.seeds, options.n_seeds, options.fast)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    _check_base(grid, folder, check)
    # Absolute, since jsonargparse changes the working folder while it reads a file.
    with _Progress(grid, folder.absolute()) as progress:
        runner = GridRunner(
            grid=grid, folder=folder, jobs=options.jobs, check=check, launcher=launcher,
            on_start=progress.start, on_end=progress.end, on_wait=progress.wait,
        )  # fmt: skip
        try:
            comparison = runner.run()
        except KeyboardInterrupt:
            print("\nstopped; the same command resumes from here", file=sys.stderr)
            return 130
    _write(comparison, folder)
    _print(comparison, folder, options.format)
    return 0 if comparison.complete else 3


def _check_base(grid: Grid, folder: Path, check: Check) -> None:
    """Check the base alone first: if it is wrong, every row would be."""
    file = folder / "base.yaml"
    file.write_text(to_yaml(grid.base), encoding="utf-8")
    reason = check(file)
    if reason is not None:
        raise ValueError(f"fit does not accept the base of {grid.name}: {reason}")


def _texts(comparison: Comparison) -> dict[str, str]:
    return {
        "json": comparison.to_json(),
        "csv": comparison_csv(comparison),
        "html": comparison_page(comparison),
        "md": comparison_markdown(comparison),
    }


def _write(comparison: Comparison, folder: Path) -> None:
    for ending, text in _texts(comparison).items():
        part = folder / f"comparison.{ending}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / f"comparison.{ending}")


def _print(comparison: Comparison, folder: Path, form: str) -> None:
    if form != "table":
        print(_texts(comparison)[form], end="")
        return
    console = Console()
    for part in comparison_text(comparison):
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    places = f"\nPictures: {folder / 'comparison.html'}\nAll numbers: {folder / 'comparison.json'}"
    console.print(places, highlight=False, markup=False, soft_wrap=True)


class _Progress:
    """A bar over the grid and a line for every run that has ended; on stderr, so that stdout holds only results."""

    def __init__(self, grid: Grid, folder: Path) -> None:
        self._folder = folder
        columns = (TextColumn("{task.description:<34.34}"), BarColumn(18), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(file=sys.stderr))
        self._task = self._bar.add_task(grid.name, total=len(grid.runs()))

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, run: PlannedRun) -> None:
        self._bar.update(self._task, description=f"{run.variant}, seed {run.seed}")

    def wait(self, run: PlannedRun) -> None:
        self._bar.update(self._task, description=f"waits for {run.variant}, seed {run.seed}")

    def end(self, run: Run, so_far: Comparison) -> None:
        _write(so_far, self._folder)  # after every run, for people who look while the grid runs
        line = f"{run.variant}, seed {run.seed}: {run.failure or _numbers(run)}"
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._bar.advance(self._task)


def _numbers(run: Run) -> str:
    scores = ", ".join(f"{name} {value:.3f}" for name, value in (run.scores or {}).items())
    return scores + ("" if run.seconds_per_step is None else f"; {run.seconds_per_step:.3g} s/step")
