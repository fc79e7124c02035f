"""Runs what it is told, a line of JSON a run, in whatever Python it was started with.

    python -m benchmarks.faults.worker

A line in, ``{"row": ..., "column": ..., "seed": ..., "twin": null}``; a line out, marked, with the ending.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch

MARK = "ending: "


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Run one task; an error of the benchmark or a peer is an answer, too."""
    from benchmarks.faults.catalogue import ROWS
    from benchmarks.faults.running import fit, to_plain

    (row,) = [row for row in ROWS if row.name == task["row"]]
    try:
        return to_plain(fit(row, task["column"], task["seed"], twin=bool(task["twin"])))
    except Exception:  # whatever a peer raises must not end the other runs
        return {"broken": traceback.format_exc()}


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
