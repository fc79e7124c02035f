"""Keep what a comparison found beside the benchmarks, without its step-by-step numbers; README's tables are made of it.

python -m lightning_norms compare --config xiong.yaml --folder compare
python benchmarks/keep_comparison.py compare/comparison.json
python -m tests.test_readme
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from lightning_norms.reports.comparison import Comparison
from lightning_norms.reports.json_form import as_plain

KEPT = Path(__file__).parent / "comparisons"


def main() -> None:
    """One file each."""
    for path in sys.argv[1:]:
        found = Comparison.from_json(Path(path).read_text(encoding="utf-8"))
        short = replace(found, runs=tuple(replace(run, losses=(), curve=(), gradient_last=None) for run in found.runs))
        plain = as_plain(short)
        KEPT.mkdir(exist_ok=True)
        text = json.dumps({each.name: plain[each.name] for each in fields(short)}, indent=1, allow_nan=False)
        (KEPT / f"{found.name}.json").write_text(text + "\n", encoding="utf-8")
        print(KEPT / f"{found.name}.json")


if __name__ == "__main__":
    main()
