"""Log gradient norm, residual stream and update ratio at every depth of a network while it trains."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.sharding import is_deepspeed, pending_scale
from lightning_norms.checks import check_switches, check_whole
from lightning_norms.files.log_folder import find_log_folder, write_file
from lightning_norms.learning_rate import KeepsConfiguration, UnseenSteps, configured_of, is_cancelled
from lightning_norms.measuring.depth_history import DepthHistory, Profile
from lightning_norms.measuring.measured_step import MeasuredStep, read_steps
from lightning_norms.measuring.stream import StreamMeter
from lightning_norms.measuring.trained_parameters import TrainedParameters
from lightning_norms.metrics import GRAD_NORM, UPDATE_RATIO

PICTURE = "grad_norm_by_depth.png"
TITLE = "Gradient norm by depth (L2, before clipping)"


class DepthMonitor(KeepsConfiguration):
    """Logs norms by depth every few optimizer steps, and shows the run as a table and a heat map at its end.

    ========================  =====================================================================================
    key                       meaning
    ========================  =====================================================================================
    ``grad_norm/block_00``    L2 norm of the gradient: float32, unscaled, **before clipping**, of all ranks
    ``stream_rms/block_00``   root mean square of the residual stream after the block, mean over ranks
    ``update_ratio/block_00`` norm of the step's weight change / norm of the weights before it
    ========================  =====================================================================================

    Besides blocks: ``embedding``, ``final_norm``, ``head``, ``other`` and ``total`` (all that the optimizer owns). With
    several optimizers a group carries the optimizer: ``grad_norm/optimizer_1.block_00``. Several stacks are kept apart:
    ``grad_norm/encoder.block_00``. A group without trainable parameters is absent.

    A logging step costs a few kernels, one copy to the host and, on several ranks, one collective (none under ddp with
    ``stream: false``); other steps cost a counter. A step that ``LRFallback`` skips has its true
    gradients and updates of 0, whatever the order of the callbacks. Under ``torch.compile`` of the whole network hooks
    on blocks do not fire, so ``stream_rms`` is absent. Under ``ddp_spawn`` the history stays in the processes that
    trained: read it from a logger, the picture or a checkpoint.

    Args:
        every_n_steps: optimizer steps between two records; null for the trainer's ``log_every_n_steps``. The first step
            is step 0 and is always recorded.
        stream: measure the residual stream: the first of several streams, stacked streams as a whole.
        updates: measure update ratios, which needs a copy of the trained parameters on logging steps.
        table: print a table at the end of fit, also after an exception.
        picture: write ``grad_norm_by_depth.png`` into the run's log folder, and into TensorBoard if it is a logger.

    Raises:
        ValueError: if ``every_n_steps`` is no whole number above 0, or a switch is neither true nor false.

    Example:
        >>> monitor = DepthMonitor(every_n_steps=30)
        >>> monitor.history.steps
        []
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        stream: bool = True,
        updates: bool = True,
        table: bool = True,
        picture: bool = True,
    ) -> None:
        super().__init__()
        if every_n_steps is not None:
            check_whole("DepthMonitor", "every_n_steps", every_n_steps, 1)
        check_switches("DepthMonitor", stream=stream, updates=updates, table=table, picture=picture)
        self.every_n_steps, self.stream, self.updates = every_n_steps, stream, updates
        self.table, self.picture = table, picture
        self.history = DepthHistory()
        self._counts: list[int] = []
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._depth: DepthMap | None = None
        self._trained: dict[int, TrainedParameters] = {}
        self._pending: list[MeasuredStep] = []
        self._hooks = ExitStack()
        self._meter: StreamMeter | None = None
        self._folder: str | None = None
        self._every = 0  # nothing is recorded
        self._unreported = False
        self._unseen: UnseenSteps | None = None
        self._steps = 0  # of this fit

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
        self._start_afresh()
        super().on_fit_start(trainer, pl_module)
        self._folder = find_log_folder(trainer)  # every rank must be here to answer
        if is_deepspeed(trainer.strategy):
            rank_zero_warn("DepthMonitor: DeepSpeed keeps gradients to itself, so nothing is recorded.")
            return
        self._every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]  # of a connector
        if not self._every:
            rank_zero_warn("DepthMonitor: log_every_n_steps is 0, so nothing is recorded: give every_n_steps.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        configured_of(trainer).warn(trainer)
        # A restored or earlier history goes on, unless this run starts before its end.
        start = _logged_step(trainer)
        fresh = start == 0 and trainer.ckpt_path is None
        if fresh or start < max(self.history.logged_steps, default=0):
            self.history, self._counts = DepthHistory(), []
        if self._every:
            self._unseen = UnseenSteps(pl_module, "DepthMonitor", "nothing is recorded")
        self._count_optimizers(trainer)

    def _count_optimizers(self, trainer: Trainer) -> None:
        self._counts += [0] * (len(trainer.optimizers) - len(self._counts))  # one may join in mid-run

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # An optimizer step that is to be recorded may come in this batch.
        if self.stream and self._every and any(count % self._every == 0 for count in self._counts):
            self._meter = self._meter or StreamMeter(self._map(pl_module).stacks)
            self._meter.attach()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # Gradients are reduced and unscaled here, but not yet clipped.
        number = next((i for i, other in enumerate(trainer.optimizers) if other is optimizer), 0)
        self._count_optimizers(trainer)
        count, self._counts[number] = self._counts[number], self._counts[number] + 1
        self._steps += 1
        if not self._every or count % self._every:
            return
        prefix = f"optimizer_{number}." if len(trainer.optimizers) > 1 else ""
        if number not in self._trained:
            self._trained[number] = TrainedParameters(pl_module, self._map(pl_module))
            for key in (GRAD_NORM, UPDATE_RATIO):
                self.history.declare([key.of(prefix + group) for group in (*self._map(pl_module).groups, "total")])
        norms = self._trained[number].norms(optimizer, trainer.strategy.model)
        step = MeasuredStep(norms, prefix, count, pending_scale(trainer, optimizer), with_update=self.updates)
        self._pending.append(step)
        self._hooks.callback(optimizer.register_step_post_hook(lambda *_: step.finish(is_cancelled(optimizer))).remove)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._detach()
        if self._unseen is not None:
            self._unseen.end_batch(trainer, self._steps)
        if self._pending:
            self._record(trainer)

    def _detach(self) -> None:
        if self._meter is not None:
            self._meter.detach()
        self._hooks.close()

    def _record(self, trainer: Trainer) -> None:
        values = read_steps(self._pending, self._meter, trainer)
        logged_step = max(_logged_step(trainer), *self.history.logged_steps[-1:], 0)
        self.history.add(self._pending[0].count, logged_step, values)
        self._pending, self._unreported = [], True
        for logger in trainer.loggers:
            logger.log_metrics(metrics=values, step=logged_step)

    def _map(self, pl_module: LightningModule) -> DepthMap:
        if self._depth is None:
            self._depth = DepthMap.of(pl_module)
            if not self._depth.stacks:
                rank_zero_warn(f"DepthMonitor: there are no depths to tell apart. {describe(pl_module)}")
            if any(name.endswith("_flat_param") for name in self._depth.by_name):
                rank_zero_warn(
                    "DepthMonitor: FSDP with use_orig_params=False makes one tensor of all that it wraps: blocks that "
                    "are wrapped one by one are measured as ever, the rest together as `other`."
                )
        return self._depth

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self._counts), "history": self.history.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._counts = list(state_dict["counts"])
        self.history.load_state_dict(state_dict["history"])

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
        self._show(trainer)
        self._start_afresh()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)  # a run that was killed is the one whose picture matters

    def _show(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or not self._unreported:
            return
        profile = self.history.profile(GRAD_NORM.of(""))
        try:
            if self.table:
                _print_table(profile)
            has_depths = self._depth is not None and bool(self._depth.stacks)  # else there is nothing to see
            if self.picture and has_depths and self._folder is not None:
                self._draw(profile, trainer.loggers, self._folder)
        except Exception as error:  # a picture must never end a run that has finished
            rank_zero_warn(f"DepthMonitor: the run is fine, but its table or picture failed: {error!r}")

    def _draw(self, profile: Profile, loggers: Iterable[Any], folder: str) -> None:
        from lightning_norms.reports.depth_picture import depth_heat_map, pixels, png

        figure = depth_heat_map(profile, TITLE, "L2 norm of the gradient")
        path = write_file(folder, PICTURE, png(figure))
        print(f"Gradient norm by depth, as a picture: {path}")
        for logger in loggers:
            add_image = getattr(getattr(logger, "experiment", None), "add_image", None)
            if add_image is not None:
                add_image("grad_norm_by_depth", pixels(figure), self.history.logged_steps[-1], dataformats="HWC")


def _print_table(profile: Profile) -> None:
    from rich.console import Console

    from lightning_norms.reports.console import depth_table, ratio_readings

    console = Console(file=sys.stdout)
    console.print(depth_table(profile, TITLE))
    for line in ratio_readings(profile, "gradient"):
        console.print(line, highlight=False)


def _logged_step(trainer: Trainer) -> int:
    """The loggers' step axis, the one that ``self.log`` and Lightning's own monitors use."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
