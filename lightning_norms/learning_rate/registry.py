"""The factors of the optimizers of a run: one :class:`Factors` for each, whoever asks, also of those made anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.learning_rate.factors import FACTORS, Factors
from lightning_norms.metrics import EFFECTIVE_LEARNING_RATE


def factors_of(optimizer: Any) -> Factors:
    """The one :class:`Factors` of a torch optimizer, or of Lightning's wrapper around one; made on first use."""
    inner = _unwrap(optimizer)
    return FACTORS[inner] if inner in FACTORS else Factors(inner)


def all_factors_of(optimizers: Iterable[Any]) -> list[Factors]:
    """The :class:`Factors` of those optimizers that have some."""
    return [FACTORS[inner] for inner in map(_unwrap, optimizers) if inner in FACTORS]


def is_cancelled(optimizer: Any) -> bool:
    """Whether the step of ``optimizer`` in progress, or else its last one, was told to move nothing."""
    return any(factors.is_cancelled for factors in all_factors_of([optimizer]))


def follow(all_factors: Sequence[Factors], optimizers: Sequence[Any], stepping: Any = None) -> list[Factors]:
    """Let optimizers that were made anew in mid-run take over the factors of those that they replace.

    A further optimizer gets the same factors at clock 0.

    Args:
        all_factors: the factors of the optimizers before, of which some may be gone.
        optimizers: all optimizers of the run now.
        stepping: the optimizer whose step is under way; its new factors count for this step.

    Returns:
        The factors of ``optimizers``, in their order.
    """
    inner = [_unwrap(optimizer) for optimizer in optimizers if optimizer.param_groups]
    before = [factors.optimizer for factors in all_factors]
    is_same = len(inner) == len(before) and all(one is other for one, other in zip(inner, before, strict=True))
    if is_same or not inner or not all_factors or _is_scaled(_unwrap(stepping)):
        return list(all_factors)
    gone = [factors for factors in all_factors if all(factors.optimizer is not optimizer for optimizer in inner)]
    for optimizer in inner:
        if _is_scaled(optimizer):
            continue
        if gone:
            gone.pop(0).move(optimizer)
        else:
            all_factors[0].copy(optimizer)
        if stepping is not None and _unwrap(stepping) is optimizer:
            FACTORS[optimizer].show()
    for factors in gone:
        factors.leave()
    return [FACTORS[optimizer] for optimizer in inner]


def effective_learning_rates(optimizers: Sequence[Any]) -> dict[str, float]:
    """Learning rates of the last steps of all optimizers of a run under their logged keys.

    A group is called by its "name", or else by its number "0", "1", ...; with several optimizers "optimizer1/0" is the
    first group of the second one.
    """
    rates = {}
    for position, optimizer in enumerate(map(_unwrap, optimizers)):
        owner = f"optimizer{position}/" if len(optimizers) > 1 else ""
        names = [str(group.get("name", index)) for index, group in enumerate(optimizer.param_groups)]
        if len(set(names)) < len(names):
            names = [str(index) for index in range(len(names))]
        for name, rate in zip(names, factors_of(optimizer).used(), strict=False):
            rates[EFFECTIVE_LEARNING_RATE.of(owner + name)] = rate
    return rates


def _is_scaled(optimizer: Any) -> bool:
    return any(factors.names() for factors in all_factors_of([optimizer]))


def _unwrap(optimizer: Any) -> Any:
    return optimizer._optimizer if has_class_name(optimizer, "LightningOptimizer") else optimizer
