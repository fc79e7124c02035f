"""Tokens per second of a training step: our decoder against others of the same shape with the same weights.

    python benchmarks/step.py                                    eager, about 10 minutes on 2 cores
    python benchmarks/step.py --compile                          through torch.compile
    python benchmarks/step.py --shapes 12x128 --precisions bf16-mixed --profile      what the time goes into

Forward, cross-entropy, backward, AdamW (fused, the same for all), in turn in one process on the same threads. Losses of
those that have the same weights must agree before anything is timed. *Of the peak*: against this process's own product
of two 1024 x 1024 matrices in the same precision.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
import warnings
from collections.abc import Callable

import paired
import peers
import torch
import torch.nn.functional as F
from peers import Shape
from torch import Tensor, nn

SHAPES = {
    "6x384": Shape(6, 384, 6, 256, 8, 512),
    "12x128": Shape(12, 128, 4, 256, 8, 512),
    "48x64": Shape(48, 64, 4, 64, 8, 256),
}
PRECISIONS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "32": contextlib.nullcontext,
    "bf16-mixed": functools.partial(torch.autocast, "cpu", torch.bfloat16),
}
OURS = "lightning_norms"


class Candidate:
    """A model with its optimizer and its batches.

    Args:
        model: tokens to logits.
        shape: of its batches.
        precision: a name in ``PRECISIONS``.
    """

    def __init__(self, model: nn.Module, shape: Shape, precision: str) -> None:
        self.model, self.context = model, PRECISIONS[precision]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.batches = peers.batches(shape)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """In nats per token."""
        with self.context():
            logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(self) -> Tensor:
        """One step of training."""
        loss = self.loss(*next(self.batches))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def seconds(self, steps: int) -> float:
        """A step's, over a few."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - begun) / steps


def candidates(shape: Shape, precision: str, compiled: bool) -> dict[str, Candidate]:
    """Ours and the peers, warm; stops if losses that must be equal are not."""
    torch.manual_seed(0)
    source = peers.ours(shape)
    models: dict[str, nn.Module] = {OURS: source, **{name: make(shape, source) for name, make in peers.PEERS.items()}}
    made = {name: Candidate(model, shape, precision) for name, model in models.items()}
    batch = next(peers.batches(shape))
    with torch.no_grad():
        losses = {name: float(each.loss(*batch)) for name, each in made.items() if name not in peers.OWN_LOSS}
    allowed = peers.LOSS_TOLERANCE if precision == "32" else 1e-2
    if max(losses.values()) - min(losses.values()) > allowed:
        raise SystemExit(f"losses of the same weights differ by more than {allowed}: {losses}")
    for each in made.values():
        if compiled:
            each.model = torch.compile(each.model)  # type: ignore[assignment]  # callable like a module
        each.seconds(3)
    return made


def peak(precision: str) -> float:
    """Operations per second of a product of two matrices."""
    kind = torch.float32 if precision == "32" else torch.bfloat16
    left, right = torch.randn(2, 1024, 1024, dtype=kind)
    times = []
    for _ in range(8):
        begun = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - begun)
    return float(2 * 1024**3 / min(times[1:]))


def rows(shape: Shape, precision: str, compiled: bool, rounds: int) -> list[list[object]]:
    """One for each candidate."""
    made = candidates(shape, precision, compiled)
    first = made[OURS].seconds(2)
    steps = max(2, round(0.6 / first))
    timed: dict[str, Callable[[], float]] = {
        name: functools.partial(each.seconds, steps) for name, each in made.items()
    }
    figures = paired.in_turn({**timed, "peak": lambda: peak(precision)}, rounds)
    top = statistics.median(figures.pop("peak"))
    best = min((name for name in figures if name != OURS), key=lambda name: statistics.median(figures[name]))
    told = []
    for name, seconds in figures.items():
        middle = statistics.median(seconds)
        ratio = paired.told(paired.ratios(seconds, figures[OURS]))
        share = f"{shape.operations / middle / top:.0%}"
        parameters = sum(parameter.numel() for parameter in made[name].model.parameters())
        what = f"{name} (best peer)" if name == best else name
        speed = f"{shape.tokens / middle:,.0f}"
        told.append([shape, precision, what, f"{parameters:,}", speed, share, "1" if name == OURS else ratio])
    return told


def profile(shape: Shape, precision: str, compiled: bool) -> None:
    """What the time of ours, and of the others, goes into."""
    for name, each in candidates(shape, precision, compiled).items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            each.seconds(5)
        print(f"\n{name}, {shape}, {precision}: five steps")
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print the operators of five steps instead")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    found: list[list[object]] = []
    for name in chosen.shapes:
        for precision in chosen.precisions:
            if chosen.profile:
                profile(SHAPES[name], precision, chosen.compile)
            else:
                found += rows(SHAPES[name], precision, chosen.compile, chosen.rounds)
    if found:
        header = ["shape", "precision", "decoder", "parameters", "tokens/s", "of the peak", "its step / ours"]
        print(paired.table(header, found))
        print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
