"""Run every healthy kind twice from the same seed, bare and with LRFallback at its defaults: does the net hurt?

    python benchmarks/zoo/protected.py --seeds 0 1 2 --steps 500 --jobs 2 --json protected.json

Prints the interventions of each run and both end losses. A run without an intervention must end at the same loss, bit
for bit. ``--sick`` runs the sick kinds instead.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.zoo.judging import LAST
from benchmarks.zoo.running import run
from benchmarks.zoo.zoo import HEALTHY, SICK, select
from lightning_norms import LRFallback

ACTIONS = ("skip", "rollback", "restart", "stop", "report")


@dataclass(frozen=True)
class Pair:
    """One kind and seed, bare and protected.

    Attributes:
        bare, protected: mean loss of the last steps.
        change: protected end loss less the bare one, as a share of what the bare run improved by.
        events: [step, action, cause, factor] of each event.
        factor: on the learning rate at the end.
        error: what ended the protected run early.
    """

    kind: str
    tag: str
    seed: int
    steps: int
    bare: float
    protected: float
    change: float
    events: list[list[object]]
    factor: float
    error: str | None
    bare_seconds: float
    protected_seconds: float

    def count(self, action: str) -> int:
        """Events with this action."""
        return sum(event[1] == action for event in self.events)


def pair(name: str, seed: int, steps: int) -> Pair:
    """Both runs of a kind."""
    (kind,) = select([name])
    bare = run(kind, seed, steps)
    fallback = LRFallback()
    protected = run(kind, seed, steps, [fallback])
    events: list[list[object]] = [[event.step, event.action, event.cause, event.factor] for event in fallback.events]
    ends = _end(bare.losses), _end(protected.losses)
    progress = abs(_mean(bare.losses[:5]) - ends[0])
    change = (ends[1] - ends[0]) / progress if progress else math.nan
    factor = fallback.events[-1].factor if fallback.events else 1.0
    return Pair(
        kind.name, kind.tag, seed, steps, *ends, change, events, factor, protected.error,
        round(bare.seconds, 2), round(protected.seconds, 2),
    )  # fmt: skip


def _mean(losses: list[float]) -> float:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return mean(finite) if finite else math.nan


def _end(losses: list[float]) -> float:
    return _mean(losses[-LAST:])


def _one(task: tuple[str, int, int]) -> Pair:
    torch.set_num_threads(1)
    return pair(*task)


def main() -> None:
    """Print a line a pair, write the JSON as it grows, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", help="names, or parts of names")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sick", action="store_true", help="the sick kinds instead of the healthy ones")
    options = parser.parse_args()
    kinds = select(options.kinds, SICK if options.sick else HEALTHY)
    tasks = [(kind.name, seed, options.steps) for kind in kinds for seed in options.seeds]
    pairs: list[Pair] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for result in pool.map(_one, tasks):
            pairs.append(result)
            print(_line(result), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(result) for result in pairs], indent=1) + "\n")
    print(_summary(pairs))


def _line(result: Pair) -> str:
    counts = ", ".join(f"{result.count(action)} {action}" for action in ACTIONS if result.count(action)) or "-"
    return (
        f"{result.kind:40} {result.seed}  {result.bare:9.4f} {result.protected:9.4f} {result.change:+7.1%}"
        f"  factor {result.factor:.3g}  {counts}  {result.error or ''}"
    )


def _summary(pairs: list[Pair]) -> str:
    lines = [""]
    for name in dict.fromkeys(result.kind for result in pairs):
        runs = [result for result in pairs if result.kind == name]
        counts = Counter(f"{event[1]} ({event[2]})" for result in runs for event in result.events)
        errors = Counter(result.error for result in runs if result.error)
        if counts or errors:
            words = [f"{count} x {what}" for what, count in (counts + errors).items()]
            lines.append(f"{name}: {', '.join(words)}; {mean(result.change for result in runs):+.1%}")
    steps = sum(result.steps for result in pairs)
    totals = {action: sum(result.count(action) for result in pairs) for action in ACTIONS}
    touched = sum(bool(result.events) for result in pairs)
    worse = sum(result.change > 0.02 for result in pairs)
    words = ", ".join(f"{count} {action}" for action, count in totals.items())
    lines.append(
        f"{len(pairs)} runs, {steps} steps: {touched} with an event, {words};"
        f" {sum(result.factor < 1 for result in pairs)} end with a lower rate, {worse} end more than 2 % worse."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
