"""The same faults, four kinds of protection, three seeds: who survives without a person, and what it costs.

    python benchmarks/fallback_faults.py                            about 10 minutes; prints a Markdown table
    python benchmarks/fallback_faults.py --faults "NaN loss once"   only this row
    python benchmarks/fallback_faults.py --save raw.json            also the numbers of every run

The network is the one of examples/existing_project_before.py, x -> (5x + 3) mod 32, with 4 post-norm layers at 1e-3:
the loss is 0.5 at step 60, where the fault comes, and 0.1 at step 160, the last one. The silent stall is the example
as it is: 18 layers at 3e-3, a learning rate at which it never learns; 250 steps.

A run has survived if it reached its last step by itself, finite, with a loss below 1.0 (guessing is 3.47). Steps lost
are steps whose update is not in the final weights, by Adam's own counter: skipped, undone, or never taken.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import runpy
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import quiet
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import SpikeDetection
from torch.utils.data import DataLoader

from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "existing_project_before.py"))
AT, LAST, ALIVE = 60, 10, 1.0
STALL = "silent stall"
FAULTS = (
    "none",
    "3x loss, one batch",
    "NaN loss once",
    "Inf gradient once",
    "5 poisoned batches",
    "10x learning rate, one step",
    "30x learning rate from then on",
    STALL,
)


class Faulty(EXAMPLE["Encoder"]):
    """Somebody's encoder, to which one thing happens.

    Args:
        fault: one of ``FAULTS``.
    """

    def __init__(self, fault: str) -> None:
        super().__init__(layers=18 if fault == STALL else 4)
        self.fault = fault
        self.rate = 3e-3 if fault == STALL else 1e-3
        self.losses: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, as in the example."""
        return torch.optim.Adam(self.parameters(), lr=self.rate)

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Set the learning rate, as a schedule would."""
        step, factor = self.trainer.global_step, 1
        if self.fault.startswith("10x") and step == AT:
            factor = 10
        if self.fault.startswith("30x") and step >= AT:
            factor = 30
        self.trainer.optimizers[0].param_groups[0]["lr"] = self.rate * factor

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The example's loss, or what the fault makes of it."""
        step = self.trainer.global_step
        if self.fault == "5 poisoned batches" and AT <= step < AT + 5:
            batch = torch.randint(32, batch.shape, generator=torch.Generator().manual_seed(step))
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        if step == AT and self.fault.startswith("3x"):
            return 3 * loss
        return loss * math.nan if step == AT and self.fault.startswith("NaN") else loss

    def on_after_backward(self) -> None:
        """One entry of one gradient overflows."""
        if self.fault.startswith("Inf") and self.trainer.global_step == AT:
            self.head.weight.grad[0, 0] = math.inf


class SkipNonFinite(Callback):
    """What mixed-precision training with a GradScaler does (accelerate, Hugging Face): no step from a NaN or an Inf."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients if any of them is not finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not torch.nn.utils.get_total_norm([p.grad for p in parameters]).isfinite():
            for parameter in parameters:
                parameter.grad = None


PROTECTIONS = {
    "no protection": list,
    "Lightning's SpikeDetection": lambda: [SpikeDetection()],
    "skip non-finite (HF style)": lambda: [SkipNonFinite()],
    "LRFallback": lambda: [LRFallback()],
}


@dataclass
class Outcome:
    """How one run ended."""

    survived: bool
    loss: float
    lost: int
    stopped_at: int | None
    events: list[str]


def run(fault: str, protection: str, seed: int) -> Outcome:
    """Train once."""
    seed_everything(seed, verbose=False)
    steps = 250 if fault == STALL else 160
    callbacks, module = PROTECTIONS[protection](), Faulty(fault)
    data = DataLoader(EXAMPLE["sequences"](count=8 * steps), batch_size=8)
    with quiet.trainer(callbacks=callbacks, max_steps=steps) as trainer:
        stopped_at = None
        try:
            trainer.fit(module, data)
        except (TrainingSpikeException, FallbackExhaustedError):
            stopped_at = len(module.losses) - 1
    finite = all(parameter.isfinite().all() for parameter in module.parameters())
    loss = statistics.fmean(module.losses[-LAST:]) if finite else math.nan
    taken = int(trainer.optimizers[0].state[module.head.weight]["step"]) if finite else 0
    events = [event.message for each in callbacks if isinstance(each, LRFallback) for event in each.events]
    return Outcome(stopped_at is None and finite and loss < ALIVE, loss, steps - taken, stopped_at, events)


def cell(outcomes: list[Outcome]) -> str:
    """Survivors, loss (lowest to highest) of all runs that end finite, steps lost; where a run was stopped."""
    losses = [each.loss for each in outcomes if math.isfinite(each.loss)]
    text = f"**{sum(each.survived for each in outcomes)} of {len(outcomes)}**"
    stops = [str(each.stopped_at) for each in outcomes if each.stopped_at is not None]
    if stops:
        text += f", stopped at step {', '.join(stops)}"
    if losses:
        text += f"; loss {statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
    if len(losses) < len(outcomes):
        text += f"; weights NaN in {len(outcomes) - len(losses)}"
    if any(each.survived for each in outcomes):
        text += f"; lost {', '.join(str(each.lost) for each in outcomes if each.survived)}"
    return text


def main() -> None:
    """Run everything, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"| fault | {' | '.join(PROTECTIONS)} |\n|---{'|---' * len(PROTECTIONS)}|", flush=True)
    raw: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for fault in chosen.faults:
        row = {name: [run(fault, name, seed) for seed in chosen.seeds] for name in PROTECTIONS}
        print(f"| {fault} | {' | '.join(cell(outcomes) for outcomes in row.values())} |", flush=True)
        raw[fault] = {name: [asdict(each) for each in outcomes] for name, outcomes in row.items()}
    if chosen.save is not None:
        chosen.save.write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
