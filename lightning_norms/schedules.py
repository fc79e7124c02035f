"""Learning rate schedules: pure functions from an optimizer step to a factor on the learning rate.

Steps are 0-based optimizer steps. The first step of a W-step warmup uses 1/W, never 0, so no batch is wasted. A field
whose name ends in ``_steps`` is a length: an int is a number of optimizer steps, a float strictly between 0 and 1 is a
share of the run. :meth:`Schedule.resolve` fills in what only the run knows: its length and its optimizer.
:class:`Then` joins two schedules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from typing_extensions import override

from lightning_norms.checks import check_number, check_whole


@dataclass(frozen=True)
class Run:
    """What a schedule may depend on in the run that uses it.

    Args:
        total_steps: optimizer steps of the whole run; None if it has no end.
        beta2: decay of the optimizer's second moment, ``betas[1]``; None if it has none.
        learning_rate: base learning rate of the optimizer's first parameter group.
    """

    total_steps: int | None
    beta2: float | None
    learning_rate: float


@dataclass(frozen=True)
class Schedule(ABC):
    """A function of the 0-based optimizer step that returns a factor on the learning rate.

    A new schedule is a frozen dataclass with a ``__call__``. Its fields are checked and resolved by name: ``*_steps``
    is a length, ``warmup_steps`` the one that ends at the peak, ``floor`` a share of the peak in [0, 1].

    Raises:
        ValueError: when built, if a length is not an int >= 0 or a float strictly between 0 and 1, or ``floor`` is not
            in [0, 1].
    """

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Compute the factor on the learning rate at ``step``."""

    def __post_init__(self) -> None:
        name, floor = type(self).__name__, getattr(self, "floor", 0)
        for field in _length_fields(self):
            _check_length(self, field)
        if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not 0 <= floor <= 1:
            raise ValueError(f"{name}.floor must be a share of the peak in [0, 1]; got {floor!r}")

    def resolve(self, run: Run) -> Schedule:
        """Turn every length into a number of steps of ``run``.

        Raises:
            ValueError: if it needs something that this run or its optimizer does not have.

        Example:
            >>> LinearWarmup(0.1).resolve(Run(total_steps=2000, beta2=0.98, learning_rate=1e-3))
            LinearWarmup(warmup_steps=200)
        """
        lengths = {field.name: _in_steps(self, field.name, run) for field in _length_fields(self)}
        return replace(self, **lengths)

    def length(self) -> int | None:
        """Number of steps until the factor is constant, where :class:`Then` hands over; None if it never ends."""
        return None

    def warmup_length(self) -> int:
        """Number of steps until the factor reaches its peak; 0 for a schedule that starts there."""
        return _steps(self, "warmup_steps") if hasattr(self, "warmup_steps") else 0


@dataclass(frozen=True)
class Constant(Schedule):
    """Full learning rate.

    Args:
        hold_steps: number of steps (int) or share of the run (float) before :class:`Then` hands over; None = for ever.

    Example:
        >>> Constant()(0)
        1.0
    """

    hold_steps: int | float | None = None

    @override
    def __call__(self, step: int) -> float:
        return 1.0

    @override
    def length(self) -> int | None:
        return None if self.hold_steps is None else _steps(self, "hold_steps")


