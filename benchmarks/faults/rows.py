"""What a row of the benchmark is: a run to which something happens, and the run that it is measured against."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.faults.goals import Goal
from benchmarks.zoo.kinds import Kind

Yardstick = Callable[..., float]
"""(kind, seed, run of the zoo) -> the loss at the end of the run."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One failure.

    Attributes:
        name: plain words, unique in the benchmark.
        group: the table it stands in.
        kind: the run to which something happens.
        twin: the same run without the fault, or fixed by hand; it is never protected.
        steps: optimizer steps of both.
        seeds: how many seeds count, from 0 on.
        goal: what a run must reach.
        yardstick: the loss at the end.
        at: the step of the fault, None where the run is sick from the start.
    """

    name: str
    group: str
    kind: Kind
    twin: Kind
    steps: int
    seeds: int
    goal: Goal
    yardstick: Yardstick
    at: int | None = None

    @property
    def version(self) -> str:
        """Digest of the code that defines the row: the module of its kind, and what every row is made of."""
        shared = [str(Path(__file__).with_name(name)) for name in ("faulty.py", "yardsticks.py")]
        return digest(inspect.getfile(self.kind.module), *shared)


@cache
def digest(*files: str) -> str:
    """Eight hex digits that change with the code in some files, but not with its layout or its comments."""
    trees = [ast.dump(ast.parse(Path(file).read_text(encoding="utf-8"))) for file in files]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:8]


def select(rows: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    """The rows whose name holds one of some words, or whose group is one of them; all of them for None.

    Raises:
        ValueError: a word fits no row.
    """
    if names is None:
        return list(rows)
    groups = {row.group for row in rows}
    for name in names:
        if name not in groups and not any(name in row.name for row in rows):
            raise ValueError(f"No row is called {name!r}. There are: {', '.join(row.name for row in rows)}.")
    words = [name for name in names if name not in groups]
    return [row for row in rows if row.group in names or any(word in row.name for word in words)]
