"""Ground truth for ``diagnose``: is what it says after 80 steps what 300 steps show? One Markdown table.

    python benchmarks/diagnose_grid.py --results grid.json

Placement x depth x learning rate x cold or warm: 48 decoders in the setting of the post48 recipes (width 64, Xavier
weights, bytes of code and prose). Each is trained for 300 steps, and on its own given to ``diagnose``, which tries it
as it is for its default number of steps and nothing else. A run is *alive* if the mean loss of its last 20 steps is
more than 0.15 nats below the unigram entropy of the data, which is what a dead network ends at; else it is *dead*.
``diagnose`` agrees if it says ``trains`` of a run that is alive, or anything else but ``undecided`` of one that is
dead. Undecided never agrees.

Two processes with one thread each, some twenty minutes on two idle cores. What is finished stands in the file of
results and is not repeated; after a change of the rules, ``--diagnose_again`` repeats the short trials only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_norms import DecoderConfig, DecoderModule, TextDataModule, Warmup, Xavier, diagnose
from lightning_norms.diagnosing.changes import Plan
from lightning_norms.placements import PostNorm, PreNorm
from lightning_norms.reports.diagnosis.data import Diagnosis, Trial, Verdict
from lightning_norms.schedules import LinearWarmup

PLACEMENTS = {"PreNorm": PreNorm, "PostNorm": PostNorm}
DEPTHS, RATES, WARMUPS = (6, 24, 48), (3e-4, 1e-3, 3e-3, 1e-2), (0, 100)
STEPS, LAST, MARGIN = 300, 20, 0.15
"""Of the real run: its steps, those that its loss is the mean of, and nats below the unigram entropy to be alive."""


@dataclass(frozen=True)
class Configuration:
    """One cell of the grid."""

    placement: str
    depth: int
    learning_rate: float
    warmup: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Key in the file of results."""
        return f"{self.placement}-{self.depth}-{self.learning_rate:g}-{self.warmup}-{self.seed}"

    def module(self, width: int = 64) -> DecoderModule:
        """A fresh one, from the seed."""
        seed_everything(self.seed, verbose=False)
        config = DecoderConfig(
            vocab_size=256, context_length=64, d_model=width, n_heads=4, n_layers=self.depth, tied_head=False,
            placement=PLACEMENTS[self.placement](), initialization=Xavier(),
        )  # fmt: skip
        return DecoderModule(config, learning_rate=self.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)

    def callbacks(self) -> list[Callback]:
        """The warmup, if there is one."""
        return [Warmup(LinearWarmup(self.warmup))] if self.warmup else []


class Losses(Callback):
    """Training loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note it."""
        self.values.append(float(outputs["loss"]))


def batches() -> TextDataModule:
    """Eight windows of 64 bytes a step."""
    return TextDataModule(context_length=64, batch_size=8)


def trainer(callbacks: list[Callback]) -> Trainer:
    """A silent one that writes nothing."""
    return Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, limit_val_batches=0, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip


