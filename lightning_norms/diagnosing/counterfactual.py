"""What one short run changes in the run as given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback


@dataclass(frozen=True)
class Change:
    """What a trial changes in the run as given: callbacks, a factor on the learning rate, or the module itself."""

    name: str
    words: str = ""
    patch: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Class names of given callbacks that the change takes the place of."""
    callbacks: Callable[[], Sequence[Callback]] = tuple
    learning_rate: float = 1.0
    """Factor on it."""
    rebuild: Callable[[Any], Any] | None = None
    """Another module from the given one; the architecture is then not the user's."""

    def callbacks_from(self, given: Sequence[Callback]) -> list[Callback]:
        """Fresh callbacks of one trial: copies of what was given, and those of the change."""
        kept = [callback for callback in given if type(callback).__name__ not in self.without]
        return [*(copy.deepcopy(callback) for callback in kept), *self.callbacks()]
