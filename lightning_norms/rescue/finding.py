"""What a rule recognises in a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """What was recognised in a step: a cause, one plain sentence, and the evidence in numbers."""

    cause: str
    message: str
    evidence: dict[str, float] = field(default_factory=dict)
    doubtful: bool = False
    """Whether other data, or another loss, would look the same."""

    @property
    def is_harmless(self) -> bool:
        """Whether nothing is to be done about it, and nothing to be learnt from the step."""
        return self.cause in ("absent", "overflow")
