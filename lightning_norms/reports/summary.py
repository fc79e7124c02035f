"""The answer in plain words, from a finished diagnosis."""

from __future__ import annotations

from lightning_norms.reports.diagnosis import Diagnosis


def summarize(found: Diagnosis) -> tuple[str, ...]:
    """A few sentences, the verdict first."""
    return (f"This configuration {found.verdict.value}.", *(cause.sentence for cause in found.causes))
