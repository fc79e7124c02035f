"""What Lightning calls whenever a Trainer is made: an empty list, unless the environment names callbacks.

It stands outside the package, so that a script that does not ask for us imports nothing of us.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "LIGHTNING_NORMS_CALLBACKS"


def callbacks() -> list[Any]:
    """The entry point ``lightning.pytorch.callbacks_factory``, and the same of ``pytorch_lightning``.

    Raises:
        ValueError: the variable cannot be read; one sentence with its name, what it says, and what may stand there.

    Example:
        >>> callbacks()
        []
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return []
    from lightning_norms.cli.environment import FromEnvironment

    return [FromEnvironment(text)]
