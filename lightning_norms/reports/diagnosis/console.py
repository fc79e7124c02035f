"""A diagnosis for a terminal of 80 columns: the trials as a table, depth as a few numbers, and the answer in words."""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from rich.console import RenderableType
from rich.padding import Padding

from lightning_norms.reports.diagnosis.data import Diagnosis
from lightning_norms.reports.diagnosis.tables import look_table, trials_table


def diagnosis_text(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """The parts of the report, in the order in which they are read."""
    if diagnosis.look.profiles:
        yield look_table(diagnosis.look)
    if diagnosis.trials:
        yield trials_table(diagnosis)
    for paragraph in diagnosis.summary:
        yield ""
        yield paragraph
    best = diagnosis.best
    if best is not None and best.patch and not diagnosis.trains:
        yield ""
        yield f"The change ({best.name}), for your YAML file (callbacks are added to the list):"
        yield ""
        yield Padding(yaml.safe_dump(best.patch, sort_keys=False).rstrip(), (0, 0, 0, 2))
