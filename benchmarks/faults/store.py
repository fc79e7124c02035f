"""Results on disk, a line a run, and what is still missing there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.columns import ARC, BY_NAME, NONE, OWN, Column
from benchmarks.faults.goals import Ending
from benchmarks.faults.rows import Row
from benchmarks.faults.running import from_plain

Key = tuple[str, str, int, str, str]
TWIN = "twin"


class Store:
    """A file of endings, newest last.

    Args:
        path: of the file; made when the first run ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = _read(path)

    def add(self, task: dict[str, Any], ending: dict[str, Any]) -> None:
        """Keep an ending, in memory and on disk; a broken run is told on the console only, and tried again."""
        if "broken" in ending:
            return
        versions = {name: task[name] for name in ("seed", "row_version", "column_version")}
        who = {"row": task["twin"], "column": TWIN} if task["twin"] else {"row": task["row"], "column": task["column"]}
        record = {**who, **versions, **ending}
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def compact(self) -> None:
        """Leave only the newest ending of each row, column and seed in the file, in a fixed order."""
        newest = {(record["row"], record["column"], record["seed"]): record for record in _read(self.path)}
        self.records = [newest[key] for key in sorted(newest)]
        self.path.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")

    def keys(self) -> set[Key]:
        """Row, column, seed and versions of all records."""
        names = ("row", "column", "seed", "row_version", "column_version")
        return {tuple(record[name] for name in names) for record in self.records}

    def endings(self, row: Row, column: str, seeds: Sequence[int]) -> dict[int, Ending]:
        """Seed -> the newest ending of the row as its code is now."""
        name = row.twin.name if column == TWIN else row.name
        return {
            record["seed"]: from_plain(record)
            for record in self.records
            if (record["row"], record["column"], record["row_version"]) == (name, column, row.version)
            and record["seed"] in seeds
        }

    def version(self, column: str) -> str | None:
        """What the newest results of a column were made with."""
        versions = [record["column_version"] for record in self.records if record["column"] == column]
        return versions[-1] if versions else None


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def plan(
    rows: Sequence[Row], columns: Sequence[Column], seeds: Sequence[int] | None, pythons: dict[str, str],
    arc: str | None, store: Store,
) -> list[tuple[str, dict[str, Any]]]:  # fmt: skip
    """The runs that are missing, twins first, each with the Python that it needs."""
    done = store.keys()
    missing: dict[Key, tuple[str, dict[str, Any]]] = {}
    for row in rows:
        for seed in range(row.seeds) if seeds is None else seeds:
            task = {"row": row.name, "seed": seed, "row_version": row.version}
            bare = BY_NAME[NONE].version()
            key = (row.twin.name, TWIN, seed, row.version, bare)
            missing[key] = pythons[OWN], {**task, "column": NONE, "column_version": bare, "twin": row.twin.name}
            for column in columns:
                if column.interpreter in pythons:
                    version = f"arc-training {arc}" if column.interpreter == ARC else column.version()
                    run = {**task, "column": column.name, "column_version": version, "twin": None}
                    missing[row.name, column.name, seed, row.version, version] = pythons[column.interpreter], run
    tasks = [missing[key] for key in missing if key not in done]
    return sorted(tasks, key=lambda task: task[1]["twin"] is None)
