"""Running a grid: every run is an ordinary ``fit`` in a process or a job, and a folder, of its own.

::

    folder/runs/pre_1337_0f3a9c11/run.yaml       its configuration: fit --config run.yaml is the same run
                                  attempt_1/      logs and checkpoints; attempt_2 goes on from the last checkpoint
                                  attempt_1/record.json   there only if the fit came to its end
                                  output.txt      what it said; on a cluster, job/ has the rest
    folder/comparison.json  .csv  .html  .md      anew after every run

Nothing else is remembered, so a grid that was killed at any moment goes on when it is started again. A run that another
grid has finished in the same folder under another name is not run again; two equal variants of one grid both run.
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
"""Why ``fit --config`` would refuse a file; None if it would not."""
REASON = 160
"""Most characters of a reason in a table."""
LAST_WORDS = re.compile(r"error: |[\w.]*(Error|Exception|Interrupt)\b")


@dataclass
class GridRunner:
    """Runs what is missing of a grid.

    Args:
        grid: what to run.
        folder: where runs and results go.
        jobs: runs at a time.
        check: of a configuration, before the first run starts.
        on_start: told when a run starts.
        on_end: told when one has ended, with its result and with the comparison so far.
        on_wait: told when a run has to wait for one that another grid, or a killed one, has left going on.
        launcher: what starts a run.
    """

    grid: Grid
    folder: Path
    jobs: int = 1
    check: Check = lambda _: None
    on_start: Callable[[PlannedRun], object] = lambda _: None
    on_end: Callable[[Run, Comparison], object] = lambda *_: None
    on_wait: Callable[[PlannedRun], object] = lambda _: None
    launcher: Launcher = field(default_factory=LocalLauncher)
    _started: set[Started] = field(default_factory=set)
    _stopped: bool = False
    _planned: tuple[PlannedRun, ...] = ()

    def run(self) -> Comparison:
        """Everything that is not finished; a run that fails costs its own row only."""
        planned = self._planned = self.grid.runs()
        for each in planned:
            self._write(each)
        refused = self._refused(planned)
        results: dict[PlannedRun, Run] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(self._one, each, refused.get(each.variant)): each for each in planned}
            try:
                for done in as_completed(waiting):
                    results[waiting[done]] = done.result()
                    self.on_end(done.result(), self._comparison(planned, results))
            except BaseException:
                self._stop()
                pool.shutdown(cancel_futures=True)
                raise
        return self._comparison(planned, results)

    def _comparison(self, planned: tuple[PlannedRun, ...], results: Mapping[PlannedRun, Run]) -> Comparison:
        pending = "has not run yet"
        runs = tuple(results.get(each) or Run(each.variant, each.seed, pending) for each in planned)
        titles = {name: variant.title for name, variant in self.grid.variants.items()}
        foreign = any("loss" in name for run in runs for name in run.scores or {})
        labels = {name: variant.labels for name, variant in self.grid.variants.items() if variant.labels}
        unit = "loss" if foreign else "bits/byte"
        name, baseline, axes, published = self.grid.name, self.grid.baseline, self.grid.axes, self.grid.exponents
        return Comparison(name, baseline, titles, runs, unit=unit, axes=axes, labels=labels, published=published)

    def _write(self, planned: PlannedRun) -> None:
        place = self._place(planned)
        place.mkdir(parents=True, exist_ok=True)
        (place / "run.yaml").write_text(planned.config, encoding="utf-8")

    def _place(self, planned: PlannedRun) -> Path:
        return self.folder / "runs" / planned.folder

    def _refused(self, planned: tuple[PlannedRun, ...]) -> dict[str, str]:
        """Variant -> why its configuration is none: known before the first run has cost anything."""
        first = {each.variant: each for each in reversed(planned)}
        why = {name: self.check(self._place(each) / "run.yaml") for name, each in first.items()}
        return {name: reason for name, reason in why.items() if reason is not None}

    # -- one run ---------------------------------------------------------------------------------------------------

    def _one(self, planned: PlannedRun, refused: str | None) -> Run:
        if refused is not None:
            return Run(planned.variant, planned.seed, _short(refused))
        place = self._place(planned)
        with alone(place, lambda: self.on_wait(planned)) as lock:
            record = newest(place, run_record.FILE) or self._elsewhere(planned)
            if record is not None:
                return from_record(planned, record)
            self.on_start(planned)
            checkpoint = newest(place, "last.ckpt")
            code = self._fit(place, lock, checkpoint)
            if checkpoint is not None and newest(place, run_record.FILE) is None and not self._stopped:
                code = self._fit(place, lock, None)  # a checkpoint that it cannot go on from
            record = newest(place, run_record.FILE)
            if record is None:
                return Run(planned.variant, planned.seed, _why(code, place / "output.txt"))
            return from_record(planned, record)

    def _elsewhere(self, planned: PlannedRun) -> Path | None:
        """Record of an equal run of another grid."""
        if sum(each.ending == planned.ending for each in self._planned) > 1:
            return None  # the grid asks how far two equal runs are from each other
        for place in sorted((self.folder / "runs").glob(f"*{planned.ending}")):
            config = place / "run.yaml"  # a digest is short: the text decides
            if config.exists() and config.read_text(encoding="utf-8") == planned.config:
                record = newest(place, run_record.FILE)
                if record is not None:
                    return record
        return None

    def _fit(self, place: Path, lock: int | None, checkpoint: Path | None) -> int:
        """Start it or go on; the exit code."""
        words = [sys.executable, "-m", "lightning_norms", *_command(place, checkpoint)]
        started = self.launcher.start(words, place, lock, run_record.FILE)
        self._started.add(started)
        if self._stopped:  # between the two: nobody has told it
            started.stop()
        try:
            return started.wait()
        finally:
            self._started.discard(started)

    def _stop(self) -> None:
        self._stopped = True
        for started in list(self._started):
            started.stop()


def _command(place: Path, checkpoint: Path | None) -> list[str]:
    """A ``fit`` whose logs and checkpoints are a new attempt in the run's folder."""
    attempt = 1 + max((int(path.name.partition("_")[2]) for path in place.glob("attempt_*")), default=0)
    (place / f"attempt_{attempt}").mkdir()
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={place}"]
    logger += ["--trainer.logger.name=", f"--trainer.logger.version=attempt_{attempt}"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    resume = [] if checkpoint is None else [f"--ckpt_path={checkpoint}"]
    return ["fit", "--config", str(place / "run.yaml"), *logger, *quiet, *resume]


def newest(place: Path, name: str) -> Path | None:
    """The latest file of that name in the attempts of a run."""
    found = [path for path in place.glob(f"attempt_*/**/{name}") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def from_record(planned: PlannedRun, path: Path) -> Run:
    """A run's result; one that ended in NaN, or was never validated, is none."""
    data: dict[str, Any] = run_record.read(path.parent)
    run = as_typed({"variant": planned.variant, "seed": planned.seed, "failure": None, **data}, Run)
    broken = [name for name, value in (run.scores or {}).items() if not math.isfinite(value)]
    if broken:
        return replace(run, failure=f"diverged: {', '.join(broken)} ended as {(run.scores or {})[broken[0]]}")
    if not run.scores:
        return replace(run, scores=None, failure="logged no number of a validation set: nothing to compare")
    return run


def _why(code: int, output: Path) -> str:
    """The last words of a run that did not finish."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = (line for line in reversed(lines) if LAST_WORDS.match(line))
    said = next(found, "").removeprefix("error: ") or (lines[-1] if lines else "it said nothing")
    return _short(f"killed by signal {-code}: {said}" if code < 0 else said)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= REASON else words[: REASON - 3] + "..."
