"""What starts a run of a grid: a process of this machine, or a job of a cluster through ``submitit``.

::

    grid ── words of a fit ──> LocalLauncher      a process here, which inherits the lock of the run folder
                          ──> SubmititLauncher   a job in the queue, which takes that lock itself when it starts

A job on another host cannot inherit a lock, so the grid releases it when it submits a job. The run folders must then be
on a file system that all hosts share, and whose ``flock`` works between them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightning_norms.comparing.locks import alone

POLL = 0.5
"""Seconds between two looks at a job's result file; submitit asks the queue itself less often."""
GRACE = 5.0
"""Seconds to wait for a job that was cancelled."""
STOPPED = -15
"""Exit code of a job that was cancelled, as of a process that was terminated."""
MINUTES = 60
"""Default time limit of a job; submitit's own is 5 minutes, and 2 for local jobs."""
ONE_TASK = ("nodes", "tasks_per_node")
_RAISED = re.compile(r"[\w.]+(?:Error|Exception): .*")


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


@dataclass
class SubmititLauncher:
    """Submits jobs to the cluster that ``submitit`` detects; a job is one run, whose devices Lightning starts itself.

    Args:
        options: Parameters of ``executor.update_parameters`` (timeout_min, slurm_partition, gpus_per_node,
            cpus_per_task ...), and ``cluster``, "slurm" or "local", to override the detection.

    Raises:
        ValueError: If submitit is not installed, or does not accept an option.

    Source: https://github.com/facebookincubator/submitit
    """

    options: dict[str, Any] = field(default_factory=dict)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Submitit's record of all jobs is not safe for threads."""

    def __post_init__(self) -> None:
        for name in ONE_TASK:
            if self.options.get(name, 1) != 1:
                raise ValueError(f"{name} is {self.options[name]!r}, but a job of compare is one task on one node.")
        self.options = {"timeout_min": MINUTES, **self.options}
        _ignore_interrupts_here_only()
        with tempfile.TemporaryDirectory() as folder:
            self._executor(Path(folder))  # wrong options are refused before anything has started

    def start(self, words: Sequence[str], place: Path, lock: int | None, done: str) -> Job:
        """Submit the job. It blocks on the folder's lock while another process holds it."""
        import cloudpickle

        # By value: the job's own process needs no torch, only the run that it starts does.
        cloudpickle.register_pickle_by_value(sys.modules[__package__])
        place = place.absolute()
        threads = self.options.get("cpus_per_task")
        with self._one_at_a_time:
            executor = self._executor(place / "job")
            executor.update_parameters(name=str(self.options.get("name", place.name)))
            job = executor.submit(run_alone, list(words), str(place), threads, done)
        if lock is not None:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_UN)
        return Job(job, place, self.options["timeout_min"], self._one_at_a_time)

    def _executor(self, folder: Path) -> Any:
        try:
            import submitit
        except ImportError:
            words = "--launcher submitit needs the submitit library: pip install 'lightning_norms[cluster]'"
            raise ValueError(words) from None
        options = dict(self.options)
        try:
            executor = submitit.AutoExecutor(folder, cluster=options.pop("cluster", None))
            executor.update_parameters(**options)
        except (ValueError, NameError, AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(f"--launcher_options: {str(error).splitlines()[0]}") from None
        return executor


def _ignore_interrupts_here_only() -> None:
    """Let jobs be interrupted although this process ignores SIGINT, as under ``nohup ... &`` in a script.

    submitit cancels a local job by SIGINT. A child process inherits that a signal is ignored, but never a handler.
    """
    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)


class Job:
    """A job that was submitted."""

    def __init__(self, job: Any, place: Path, minutes: float, one_at_a_time: threading.Lock) -> None:
        self._job, self._place, self._minutes, self._one_at_a_time = job, place, minutes, one_at_a_time
        self._stopped = threading.Event()

    def wait(self) -> int:
        """Wait for the exit code of the run; 1 if the job around it died, with the reason in ``output.txt``."""
        while not self._stopped.wait(POLL) and not self._is_done():
            pass
        if self._stopped.is_set():
            end = time.monotonic() + GRACE
            while not self._is_done() and time.monotonic() < end:
                time.sleep(POLL)
            return STOPPED
        error = self._job.exception()
        if error is None:
            return int(self._job.result())
        with (self._place / "output.txt").open("a", encoding="utf-8") as output:
            output.write(f"\nerror: {self._explain(str(error))}\n")
        return 1

    def terminate(self) -> None:
        """Cancel the job."""
        self._stopped.set()
        with self._one_at_a_time:
            self._job.cancel(check=False)

    def _is_done(self) -> bool:
        with self._one_at_a_time:
            return bool(self._job.done())

    def _explain(self, error: str) -> str:
        if re.search("timed-out|TIMEOUT", error):
            limit = f"the job took longer than timeout_min, which is {self._minutes:g}"
            return f"{limit}; the same command resumes from its last checkpoint"
        raised = _RAISED.findall(error)
        reason = raised[-1] if raised else f"ended as {self._job.state} and left no result"
        return f"job {self._job.job_id}: {reason}; its log is {self._job.paths.stderr}"


def run_alone(words: list[str], place: str, threads: int | None, done: str) -> int:
    """Lock the run folder on the cluster's machine and start the command, unless the run was finished meanwhile.

    Args:
        words: The command.
        place: The run folder.
        threads: Cores of the job; None if not known.
        done: Name of a file in an attempt whose presence means that the run is finished.
    """
    with alone(Path(place), lambda: None) as lock:
        if any(Path(place).glob(f"attempt_*/**/{done}")):
            return 0
        env = run_environment(os.environ, threads)
        if "SLURM_JOB_ID" in env:
            env["SLURM_JOB_NAME"] = "interactive"  # Lightning then starts its devices itself and never requeues
        process = start_process(words, Path(place), lock, env)
        try:
            return process.wait()
        except BaseException:  # cancelled, or out of time
            process.terminate()
            raise
