"""Where a run of a grid is started: a process of this machine, or a job of a cluster through ``submitit``.

::

    grid ── words of a fit ──> LocalLauncher      a process here, which inherits the lock of the run's folder
                          ──> SubmititLauncher   a job in the queue, which takes that lock itself when it starts

A job on another host cannot inherit a lock, so the grid gives it up when it hands a job in. Folders must then be on a
file system that all hosts share, and whose ``flock`` holds between them.
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

import yaml

from lightning_norms.comparing.locks import alone

NAMES = ("local", "submitit")
POLL = 0.5
"""Seconds between two looks at a job's result file; submitit asks the queue itself more rarely."""
GRACE = 5.0
"""Seconds that a job which was cancelled is waited for."""
STOPPED = -15
"""Exit code of a job that was cancelled, as of a process that was terminated."""
MINUTES = 60
"""That a job may take unless ``timeout_min`` says otherwise; submitit's own default is 5, and locally 2."""
ONE_TASK = ("nodes", "tasks_per_node")
_RAISED = re.compile(r"[\w.]+(?:Error|Exception): .*")


class Started(Protocol):
    """A run that is under way."""

    def wait(self) -> int:
        """Until it has ended or was stopped; its exit code."""

    def stop(self) -> None:
        """End it, without waiting for that."""


class Launcher(Protocol):
    """Starts runs."""

    def start(self, words: Sequence[str], place: Path, lock: int | None, done: str) -> Started:
        """Start a command.

        Args:
            words: of the command.
            place: folder of the run; what the command says goes to ``output.txt`` there.
            lock: of that folder, held by the grid; None where the system has no such locks.
            done: name of a file in an attempt that says that there is nothing left to do.
        """


def launcher(name: str, options: Sequence[str], jobs: int) -> Launcher:
    """The launcher of a name.

    Args:
        name: "local" or "submitit".
        options: ``key=value`` words for submitit.
        jobs: runs at a time.

    Raises:
        ValueError: if options do not fit, or submitit is not installed.

    Example:
        >>> launcher("local", (), jobs=2)
        LocalLauncher(jobs=2)
        >>> launcher("local", ("timeout_min=60",), jobs=2)
        Traceback (most recent call last):
            ...
        ValueError: --launcher_options are for --launcher submitit; the local one has none.
    """
    if name == "submitit":
        return SubmititLauncher(parsed(options))
    if options:
        raise ValueError("--launcher_options are for --launcher submitit; the local one has none.")
    return LocalLauncher(jobs)


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """Words of the command line as arguments.

    Raises:
        ValueError: if a word is no ``key=value``.

    Example:
        >>> parsed(["timeout_min=90", "slurm_partition=gpu", "slurm_exclusive=true"])
        {'timeout_min': 90, 'slurm_partition': 'gpu', 'slurm_exclusive': True}
    """
    for word in options:
        if not re.fullmatch(r"\w+=.+", word, re.DOTALL):
            raise ValueError(f"--launcher_options has {word!r}, but each must be key=value, such as timeout_min=60.")
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in options)}


# --- this machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalLauncher:
    """Processes here.

    Args:
        jobs: runs at a time, which share the cores.
    """

    jobs: int = 1

    def start(self, words: Sequence[str], place: Path, lock: int | None, done: str) -> Process:
        """The process holds the lock too: if the grid is killed, a new one waits for the run that is left over."""
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        return Process(words, place, lock, environment(os.environ, threads))


class Process:
    """A command whose words go to the end of ``output.txt``."""

    def __init__(self, words: Sequence[str], place: Path, lock: int | None, env: Mapping[str, str]) -> None:
        held = () if lock is None else (lock,)
        with (place / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env, pass_fds=held)

    def wait(self) -> int:
        """Its exit code; below 0 the signal that killed it."""
        return self._process.wait()

    def stop(self) -> None:
        """Ask it to end."""
        self._process.terminate()


