"""The reference story from the shipped recipes: every recipe by every seed, one Markdown table.

    python benchmarks/reference_story.py --seeds 0 1 2 --folder story

Runs that are finished are not repeated, so an interrupted story goes on. About two minutes a run on one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

RECIPES = ("pre48", "post48-cold", "post48-warmup", "post48-rescale", "post48", "deepnorm48")
LAST = 20  # steps that the final training loss is a mean of


def run(recipe: str, seed: int, folder: Path) -> dict[str, float]:
    """Numbers of one run; it is started only if they are not there yet."""
    results = folder / f"{recipe}-{seed}.json"
    if not results.exists():
        logs = folder / f"{recipe}-{seed}"
        arguments = [
            "fit",
            "--config",
            f"{recipe}.yaml",
            "--seed_everything",
            str(seed),
            "--trainer.log_every_n_steps=1",
        ]
        logger = [
            "--trainer.logger=CSVLogger",
            f"--trainer.logger.save_dir={logs}",
            "--trainer.enable_progress_bar=false",
        ]
        with (folder / f"{recipe}-{seed}.log").open("w") as log:
            subprocess.run(
                [sys.executable, "-m", "lightning_norms", *arguments, *logger], check=True, stdout=log, stderr=log
            )
        results.write_text(json.dumps(read(next(logs.rglob("metrics.csv")))))
    return json.loads(results.read_text())


def read(metrics: Path) -> dict[str, float]:
    """Mean loss of the last steps, and the last validation."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    last = {name: value for row in rows for name, value in row.items() if value and name.startswith("val/")}
    return {"steps": len(losses), "loss": statistics.fmean(losses[-LAST:])} | {k: float(v) for k, v in last.items()}


def cell(values: list[float]) -> str:
    """Mean, and the values behind it."""
    return f"{statistics.fmean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--folder", type=Path, default=Path("story"))
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for seed in chosen.seeds:  # all recipes of one seed first: an interrupted story compares like with like
        for recipe in chosen.recipes:
            run(recipe, seed, chosen.folder)
    print(f"| recipe | loss of the last {LAST} steps, nats/byte | bits per byte, code | bits per byte, prose |")
    print("|---|---|---|---|")
    for recipe in chosen.recipes:
        runs = [run(recipe, seed, chosen.folder) for seed in chosen.seeds]
        columns = [[one[key] for one in runs] for key in ("loss", "val/code/bits_per_byte", "val/prose/bits_per_byte")]
        print(f"| {recipe} | {' | '.join(cell(values) for values in columns)} |")


if __name__ == "__main__":
    main()
