"""Diagnose every kind of the zoo from short trials, and compare the verdict with how a real run of 600 steps ends.

    python benchmarks/zoo/diagnosed.py --json diagnosed.json

Kinds whose fault comes only at step 150 are left out: no trial of 80 steps can see it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.zoo.kinds import TRAINS, Kind
from benchmarks.zoo.running import make_trainer, quiet
from benchmarks.zoo.zoo import select
from lightning_norms import diagnose

LATE = "from step 150"


@dataclass(frozen=True)
class Row:
    """What ``diagnose`` says of a kind; ``mark`` is right, undecided, wrong or error."""

    kind: str
    outcome: str
    verdict: str
    mark: str
    reason: str
    constant: float | None
    causes: tuple[str, ...]
    summary: tuple[str, ...]
    seconds: float


def diagnosed(kind: Kind, seed: int = 0) -> Row:
    """Diagnose a kind; an error becomes its row."""
    start = time.perf_counter()
    with quiet(), tempfile.TemporaryDirectory() as folder:
        module, data = kind.build(seed)
        try:
            result = diagnose(module, data, make_trainer(kind, 600, folder))
        except (ValueError, RuntimeError) as error:
            sentence = str(error).splitlines()[0]
            return Row(kind.name, kind.outcome, "error", "error", sentence, None, (), (), time.perf_counter() - start)
    verdict = result.verdict.value
    mark = "right" if result.trains == (kind.outcome == TRAINS) else "wrong"
    return Row(
        kind=kind.name,
        outcome=kind.outcome,
        verdict=verdict,
        mark="undecided" if verdict == "undecided" else mark,
        reason=result.trials[0].reason,
        constant=result.look.constant_loss,
        causes=tuple(cause.name for cause in result.causes),
        summary=result.summary,
        seconds=round(time.perf_counter() - start, 1),
    )


def counts(rows: Sequence[Row]) -> str:
    """One line: how many are right, undecided, wrong, refused."""
    marks = [row.mark for row in rows]
    words = (f"{marks.count(mark)} {mark}" for mark in ("right", "undecided", "wrong", "error"))
    return f"{len(rows)} kinds: {', '.join(words)}"


def main() -> None:
    """Print a line a kind, and write the JSON as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", help="names, or parts of names")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for kind in select(options.kinds):
        if LATE in kind.name:
            continue
        row = diagnosed(kind)
        rows.append(row)
        print(
            f"{row.mark:9} {row.kind:42} {row.outcome:6} {row.verdict:15} {row.seconds:6.1f} s  {row.reason}",
            flush=True,
        )
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print(counts(rows))


if __name__ == "__main__":
    main()
