"""Which of the known mechanisms is at work: each rule reads numbers, and says them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_norms.reports.diagnosis import Cause, Facts, Look, Trial


def mechanisms(facts: Facts, look: Look, trials: Sequence[Trial]) -> tuple[Cause, ...]:
    """The causes, the weightiest first; empty if nothing is wrong."""
    return ()
