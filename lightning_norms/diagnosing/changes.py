"""What ``diagnose`` tries: one change each, none of which touches the user's code, and its fragment of YAML."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from lightning_norms.anatomy.fresh_weights import already_scaled
from lightning_norms.anatomy.rescaling import is_rescaled
from lightning_norms.anatomy.writers import residual_writers, value_path
from lightning_norms.callbacks.residual_rescale import SETTLED, ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.model.placements.single_stream import DeepNorm, PreNorm
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Facts
from lightning_norms.rescale_rules import DeepNormRescale, GPT2Rescale, RescaleRule
from lightning_norms.schedules import LinearWarmup

if TYPE_CHECKING:
    from lightning_norms.module import DecoderModule

DIVISORS = (3, 10)
"""The learning rate is divided by these factors."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a trial changes in the run as given: callbacks, a factor on the learning rate, or the module itself."""

    name: str
    words: str = ""
    patch: dict[str, Any] = field(default_factory=dict)
    """The change as a fragment of YAML, sized for the whole run."""
    callbacks: Callable[[], Sequence[Callback]] = tuple
    """Builds the callbacks that the change adds."""
    factor: float = 1.0
    """Factor on the learning rate."""
    rebuild: Callable[[Any], Any] | None = None
    """Builds another module from the given one; the architecture is then not the user's."""

    def all_callbacks(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Fresh callbacks for one trial: copies of the given ones, and those of the change."""
        return [*(copy.deepcopy(callback) for callback in callbacks), *self.callbacks()]


BASELINE = Change(name=AS_GIVEN)


@dataclass(frozen=True)
class Plan:
    """The changes to try, in order, and one sentence for each that cannot be tried."""

    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    last_resort: Change | None = None
    """All changes that keep the architecture together, for a run that no single one saves."""


def plan(facts: Facts, built: Any, callbacks: Sequence[Callback], steps: int, trained: bool = False) -> Plan:
    """Decide what to try on a run.

    Args:
        facts: the run as configured.
        built: a copy of the module after its first step, so that everything in it exists.
        callbacks: callbacks of the configuration.
        steps: optimizer steps of a trial.
        trained: whether the weights have been trained, so that another init would spoil them.
    """
    notes: list[str] = []
    warmup = small = deep = None
    if trained:
        notes.append("no rescale was tried: these weights have been trained")
    else:
        small = _rescale(built, callbacks, GPT2Rescale(), "rescale", notes)
        deep = _rescale(built, callbacks, DeepNormRescale(), "DeepNorm-style init", notes)
    if any(type(callback).__name__ == "Warmup" for callback in callbacks):
        notes.append("warmup was not tried: the configuration has one")
    else:
        warmup = _warmup(facts, steps)
    both = _combine(warmup, small) if warmup and small else None
    rates = [_lower_rate(facts, built, divisor) for divisor in DIVISORS]
    changes = [change for change in (warmup, *rates, small, deep, both) if change]
    parts = [change for change in (warmup, small, rates[0]) if change]
    return Plan((*changes, *_placements(built)), tuple(notes), _combine(*parts) if len(parts) > 1 else None)


def recommended_warmup(facts: Facts) -> int:
    """Warmup steps for the whole run: 2 / (1 - beta2), or a tenth of the run; at most a third of the run.

    Source: Ma & Yarats 2019, arXiv:1910.04209.
    """
    steps = 100 if facts.total_steps is None else facts.total_steps // 10
    if facts.beta2 is not None and facts.beta2 < 1:
        steps = round(2 / (1 - facts.beta2))
    return max(1, steps if facts.total_steps is None else min(steps, facts.total_steps // 3))


def shallower(built: Any) -> Change | None:
    """Reduce our own decoder to a quarter of its blocks, if at least two are left; None for any other module."""
    if not _is_our_decoder(built) or built.config.n_layers < 8:
        return None
    layers = built.config.n_layers // 4
    return Change(name="shallower", words=f"{layers} blocks", rebuild=partial(_rebuild, n_layers=layers))


def _warmup(facts: Facts, steps: int) -> Change:
    short, long = max(1, steps // 3), recommended_warmup(facts)
    init = {"schedule": {"class_path": "LinearWarmup", "init_args": {"warmup_steps": long}}}
    return Change(
        name="warmup",
        words=f"linear warmup of {short} of {steps} steps (for the whole run: {long})",
        patch=_callback("Warmup", init),
        callbacks=lambda: [Warmup(LinearWarmup(short))],
    )


def _rescale(
    built: Any, callbacks: Sequence[Callback], rule: RescaleRule, name: str, notes: list[str]
) -> Change | None:
    """Start the residual branches smaller; None, with a note, where that is done already or not possible."""
    matrices, obstacle = None, ""
    if any(isinstance(callback, ResidualRescale) for callback in callbacks):
        obstacle = "the configuration has ResidualRescale"
    elif is_rescaled(built) or getattr(built, SETTLED, False):
        obstacle = "these weights have been rescaled"
    else:
        try:
            matrices = value_path(built) if rule.whole_value_path else residual_writers(built)
        except (ValueError, AttributeError) as error:
            obstacle = str(error).partition(". Seen")[0].splitlines()[0].rstrip(".:")
    if matrices and already_scaled(matrices, rule):
        obstacle = "this init already has it"
    if obstacle or not matrices:
        notes.append(f"{name} was not tried: {obstacle}")
        return None
    layers = max(matrix.layers for matrix in matrices)
    kind = "value path" if rule.whole_value_path else "residual writers"
    return Change(
        name=name,
        words=f"{kind} x {rule.gain(layers, layers):.3g} at init ({len(matrices)} matrices)",
        patch=_callback("ResidualRescale", {"rule": type(rule).__name__}),
        callbacks=lambda: [ResidualRescale(rule)],
    )


def _lower_rate(facts: Facts, built: Any, divisor: int) -> Change:
    rate = float(f"{facts.learning_rate / divisor:.2g}")
    key = _rate_key(built, facts.learning_rate)
    return Change(
        name=f"lr/{divisor}",
        words=f"learning rate {rate:g} instead of {facts.learning_rate:g}",
        patch={} if key is None else {"model": {"init_args": {key: rate}}},
        factor=rate / facts.learning_rate if facts.learning_rate else 1.0,
    )


def _rate_key(built: Any, rate: float) -> str | None:
    """The only argument of the module that holds the learning rate; None if there is none, or several."""
    keys = [
        key
        for key, value in dict(getattr(built, "hparams", {})).items()
        if isinstance(value, float) and value == rate and ("lr" in key.lower() or "rate" in key.lower())
    ]
    return keys[0] if len(keys) == 1 else None


def _combine(*changes: Change) -> Change:
    added = [item for change in changes for item in change.patch.get("trainer", {}).get("callbacks", [])]
    patch = {key: value for change in changes for key, value in change.patch.items()}
    return Change(
        name=" + ".join(change.name for change in changes),
        words="; ".join(change.words for change in changes),
        patch=patch | ({"trainer": {"callbacks": added}} if added else {}),
        callbacks=lambda: [callback for change in changes for callback in change.callbacks()],
        factor=math.prod(change.factor for change in changes),
    )


def _placements(built: Any) -> Iterator[Change]:
    """Other placements for our own decoder, whose configuration is known."""
    for placement in (PreNorm(), DeepNorm()) if _is_our_decoder(built) else ():
        name = type(placement).__name__
        if type(built.config.placement) is not type(placement):
            yield Change(
                name=name,
                words=f"another architecture: placement {name}",
                patch={"model": {"init_args": {"decoder": {"placement": name}}}},
                rebuild=partial(_rebuild, placement=placement),
            )


def _is_our_decoder(module: Any) -> bool:
    # By name, as any module may come and most runs never load ours; a subclass may take other arguments.
    return (type(module).__module__, type(module).__name__) == ("lightning_norms.module", "DecoderModule")


def _rebuild(module: DecoderModule, **changes: Any) -> DecoderModule:
    names = ("learning_rate", "betas", "eps", "weight_decay", "scheduler", "sampling", "max_new_tokens")
    return type(module)(replace(module.config, **changes), **{name: getattr(module, name) for name in names})


def _callback(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": {"callbacks": [{"class_path": name, "init_args": arguments}]}}