def measure(configuration: Configuration, run: dict[str, Any] | None) -> dict[str, Any]:
    """The real run, unless it is known, and the diagnosis from a fresh start."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning_norms"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run = run or real_run(configuration)
    return {"configuration": asdict(configuration), "run": run, "diagnosis": diagnosis(configuration)}


def real_run(configuration: Configuration) -> dict[str, Any]:
    """Losses of all steps."""
    losses, started = Losses(), time.perf_counter()
    trainer([*configuration.callbacks(), losses]).fit(configuration.module(), batches())
    values = [value if math.isfinite(value) else str(value) for value in losses.values]
    return {"losses": values, "seconds": time.perf_counter() - started}


def diagnosis(configuration: Configuration) -> dict[str, Any]:
    """All that ``diagnose`` finds without counterfactuals."""
    module, data, started = configuration.module(), batches(), time.perf_counter()
    data.prepare_data()
    data.setup("fit")  # the unigram entropy is then known, as in the command
    with mock.patch("lightning_norms.diagnosing.diagnose.plan", return_value=Plan((), ())):
        found = diagnose(module, data, trainer(configuration.callbacks()))
    return {
        "found": json.loads(found.to_json()),
        "unigram_entropy": data.unigram_entropy,
        "seconds": time.perf_counter() - started,
    }


@dataclass(frozen=True)
class Row:
    """One configuration, judged twice."""

    configuration: Configuration
    losses: list[float]
    unigram_entropy: float
    trial: Trial
    seconds: tuple[float, float]

    @classmethod
    def of(cls, result: dict[str, Any]) -> Row:
        """From the file."""
        run, diagnosis = result["run"], result["diagnosis"]
        (trial,) = Diagnosis.from_json(json.dumps(diagnosis["found"])).trials
        losses = [float(value) for value in run["losses"]]
        seconds = (run["seconds"], diagnosis["seconds"])
        return cls(Configuration(**result["configuration"]), losses, diagnosis["unigram_entropy"], trial, seconds)

    @property
    def loss(self) -> float:
        """At the end of the real run."""
        return statistics.fmean(self.losses[-LAST:])

    @property
    def alive(self) -> bool:
        """The truth; False for NaN."""
        return self.loss < self.unigram_entropy - MARGIN

    @property
    def verdict(self) -> Verdict:
        """Of the short trial."""
        return self.trial.verdict

    @property
    def agrees(self) -> bool:
        """Whether the short trial said what the long run showed."""
        if self.verdict is Verdict.UNDECIDED:
            return False
        return self.alive == (self.verdict is Verdict.TRAINS)

    @property
    def is_false_alarm(self) -> bool:
        """Whether a healthy run was called dead."""
        return self.alive and self.verdict not in (Verdict.TRAINS, Verdict.UNDECIDED)


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as Markdown, then how often they agree."""
    entropy = rows[0].unigram_entropy
    yield f"| placement | blocks | lr | warmup | loss at {STEPS} steps | outcome | diagnose | end loss | agrees |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        one, end = row.configuration, row.trial.end_loss
        cells = [
            *(one.placement, str(one.depth), f"{one.learning_rate:g}", str(one.warmup) if one.warmup else "cold"),
            *(f"{row.loss:.3f}", "alive" if row.alive else "dead", row.verdict.value),
            *("-" if end is None else f"{end:.3f}", "yes" if row.agrees else "**no**"),
        ]
        yield f"| {' | '.join(cells)} |"
    agree, alarms = sum(row.agrees for row in rows), sum(row.is_false_alarm for row in rows)
    alive, undecided = sum(row.alive for row in rows), sum(row.verdict is Verdict.UNDECIDED for row in rows)
    missed = sum(not row.alive and row.verdict is Verdict.TRAINS for row in rows)
    repeated = sum(tuple(row.losses[: len(row.trial.losses)]) == row.trial.losses for row in rows)
    took = [statistics.median(row.seconds[part] for row in rows) for part in (0, 1)]
    yield ""
    yield f"Agreement: {agree} of {len(rows)} ({agree / len(rows):.0%}). Unigram entropy: {entropy:.3f} nats."
    yield f"Healthy runs called dead: {alarms} of {alive}. Dead runs said to train: {missed} of {len(rows) - alive}."
    yield f"Undecided: {undecided}. Trials with the very losses of the run's first steps: {repeated} of {len(rows)}."
    yield f"Median seconds: {took[0]:.0f} for the run, {took[1]:.0f} for diagnose."
    for row in rows:
        if not row.agrees:
            yield f"- {row.configuration.name}: {row.verdict.value}: {row.trial.reason}"


def grid(chosen: argparse.Namespace) -> list[Configuration]:
    """All cells, shallow ones first: what is quick is known soon."""
    cells = itertools.product(chosen.depths, chosen.rates, chosen.warmups, chosen.placements, chosen.seeds)
    return [Configuration(placement, depth, rate, warmup, seed) for depth, rate, warmup, placement, seed in cells]


def run_missing(wanted: list[Configuration], file: Path, workers: int, anew: bool) -> dict[str, Any]:
    """Results by name; each is written as soon as it is there.

    Args:
        wanted: what is to be there.
        file: of results.
        workers: processes.
        anew: diagnose again what has been diagnosed.
    """
    done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    missing = [one for one in wanted if anew or "diagnosis" not in done.get(one.name, {})]
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # for the workers, which start afresh
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(measure, one, done.get(one.name, {}).get("run")): one for one in missing}
        for future in as_completed(running):
            name = running[future].name
            done[name] = future.result()
            half_written = file.with_suffix(".part")
            half_written.write_text(json.dumps(done))
            half_written.replace(file)
            row = Row.of(done[name])
            state, mark = "alive" if row.alive else "dead", "" if row.agrees else "  <- differs"
            print(f"{name}: {row.loss:.3f} {state}; {row.verdict.value}{mark}", flush=True)
    return done


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("diagnose_grid.json"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--placements", nargs="+", default=list(PLACEMENTS), choices=PLACEMENTS)
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--warmups", type=int, nargs="+", default=list(WARMUPS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only_table", action="store_true", help="run nothing: the table of what is there")
    parser.add_argument("--diagnose_again", action="store_true", help="with other rules: real runs are not repeated")
    chosen = parser.parse_args()
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    wanted = grid(chosen)
    done = run_missing([] if chosen.only_table else wanted, chosen.results, chosen.workers, chosen.diagnose_again)
    rows = [Row.of(done[one.name]) for one in wanted if "diagnosis" in done.get(one.name, {})]
    print("\n".join(table(rows)) if rows else f"{chosen.results} has no results.")


if __name__ == "__main__":
    main()
