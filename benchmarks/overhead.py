"""What our callbacks cost a training step, against bare Lightning and against Lightning's own means.

    python benchmarks/overhead.py                    about 10 minutes on 2 cores; prints five Markdown tables
    python benchmarks/overhead.py --steps 300        steadier

First table: each candidate is an ordinary fit in a process of its own, and they take turns step by step: one step of
the first, one of the second, ... So a slow second hits all alike; but two processes of the same kind may differ a
little, whatever the number of steps. Second table: one process for each of ours, whose callbacks act in
every second step only; their intervals count the steps in which they act. Third table: what their hooks take. A step is
timed from the start of its batch to the start of the next: all hooks, logging and the loading of the batch are in it.
Data are the recipe's; the learning rate is 1e-7, so that nothing goes wrong while time is taken.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import resources
from multiprocessing.connection import Connection
from typing import Any

import paired
import quiet
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import SpikeDetection
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_norms import DepthMonitor, LRFallback, ResidualRescale, Warmup
from lightning_norms.rescue.snapshot import Snapshot
from lightning_norms.schedules import LinearWarmup


class GradNorm(Callback):
    """Lightning's documented way to watch gradients: the norm of every parameter, logged every step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """As in its documentation."""
        self.log_dict(grad_norm(pl_module, norm_type=2))


BARE = "bare Lightning"
FOUR = "our four callbacks"
KINDS: dict[str, Callable[[], list[Callback]]] = {
    BARE: list,
    FOUR: lambda: [
        Warmup(LinearWarmup(100)),
        ResidualRescale(),
        DepthMonitor(table=False, picture=False),
        LRFallback(),
    ],
    "DepthMonitor": lambda: [DepthMonitor(table=False, picture=False)],
    "LRFallback": lambda: [LRFallback()],
    "Lightning's grad_norm and log_dict": lambda: [GradNorm()],
    "Lightning's SpikeDetection": lambda: [SpikeDetection()],
}
OURS = (FOUR, "DepthMonitor", "LRFallback")
MODELS = {
    "post48": [],
    "12 x 128": ["--model.init_args.decoder.n_layers=12", "--model.init_args.decoder.d_model=128"],
}
SKIPPED = 5  # steps at the start of a fit that are not timed
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"}


def recipe(model: str) -> tuple[LightningModule, LightningDataModule]:
    """Module and data of post48.yaml, or the same with another shape."""
    path = str(resources.files("lightning_norms") / "recipes" / "post48.yaml")
    still = "--model.init_args.learning_rate=1e-7"
    arguments = ["--config", path, "--trainer.callbacks=[]", "--trainer.logger=false", still, *MODELS[model]]
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


def fit(module: LightningModule, data: LightningDataModule, callbacks: list[Callback], steps: int) -> Trainer:
    """Some steps with a logger, in silence."""
    options = {"callbacks": callbacks, "max_steps": steps, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    with quiet.trainer(logger=TensorBoardLogger, **options) as trainer:
        trainer.fit(module, data)
    return trainer


class Turns(Callback):
    """Waits for its turn at the start of every batch, and says how long the last step took. Stands first."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.begun: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The end of a step and the start of the next."""
        if self.begun is not None:
            self.connection.send(time.perf_counter() - self.begun)
        self.connection.recv()
        self.begun = time.perf_counter()


def work(kind: str, model: str, steps: int, threads: int, connection: Connection) -> None:
    """A fit that takes turns."""
    hush(threads)
    fit(*recipe(model), [Turns(connection), *KINDS[kind]()], steps + 1)


def turns(model: str, kinds: list[str], steps: int, threads: int) -> dict[str, list[float]]:
    """Seconds of every step of every kind."""
    context = multiprocessing.get_context("spawn")
    ends, processes = {}, []
    for kind in kinds:
        ends[kind], theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(kind, model, steps, threads, theirs)))
        processes[-1].start()
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(steps):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            ends[kind].send("go")
            seconds[kind].append(ends[kind].recv())
    for kind, process in zip(kinds, processes, strict=True):
        ends[kind].send("go")
        process.join()
    return {kind: values[SKIPPED:] for kind, values in seconds.items()}


def overhead(model: str, kinds: list[str], steps: int, threads: int) -> list[list[object]]:
    """One row for each kind."""
    seconds = turns(model, kinds, steps, threads)
    return [
        [model, kind, f"{1e3 * statistics.median(values):.1f}", *beside(values, seconds[BARE])]
        for kind, values in seconds.items()
    ]


def beside(seconds: list[float], others: list[float]) -> tuple[str, str]:
    """The median ratio of pairs of steps with its standard error, and the ratio of the means."""
    ratios = paired.ratios(seconds, others)
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{statistics.median(ratios):.3f} ± {error:.3f}", f"{mean(seconds) / mean(others):.3f}"


