"""Functions around the update of one optimizer, without the closure that computes the gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class StepHooks:
    """Calls ``begin`` right before the update of an optimizer and ``end`` right after it.

    ::

        step() -> begin -> (pause -> closure -> begin), as often as the closure is called -> update -> end

    In full precision the closure is all of ``training_step``; ``begin`` comes before it as well, for optimizers that
    read their hyper-parameters first (LBFGS). A ``step()`` that calls its parent's ends once, at its own end.

    Args:
        optimizer: a torch optimizer.
        begin: called before the update.
        end: called after the update.
        pause: called before the closure.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        >>> hooks = StepHooks(optimizer, begin=lambda: print("begin"), end=lambda: print("end"))
        >>> optimizer.step()
        begin
        end
        >>> hooks.remove()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        begin: Callable[[], object],
        end: Callable[[], object],
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        self._begin, self._end, self._pause = begin, end, pause
        self._depth = 0  # calls of step() that have begun and not ended: a subclass may call its parent's
        self._has_ended = False
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        # Before the user's own hooks, which may step a scheduler.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._handles[1].id, last=False)

    def reset(self) -> None:
        """Forget a step that an exception has left open."""
        self._depth = 0

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._depth += 1
        self._begin()
        if _is_closure(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._outside(kwargs["closure"])}
        if len(args) > 1 and _is_closure(args[1]):  # args[0] is the optimizer
            return (args[0], self._outside(args[1]), *args[2:]), kwargs
        return None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A step that had begun before these hooks were put on ends without a begin; its parent's may have ended before.
        is_within = self._depth > 1 or (self._depth == 0 and self._has_ended)
        self._depth = max(0, self._depth - 1)
        if not is_within:
            self._has_ended = True
            self._end()

    def _outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(closure)
        def outside(*args: Any, **kwargs: Any) -> Any:
            self._pause()
            try:
                result = closure(*args, **kwargs)
            except BaseException:
                self.reset()
                raise
            self._begin()
            return result

        return outside


def _is_closure(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module | Tensor)
