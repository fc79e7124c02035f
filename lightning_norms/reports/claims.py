"""Popular explanations held against this model's own numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_norms.reports.diagnosis import Claim, Facts, Look, Trial


def claims(facts: Facts, look: Look, trials: Sequence[Trial]) -> tuple[Claim, ...]:
    """What holds, what does not, and what these numbers do not decide."""
    return ()
