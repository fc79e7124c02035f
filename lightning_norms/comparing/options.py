"""The options of ``lightning_norms compare``."""

from __future__ import annotations

import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lightning_norms.comparing.launchers import Launcher, LocalLauncher
from lightning_norms.comparing.submitit_launcher import SubmititLauncher

EPILOG = """\
A grid is a YAML file with
  base      one run's configuration, or the name of a file or recipe
  baseline  the variant that the others are compared with
  seeds     list of seeds of weights and data order; every variant runs with each
  variants  name: {title: ..., and what it changes in the base, nested as there}

Finished runs are not repeated: the same command resumes where it was stopped.

On a cluster: --launcher submitit --jobs 8 --launcher_options timeout_min=90
slurm_partition=gpu gpus_per_node=1 cpus_per_task=8; any parameter of submitit's
AutoExecutor, and cluster=slurm or cluster=local to override its choice.
--folder must be on a file system that all machines share, with locks (flock).
Ctrl-C cancels the jobs.

Exit code: 0 every run finished, 3 a row is missing (the table says why), 2 wrong input.
"""


class _Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    pass


def build_parser() -> ArgumentParser:
    """Build the parser of the command line."""
    parser = ArgumentParser(
        prog="lightning_norms compare",
        description="Run variants by seeds, and say which differences to the baseline are results.",
        epilog=EPILOG,
        formatter_class=_Help,
        exit_on_error=False,
    )
    parser.add_argument("-c", "--config", required=True, help="a grid: a shipped recipe or a file of yours")
    parser.add_argument("--folder", default="compare", help="folder of runs and results")
    text = "number of runs at a time, which share the cores, or of jobs in the queue of a cluster"
    parser.add_argument("--jobs", type=int, default=1, help=text)
    text = "what starts a run: local, a process here, or submitit, a job of a cluster"
    parser.add_argument("--launcher", choices=("local", "submitit"), default="local", help=text)
    text = "parameters of submitit; timeout_min is 60 unless given"
    parser.add_argument("--launcher_options", nargs="+", default=[], metavar="KEY=VALUE", help=text)
    text = "list of seeds such as [0, 1, 2] that replaces the file's"
    parser.add_argument("--seeds", type=list[int] | None, default=None, help=text)
    text = "number of seeds: the first ones of the file, and whole numbers above them if it has fewer"
    parser.add_argument("--n_seeds", type=int | None, default=None, help=text)
    text = "three steps of a tiny model with one seed, to see whether the grid works"
    parser.add_argument("--fast", action="store_true", help=text)
    formats = ("table", "json", "csv", "html", "md")
    parser.add_argument("--format", choices=formats, default="table", help="what is printed; all are written")
    return parser


def make_launcher(name: str, options: Sequence[str], jobs: int) -> Launcher:
    """Make the launcher of that name.

    Args:
        name: "local" or "submitit".
        options: ``key=value`` words for submitit.
        jobs: Number of runs at a time.

    Raises:
        ValueError: If options do not fit, or submitit is not installed.

    Example:
        >>> make_launcher("local", (), jobs=2)
        LocalLauncher(jobs=2)
        >>> make_launcher("local", ("timeout_min=60",), jobs=2)
        Traceback (most recent call last):
            ...
        ValueError: --launcher_options are for --launcher submitit; the local launcher has none.
    """
    if name == "submitit":
        return SubmititLauncher(parse_options(options))
    if options:
        raise ValueError("--launcher_options are for --launcher submitit; the local launcher has none.")
    return LocalLauncher(jobs)


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` words, with values as in YAML.

    Raises:
        ValueError: If a word is not ``key=value``.

    Example:
        >>> parse_options(["timeout_min=90", "slurm_partition=gpu", "slurm_exclusive=true"])
        {'timeout_min': 90, 'slurm_partition': 'gpu', 'slurm_exclusive': True}
    """
    for word in options:
        if not re.fullmatch(r"\w+=.+", word, re.DOTALL):
            raise ValueError(f"--launcher_options has {word!r}, but each must be key=value, such as timeout_min=60.")
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in options)}
