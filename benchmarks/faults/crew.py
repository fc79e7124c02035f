"""Several workers, each a process of its own, that share out the runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import local
from typing import IO, Any

from benchmarks.faults.columns import ARC, OWN
from benchmarks.faults.worker import MARK

ROOT = Path(__file__).parents[2]


def interpreters(arc_python: str | None) -> dict[str, str]:
    """Name of an environment -> its Python."""
    return {OWN: sys.executable} | ({ARC: arc_python} if arc_python else {})


def version_of(python: str, package: str) -> str | None:
    """The version of a package in another environment, None if it is not installed there."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


class Worker:
    """One process that does a run at a time."""

    def __init__(self, python: str) -> None:
        options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True, "cwd": ROOT}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "benchmarks.faults.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, **options,
        )  # fmt: skip

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """Do a run and return its ending."""
        to, back = _pipes(self._process)
        to.write(json.dumps(task) + "\n")
        to.flush()
        for line in back:
            if line.startswith(MARK):
                ending: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return ending
        return {"broken": f"the worker ended with code {self._process.wait()}"}

    def close(self) -> None:
        """End the process."""
        _pipes(self._process)[0].close()
        self._process.wait()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def run_all(tasks: Iterable[tuple[str, dict[str, Any]]], jobs: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (task, ending) as runs end.

    Args:
        tasks: (Python, task) pairs.
        jobs: runs at the same time; each has one worker for every Python.
    """
    mine, workers = local(), []

    def work(python: str, task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        own: dict[str, Worker] = mine.__dict__.setdefault("workers", {})
        if python not in own:
            own[python] = Worker(python)
            workers.append(own[python])
        return task, own[python].run(task)

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(work, *task) for task in tasks]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()