def environment(given: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Of a run: what the user set stays, but a seed that Lightning left there is not this run's.

    Example:
        >>> environment({"PL_GLOBAL_SEED": "7", "HOME": "/"}, threads=2)
        {'OMP_NUM_THREADS': '2', 'HOME': '/'}
    """
    share = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {key: value for key, value in {**share, **given}.items() if key != "PL_GLOBAL_SEED"}


# --- a cluster --------------------------------------------------------------------------------------------------------


@dataclass
class SubmititLauncher:
    """Jobs of the cluster that ``submitit`` finds here; a job is one run, whose devices Lightning starts itself.

    Args:
        options: of ``executor.update_parameters`` (timeout_min, slurm_partition, gpus_per_node, cpus_per_task ...), and
            ``cluster``, if submitit should not choose: "slurm" or "local".

    Raises:
        ValueError: if submitit is not installed, or an option is none of its own.

    Source:
        https://github.com/facebookincubator/submitit
    """

    options: dict[str, Any] = field(default_factory=dict)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """What submitit knows of all jobs is not made for several threads."""

    def __post_init__(self) -> None:
        for name in ONE_TASK:
            if self.options.get(name, 1) != 1:
                raise ValueError(f"{name} is {self.options[name]!r}, but a job of compare is one task on one node.")
        self.options = {"timeout_min": MINUTES, **self.options}
        ignore_interrupts_here_only()
        with tempfile.TemporaryDirectory() as folder:
            self._executor(Path(folder))  # known to be wrong before anything has started

    def start(self, words: Sequence[str], place: Path, lock: int | None, done: str) -> Job:
        """Hand it in; the job waits for the lock, should another one still hold it."""
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
        given = dict(self.options)
        try:
            executor = submitit.AutoExecutor(folder, cluster=given.pop("cluster", None))
            executor.update_parameters(**given)
        except (ValueError, NameError, AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(f"--launcher_options: {str(error).splitlines()[0]}") from None
        return executor


def ignore_interrupts_here_only() -> None:
    """Let jobs be interrupted although this process ignores SIGINT, as under ``nohup ... &`` in a script.

    submitit cancels a job of this machine by SIGINT. Processes inherit that a signal is ignored, but never a handler.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others may not set handlers
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)


class Job:
    """A job in the queue, or out of it."""

    def __init__(self, job: Any, place: Path, minutes: float, one_at_a_time: threading.Lock) -> None:
        self._job, self._place, self._minutes, self._one_at_a_time = job, place, minutes, one_at_a_time
        self._stopped = threading.Event()

    def wait(self) -> int:
        """Exit code of the run; 1 if the job died around it, and ``output.txt`` says how."""
        while not self._stopped.wait(POLL) and not self._done():
            pass
        if self._stopped.is_set():
            end = time.monotonic() + GRACE
            while not self._done() and time.monotonic() < end:
                time.sleep(POLL)
            return STOPPED
        error = self._job.exception()
        if error is None:
            return int(self._job.result())
        with (self._place / "output.txt").open("a", encoding="utf-8") as output:
            output.write(f"\nerror: {self._why(str(error))}\n")
        return 1

    def stop(self) -> None:
        """Cancel it."""
        self._stopped.set()
        with self._one_at_a_time:
            self._job.cancel(check=False)

    def _done(self) -> bool:
        with self._one_at_a_time:
            return bool(self._job.done())

    def _why(self, said: str) -> str:
        if re.search("timed-out|TIMEOUT", said):
            limit = f"the job took longer than timeout_min, which is {self._minutes:g}"
            return f"{limit}; the same command goes on from its last checkpoint"
        raised = _RAISED.findall(said)
        how = raised[-1] if raised else f"ended as {self._job.state} and left no result"
        return f"job {self._job.job_id}: {how}; its log is {self._job.paths.stderr}"


def run_alone(words: list[str], place: str, threads: int | None, done: str) -> int:
    """On the cluster's machine: take the run's folder, and start the command unless another job has done it meanwhile.

    Args:
        words: of the command.
        place: folder of the run.
        threads: cores of the job, if known.
        done: name of a file in an attempt that says that there is nothing left to do.
    """
    with alone(Path(place), lambda: None) as lock:
        if any(Path(place).glob(f"attempt_*/**/{done}")):
            return 0
        env = environment(os.environ, threads)
        if "SLURM_JOB_ID" in env:
            env["SLURM_JOB_NAME"] = "interactive"  # Lightning then starts its devices as at a desk, and never requeues
        process = Process(words, Path(place), lock, env)
        try:
            return process.wait()
        except BaseException:  # cancelled, or out of time
            process.stop()
            raise
