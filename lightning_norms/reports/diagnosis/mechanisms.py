"""Which known mechanism is at work: each rule reads numbers of this model and states them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_norms.reports.console import loss_text, number
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Cause, Facts, Look, Trial, Verdict
from lightning_norms.reports.diagnosis.reach import FIRST, VANISHED, end_of, received_nothing, weakest

FAULTS = ("identical blocks", "no causal mask")
"""Flags that are a cause by themselves."""
REACHED = 0.03
"""The gradient reaches every block if the weakest has this share of the largest at the first step."""


def mechanisms(facts: Facts, look: Look, trials: Sequence[Trial]) -> tuple[Cause, ...]:
    """Return the causes, the weightiest first; none if the configuration trains and nothing stands out."""
    if not facts.trainable:
        sentence = f"None of the {facts.parameters:,} parameters is trainable: nothing can be learnt."
        return (Cause("frozen", sentence, {"trainable": 0.0, "parameters": float(facts.parameters)}),)
    baseline = next((trial for trial in trials if trial.name == AS_GIVEN), None)
    causes = [*_large_logits(look), *_named_flags(look)]
    if baseline is not None and baseline.verdict is not Verdict.TRAINS:
        causes = [*_failure(baseline), *_decisive_changes(trials), *causes]
        if "LRFallback" in facts.left_out:
            sentence = "LRFallback was left out: it may be all that keeps this run alive."
            causes.append(Cause("kept alive by LRFallback", sentence))
    return tuple(causes)


def bottom_over_top(trial: Trial, column: int) -> float | None:
    """Gradient norm of the lowest block of the first stack over that of its highest, at a recorded step."""
    rows = next(iter(trial.gradients.stacks().values()), ())
    if len(rows) < 2 or not trial.gradients.steps:
        return None
    top = trial.gradients.values[rows[-1]][column]
    return trial.gradients.values[rows[0]][column] / top if top else None


def _failure(baseline: Trial) -> Iterator[Cause]:
    first, last = weakest(baseline.gradients, FIRST), weakest(baseline.gradients, end_of(baseline.gradients))
    named = next((event.step for event in baseline.events if event.cause == "stall"), None)
    if first is not None and first[0] < VANISHED:
        named = 0 if named is None else named
    elif baseline.verdict is not Verdict.STALLS or first is None or last is None or named is None:
        evidence = dict(baseline.events[0].evidence) if baseline.events else {}
        yield Cause(_name(baseline), f"As given, {baseline.reason}.", evidence)
        return
    if last is None or named is None:
        return
    evidence = {"share_first": first[0], "share_last": last[0], "named_at": float(named)}
    end = f"at step {baseline.gradients.steps[-1]}"
    if first[0] >= REACHED:
        yield Cause(
            "cut off by the updates",
            f"At the first step the gradient reaches every block: the weakest, {first[1]}, gets {number(first[0])} of "
            f"the largest. By step {named} some blocks have lost it, and {end} {last[1]} gets {number(last[0])}: "
            "nothing vanishes at init, the first updates cut these blocks off.",
            evidence,
        )
    else:
        yield Cause(
            "no gradient from the start",
            f"Already at the first step {first[1]} gets only {number(first[0])} of the largest block's gradient, and "
            f"{number(last[0])} {end}: the init cuts it off, before any update.",
            evidence,
        )


def _name(baseline: Trial) -> str:
    """Name what the numbers of a trial show by themselves."""
    if baseline.learning_rates and not any(baseline.learning_rates):
        return "learning rate 0"
    if baseline.grad_norms and not any(baseline.grad_norms):
        return "loss without gradient"
    return "blocks cut off" if received_nothing(baseline.gradients) else baseline.verdict.value


def _named_flags(look: Look) -> Iterator[Cause]:
    """Faults of the network itself, which a falling loss does not show."""
    for flag in look.flags:
        if flag.name in FAULTS:
            yield Cause(flag.name, flag.sentence[:1].upper() + flag.sentence[1:] + ".", flag.evidence)


def _decisive_changes(trials: Sequence[Trial]) -> Iterator[Cause]:
    """A change that makes the run train points to the cause."""
    trains: dict[str, bool] = {}
    for trial in trials:
        if trial.name != AS_GIVEN:
            trains[trial.name] = trains.get(trial.name, True) and trial.verdict is Verdict.TRAINS
    rate = next((name for name in ("lr/3", "lr/10") if trains.get(name)), None)
    if rate is not None:
        yield Cause("learning rate", f"The learning rate is too high for this start: {_compare(trials, rate)}.")
    if trains.get("warmup"):
        yield Cause("no warmup", f"The start is too fast: {_compare(trials, 'warmup')}.")
    for name in ("rescale", "DeepNorm-style init"):
        if trains.get(name):
            yield Cause("large branches", f"The residual branches start too large: {_compare(trials, name)}.")
    both = "warmup + rescale"
    if trains.get(both) and not trains.get("warmup") and not trains.get("rescale"):
        alone = "; ".join(f"{name}: {_verdict(trials, name)}" for name in ("warmup", "rescale"))
        sentence = f"Two things at once: {_compare(trials, both)}, but neither alone ({alone})."
        yield Cause("large branches and a cold start", sentence)
    if trains and not any(trains.values()):
        names = {trial.name for trial in trials if trial.name in trains and trial.verdict is Verdict.UNDECIDED}
        sentence = f"None of the {len(trains)} changes that were tried makes it train."
        if names:
            sentence = (
                f"None of the {len(trains)} changes that were tried is seen to train in so few steps; "
                f"undecided: {len(names)}."
            )
        yield Cause("not found", sentence)


def _large_logits(look: Look) -> Iterator[Cause]:
    if look.first_loss is None or look.uniform_loss is None or look.logits_rms is None:
        return
    if look.first_loss > 1.5 * look.uniform_loss and look.first_loss > look.uniform_loss + 1:
        yield Cause(
            "large logits",
            f"The first loss is {number(look.first_loss)}, but uniform predictions cost only ln {look.classes} = "
            f"{look.uniform_loss:.3f}: the logits start with RMS {number(look.logits_rms)}, so the head (or the stream "
            "that it reads) starts too large.",
            {"first_loss": look.first_loss, "uniform_loss": look.uniform_loss, "logits_rms": look.logits_rms},
        )


def _compare(trials: Sequence[Trial], name: str) -> str:
    ends = [next(trial.end_loss for trial in trials if trial.name == kind) for kind in (name, AS_GIVEN)]
    if ends[0] is None or ends[1] is None:
        return f"with {name} it trains"
    return f"with {name} it trains (end loss {loss_text(ends[0])} against {loss_text(ends[1])})"


def _verdict(trials: Sequence[Trial], name: str) -> str:
    return next((trial.verdict.value for trial in trials if trial.name == name), "not tried")
