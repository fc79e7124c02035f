"""``lightning_norms compare``: variants by seeds in one command, and which of the gaps between them is a result."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_norms import recipes
from lightning_norms.comparing import grid, launchers
from lightning_norms.comparing.grid import Grid, PlannedRun
from lightning_norms.comparing.grid_runner import Check, GridRunner
from lightning_norms.recipes.overlay import as_yaml
from lightning_norms.reports.comparison.console import comparison_csv, comparison_text
from lightning_norms.reports.comparison.data import Comparison, Run
from lightning_norms.reports.comparison.markdown import comparison_markdown
from lightning_norms.reports.comparison.page import comparison_page

EPILOG = """\
A grid is a YAML file with
  base      one run's configuration, or the name of a file or recipe
  baseline  the variant that the others are held against
  seeds     of weights and data order; every variant runs with each
  variants  name: {title: ..., and what it changes in the base, nested as there}

Finished runs are not repeated: the same command goes on where it was stopped.

On a cluster: --launcher submitit --jobs 8 --launcher_options timeout_min=90
slurm_partition=gpu gpus_per_node=1 cpus_per_task=8; any parameter of submitit's
AutoExecutor, and cluster=slurm or cluster=local, if it is not to choose itself.
--folder must be on a file system that all machines share, with locks (flock).
Ctrl-C cancels the jobs.

Exit code: 0 every run finished, 3 a row is missing (the table says why), 2 wrong input.
"""


def command(arguments: list[str], check: Check) -> int:
    """``lightning_norms compare --config FILE [--folder FOLDER] ...``; returns the exit code.

    Args:
        arguments: words of the command line.
        check: why ``fit`` would refuse a configuration; None if it would not.

    Raises:
        ValueError: if the grid is wrong, or its base is no configuration of a run.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.jobs < 1:
        raise ValueError(f"--jobs is {chosen.jobs}, but at least one run must go on at a time.")
    launcher = launchers.launcher(chosen.launcher, chosen.launcher_options, chosen.jobs)
    plan = grid.read(recipes.resolve_comparison(chosen.config), chosen.seeds, chosen.fast)
    folder = Path(chosen.folder)
    folder.mkdir(parents=True, exist_ok=True)
    reason = check(_base(plan, folder))
    if reason is not None:
        raise ValueError(f"the base of {plan.name} is no configuration that fit takes: {reason}")
    with _Progress(plan, folder) as progress:
        told = (progress.start, progress.end, progress.wait)
        runner = GridRunner(plan, folder, chosen.jobs, check, *told, launcher)
        try:
            found = runner.run()
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from here", file=sys.stderr)
            return 130
    _write(found, folder)
    _print(found, folder, chosen.format)
    return 0 if found.complete else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning_norms compare",
        description="Run variants by seeds, and say which gaps to the baseline are results.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-c", "--config", required=True, help="a grid: a shipped recipe or a file of yours")
    parser.add_argument("--folder", default="compare", help="where runs and results go (default: compare)")
    text = "runs at a time, which share the cores, or jobs in the queue of a cluster (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, help=text)
    text = "what starts a run: local, a process here (default), or submitit, a job of a cluster"
    parser.add_argument("--launcher", choices=launchers.NAMES, default="local", help=text)
    text = "of submitit's update_parameters; timeout_min is 60 unless given"
    parser.add_argument("--launcher_options", nargs="+", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the file's")
    parser.add_argument("--fast", action="store_true", help="three steps of a tiny model, one seed: does it work?")
    formats = ("table", "json", "csv", "html", "md")
    parser.add_argument("--format", choices=formats, default="table", help="what is printed; all are written")
    return parser


def _base(plan: Grid, folder: Path) -> Path:
    """The base alone as a file: if that is wrong, every row would be."""
    file = folder / "base.yaml"
    file.write_text(as_yaml(plan.base), encoding="utf-8")
    return file


def _texts(found: Comparison) -> dict[str, str]:
    return {
        "json": found.to_json(),
        "csv": comparison_csv(found),
        "html": comparison_page(found),
        "md": comparison_markdown(found),
    }


def _write(found: Comparison, folder: Path) -> None:
    for ending, text in _texts(found).items():
        part = folder / f"comparison.{ending}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / f"comparison.{ending}")


def _print(found: Comparison, folder: Path, form: str) -> None:
    if form != "table":
        print(_texts(found)[form], end="")
        return
    console = Console()
    for part in comparison_text(found):
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    places = f"\nPictures: {folder / 'comparison.html'}\nAll numbers: {folder / 'comparison.json'}"
    console.print(places, highlight=False, markup=False, soft_wrap=True)


class _Progress:
    """A bar over the grid and a line for every run that has ended; on stderr, so that only results are on stdout."""

    def __init__(self, plan: Grid, folder: Path) -> None:
        columns = (
            TextColumn("{task.description:<34.34}"),
            BarColumn(bar_width=18),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(file=sys.stderr))
        self._task = self._bar.add_task(plan.name, total=len(plan.runs()))
        self._folder = folder
        self._lock = threading.Lock()

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, run: PlannedRun) -> None:
        """Say which run is under way."""
        self._bar.update(self._task, description=f"{run.variant}, seed {run.seed}")

    def wait(self, run: PlannedRun) -> None:
        """Say why nothing goes on."""
        self._bar.update(self._task, description=f"waits for {run.variant}, seed {run.seed}")

    def end(self, run: Run, so_far: Comparison) -> None:
        """One line; the results so far are on the disk, for those who look while it runs."""
        with self._lock:
            line = f"{run.variant}, seed {run.seed}: {run.failure or _numbers(run)}"
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._bar.advance(self._task)
            _write(so_far, self._folder)


def _numbers(run: Run) -> str:
    scores = ", ".join(f"{name} {value:.3f}" for name, value in (run.scores or {}).items())
    return scores + ("" if run.seconds_per_step is None else f"; {run.seconds_per_step:.3g} s/step")
