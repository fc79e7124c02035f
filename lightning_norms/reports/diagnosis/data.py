"""The result of ``diagnose`` as frozen plain data, which JSON stores without loss.

::

    Diagnosis
      facts     the run as it was configured
      look      measurements before and at the first update: sizes by depth, growth per block, flags
      trials    short runs, as given and with one change each: losses, gradient by depth, events, verdict
      verdict   how the configuration as given ends; causes, fixes (best first) and popular claims, with their numbers
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.typed_json import as_plain, as_typed

AS_GIVEN = "as given"
FORMAT = 1


class Verdict(str, Enum):
    """How a short run ended."""

    TRAINS = "trains"
    STALLS = "stalls silently"
    SPIKES = "spikes"
    DIVERGES = "diverges"
    NON_FINITE = "non-finite"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The run as it was configured."""

    module: str
    parameters: int
    trainable: int
    blocks: dict[str, int] = field(default_factory=dict)
    """Label of each stack of blocks -> number of blocks, L; the label of a single stack is empty."""
    norms: dict[str, int] = field(default_factory=dict)
    """Kind of norm with its eps -> how many of them."""
    optimizer: str = "none"
    learning_rate: float = math.nan
    """Learning rate of the first parameter group, before scheduler and warmup."""
    beta2: float | None = None
    scheduler: str | None = None
    warmup_steps: int | None = None
    """Length of the configuration's ``Warmup`` callback; None without one."""
    total_steps: int | None = None
    precision: str = ""
    ranks: int = 1
    accumulate: int = 1
    manual: bool = False
    """Whether the module uses manual optimization."""
    callbacks: tuple[str, ...] = ()
    """Callbacks of the configuration that ran in every trial."""
    left_out: tuple[str, ...] = ()
    """Callbacks that did not run: monitors, checkpoints, and everything that rescues a run."""


@dataclass(frozen=True, kw_only=True)
class DepthProfile:
    """One quantity by depth at one moment, lowest depth first."""

    name: str
    """``stream_rms``, ``block_change``, ``branch_ratio``, ``parameter_gradient``, ``stream_gradient``,
    ``norm_input`` (by norm, in the order of the forward pass) or ``first_update``."""
    unit: str
    meaning: str
    groups: tuple[str, ...]
    values: tuple[float, ...]

    def of_blocks(self) -> dict[str, tuple[float, ...]]:
        """Values of the blocks of each stack, lowest first; the key is the prefix before ``block_``."""
        rows = Profile(self.groups, (0,), tuple((value,) for value in self.values)).stacks()
        return {label: tuple(self.values[i] for i in indices) for label, indices in rows.items()}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Factor by which a quantity grows from one block to the next: exp(slope of its logarithm), with its interval."""

    name: str
    """Name of the :class:`DepthProfile`."""
    stack: str
    blocks: int
    factor: float
    low: float
    high: float
    """``low`` to ``high`` is the 95 % confidence interval of ``factor``."""


@dataclass(frozen=True)
class Flag:
    """A notable property of the model or its configuration, in one sentence with its numbers."""

    name: str
    sentence: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Look:
    """Measurements before the first update, and what that update changed."""

    first_loss: float | None = None
    classes: int | None = None
    """V, the number of columns of the logits."""
    uniform_loss: float | None = None
    """ln V, nats: the loss of uniform predictions."""
    is_negated: bool = False
    """Whether the loss is minus cross-entropy, so that training makes predictions worse."""
    constant_loss: float | None = None
    """Loss of the best constant prediction for these labels: a dead run falls to it and stays there."""
    labels: int = 0
    """Number of labels behind ``constant_loss``; 0 if it is exact (provided by the data module) or unknown."""
    logits_rms: float | None = None
    logit_change: float | None = None
    """RMS by which the first update changes the logits of its own batch."""
    post_norm: bool | None = None
    """Whether every block ends in a norm (the RMS of its output is the same at every position)."""
    profiles: tuple[DepthProfile, ...] = ()
    growths: tuple[Growth, ...] = ()
    flags: tuple[Flag, ...] = ()

    def profile(self, name: str) -> DepthProfile | None:
        """Return the profile called ``name``, or None if it was not measured."""
        return next((profile for profile in self.profiles if profile.name == name), None)


@dataclass(frozen=True)
class TrialEvent:
    """A finding of one of the rules in :mod:`lightning_norms.rescue.rules`."""

    step: int
    cause: str
    """``non_finite``, ``spike``, ``divergence`` or ``stall``."""
    message: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One short run; all trials of a seed start from the same weights and see the same batches."""

    name: str
    change: str = ""
    """The change in words; empty for the run as given."""
    patch: dict[str, Any] = field(default_factory=dict)
    """The change as a fragment of YAML, sized for the whole run (not for the short trial)."""
    seed: int
    planned_steps: int
    keeps_model: bool = True
    """False if the change is another architecture, such as another placement."""
    losses: tuple[float, ...] = ()
    """Training loss of every optimizer step in nats; NaN for a step without one."""
    excess: tuple[float, ...] = ()
    """Loss minus that of the best constant prediction on the same labels, which cancels the noise of the batches."""
    grad_norms: tuple[float, ...] = ()
    """L2 norm of the whole gradient, before clipping."""
    learning_rates: tuple[float, ...] = ()
    """Effective learning rates of the first parameter group."""
    is_negated: bool = False
    """Whether the loss is minus cross-entropy."""
    optimizers: int = 1
    """Number of optimizers: several may play against each other, and then no loss has to fall."""
    gradients: Profile = field(default_factory=lambda: Profile((), (), ()))
    """Gradient norm of every block at the recorded steps."""
    events: tuple[TrialEvent, ...] = ()
    """The first step of each incident."""
    loss_scale: float | None = None
    """By how much perfect predictions beat constant ones under this loss; None if the loss could not be followed."""
    stalled_steps: int = 0
    """Number of consecutive steps, up to the last one, for which the stall rule held."""
    end_loss: float | None = None
    """Median loss of the last ten steps."""
    verdict: Verdict = Verdict.UNDECIDED
    reason: str = ""
    """The sentence behind the verdict, with its numbers."""
    plateau: bool = False
    """Whether the loss is flat at that of a constant prediction, which alone may be a plateau or a dead run."""
    stopped_early: bool = False


