"""A Trainer that prints nothing and leaves nothing behind."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer


@contextmanager
def trainer(**options: Any) -> Iterator[Trainer]:
    """On the CPU, without checkpoints, bar and summary; its folder is gone afterwards.

    Args:
        options: of Trainer; ``logger`` is a logger's class.
    """
    silent = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = options.pop("logger", None)
        options["logger"] = False if logger is None else logger(folder)
        yield Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **silent, **options)
