"""Timing in turn, A B C A B C: a slow minute of the machine hits all alike, and a ratio is taken within each round."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch


def in_turn(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each candidate once a round; a candidate measures itself and returns its figure.

    Every second round runs backwards, so that nobody always comes after the same neighbour.
    """
    figures: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        order = list(candidates) if number % 2 == 0 else list(reversed(candidates))
        for name in order:
            figures[name].append(candidates[name]())
    return figures


def ratios(figures: Sequence[float], to: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(figures, to, strict=True)]


def told(values: Sequence[float], digits: int = 2) -> str:
    """Median (lowest to highest)."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def machine() -> str:
    """The line that stands over every table: what the numbers were taken on, and when."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"{os.cpu_count()} CPU cores ({_processor()}), {torch.get_num_threads()} threads, load {load:.1f} at the end, "
        f"Python {platform.python_version()}, torch {version('torch').partition('+')[0]}, "
        f"lightning {version('lightning')}, {datetime.date.today()}."
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
