"""What starts a run of a grid, and the launcher of this machine.

::

    grid ── words of a fit ──> LocalLauncher      a process here, which inherits the lock of the run folder
                          ──> SubmititLauncher   a job in the queue, which takes that lock itself when it starts
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Started(Protocol):
    """A run that is under way."""

    def wait(self) -> int:
        """Wait until the run has ended or was stopped; return its exit code."""

    def terminate(self) -> None:
        """Ask the run to end, without waiting for it."""


class Launcher(Protocol):
    """Starts runs."""

    def start(self, words: Sequence[str], place: Path, lock: int | None, done: str) -> Started:
        """Start a command.

        Args:
            words: The command.
            place: The run folder; the output of the command is appended to ``output.txt`` there.
            lock: Descriptor of that folder's lock, held by the grid; None where the system has no such locks.
            done: Name of a file in an attempt whose presence means that the run is finished.
        """


@dataclass(frozen=True)
class LocalLauncher:
    """Starts processes on this machine.

    Args:
        jobs: Number of runs at a time, which share the cores.
    """

    jobs: int = 1

    def start(self, words: Sequence[str], place: Path, lock: int | None, done: str) -> subprocess.Popen[bytes]:
        """Start a process that also holds the lock: after the grid was killed, a new one waits for a run that lives."""
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        return start_process(words, place, lock, run_environment(os.environ, threads))


def start_process(
    words: Sequence[str], place: Path, lock: int | None, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command that inherits the lock and appends its output to ``output.txt``."""
    descriptors = () if lock is None else (lock,)
    with (place / "output.txt").open("ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env, pass_fds=descriptors)


def run_environment(variables: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """The environment of a run: the user's, without the seed that Lightning keeps there for its own run.

    Example:
        >>> run_environment({"PL_GLOBAL_SEED": "7", "HOME": "/"}, threads=2)
        {'OMP_NUM_THREADS': '2', 'HOME': '/'}
    """
    share = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {key: value for key, value in {**share, **variables}.items() if key != "PL_GLOBAL_SEED"}
