"""Keep what a comparison found beside the benchmarks, without its step-by-step numbers; README's tables are made of it.

python -m lightning_norms compare --config xiong.yaml --folder compare
python benchmarks/keep_comparison.py compare/comparison.json
python -m tests.test_readme

A grid in several sittings: --fill keeps what is kept already, and adds the runs that were missing, other seeds too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path

from lightning_norms.reports.comparison.data import Comparison
from lightning_norms.reports.typed_json import as_plain

KEPT = Path(__file__).parent / "comparisons"


def filled(kept: Comparison, found: Comparison) -> Comparison:
    """The runs of ``kept``, with those of ``found`` that are missing there, as failed ones or as other seeds."""
    known = {(run.variant, run.seed): run for run in kept.runs}
    new = {(run.variant, run.seed): run for run in found.runs if run.finished}
    runs = known | {key: run for key, run in new.items() if key not in known or not known[key].finished}
    order = list(dict.fromkeys(run.variant for run in kept.runs))
    return replace(kept, runs=tuple(runs[key] for key in sorted(runs, key=lambda key: (order.index(key[0]), key[1]))))


def main() -> None:
    """One file each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="comparison.json")
    parser.add_argument("--fill", action="store_true", help="only runs that the kept file of that name lacks")
    chosen = parser.parse_args()
    for path in chosen.paths:
        found = Comparison.from_json(path.read_text(encoding="utf-8"))
        if chosen.fill:
            kept = KEPT / f"{found.name}.json"
            found = filled(Comparison.from_json(kept.read_text(encoding="utf-8")), found)
        short = replace(found, runs=tuple(replace(run, losses=(), curve=(), gradient_last=None) for run in found.runs))
        plain = as_plain(short)
        KEPT.mkdir(exist_ok=True)
        text = json.dumps({each.name: plain[each.name] for each in fields(short)}, indent=1, allow_nan=False)
        (KEPT / f"{found.name}.json").write_text(text + "\n", encoding="utf-8")
        print(KEPT / f"{found.name}.json")


if __name__ == "__main__":
    main()
