"""Whether a network that predicts the next token sees it: the gradient of one prediction by the inputs after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_norms.diagnosing.labels import CROSS_ENTROPY
from lightning_norms.reports.diagnosis.data import Flag


class NextTokenWatcher(TorchFunctionMode):
    """Keeps the first embedding of tokens and the last cross-entropy of a pass; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: Tensor | None = None
        self._embedded: Tensor | None = None
        self._logits: Tensor | None = None
        self._labels: Tensor | None = None

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.embedding and self._tokens is None and args[0].ndim == 2 and result.requires_grad:
            self._tokens, self._embedded = args[0], result
        elif func is F.cross_entropy:
            call = CROSS_ENTROPY.bind(*args, **(kwargs or {}))
            self._logits, self._labels = call.arguments["input"], call.arguments["target"]
        return result

    def flags(self) -> list[Flag]:
        """Return the fault if a prediction in the middle depends on a later input, which holds its label."""
        try:
            flag = self._flag()
        except RuntimeError:  # compiled and checkpointed code may not give this gradient
            return []
        return [] if flag is None else [flag]

    @torch.enable_grad()
    def _flag(self) -> Flag | None:
        tokens, embedded, logits, labels = self._tokens, self._embedded, self._logits, self._labels
        if tokens is None or embedded is None or logits is None or labels is None or labels.is_floating_point():
            return None
        rows, time = tokens.shape
        if logits.ndim != 2 or labels.numel() % rows or time - labels.numel() // rows not in (0, 1) or time < 4:
            return None
        labels = labels.reshape(rows, -1)
        following, labels = tokens[:, 1:], labels[:, : time - 1]
        scored = labels >= 0
        if not bool(scored.any()) or not torch.equal(labels[scored], following[scored]):
            return None  # it does not predict the next token
        middle = time // 2
        predictions = logits.reshape(rows, -1, logits.shape[-1])[:, middle]
        (grad,) = torch.autograd.grad(predictions.float().square().sum(), embedded)
        if not bool(grad[:, middle + 1 :].any()):
            return None
        sentence = (
            f"the prediction of token {middle + 2} of {time} depends on that token and on later ones: the causal mask "
            "is missing, so the loss falls without anything that generation could use"
        )
        return Flag("no causal mask", sentence, {"position": float(middle)})
