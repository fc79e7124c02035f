"""Lightning's Trainer with one more command, ``diagnose``, and a progress bar for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

from lightning.pytorch import Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lightning_norms.diagnosing.diagnose import Rebuild, diagnose
from lightning_norms.files.log_folder import write_file
from lightning_norms.reports.diagnosis.console import diagnosis_text
from lightning_norms.reports.diagnosis.data import Diagnosis
from lightning_norms.reports.diagnosis.page import diagnosis_page


class NormsTrainer(Trainer):
    """A Trainer that can also diagnose whether a run trains.

    Attributes:
        diagnosis: result of the last :meth:`diagnose`; None before.
        rebuild: builds module and data for another seed; the command line sets it.
    """

    diagnosis: Diagnosis | None = None
    rebuild: Rebuild | None = None

    def diagnose(
        self,
        model: Any,
        datamodule: Any = None,
        steps: int | None = None,
        seeds: list[int] | None = None,
        n_seeds: int = 1,
        no_trials: bool = False,
        folder: str = "diagnosis",
        format: Literal["table", "json", "html"] = "table",  # noqa: A002 - the name of the option
    ) -> None:
        """Find out whether a run trains, why not, and what fixes it. Exit code 0: trains, 3: does not, 2: wrong input.

        Args:
            model: any LightningModule.
            datamodule: its data.
            steps: optimizer steps per trial; null for 80, or up to 160 to see what follows a warmup.
            seeds: list of seeds to repeat all trials for, such as [0,1,2]; gains then have a spread.
            n_seeds: number of consecutive seeds, starting with seed_everything; instead of seeds.
            no_trials: only measure the first step.
            folder: folder for diagnosis.json and diagnosis.html, a path or a URL; created if needed.
            format: what to print: tables and a summary, the JSON, or the HTML page.
        """
        options: dict[str, Any] = {"steps": steps, "seeds": seeds, "n_seeds": n_seeds, "rebuild": self.rebuild}
        with ConsoleProgress() if self.is_global_zero else nullcontext() as progress:
            result = diagnose(model, datamodule, self, trials=not no_trials, progress=progress, **options)
        self.diagnosis = result
        if not self.is_global_zero:
            return
        texts = {"json": result.to_json(), "html": diagnosis_page(result)}
        places = {ending: write_file(folder, f"diagnosis.{ending}", text.encode()) for ending, text in texts.items()}
        if format in texts:
            print(texts[format], end="")
            return
        console = Console()
        for part in diagnosis_text(result):
            console.print(part, highlight=False, markup=False)
        lines = f"\nPictures: {places['html']}\nAll numbers: {places['json']}"
        console.print(lines, highlight=False, markup=False, soft_wrap=True)


class ConsoleProgress:
    """One line per trial, within 80 columns; on stderr, so that stdout holds only the report."""

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

    def __exit__(self, *error: object) -> None:
        self._finish()
        self._bars.stop()

    def __call__(self, name: str, steps: int, done: int, loss: float) -> None:
        """Advance the line of a trial; step 0 adds it."""
        if not done or self._task is None:
            self._finish()
            self._task = self._bars.add_task(name, total=steps, loss=loss)
        self._bars.update(self._task, completed=done, loss=loss)

    def _finish(self) -> None:
        if self._task is not None:
            self._bars.stop_task(self._task)
