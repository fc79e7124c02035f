"""Which of the known mechanisms is at work: each rule reads numbers of this model, and says them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_norms.reports.console import number
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Cause, Facts, Look, Trial, Verdict

REACHED = 0.03
"""Share of the strongest block's gradient that the weakest must have at the first step, for it to be reached."""


def mechanisms(facts: Facts, look: Look, trials: Sequence[Trial]) -> tuple[Cause, ...]:
    """The causes, the weightiest first; empty if the configuration trains and nothing stands out."""
    if not facts.trainable:
        sentence = f"None of the {facts.parameters:,} parameters is trainable: nothing can be learnt."
        return (Cause("frozen", sentence, {"trainable": 0.0, "parameters": float(facts.parameters)}),)
    given = next((trial for trial in trials if trial.name == AS_GIVEN), None)
    found = list(_large_logits(look))
    if given is not None and given.verdict is not Verdict.TRAINS:
        found = [*_how_it_fails(given), *_what_decides(trials), *found, *_rescued(facts)]
    return tuple(found)


def bottom_over_top(trial: Trial, column: int) -> float | None:
    """Gradient norm of the lowest block over that of the highest, of the first stack, at a recorded step."""
    rows = next(iter(trial.gradients.stacks().values()), ())
    if len(rows) < 2 or not trial.gradients.steps:
        return None
    top = trial.gradients.values[rows[-1]][column]
    return trial.gradients.values[rows[0]][column] / top if top else None


def weakest_share(trial: Trial, column: int) -> tuple[float, str] | None:
    """The least gradient of a block over the largest of its stack, and which block."""
    shares = []
    for rows in trial.gradients.stacks().values():
        largest = max(trial.gradients.values[row][column] for row in rows)
        if largest > 0:
            shares += [(trial.gradients.values[row][column] / largest, trial.gradients.groups[row]) for row in rows]
    return min(shares, default=None)


def _how_it_fails(given: Trial) -> Iterator[Cause]:
    if given.verdict is Verdict.STALLS:
        yield from _stall(given)
    else:
        name = {Verdict.UNDECIDED: "undecided"}.get(given.verdict, given.verdict.value)
        yield Cause(name, f"As given, {given.reason}.", dict(given.events[0].evidence) if given.events else {})


def _stall(given: Trial) -> Iterator[Cause]:
    first, last = weakest_share(given, 0), weakest_share(given, -1)
    named = next((event.step for event in given.events if event.cause == "stall"), None)
    if first is None or last is None or named is None:
        return
    evidence = {"share_first": first[0], "share_last": last[0], "named_at": float(named)}
    steps = given.gradients.steps
    if first[0] >= REACHED:
        yield Cause(
            "cut off by the updates",
            f"At the first step the gradient reaches every block: the weakest, {first[1]}, gets {number(first[0])} of "
            f"the largest. By step {named} depths have lost it, and at step {steps[-1]} {last[1]} gets "
            f"{number(last[0])}: nothing has vanished at init, the first updates cut these depths off.",
            evidence,
        )
    else:
        yield Cause(
            "no gradient from the start",
            f"Already at the first step {first[1]} gets only {number(first[0])} of the largest block's gradient, and "
            f"{number(last[0])} at step {steps[-1]}: it is cut off by the init, before any update.",
            evidence,
        )


def _what_decides(trials: Sequence[Trial]) -> Iterator[Cause]:
    """What the counterfactuals say: the change that makes the difference is the cause."""
    trains = _by_change(trials)
    rates = {name: trains[name] for name in ("lr/3", "lr/10") if name in trains}
    small = {name: trains[name] for name in ("rescale", "DeepNorm-style init") if name in trains}
    if any(rates.values()):
        first = next(name for name, alive in rates.items() if alive)
        yield Cause("learning rate", f"The learning rate is too high for this start: {_compare(trials, first)}.")
    if trains.get("warmup"):
        yield Cause("no warmup", f"The start is too fast: {_compare(trials, 'warmup')}.")
    for name, alive in small.items():
        if alive:
            yield Cause("large branches", f"The residual branches start too large: {_compare(trials, name)}.")
    both = "warmup + rescale"
    if trains.get(both) and not trains.get("warmup") and not trains.get("rescale"):
        yield Cause(
            "large branches and a cold start",
            f"Two things at once: {_compare(trials, both)}, but neither alone (warmup: {_verdict(trials, 'warmup')}; "
            f"rescale: {_verdict(trials, 'rescale')}).",
        )
    if trains and not any(trains.values()):
        yield Cause("not found", f"None of the {len(trains)} changes that were tried makes it train.")


def _large_logits(look: Look) -> Iterator[Cause]:
    if look.first_loss is None or look.uniform_loss is None or look.logits_rms is None:
        return
    if look.first_loss > 1.5 * look.uniform_loss and look.first_loss > look.uniform_loss + 1:
        yield Cause(
            "large logits",
            f"The first loss is {number(look.first_loss)}, but knowing nothing costs only ln {look.classes} = "
            f"{look.uniform_loss:.3f}: the logits start with RMS {number(look.logits_rms)}, so the head (or the stream "
            "that it reads) starts too large.",
            {"first_loss": look.first_loss, "uniform_loss": look.uniform_loss, "logits_rms": look.logits_rms},
        )


def _rescued(facts: Facts) -> Iterator[Cause]:
    if "LRFallback" in facts.left_out:
        yield Cause("kept alive by LRFallback", "LRFallback was left out: only with it may this run stay alive.")


def _by_change(trials: Sequence[Trial]) -> dict[str, bool]:
    """Change -> whether it trains on every seed."""
    found: dict[str, bool] = {}
    for trial in trials:
        if trial.name != AS_GIVEN:
            found[trial.name] = found.get(trial.name, True) and trial.verdict is Verdict.TRAINS
    return found


def _compare(trials: Sequence[Trial], name: str) -> str:
    trial = next(each for each in trials if each.name == name)
    given = next(each for each in trials if each.name == AS_GIVEN)
    ends = (
        ""
        if trial.end_loss is None or given.end_loss is None
        else (f" (end loss {trial.end_loss:.3f} against {given.end_loss:.3f})")
    )
    return f"with {name} it trains{ends}"


def _verdict(trials: Sequence[Trial], name: str) -> str:
    return next((trial.verdict.value for trial in trials if trial.name == name), "not tried")