@dataclass(frozen=True)
class LinearWarmup(Schedule):
    r"""Straight line up: 1/W, 2/W, ..., 1, 1, ...

    .. math:: \min(1, (\text{step} + 1) / W)

    Args:
        warmup_steps: W, optimizer steps (int) or share of the run (float); 0 = full learning rate at once.

    Example:
        >>> [LinearWarmup(4)(step) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    warmup_steps: int | float

    @override
    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / max(1, _steps(self, "warmup_steps")))

    @override
    def length(self) -> int:
        return _steps(self, "warmup_steps")


@dataclass(frozen=True)
class InverseSqrtDecay(Schedule):
    r"""Straight line up to 1 at step W, then down with the inverse square root: Noam's shape as a share of the peak.

    .. math:: \min(t / W, \sqrt{W / t}), \quad t = \text{step} + 1

    Args:
        warmup_steps: W, optimizer steps (int) or share of the run (float); 0 is taken as 1, which peaks at once.

    Example:
        >>> [InverseSqrtDecay(4)(step) for step in (0, 3, 15)]
        [0.25, 1.0, 0.5]

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.3.
    """

    warmup_steps: int | float

    @override
    def __call__(self, step: int) -> float:
        time, warmup = step + 1, max(1, _steps(self, "warmup_steps"))
        return min(time / warmup, math.sqrt(warmup / time))


@dataclass(frozen=True)
class Noam(Schedule):
    r"""The learning rate of "Attention is all you need" in absolute terms, whatever the optimizer's own one is.

    .. math:: \text{learning rate} = d^{-1/2} \min(t^{-1/2}, t \, W^{-3/2}), \quad t = \text{step} + 1

    As a factor it is divided by the base learning rate. Other parameter groups keep their ratio to the first one, and a
    scheduler of the user still multiplies it.

    Args:
        d_model: d, width of the model.
        warmup_steps: W, optimizer steps (int) or share of the run (float); 0 is taken as 1.
        learning_rate: the base learning rate to divide by; None = that of the optimizer's first parameter group.

    Raises:
        ValueError: if ``d_model`` or ``learning_rate`` is not positive.

    Example:
        >>> noam = Noam(d_model=512, warmup_steps=4000, learning_rate=1.0)
        >>> f"{noam(3999):.3g}"
        '0.000699'

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 3.
    """

    d_model: int
    warmup_steps: int | float
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("Noam", "d_model", self.d_model, 1)
        if self.learning_rate is not None:
            check_number("Noam", "learning_rate", self.learning_rate, above=0)

    @override
    def __call__(self, step: int) -> float:
        if self.learning_rate is None:
            raise ValueError("Noam needs the base learning rate: call resolve(run) first")
        time, warmup = step + 1, max(1, _steps(self, "warmup_steps"))
        shape = min(math.sqrt(1 / time), time / warmup * math.sqrt(1 / warmup))
        return math.sqrt(1 / self.d_model) * shape / self.learning_rate

    @override
    def resolve(self, run: Run) -> Schedule:
        rate = run.learning_rate if self.learning_rate is None else self.learning_rate
        return Schedule.resolve(replace(self, learning_rate=rate), run)


@dataclass(frozen=True)
class ExponentialWarmup(Schedule):
    r"""Fast first, then ever slower: reaches 63 % after tau steps and 95 % after 3 tau.

    .. math:: 1 - \exp(-t / \tau), \quad t = \text{step} + 1

    Args:
        time_steps: tau, optimizer steps (int) or share of the run (float); None = 1 / (1 - beta2) of the optimizer, the
            paper's untuned exponential warmup.

    Example:
        >>> round(ExponentialWarmup(1)(0), 4)
        0.6321
        >>> round(ExponentialWarmup().resolve(Run(None, beta2=0.98, learning_rate=1e-3))(49), 4)
        0.6321

    Source: Ma & Yarats 2019, arXiv:1910.04209.
    """

    time_steps: int | float | None = None

    @override
    def __call__(self, step: int) -> float:
        time = _steps(self, "time_steps")
        return 1.0 if time == 0 else -math.expm1(-(step + 1) / time)

    @override
    def resolve(self, run: Run) -> Schedule:
        return ExponentialWarmup(_memory(self, run)) if self.time_steps is None else super().resolve(run)

    @override
    def warmup_length(self) -> int:
        return _steps(self, "time_steps")  # where 63 % is reached


@dataclass(frozen=True)
class UntunedWarmup(Schedule):
    r"""Linear warmup for as long as Adam needs to estimate its second moment: W = 2 / (1 - beta2), nothing to tune.

    beta2 0.95 -> 40 steps, 0.98 -> 100, 0.99 -> 200, 0.999 -> 2000.

    Example:
        >>> UntunedWarmup().resolve(Run(total_steps=None, beta2=0.99, learning_rate=1e-3))
        LinearWarmup(warmup_steps=200)

    Source: Ma & Yarats 2019, arXiv:1910.04209.
    """

    @override
    def __call__(self, step: int) -> float:
        raise ValueError("UntunedWarmup needs the optimizer's beta2: call resolve(run) first")

    @override
    def resolve(self, run: Run) -> Schedule:
        return LinearWarmup(_memory(self, run, times=2))


@dataclass(frozen=True)
class CosineDecay(Schedule):
    r"""Half a cosine from 1 down to ``floor``; its first step is still 1, and ``floor`` is reached after its last.

    .. math:: f + (1 - f) (1 + \cos(\pi \, \text{step} / D)) / 2

    Args:
        decay_steps: D, optimizer steps (int) or share of the run (float).
        floor: f, share of the peak that stays, in [0, 1].

    Example:
        >>> [round(CosineDecay(4, floor=0.1)(step), 3) for step in range(6)]
        [1.0, 0.868, 0.55, 0.232, 0.1, 0.1]

    Source: Loshchilov & Hutter 2016, arXiv:1608.03983, equation 5 without restarts.
    """

    decay_steps: int | float
    floor: float = 0.0

    @override
    def __call__(self, step: int) -> float:
        left = 0.5 * (1 + math.cos(math.pi * _done(step, _steps(self, "decay_steps"))))
        return self.floor + (1 - self.floor) * left

    @override
    def length(self) -> int:
        return _steps(self, "decay_steps")


@dataclass(frozen=True)
class LinearDecay(Schedule):
    r"""Straight line from 1 down to ``floor``; its first step is still 1, and ``floor`` is reached after its last.

    .. math:: f + (1 - f) (1 - \text{step} / D)

    Args:
        decay_steps: D, optimizer steps (int) or share of the run (float).
        floor: f, share of the peak that stays, in [0, 1].

    Example:
        >>> [LinearDecay(4)(step) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    decay_steps: int | float
    floor: float = 0.0

    @override
    def __call__(self, step: int) -> float:
        return self.floor + (1 - self.floor) * (1 - _done(step, _steps(self, "decay_steps")))

    @override
    def length(self) -> int:
        return _steps(self, "decay_steps")


@dataclass(frozen=True)
class Then(Schedule):
    """``first`` for its whole length, then ``second`` from its own step 0.

    Args:
        first: schedule to start with; it must have an end.
        second: schedule to continue with.

    Raises:
        ValueError: if ``first`` never ends.

    Example:
        >>> [Then(LinearWarmup(2), LinearDecay(2))(step) for step in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    first: Schedule
    second: Schedule

    def __post_init__(self) -> None:
        for name, part in (("first", self.first), ("second", self.second)):
            if not isinstance(part, Schedule):
                raise ValueError(f"Then.{name} must be a schedule such as LinearWarmup(100); got {part!r}")

    @override
    def __call__(self, step: int) -> float:
        handover = self._handover()
        return self.first(step) if step < handover else self.second(step - handover)

    @override
    def resolve(self, run: Run) -> Schedule:
        both = Then(self.first.resolve(run), self.second.resolve(run))
        both._handover()  # only now is it known whether ``first`` ends
        return both

    @override
    def length(self) -> int | None:
        rest = self.second.length()
        return None if rest is None else self._handover() + rest

    @override
    def warmup_length(self) -> int:
        return self.first.warmup_length()

    def _handover(self) -> int:
        length = self.first.length()
        if length is None:
            raise ValueError(f"Then.first must have an end, so that second can start; {self.first} goes on for ever")
        return length


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    r"""Up, flat, and down at the very end of the run: ``Then(LinearWarmup, Then(Constant, LinearDecay))``.

    ::

        1 |   ______________
          |  /              \
          | /                \__ floor
          +-W--- stable ---D----  total steps

    Args:
        warmup_steps: W, optimizer steps (int) or share of the run (float).
        decay_steps: D, optimizer steps (int) or share of the run (float).
        floor: share of the peak that stays at the end, in [0, 1].

    Raises:
        ValueError: when resolved, if the run has no end or is shorter than W + D.

    Example:
        >>> WarmupStableDecay(10, 0.2).resolve(Run(total_steps=100, beta2=None, learning_rate=1e-3)).second
        Then(first=Constant(hold_steps=70), second=LinearDecay(decay_steps=20, floor=0.0))

    Source: Hu et al. 2024 (MiniCPM), arXiv:2404.06395; linear decay as in Hägele et al. 2024, arXiv:2405.18392.
    """

    warmup_steps: int | float
    decay_steps: int | float
    floor: float = 0.0

    @override
    def __call__(self, step: int) -> float:
        raise ValueError("WarmupStableDecay needs the length of the run: call resolve(run) first")

    @override
    def resolve(self, run: Run) -> Schedule:
        if run.total_steps is None:
            raise ValueError(_no_end(f"WarmupStableDecay(decay_steps={self.decay_steps})"))
        warmup, decay = _in_steps(self, "warmup_steps", run) or 0, _in_steps(self, "decay_steps", run) or 0
        stable = run.total_steps - warmup - decay
        if stable < 0:
            raise ValueError(
                f"WarmupStableDecay needs {warmup} + {decay} steps, but the run has {run.total_steps}:"
                " make warmup_steps or decay_steps shorter"
            )
        return Then(LinearWarmup(warmup), Then(Constant(stable), LinearDecay(decay, self.floor)))


def _length_fields(schedule: Schedule) -> list[Field[Any]]:
    return [field for field in fields(schedule) if field.name.endswith("_steps")]


def _check_length(schedule: Schedule, field: Field[Any]) -> None:
    value = getattr(schedule, field.name)
    if value is None and field.default is None:
        return
    # Two separate rules, so that YAML's `1.0` is an error instead of one step or the whole run.
    if (_is_int(value) and value >= 0) or (isinstance(value, float) and 0 < value < 1):
        return
    raise ValueError(
        f"{type(schedule).__name__}.{field.name} must be a number of optimizer steps (an int >= 0) or a share of the"
        f" run (a float between 0 and 1, both excluded); got {value!r}"
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_steps(schedule: Schedule, name: str, run: Run) -> int | None:
    value = getattr(schedule, name)
    if not isinstance(value, float):
        return None if value is None else int(value)
    if run.total_steps is None:
        raise ValueError(_no_end(f"{type(schedule).__name__}({name}={value})"))
    # Nearest step, halves down, so that 0.5 + 0.5 of an odd run is not longer than the run.
    return max(1, math.ceil(value * run.total_steps - 0.5))


def _steps(schedule: Schedule, name: str) -> int:
    value = getattr(schedule, name)
    if not _is_int(value):
        raise ValueError(f"{type(schedule).__name__}.{name}={value!r} depends on the run: call resolve(run) first")
    return int(value)


def _done(step: int, length: int) -> float:
    return 1.0 if length == 0 else min(1.0, step / length)


def _memory(schedule: Schedule, run: Run, times: int = 1) -> int:
    """Memory of the second moment in steps, 1 / (1 - beta2), rounded: int() would give 199 for beta2 = 0.99."""
    if run.beta2 is None:
        raise ValueError(
            f"{type(schedule).__name__} takes its length from Adam's beta2, but the optimizer has none:"
            " give a length, for instance LinearWarmup(100)"
        )
    return round(times / (1 - run.beta2))


def _no_end(what: str) -> str:
    return (
        f"{what} depends on the length of the run, which is not known: give an int (optimizer steps), or set"
        " Trainer(max_steps=...); with manual optimization of several optimizers only an int works"
    )
