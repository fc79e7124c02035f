"""Which of the numbers that validation logs are the scores of a run, whoever has named them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SET = r"(?:e?val|valid|validation|evaluation|dev)\d*"
_IS_VALIDATION = re.compile(rf"(?:^|[^a-z]){_SET}(?:[^a-z]|$)")
_BITS_PER_BYTE = r"bits.?per.?byte|bpb"
_KINDS = tuple(
    re.compile(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$)")
    for words in (
        _BITS_PER_BYTE,
        r"[a-z]*loss(?:es)?",
        r"nll|ce|xent|cross.?entropy|bits.?per.?(?:character|char|dim|token)|bpc|bpd",
        r"perplexity|ppl",
        r"error|mse|rmse|mae",
    )
)
"""What counts as a score, best first: lower is better in all of them."""
_NAMED_SET = re.compile(rf"{_SET}[/_.](.+)[/_.](?:{_BITS_PER_BYTE})", re.IGNORECASE)


def pick_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return validation set -> score, from all that a run has logged.

    Bits per byte count if there are any; else losses, other forms of cross-entropy, perplexities, errors. A key that
    names a set between ``val`` and bits per byte is called by the set, any other by itself. What Lightning logs both as
    ``val_loss`` and as ``val_loss_epoch`` is one score.

    Args:
        metrics: Logged key -> last value.

    Example:
        >>> pick_scores({"val/code/loss": 2.1, "val/code/bits_per_byte": 1.3, "train_loss": 2.0})
        {'code': 1.3}
        >>> pick_scores({"val_loss": 0.5, "val_loss_epoch": 0.5, "val_loss_step": 0.7, "val_accuracy": 0.9})
        {'val_loss': 0.5}
    """
    values = {key: value for key, value in metrics.items() if _IS_VALIDATION.search(_words(key))}
    values = {key: value for key, value in values.items() if _without_moment(key) not in {*values} - {key}}
    kinds = ([key for key in values if kind.search(_words(key))] for kind in _KINDS)
    scores: dict[str, float] = {}
    for key in next((keys for keys in kinds if keys), []):
        match = _NAMED_SET.fullmatch(key)
        name = match[1] if match and match[1] not in scores else key
        scores[name] = values[key]
    return scores


def _words(key: str) -> str:
    """Return ``val_loss`` for ``valLoss``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()


def _without_moment(key: str) -> str:
    """Return ``val_loss`` for ``val_loss_epoch`` and ``val_loss_step``, of one data loader or of several."""
    return re.sub(r"_(?:epoch|step)(?=$|/dataloader_idx_\d+$)", "", key)
