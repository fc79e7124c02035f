"""What ``diagnose`` found, as frozen plain data: one page of facts that JSON holds without loss.

::

    Diagnosis
      facts     the run as it was configured
      look      measured before and at the first update: sizes by depth, growth per block, flags
      trials    short runs, as given and with one change each: losses, gradient by depth, events, verdict
      verdict   of the configuration as given; causes, fixes (best first) and popular claims, each with its numbers
"""

from __future__ import annotations

import json
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


@dataclass(frozen=True)
class Facts:
    """The run as it was configured."""

    module: str
    parameters: int
    trainable: int
    blocks: dict[str, int]
    """Label of each stack of blocks -> number of blocks, L; the label of a single stack is empty."""
    optimizer: str
    learning_rate: float
    """Of the first parameter group, before scheduler and warmup."""
    beta2: float | None
    scheduler: str | None
    warmup_steps: int | None
    """Of the ``Warmup`` callback in the configuration; None without one."""
    total_steps: int | None
    precision: str
    ranks: int
    accumulate: int
    manual: bool
    """Manual optimization."""
    callbacks: tuple[str, ...]
    """Part of the configuration as given: they ran in every trial."""
    left_out: tuple[str, ...]
    """Callbacks that were left out: monitors, checkpoints, and whatever rescues a run."""


@dataclass(frozen=True)
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
        """Values of the blocks of each stack, lowest first; the key is what stands before ``block_``."""
        rows = Profile(self.groups, (0,), tuple((value,) for value in self.values)).stacks()
        return {label: tuple(self.values[i] for i in indices) for label, indices in rows.items()}


@dataclass(frozen=True)
class Growth:
    """By how much a quantity grows from one block to the next: exp(slope of its logarithm), with its interval."""

    name: str
    """Of the :class:`DepthProfile`."""
    stack: str
    blocks: int
    factor: float
    low: float
    high: float
    """95 % confidence interval of ``factor``."""


@dataclass(frozen=True)
class Flag:
    """Something seen in the model or its configuration that matters by itself, in one sentence with its numbers."""

    name: str
    sentence: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What was measured at the start: before the first update, and what that update did."""

    first_loss: float | None
    classes: int | None
    """V, columns of the logits."""
    uniform_loss: float | None
    """ln V, nats: the loss of a model that knows nothing."""
    constant_loss: float | None
    """Loss of the best constant prediction for the labels seen: a dead run falls to it and stays."""
    labels: int
    """Number of labels behind ``constant_loss``; 0 if it is exact (the data told it) or unknown."""
    logits_rms: float | None
    logit_change: float | None
    """RMS change of the logits of the same batch by the first update."""
    post_norm: bool | None = None
    """Whether the stream leaves every block through a norm (its RMS is the same at every position)."""
    profiles: tuple[DepthProfile, ...] = ()
    growths: tuple[Growth, ...] = ()
    flags: tuple[Flag, ...] = ()

    def profile(self, name: str) -> DepthProfile | None:
        """The profile of that name, if it was measured."""
        return next((each for each in self.profiles if each.name == name), None)


@dataclass(frozen=True)
class TrialEvent:
    """What a rule of ``detection`` said of a step."""

    step: int
    cause: str
    """``non_finite``, ``spike``, ``divergence`` or ``stall``."""
    message: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """One short run on the same batches from the same weights."""

    name: str
    change: str
    """In words; empty for the run as given."""
    patch: dict[str, Any]
    """The change as a fragment of the YAML file, for the run that is meant (not for the short trial)."""
    seed: int
    planned_steps: int
    keeps_model: bool = True
    """False if the change is another architecture (a placement)."""
    losses: tuple[float, ...] = ()
    """Training loss of every optimizer step, nats; NaN where a step had none."""
    excess: tuple[float, ...] = ()
    """Loss less that of the best constant prediction on the same labels: without the noise of the batches."""
    grad_norms: tuple[float, ...] = ()
    """L2 norm of the whole gradient, before clipping."""
    learning_rates: tuple[float, ...] = ()
    """Used by the first parameter group."""
    gradients: Profile = field(default_factory=lambda: Profile((), (), ()))
    """Gradient norm of every block at the recorded steps."""
    events: tuple[TrialEvent, ...] = ()
    """First step of each incident."""
    stalled_steps: int = 0
    """How many of the last steps, in a row, the stall rule held for."""
    end_loss: float | None = None
    """Median of the last ten steps."""
    verdict: Verdict = Verdict.UNDECIDED
    reason: str = ""
    """Why this verdict, in one sentence with its numbers."""
    stopped_early: bool = False


@dataclass(frozen=True)
class Cause:
    """A mechanism at work, in one sentence with the numbers that it rests on."""

    name: str
    sentence: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fix:
    """A change that was tried, and what it did."""

    name: str
    change: str
    patch: dict[str, Any]
    trains: bool
    keeps_model: bool
    verdicts: tuple[Verdict, ...]
    """One a seed."""
    gain: float | None
    """End loss as given less end loss with the change, nats, mean over seeds; above 0 is better."""
    spread: float | None
    """Standard deviation of the gain over seeds; None for one seed."""
    end_losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A popular sentence, and what this model's numbers say of it."""

    name: str
    popular: str
    holds: bool | None
    """None: the numbers do not decide it."""
    measured: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``diagnose`` found.

    Example:
        >>> facts = Facts("Net", 9, 9, {"": 2}, "AdamW", 1e-3, 0.98, None, None, 300, "32-true", 1, 1, False, (), ())
        >>> look = Look(float("nan"), 4, 1.386, None, 0, None, None)
        >>> found = Diagnosis(facts, look, Verdict.TRAINS, summary=("It trains.",))
        >>> again = Diagnosis.from_json(found.to_json())
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
    """The same look after the residual rescale, if that was tried."""
    shallow_look: Look | None = None
    """The same look at a quarter of the blocks, if the model can be built so."""
    notes: tuple[str, ...] = ()
    """What was not tried or not measured, and why; one sentence each."""
    summary: tuple[str, ...] = ()
    """The answer in plain words."""
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
        """Strict JSON: a number that is not finite is the string "nan", "inf" or "-inf"."""
        return json.dumps(as_plain(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """What :meth:`to_json` wrote.

        Raises:
            ValueError: another format than this version writes.
        """
        data = json.loads(text)
        if data.get("format") != FORMAT:
            raise ValueError(f"a diagnosis of format {data.get('format')!r}; this version reads {FORMAT}")
        return as_typed(data, cls)
