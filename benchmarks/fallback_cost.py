"""What LRFallback costs a step of post48: time, memory, and reads of the device by the host.

    python benchmarks/fallback_cost.py                 about 5 minutes on one core; prints two Markdown tables
    python benchmarks/fallback_cost.py --rounds 8      steadier

Model and data are the shipped recipe's. Time is taken in two ways. *Rounds*: short fits with nothing, with LRFallback,
with DepthMonitor, with Warmup, again and again in turn, so that a slow minute hits all alike. *Inside*: the time that
is spent in the callback's own hooks, over the time of the very same steps; it leaves out forward and optimizer hooks.
All times are processor seconds of this process: on a calm machine with one thread those are the wall's, and on a busy
one they leave out the waiting.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_norms import DepthMonitor, LRFallback, Warmup
from lightning_norms.schedules import Linear
from lightning_norms.snapshots import Snapshot

KINDS: dict[str, Callable[[], list[Callback]]] = {
    "nothing": list,
    "LRFallback": lambda: [LRFallback()],
    "DepthMonitor": lambda: [DepthMonitor(table=False, picture=False)],
    "Warmup": lambda: [Warmup(Linear(100))],
}
SKIPPED = 3  # steps at the start of a fit that are not timed
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"}


def recipe() -> tuple[LightningModule, LightningDataModule]:
    """Module and data of post48.yaml."""
    path = str(resources.files("lightning_norms") / "recipes" / "post48.yaml")
    still = "--model.init_args.learning_rate=1e-7"  # nothing may go wrong while time is taken
    arguments = ["--config", path, "--trainer.callbacks=[]", "--trainer.logger=false", still]
    with tempfile.TemporaryDirectory():
        cli = LightningCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            args=arguments,
            save_config_callback=None,
        )
    return cli.model, cli.datamodule


class Clock(Callback):
    """Processor time from the start of one batch to that of the next: all of it, callbacks too. Stands first."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        self.starts.append(time.process_time())

    def times(self) -> list[float]:
        """Seconds of each step."""
        pairs = zip(self.starts[SKIPPED:], self.starts[SKIPPED + 1 :], strict=False)
        return [after - before for before, after in pairs]


class Inside:
    """Seconds spent in the hooks that a callback gives Lightning."""

    HOOKS = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")

    def __init__(self, callback: Callback) -> None:
        self.seconds: list[float] = []
        for name in self.HOOKS:
            setattr(callback, name, self._timed(getattr(callback, name), name == self.HOOKS[0]))

    def _timed(self, hook: Callable[..., None], first: bool) -> Callable[..., None]:
        @functools.wraps(hook)
        def timed(*arguments: Any, **options: Any) -> None:
            before = time.process_time()
            hook(*arguments, **options)
            if first:
                self.seconds.append(0.0)
            self.seconds[-1] += time.process_time() - before

        return timed


def fit(module: LightningModule, data: LightningDataModule, callbacks: list[Callback], steps: int) -> Trainer:
    """Some steps, in silence."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            callbacks=callbacks,
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            **quiet,
        )
        trainer.fit(module, data)
    return trainer


def rounds(module: LightningModule, data: LightningDataModule, number: int, steps: int) -> None:
    """Time every kind in turn, print the table."""
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    inside: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(number):
        for kind, make in KINDS.items():
            clock, callbacks = Clock(), make()
            watched = [Inside(callback) for callback in callbacks]
            fit(module, data, [clock, *callbacks], steps + SKIPPED + 1)
            times = clock.times()
            medians[kind].append(statistics.median(times))
            own = [second for each in watched for second in each.seconds[SKIPPED : SKIPPED + len(times)]]
            inside[kind] += own or [0.0]
    base = medians["nothing"]
    print(f"| callback | step, ms (median of {number} rounds) | to nothing, round by round | inside its hooks |")
    print("|---|---|---|---|")
    for kind, values in medians.items():
        ratios = sorted(value / other for value, other in zip(values, base, strict=True))
        middle = statistics.median(values)
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        share = f"{1e3 * statistics.median(inside[kind]):.2f} ms, {statistics.median(inside[kind]) / middle:.2%}"
        share += f"; mean {1e3 * statistics.fmean(inside[kind]):.2f} ms"
        print(f"| {kind} | {1e3 * middle:.1f} | {spread} | {share} |")
    print(f"\nRounds of nothing differ by {max(base) / min(base) - 1:.0%} among themselves.\n")


def snapshots(module: LightningModule, data: LightningDataModule) -> None:
    """Time and bytes of a snapshot against a step."""
    clock = Clock()
    trainer = fit(module, data, [clock], 10 + SKIPPED)
    step = statistics.median(clock.times())
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    fresh, again, back = [], [], []
    snapshot = None
    for _ in range(9):
        before = time.process_time()
        Snapshot.take(module, trainer.optimizers)
        middle = time.process_time()
        snapshot = Snapshot.take(module, trainer.optimizers, reuse=snapshot)
        after = time.process_time()
        snapshot.restore(module, trainer.optimizers)
        back.append(time.process_time() - after)
        fresh.append(middle - before)
        again.append(after - middle)
    print("| | ms | steps | of a step, if every 50 |\n|---|---|---|---|")
    times = {"snapshot, new memory": fresh, "snapshot, memory written over": again, "restore": back}
    for name, values in times.items():
        value = statistics.median(values)
        print(f"| {name} | {1e3 * value:.1f} | {value / step:.3f} | {value / step / 50:.2%} |")
    print(f"\nOne snapshot: {snapshot.bytes / 1e6:.2f} MB, {snapshot.bytes / size:.2f} x the parameters.\n")


class Functions(TorchFunctionMode):
    """Counts reads of a tensor's value from Python."""

    def __init__(self) -> None:
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        self.count += getattr(function, "__name__", "") in READS
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Counts ``aten._local_scalar_dense``: one for each number that goes to the host by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reads(module: LightningModule, data: LightningDataModule, steps: int = 10) -> None:
    """Host reads a step: those of a longer fit less those of a shorter one."""
    print("| callback | reads from Python a step | of these, single numbers (`_local_scalar_dense`) |\n|---|---|---|")
    for kind, make in KINDS.items():
        counts = []
        for length in (2, 2 + steps):
            with Functions() as functions, Dispatches() as dispatches:
                fit(module, data, make(), length)
            counts.append((functions.count, dispatches.count))
        (few, few_single), (many, many_single) = counts
        print(f"| {kind} | {(many - few) / steps:.1f} | {(many_single - few_single) / steps:.1f} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round; 20 hold two of DepthMonitor's")
    chosen = parser.parse_args()
    sys.argv = sys.argv[:1]
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    module, data = recipe()
    rounds(module, data, chosen.rounds, chosen.steps)
    snapshots(module, data)
    reads(module, data)


if __name__ == "__main__":
    main()
