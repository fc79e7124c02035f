"""A bar on the console that says which short run is under way and where its loss is."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class TrialProgress(Protocol):
    """What a diagnosis tells while it runs."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, name: str, steps: int) -> None:
        """A run of at most ``steps`` steps begins."""

    def step(self, number: int, loss: float) -> None:
        """Its step ``number``, 1-based, is done."""


class Silent:
    """Says nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, name: str, steps: int) -> None:
        """Nothing."""

    def step(self, number: int, loss: float) -> None:
        """Nothing."""


class ConsoleProgress:
    """One line for each run, within 80 columns; on stderr, so that the report alone is on stdout."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:<28.28}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> ConsoleProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
        self._bars.stop()

    def start(self, name: str, steps: int) -> None:
        """A new line."""
        self._finish()
        self._task = self._bars.add_task(name, total=steps, loss=float("nan"))

    def step(self, number: int, loss: float) -> None:
        """The line moves."""
        if self._task is not None:
            self._bars.update(self._task, completed=number, loss=loss)

    def _finish(self) -> None:
        if self._task is not None:
            self._bars.stop_task(self._task)
