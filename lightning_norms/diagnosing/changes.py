"""What ``diagnose`` tries: one change each, none of which touches the user's code, and its fragment of YAML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning.pytorch import Callback

from lightning_norms.anatomy.fresh_weights import already_scaled
from lightning_norms.anatomy.rescaling import is_rescaled
from lightning_norms.anatomy.writers import residual_writers, value_path
from lightning_norms.callbacks.residual_rescale import SETTLED, ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.diagnosing.counterfactual import Change
from lightning_norms.module import DecoderModule
from lightning_norms.placements import DeepNorm, PreNorm
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Facts
from lightning_norms.rescale_rules import DeepNormRescale, GPT2Rescale, RescaleRule
from lightning_norms.schedules import LinearWarmup

DIVISORS = (3, 10)
"""Of the learning rate."""
GIVEN = Change(AS_GIVEN)


@dataclass(frozen=True)
class Plan:
    """The changes to try, in order, and one sentence for each that cannot be tried."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    last_resort: Change | None = None
    """All that keeps the architecture together, for a run that no single change saves."""


def plan(facts: Facts, built: Any, given: Sequence[Callback], steps: int, trained: bool = False) -> Plan:
    """What to try on a run.

    Args:
        facts: of the run as configured.
        built: a copy of the module after its first step, so that everything in it exists.
        given: callbacks of the configuration.
        steps: of a trial.
        trained: whether the weights came trained, so that another init would spoil them.
    """
    notes: list[str] = []
    names = {type(callback).__name__ for callback in given}
    warm = None if "Warmup" in names else _warmup(facts, steps)
    small = deep = None
    if trained:
        notes.append("no rescale was tried: these weights have been trained")
    else:
        small = _rescale(built, given, GPT2Rescale(), "rescale", notes)
        deep = _rescale(built, given, DeepNormRescale(), "DeepNorm-style init", notes)
    both = None if warm is None or small is None else _together("warmup + rescale", warm, small)
    if warm is None:
        notes.append("warmup was not tried as a change: the configuration has one")
    rates = [_lower_rate(facts, built, divisor) for divisor in DIVISORS]
    tried = [change for change in (warm, *rates, small, deep, both) if change is not None]
    parts = [change for change in (warm, small, rates[0]) if change is not None]
    name = " + ".join(part.name for part in parts)
    return Plan((*tried, *_placements(built)), tuple(notes), _together(name, *parts) if len(parts) > 1 else None)


def recommended_warmup(facts: Facts) -> int:
    """Steps for the run that is meant: 2 / (1 - beta2), or a tenth of the run; at most a third of the run.

    Source: Ma & Yarats 2019, arXiv:1910.04209.
    """
    wanted = 100 if facts.total_steps is None else facts.total_steps // 10
    if facts.beta2 is not None and facts.beta2 < 1:
        wanted = round(2 / (1 - facts.beta2))
    return max(1, wanted if facts.total_steps is None else min(wanted, facts.total_steps // 3))


def _warmup(facts: Facts, steps: int) -> Change:
    short, long = max(1, steps // 3), recommended_warmup(facts)
    init = {"schedule": {"class_path": "LinearWarmup", "init_args": {"warmup_steps": long}}}
    return Change(
        "warmup",
        f"linear warmup of {short} of {steps} steps (for the whole run: {long})",
        _callback("Warmup", init),
        callbacks=lambda: [Warmup(LinearWarmup(short))],
    )


def _rescale(built: Any, given: Sequence[Callback], rule: RescaleRule, name: str, notes: list[str]) -> Change | None:
    """A smaller start of the residual branches, unless the weights have it or its matrices are not found."""
    if any(isinstance(callback, ResidualRescale) for callback in given):
        notes.append(f"{name} was not tried: the configuration has ResidualRescale")
        return None
    if is_rescaled(built) or getattr(built, SETTLED, False):
        notes.append(f"{name} was not tried: these weights have been rescaled")
        return None
    try:
        matrices = value_path(built) if rule.whole_value_path else residual_writers(built)
    except ValueError as error:
        notes.append(f"{name} was not tried: {str(error).partition('. Seen')[0].splitlines()[0].rstrip('.:')}")
        return None
    if already_scaled(matrices, rule):
        notes.append(f"{name} was not tried: this init already has it")
        return None
    layers = max(matrix.layers for matrix in matrices)
    what = "value path" if rule.whole_value_path else "residual writers"
    return Change(
        name,
        f"{what} x {rule.gain(layers, layers):.3g} at init ({len(matrices)} matrices)",
        _callback("ResidualRescale", {"rule": type(rule).__name__}),
        callbacks=lambda: [ResidualRescale(rule)],
    )


def _lower_rate(facts: Facts, built: Any, divisor: int) -> Change:
    rate = float(f"{facts.learning_rate / divisor:.2g}")
    key = _rate_key(built, facts.learning_rate)
    patch = {} if key is None else {"model": {"init_args": {key: rate}}}
    return Change(
        f"lr/{divisor}",
        f"learning rate {rate:g} instead of {facts.learning_rate:g}",
        patch,
        learning_rate=rate / facts.learning_rate if facts.learning_rate else 1.0,
    )


def _rate_key(built: Any, rate: float) -> str | None:
    """The one argument of the module that holds the learning rate; None if there is none, or several."""
    found = [
        key
        for key, value in dict(getattr(built, "hparams", {})).items()
        if isinstance(value, float) and value == rate and ("lr" in key.lower() or "rate" in key.lower())
    ]
    return found[0] if len(found) == 1 else None


def _together(name: str, *changes: Change) -> Change:
    def callbacks() -> list[Callback]:
        return [callback for change in changes for callback in change.callbacks()]

    added = [item for change in changes for item in change.patch.get("trainer", {}).get("callbacks", [])]
    patch = {key: value for change in changes for key, value in change.patch.items()}
    if added:
        patch["trainer"] = {"callbacks": added}
    rate = math.prod(change.learning_rate for change in changes)
    words = "; ".join(change.words for change in changes)
    return Change(name, words, patch, callbacks=callbacks, learning_rate=rate)


def _placements(built: Any) -> Iterator[Change]:
    """Other architectures: only of our own module, whose recipe is known."""
    if type(built) is not DecoderModule:
        return
    for placement in (PreNorm(), DeepNorm()):
        name = type(placement).__name__
        if type(built.config.placement) is not type(placement):
            patch = {"model": {"init_args": {"decoder": {"placement": name}}}}
            words = f"another architecture: placement {name}"
            yield Change(name, words, patch, rebuild=partial(_rebuilt, placement=placement))


def shallower(built: Any) -> Change | None:
    """A quarter of the blocks: only of our own module, and only if that leaves some."""
    if type(built) is not DecoderModule or built.config.n_layers < 8:
        return None
    layers = built.config.n_layers // 4
    return Change("shallower", f"{layers} blocks", rebuild=partial(_rebuilt, n_layers=layers))


def _rebuilt(module: DecoderModule, **changes: Any) -> DecoderModule:
    return DecoderModule(
        replace(module.config, **changes),
        learning_rate=module.learning_rate,
        betas=module.betas,
        eps=module.eps,
        weight_decay=module.weight_decay,
        scheduler=module.scheduler,
        sampling=module.sampling,
        max_new_tokens=module.max_new_tokens,
    )


def _callback(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": {"callbacks": [{"class_path": name, "init_args": arguments}]}}
