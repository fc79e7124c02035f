"""Who survives what, and at which price: every failure under every protection, at its defaults.

    python -m benchmarks.faults                                        everything that is not in results.jsonl yet
    python -m benchmarks.faults --rows transient --columns LRFallback  one table, one column
    python -m benchmarks.faults --arc-python ENV/bin/python            also arc-training, in an environment of its own
    python -m benchmarks.faults --page                                 only write the tables anew

Every run is a line of results.jsonl as soon as it ends; a rerun skips what is there for the same code.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.faults.catalogue import ROWS
from benchmarks.faults.columns import ARC, BY_NAME, COLUMNS
from benchmarks.faults.crew import interpreters, run_all, version_of
from benchmarks.faults.page import write_page
from benchmarks.faults.rows import select
from benchmarks.faults.store import Store, plan

HERE = Path(__file__).parent


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", help="groups, or words in the names of rows")
    parser.add_argument("--columns", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 to 4 or 0 to 2, as the row says")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--arc-python", default=os.environ.get("ARC_PYTHON"), help="a Python that has arc-training")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--page", action="store_true", help="run nothing")
    options = parser.parse_args()
    store = Store(options.results)
    if not options.page:
        pythons = interpreters(options.arc_python)
        arc = version_of(pythons[ARC], "arc-training") if ARC in pythons else None
        columns = [column for column in COLUMNS if column.name in options.columns]
        tasks = plan(select(ROWS, options.rows), columns, options.seeds, pythons, arc, store)
        start = time.monotonic()
        for number, (task, ending) in enumerate(run_all(tasks, options.jobs), 1):
            store.add(task, ending)
            print(f"{number}/{len(tasks)} {time.monotonic() - start:5.0f} s  {_line(task, ending)}", flush=True)
        store.compact()
    if options.results == HERE / "results.jsonl":
        write_page(HERE / "README.md", store, ROWS)


def _line(task: dict[str, object], ending: dict[str, object]) -> str:
    who = "twin" if task["twin"] else task["column"]
    if "broken" in ending:
        return f"{task['row']} | {who} | {task['seed']} | broken: {str(ending['broken']).strip().splitlines()[-1]}"
    loss = ending["loss"]
    shown = f"{loss:.4f}" if isinstance(loss, float) else "not finite"
    notes = f"lost {ending['lost']}, {ending['counts'] or '-'}, {ending['error'] or ''}"
    return f"{task['row']} | {who} | {task['seed']} | {shown}, finite {ending['finite']}, {notes}"


if __name__ == "__main__":
    main()
