"""Buffers that a forward pass writes to, kept so that a skipped step leaves no trace in them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class BufferKeeper:
    """Copies of the buffers that a forward pass changes (running statistics), which a skipped step must not leave.

    Only what was written to is copied, as the tensors' version counters tell: nothing at all in most Transformers.
    Batch norm writes its running statistics past these counters, so ``running_...`` always counts as written to.

    Args:
        module: the module whose buffers are kept.
    """

    def __init__(self, module: nn.Module) -> None:
        # Looked for once: most of a Transformer's thousand modules have no buffer, and a walk costs more than a copy.
        self._owners = [(name, part) for name, part in module.named_modules() if part._buffers]
        self._kept: dict[str, tuple[Tensor, int, Tensor]] = {}  # name -> the buffer, its version, its copy
        self.keep()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in self._owners:
            for name, buffer in part._buffers.items():
                if buffer is not None and not is_lazy(buffer):
                    yield f"{prefix}.{name}", buffer

    @torch.no_grad()
    def keep(self) -> None:
        """Take the current values as those to go back to."""
        self._kept = {
            name: self._kept[name] if self._is_unchanged(name, buffer) else (buffer, _version(buffer), buffer.clone())
            for name, buffer in self._buffers()
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo what was written since; a buffer of another shape, or a new one, stays."""
        for name, buffer in self._buffers():
            copy = self._kept[name][2] if name in self._kept else buffer
            if not self._is_unchanged(name, buffer) and copy.shape == buffer.shape:
                buffer.copy_(copy)
        self.keep()

    def _is_unchanged(self, name: str, buffer: Tensor) -> bool:
        if name.rpartition(".")[2].startswith("running_") or name not in self._kept:
            return False
        return self._kept[name][0] is buffer and self._kept[name][1] == _version(buffer)


def _version(tensor: Tensor) -> int:
    # One that validation has made in inference mode cannot be written to by training.
    return 0 if tensor.is_inference() else tensor._version