def mean(seconds: list[float]) -> float:
    """Without the slowest of twenty: something else was going on in those."""
    return statistics.fmean(sorted(seconds)[: -len(seconds) // 20 or None])


class Switch(Callback):
    """Lets some callbacks act in every second step only, and times both kinds of steps. Stands first."""

    EVERY_STEP = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")

    def __init__(self, callbacks: list[Callback]) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.inside: dict[str, list[float]] = {}
        self.on, self.begun = False, 0.0
        for callback in callbacks:
            for name in self.EVERY_STEP:
                inside = self.inside.setdefault(f"{type(callback).__name__}.{name}", [])
                setattr(callback, name, functools.partial(self._if_on, getattr(callback, name), inside))

    def _if_on(self, hook: Callable[..., None], inside: list[float], *arguments: Any) -> None:
        if self.on:
            begun = time.perf_counter()
            hook(*arguments)
            inside.append(time.perf_counter() - begun)

    def on_train_batch_start(self, *_: Any) -> None:
        """The end of a step and the start of the next."""
        self.seconds[self.on].append(time.perf_counter() - self.begun)
        self.on = not self.on
        self.begun = time.perf_counter()


def work_switched(kind: str, model: str, steps: int, threads: int, connection: Connection) -> None:
    """A fit in which the callbacks act in every second step."""
    hush(threads)
    callbacks = KINDS[kind]()
    switch = Switch(callbacks)
    fit(*recipe(model), [switch, *callbacks], 2 * steps)
    connection.send((switch.seconds, switch.inside))


def switched(model: str, kinds: list[str], steps: int, threads: int) -> tuple[list[list[object]], list[list[object]]]:
    """A step with the callbacks of a kind beside those without, of one process; and what their hooks take."""
    context, rows, hooks = multiprocessing.get_context("spawn"), [], []
    for kind in kinds:
        ours, theirs = context.Pipe()
        process = context.Process(target=work_switched, args=(kind, model, steps, threads, theirs))
        process.start()
        timed, inside = ours.recv()
        process.join()
        seconds = {on: values[SKIPPED:] for on, values in timed.items()}
        hooks += [[model, kind, *row] for row in spent(inside)]
        rows.append(
            [model, kind, f"{1e3 * statistics.median(seconds[False]):.1f}", *beside(seconds[True], seconds[False])]
        )
    return rows, hooks


def spent(inside: dict[str, list[float]]) -> list[list[object]]:
    """Hooks that take a thousandth of a second now and then: usually, at the most, and on the average of all steps."""
    rows: list[list[object]] = []
    for name, seconds in inside.items():
        values = [1e3 * each for each in seconds[SKIPPED:]]
        if max(values, default=0.0) >= 1.0:
            rows.append([name, *(f"{f(values):.2f}" for f in (statistics.median, max, statistics.fmean))])
    return rows


def snapshots(module: LightningModule, data: LightningDataModule) -> None:
    """Time and bytes of a snapshot."""
    trainer = fit(module, data, [], SKIPPED)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    fresh, again, back = [], [], []
    snapshot = None
    for _ in range(9):
        begun = time.process_time()
        Snapshot.take(module, trainer.optimizers)
        middle = time.process_time()
        snapshot = Snapshot.take(module, trainer.optimizers, reuse=snapshot)
        after = time.process_time()
        snapshot.restore(module, trainer.optimizers)
        back.append(time.process_time() - after)
        fresh.append(middle - begun)
        again.append(after - middle)
    times = {"snapshot, new memory": fresh, "snapshot, memory written over": again, "restore": back}
    print(paired.table(["", "ms"], [[name, f"{1e3 * statistics.median(each):.1f}"] for name, each in times.items()]))
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
    """Counts operators, and ``aten._local_scalar_dense``: one for each number that goes to the host by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.scalars = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        self.operators += 1
        self.scalars += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def counts(model: str, kind: str, steps: int) -> tuple[int, int, int]:
    """Reads, single numbers and operators of a fit."""
    with Functions() as functions, Dispatches() as dispatches:
        fit(*recipe(model), KINDS[kind](), steps)
    return functions.count, dispatches.scalars, dispatches.operators


def reads(model: str, steps: int = 7) -> list[list[object]]:
    """A step's, of steps that log nothing: those of a longer fit less those of a shorter one, over the difference."""
    rows: list[list[object]] = []
    for kind in KINDS:
        few, many = counts(model, kind, 2), counts(model, kind, 2 + steps)
        rows.append([kind, *(f"{(more - less) / steps:.1f}" for less, more in zip(few, many, strict=True))])
    return rows


def hush(threads: int) -> None:
    """No messages, so many threads."""
    sys.argv = sys.argv[:1]
    torch.set_num_threads(threads)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of each candidate; every 50th is a logging step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="beside bare Lightning")
    parser.add_argument("--only_times", action="store_true", help="leave out snapshots and reads")
    chosen = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # nobody spins while it is another's turn
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    kinds = [BARE, *(kind for kind in chosen.kinds if kind != BARE)]
    found = [row for model in chosen.models for row in overhead(model, kinds, chosen.steps, chosen.threads)]
    header = ["model", "callbacks", "step, ms", "to bare Lightning, step by step", "mean of all steps"]
    print(paired.table(header, found), end="\n\n")
    ours = [kind for kind in OURS if kind in kinds]
    both = [switched(model, ours, chosen.steps, chosen.threads) for model in chosen.models]
    header = ["model", "callbacks", "a step without, ms", "with / without, step by step", "mean of all steps"]
    print(paired.table(header, [row for rows, _ in both for row in rows]), end="\n\n")
    header = ["model", "callbacks", "hook", "median, ms", "most", "a step"]
    print(paired.table(header, [row for _, rows in both for row in rows]), end="\n\n")
    if chosen.only_times:
        print(paired.machine())
        return
    hush(chosen.threads)
    snapshots(*recipe("post48"))
    header = ["callbacks", "reads from Python a step", "of these single numbers", "operators a step"]
    print(paired.table(header, reads(chosen.models[0])))
    print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