@dataclass(frozen=True)
class Cause:
    """A mechanism at work, in one sentence with the numbers behind it."""

    name: str
    sentence: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A change that was tried, and its effect."""

    name: str
    change: str
    patch: dict[str, Any]
    trains: bool
    keeps_model: bool
    verdicts: tuple[Verdict, ...]
    """One verdict per seed."""
    gain: float | None
    """End loss as given minus end loss with the change, nats, mean over seeds; above 0 is better."""
    spread: float | None
    """Standard deviation of the gain over seeds; None for one seed."""
    end_losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A popular statement, checked against the numbers of this model."""

    name: str
    popular: str
    holds: bool | None
    """None if the numbers do not decide it."""
    measured: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The whole result of ``diagnose``.

    Example:
        >>> facts = Facts(module="Net", parameters=9, trainable=9, learning_rate=1e-3)
        >>> diagnosis = Diagnosis(facts=facts, look=Look(first_loss=float("nan")), verdict=Verdict.TRAINS)
        >>> again = Diagnosis.from_json(diagnosis.to_json())
        >>> again.verdict is Verdict.TRAINS, again.facts == facts, again.look.first_loss
        (True, True, nan)
    """

    facts: Facts
    look: Look
    verdict: Verdict
    trials: tuple[Trial, ...] = ()
    causes: tuple[Cause, ...] = ()
    fixes: tuple[Fix, ...] = ()
    claims: tuple[Claim, ...] = ()
    rescaled_look: Look | None = None
    """Measurements after the residual rescale, if that was tried."""
    shallow_look: Look | None = None
    """Measurements with a quarter of the blocks, if the model can be rebuilt with fewer."""
    notes: tuple[str, ...] = ()
    """What was not tried or not measured, and why: one sentence each."""
    summary: tuple[str, ...] = ()
    """The answer in plain words, one paragraph each."""
    format: int = FORMAT

    @property
    def trains(self) -> bool:
        """Whether the configuration as given trains."""
        return self.verdict is Verdict.TRAINS

    @property
    def best(self) -> Fix | None:
        """The first fix that trains."""
        return next((fix for fix in self.fixes if fix.trains), None)

    def to_json(self) -> str:
        """Serialize to strict JSON; non-finite numbers become the strings "nan", "inf" and "-inf"."""
        return json.dumps(as_plain(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """Restore what :meth:`to_json` wrote.

        Raises:
            ValueError: the text has another format than this version writes.
        """
        data = json.loads(text)
        if data.get("format") != FORMAT:
            raise ValueError(f"a diagnosis of format {data.get('format')!r}; this version reads {FORMAT}")
        return as_typed(data, cls)
