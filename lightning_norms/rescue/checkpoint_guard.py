"""Look at the weights before any checkpoint is made of them, full or weights-only, by a callback or by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class CheckpointGuard:
    """Calls ``before`` whenever ``trainer.save_checkpoint`` is called, on every rank, until :meth:`leave`.

    A callback's ``on_save_checkpoint`` is not called for a weights-only file, and comes when the weights are gathered
    already. If ``before`` raises, no file is written.

    Args:
        trainer: the Lightning Trainer.
        before: called with True for a weights-only file.
    """

    def __init__(self, trainer: Any, before: Callable[[bool], None]) -> None:
        self._attributes = vars(trainer)
        self._own = self._attributes.get("save_checkpoint")  # an attribute of the instance: nearly never there
        save = trainer.save_checkpoint

        @wraps(save)
        def save_checkpoint(filepath: Any, weights_only: bool | None = None, *args: Any, **kwargs: Any) -> Any:
            before(bool(weights_only))
            return save(filepath, weights_only, *args, **kwargs)

        self._attributes["save_checkpoint"] = save_checkpoint

    def leave(self) -> None:
        """Give the trainer its own method back."""
        if self._own is None:
            self._attributes.pop("save_checkpoint", None)
        else:
            self._attributes["save_checkpoint"] = self._own
