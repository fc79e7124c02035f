"""Run every kind of the zoo plainly, and compare how it ends with what the zoo says of it.

    python benchmarks/zoo/outcomes.py --seeds 0 1 2 --steps 600 --json outcomes.json

The yardstick is the best constant prediction under the kind's own loss, found by optimizing constant outputs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.zoo.judging import LAST, Constant, best_constant, judge, judge_measure
from benchmarks.zoo.kinds import Kind
from benchmarks.zoo.running import Run, quiet, run
from benchmarks.zoo.zoo import select

FRESH = 1000
"""Added to the seed for data that the run has not seen."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended; ``right`` says whether that is what the zoo says."""

    kind: str
    seed: int
    expected: str
    ended: str
    right: bool
    first: float | None
    last: float | None
    fresh: float | None
    constant: float | None
    scale: float | None
    seconds: float
    error: str | None


def outcome(kind: Kind, seed: int, steps: int) -> Outcome:
    """Run a kind and judge it."""
    done = run(kind, seed, steps)
    with quiet():
        ended, constant, fresh = _judge(kind, seed, done)
    return Outcome(
        kind.name, seed, kind.outcome, ended, (ended == "trains") == (kind.outcome == "trains"),
        _mean(done.losses[:5]), _mean(done.losses[-LAST:]), fresh, None if constant is None else constant.loss,
        None if constant is None else constant.scale, round(done.seconds, 2), done.error,
    )  # fmt: skip


def _judge(kind: Kind, seed: int, done: Run) -> tuple[str, Constant | None, float | None]:
    module: Any = done.module
    if done.error is not None or not done.finite:
        return "diverged", None, None
    if hasattr(module, "measure"):
        own, naive = module.measure()
        return judge_measure(own, naive), Constant(naive, naive), own
    batches = _late_batches(kind, seed + FRESH, len(done.losses))
    constant = best_constant(module, batches)
    with torch.no_grad():
        fresh = _mean([float(module.loss(module.outputs(batch), batch)) for batch in batches])
    return judge(done.losses, constant), constant, fresh


def _late_batches(kind: Kind, seed: int, steps: int, count: int = 20) -> list[Any]:
    """Batches of another seed from where the run ended, because the data of some kinds change on the way."""
    loader = kind.data(seed)
    start = max(0, steps - count) % len(loader)
    return list(islice(cycle(loader), start, start + count))


def _mean(losses: list[float]) -> float | None:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return mean(finite) if finite else None


def _one(task: tuple[str, int, int]) -> Outcome:
    torch.set_num_threads(1)
    name, seed, steps = task
    return outcome(select([name])[0], seed, steps)


def main() -> None:
    """Print a line a run, and write the JSON as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", help="names, or parts of names")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tasks = [(kind.name, seed, options.steps) for kind in select(options.kinds) for seed in options.seeds]
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for result in pool.map(_one, tasks):
            outcomes.append(result)
            print(_line(result), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(result) for result in outcomes], indent=1) + "\n")
    wrong = [result for result in outcomes if not result.right]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} runs end as the zoo says.")


def _line(result: Outcome) -> str:
    numbers = (result.first, result.last, result.fresh, result.constant, result.scale)
    words = " ".join("      -" if number is None else f"{number:7.3f}" for number in numbers)
    mark = " " if result.right else "!"
    return (
        f"{mark} {result.kind:40} {result.seed} {result.ended:9} {words} {result.seconds:6.1f} s {result.error or ''}"
    )


if __name__ == "__main__":
    main()
