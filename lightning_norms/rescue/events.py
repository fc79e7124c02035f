"""What was done to a run and why: one event each, in memory, in checkpoints and in ``events.jsonl``.

The file is history and only grows. A resumed run goes on in it, behind a marker::

    {"step": 44, "cause": "spike", "action": "rollback", ...}      after the checkpoint of step 40: happened,
    {"resumed_at": 40}                                             but is no part of the run that goes on
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_norms.files.log_folder import Folder, append_line, has_file

FILE = "events.jsonl"
Evidence = float | int | str


@dataclass(frozen=True)
class Event:
    """One thing that was done, or would have been done, to a run.

    Args:
        step: the optimizer step that it is about, counted from 0: as many steps were taken before it.
        cause: what was seen: "non_finite", "spike", "divergence", "stall", ...
        action: what was done: "skip", "rollback", "restart", "stop", or "report" for nothing.
        evidence: the numbers that speak for the cause, by name; one-element tensors become plain numbers.
        factor: of the fallback on the learning rate, after the event.
        message: the same in plain words with units: one line for the console.

    Example:
        >>> event = Event(31, "spike", "rollback", {"loss": 9.0, "usual": 3.6}, factor=0.5, message="step 31: ...")
        >>> Event.from_plain(event.to_plain()) == event
        True
    """

    step: int
    cause: str
    action: str
    evidence: dict[str, Evidence] = field(default_factory=dict, hash=False)
    factor: float = 1.0
    message: str = ""

    def __post_init__(self) -> None:
        # A number from torch or numpy would fail in JSON and in safe loading: in the worst moment.
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in self.evidence.items()}
        object.__setattr__(self, "evidence", plain)

    def to_plain(self) -> dict[str, Any]:
        """Return a dict of plain Python, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Event:
        """Return the event that :meth:`to_plain` described; keys that a later version may add are ignored."""
        return cls(**{entry.name: data[entry.name] for entry in fields(cls) if entry.name in data})


class EventLog:
    """Events of a run, in order: kept in memory, and written to ``events.jsonl`` so that even ``kill -9`` leaves them.

    Args:
        folder: where the file goes, a path or a URL; made when the first line is written. None keeps events in memory
            only: for every rank but the first one, and for runs that leave no files.

    Example:
        >>> log = EventLog()
        >>> log.append(Event(31, "spike", "rollback"))
        >>> [event.action for event in log.events]
        ['rollback']
    """

    def __init__(self, folder: Folder | None = None) -> None:
        self.folder = folder
        self.events: list[Event] = []

    def append(self, event: Event) -> None:
        """Remember an event and write it down; returns when the line is on the disk."""
        self.events.append(event)
        self._write(event.to_plain())

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Take the events before ``step`` from a checkpoint; a file, in which later ones may stand, gets a marker."""
        events = [Event.from_plain(event) for event in state["events"]]
        self.events = [event for event in events if event.step < step]
        self._write({"resumed_at": step}, only_if_there=True)

    def state_dict(self) -> dict[str, Any]:
        """Return all events as plain Python."""
        return {"events": [event.to_plain() for event in self.events]}

    def _write(self, data: Mapping[str, Any], only_if_there: bool = False) -> None:
        if self.folder is None:
            return
        line = json.dumps(_for_json(data), allow_nan=False)
        try:
            if not only_if_there or has_file(self.folder, FILE):
                append_line(self.folder, FILE, line)
        except Exception as error:  # a full disk, or a bucket out of reach, must not end the run that this protects
            text = f"{FILE} cannot be written to {self.folder}, events are kept in memory only: {error}"
            warnings.warn(text, stacklevel=3)
            self.folder = None


def _for_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become "nan", "inf" and "-inf"."""
    if isinstance(value, Mapping):
        return {str(name): _for_json(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value
