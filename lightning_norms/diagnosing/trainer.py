"""Lightning's Trainer with one command more."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from rich.console import Console

from lightning_norms.diagnosing.diagnose import Rebuild, diagnose
from lightning_norms.diagnosing.trial_progress import ConsoleProgress
from lightning_norms.reports.diagnosis.console import diagnosis_text
from lightning_norms.reports.diagnosis.data import Diagnosis
from lightning_norms.reports.diagnosis.page import diagnosis_page


class NormsTrainer(Trainer):
    """A Trainer that can also say whether a run would train.

    Attributes:
        diagnosis: what the last :meth:`diagnose` found; None before.
        rebuild: makes module and data anew for seeds after the first; the command line sets it.
    """

    diagnosis: Diagnosis | None = None
    rebuild: Rebuild | None = None

    def diagnose(
        self,
        model: Any,
        datamodule: Any = None,
        steps: int | None = None,
        seeds: int = 1,
        no_trials: bool = False,
        folder: str = "diagnosis",
        format: Literal["table", "json", "html"] = "table",  # noqa: A002 - the name of the option
    ) -> None:
        """Say whether a run trains, why not, and what fixes it; exit code 0 trains, 3 does not, 2 wrong input.

        Args:
            model: any LightningModule.
            datamodule: its data.
            steps: optimizer steps of each short trial; null for 80, or up to 160 to see beyond a warmup.
            seeds: number of seeds to repeat all trials for; gains then have a spread.
            no_trials: only look at the first step.
            folder: where diagnosis.json and diagnosis.html go; made if it is not there.
            format: what is printed: tables and a summary, the JSON, or the page in HTML.
        """
        progress = ConsoleProgress() if self.is_global_zero else None
        found = diagnose(
            model,
            datamodule,
            self,
            steps=steps,
            seeds=seeds,
            trials=not no_trials,
            rebuild=self.rebuild,
            progress=progress,
        )
        self.diagnosis = found
        if not self.is_global_zero:
            return
        written = {"json": found.to_json(), "html": diagnosis_page(found)}
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for ending, text in written.items():
            (target / f"diagnosis.{ending}").write_text(text, encoding="utf-8")
        if format in written:
            print(written[format], end="")
            return
        console = Console()
        for part in diagnosis_text(found):
            console.print(part, highlight=False, markup=False)
        places = f"\nPictures: {target / 'diagnosis.html'}\nAll numbers: {target / 'diagnosis.json'}"
        console.print(places, highlight=False, markup=False, soft_wrap=True)
