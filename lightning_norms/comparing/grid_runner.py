"""Run a grid: every run is an ordinary ``fit`` in a process or a job, and a folder, of its own.

::

    folder/runs/pre_1337_0f3a9c11/run.yaml       its configuration: fit --config run.yaml is the same run
                                  attempt_1/      logs and checkpoints; attempt_2 resumes from the last checkpoint
                                  attempt_1/record.json   exists only if the fit came to its end
                                  output.txt      what the run printed; on a cluster, job/ has the rest
    folder/comparison.json  .csv  .html  .md      rewritten after every run

There is no other state, so a grid that was killed at any moment resumes when it is started again. A run that another
grid has finished in the same folder under another name is not repeated; two equal variants of one grid both run.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_norms.callbacks import run_record
from lightning_norms.comparing.grid import Grid, PlannedRun
from lightning_norms.comparing.launchers import Launcher, LocalLauncher, Started
from lightning_norms.comparing.locks import alone
from lightning_norms.reports.comparison.data import Comparison, Run
from lightning_norms.reports.typed_json import as_typed

Check = Callable[[Path], str | None]
"""Returns why ``fit --config`` would refuse a file; None if it would not."""
REASON = 160
"""Most characters of a reason in a table."""
LAST_WORDS = re.compile(r"error: |[\w.]*(Error|Exception|Interrupt)\b")


@dataclass(kw_only=True)
class GridRunner:
    """Runs what is missing of a grid.

    Args:
        grid: The grid.
        folder: Folder of runs and results.
        jobs: Number of runs at a time.
        check: Checks each configuration before the first run starts.
        on_start: Called when a run starts.
        on_end: Called when a run has ended, with its result and the comparison so far.
        on_wait: Called when a run waits for an equal one that another grid, or a killed one, started.
        launcher: Starts the runs.
    """

    grid: Grid
    folder: Path
    jobs: int = 1
    check: Check = lambda _: None
    on_start: Callable[[PlannedRun], object] = lambda _: None
    on_end: Callable[[Run, Comparison], object] = lambda *_: None
    on_wait: Callable[[PlannedRun], object] = lambda _: None
    launcher: Launcher = field(default_factory=LocalLauncher)

    def __post_init__(self) -> None:
        self._planned = self.grid.runs()
        self._started: set[Started] = set()
        self._stopped = False

    def run(self) -> Comparison:
        """Run everything that is not finished; a run that fails costs only its own row."""
        for planned in self._planned:
            place = self._place(planned)
            place.mkdir(parents=True, exist_ok=True)
            (place / "run.yaml").write_text(planned.config, encoding="utf-8")
        problems = self._check_variants()
        results: dict[PlannedRun, Run] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(self._run_one, run, problems.get(run.variant)): run for run in self._planned}
            try:
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
                    self.on_end(future.result(), self._compare(results))
            except BaseException:
                self._stop()
                pool.shutdown(cancel_futures=True)
                raise
        return self._compare(results)

    def _compare(self, results: Mapping[PlannedRun, Run]) -> Comparison:
        runs = tuple(results.get(run) or _failed(run, "has not run yet") for run in self._planned)
        is_foreign = any("loss" in name for run in runs for name in run.scores or {})
        variants = self.grid.variants
        return Comparison(
            name=self.grid.name,
            baseline=self.grid.baseline,
            titles={name: variant.title for name, variant in variants.items()},
            runs=runs,
            unit="loss" if is_foreign else "bits/byte",
            axes=self.grid.axes,
            labels={name: variant.labels for name, variant in variants.items() if variant.labels},
            published=self.grid.exponents,
        )

    def _place(self, planned: PlannedRun) -> Path:
        return self.folder / "runs" / planned.folder

    def _check_variants(self) -> dict[str, str]:
        """Variant -> why ``fit`` would refuse it, known before the first run has cost anything."""
        first = {run.variant: run for run in reversed(self._planned)}
        reasons = {name: self.check(self._place(run) / "run.yaml") for name, run in first.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    # -- one run ---------------------------------------------------------------------------------------------------

    def _run_one(self, planned: PlannedRun, problem: str | None) -> Run:
        if problem is not None:
            return _failed(planned, problem)
        place = self._place(planned)
        with alone(place, lambda: self.on_wait(planned)) as lock:
            record = newest(place, run_record.FILE) or self._find_equal(planned)
            if record is not None:
                return from_record(planned, record)
            self.on_start(planned)
            checkpoint = newest(place, "last.ckpt")
            code = self._fit(place, lock, checkpoint)
            record = newest(place, run_record.FILE)
            if checkpoint is not None and record is None and not self._stopped:
                code = self._fit(place, lock, None)  # the checkpoint may be unusable
                record = newest(place, run_record.FILE)
            return from_record(planned, record) if record else _failed(planned, _explain(code, place / "output.txt"))

    def _find_equal(self, planned: PlannedRun) -> Path | None:
        """The record of an equal run of another grid."""
        if sum(run.suffix == planned.suffix for run in self._planned) > 1:
            return None  # the grid asks how far two equal runs are apart
        for place in sorted((self.folder / "runs").glob(f"*{planned.suffix}")):
            config = place / "run.yaml"  # a digest is short: the text decides
            if config.exists() and config.read_text(encoding="utf-8") == planned.config:
                record = newest(place, run_record.FILE)
                if record is not None:
                    return record
        return None

    def _fit(self, place: Path, lock: int | None, checkpoint: Path | None) -> int:
        """Start or resume a run; return its exit code."""
        words = [sys.executable, "-m", "lightning_norms", *fit_command(place, checkpoint)]
        started = self.launcher.start(words, place, lock, run_record.FILE)
        self._started.add(started)
        if self._stopped:  # stopped in between, when this run was not yet in the set
            started.terminate()
        try:
            return started.wait()
        finally:
            self._started.discard(started)

    def _stop(self) -> None:
        self._stopped = True
        for started in list(self._started):
            started.terminate()


def fit_command(place: Path, checkpoint: Path | None) -> list[str]:
    """The words of a ``fit`` that logs to a new attempt in the run folder."""
    attempt = 1 + max((int(path.name.partition("_")[2]) for path in place.glob("attempt_*")), default=0)
    (place / f"attempt_{attempt}").mkdir()
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={place}"]
    logger += ["--trainer.logger.name=", f"--trainer.logger.version=attempt_{attempt}"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    resume = [] if checkpoint is None else [f"--ckpt_path={checkpoint}"]
    return ["fit", "--config", str(place / "run.yaml"), *logger, *quiet, *resume]


def newest(place: Path, name: str) -> Path | None:
    """The latest file of that name in the attempts of a run."""
    files = [path for path in place.glob(f"attempt_*/**/{name}") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def from_record(planned: PlannedRun, path: Path) -> Run:
    """The result of a run; it failed if it ended in NaN or was never validated."""
    data: dict[str, Any] = run_record.read(path.parent)
    run = as_typed({"variant": planned.variant, "seed": planned.seed, "failure": None, **data}, Run)
    scores = run.scores or {}
    broken = [name for name, value in scores.items() if not math.isfinite(value)]
    if broken:
        return replace(run, failure=f"diverged: {', '.join(broken)} ended as {scores[broken[0]]}")
    if not scores:
        return replace(run, scores=None, failure="logged no number of a validation set: nothing to compare")
    return run


def _failed(planned: PlannedRun, reason: str) -> Run:
    words = " ".join(reason.split())
    short = words if len(words) <= REASON else words[: REASON - 3] + "..."
    return Run(variant=planned.variant, seed=planned.seed, failure=short)


def _explain(code: int, output: Path) -> str:
    """Why a run did not finish, from the last error in its output."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = (line for line in reversed(lines) if LAST_WORDS.match(line))
    reason = next(errors, "").removeprefix("error: ") or (lines[-1] if lines else "it printed nothing")
    return f"killed by signal {-code}: {reason}" if code < 0 else reason
