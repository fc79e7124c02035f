"""Called by Lightning whenever a Trainer is made: returns no callback, unless the environment lists some.

The module is outside the package, so that a script without the variable imports nothing of ours.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "LIGHTNING_NORMS_CALLBACKS"


def callbacks() -> list[Any]:
    """The entry point ``callbacks_factory`` of ``lightning.pytorch`` and of ``pytorch_lightning``.

    Raises:
        ValueError: If the variable is not a list of callbacks, in one sentence.

    Example:
        >>> callbacks()
        []
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return []
    from lightning_norms.cli.environment import FromEnvironment

    return [FromEnvironment(text)]
