"""Watch every depth of a network while it trains: gradient norm, residual stream, update ratio."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.sharding import is_deepspeed, pending_scale, sharding_group, sum_over_ranks, to_local
from lightning_norms.checks import check_switches, check_whole
from lightning_norms.measuring.depth_history import DepthHistory
from lightning_norms.measuring.norms_by_group import GroupNorms, total_norm, update_ratio
from lightning_norms.measuring.stream import StreamMeter
from lightning_norms.measuring.trained_parameters import TrainedParameters
from lightning_norms.metrics import GRAD_NORM, STREAM_RMS, UPDATE_RATIO, Key

PICTURE = "grad_norm_by_depth.png"
TITLE = "Gradient norm by depth (L2, before clipping)"


@dataclass
class _Step:
    """Device-side measurements of one optimizer step, before they are summed over ranks and copied to the host."""

    norms: GroupNorms
    prefix: str
    count: int
    scale: Tensor | None
    before: list[Tensor] | None
    shares: list[Tensor]
    """Of the squared norms by group: gradients; after the step of a copied network also its weights and changes."""

    def finish(self) -> None:
        """After the step: what it changed, and what it changed it from."""
        if self.before is None:
            return
        weights = self.norms.shares(self.before)
        torch._foreach_sub_(self.before, [to_local(parameter.detach()) for parameter in self.norms.parameters])
        self.shares += [weights, self.norms.shares(self.before)]
        self.before = None

    def results(self, squares: list[Tensor]) -> list[tuple[Key, Tensor]]:
        """Norms and ratios by group and in total, from the squares of all ranks."""
        gradients, *both = [_with_total(square.sqrt()) for square in squares]
        found = [(GRAD_NORM, gradients if self.scale is None else gradients / self.scale.to(gradients))]
        return [*found, (UPDATE_RATIO, update_ratio(both[1], both[0]))] if both else found


class DepthMonitor(Callback):
    """Logs by depth every few optimizer steps, and shows the run as a table and a heat map at its end.

    ========================  =====================================================================================
    key                       meaning
    ========================  =====================================================================================
    ``grad_norm/block_00``    L2 norm of the gradient: float32, unscaled, **before clipping**, of all ranks
    ``stream_rms/block_00``   root mean square of the residual stream after the block, mean over ranks
    ``update_ratio/block_00`` norm of the step's weight change / norm of the weights before it
    ========================  =====================================================================================

    Besides blocks: ``embedding``, ``final_norm``, ``head``, ``other`` and ``total`` (of what the optimizer owns). With
    several optimizers a group carries the optimizer: ``grad_norm/optimizer_1.block_00``. Several stacks are kept apart:
    ``grad_norm/encoder.block_00``. A group without trainable parameters is absent.

    A logging step costs a few kernels, one copy to the host and, on several ranks, one collective for all of it (none
    under ddp with ``stream: false``); other steps cost a counter. Put it before callbacks that drop gradients. Under
    ``torch.compile`` of the whole network hooks on blocks do not fire, so ``stream_rms`` is absent. Under ``ddp_spawn``
    the history stays in the processes that trained: read it from a logger, the picture or a checkpoint.

    Args:
        every_n_steps: optimizer steps between two records, null for the trainer's ``log_every_n_steps``. The first step
            is step 0, and is always recorded.
        stream: measure the residual stream. Of several streams the first tensor; of stacked streams all together.
        updates: measure update ratios. Needs a copy of the trained parameters on logging steps.
        table: print a table at the end of fit, also of a fit that ends in an exception.
        picture: write ``grad_norm_by_depth.png`` into the run's log folder, and into TensorBoard where it is used.

    Raises:
        ValueError: ``every_n_steps`` is not a whole number above 0, or a switch neither true nor false.

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
        self._norms: dict[int, GroupNorms] = {}
        self._pending: list[_Step] = []
        self._handles: list[RemovableHandle] = []
        self._meter: StreamMeter | None = None
        self._folder: Path | None = None
        self._every = 1
        self._blind = False
        self._unreported = False

    # --- measuring --------------------------------------------------------------------------------------------------

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last fit's tensors; ask for the log folder while every rank is here to answer."""
        self._detach()
        self._start_afresh()
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]  # of a connector
        self._every = max(1, every)
        self._blind = is_deepspeed(trainer.strategy) or not every
        if is_deepspeed(trainer.strategy):
            rank_zero_warn("DepthMonitor: DeepSpeed keeps gradients to itself, so nothing is recorded.")
        elif not every:
            rank_zero_warn("DepthMonitor: log_every_n_steps is 0, so nothing is recorded: give every_n_steps.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with a restored or earlier history, unless this run starts before its end."""
        start = _logged_step(trainer)
        fresh = start == 0 and trainer.ckpt_path is None
        if fresh or start < max(self.history.logged_steps, default=0):
            self.history, self._counts = DepthHistory(), []
        self._counts += [0] * (len(trainer.optimizers) - len(self._counts))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Hook the blocks if an optimizer step that is to be recorded may come in this batch."""
        if self.stream and not self._blind and any(count % self._every == 0 for count in self._counts):
            if self._meter is None:
                self._meter = StreamMeter(self._map(pl_module).stacks)
            self._meter.attach()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count the step; measure gradients here, where they are reduced and unscaled but not yet clipped."""
        number = next((i for i, each in enumerate(trainer.optimizers) if each is optimizer), 0)
        count, self._counts[number] = self._counts[number], self._counts[number] + 1
        if self._blind or count % self._every:
            return
        prefix = f"optimizer_{number}." if len(trainer.optimizers) > 1 else ""
        norms = self._norms_of(trainer, pl_module, optimizer, number, prefix)
        scale = pending_scale(trainer, optimizer)
        before = None
        if self.updates and norms.parameters:
            before = [to_local(parameter.detach()).clone() for parameter in norms.parameters]
            self._handles.append(optimizer.register_step_post_hook(self._measure_update))
        shares = [norms.shares(norms.gradients())]
        # The scale is cloned because the scaler changes it in place, before this is read.
        self._pending.append(_Step(norms, prefix, count, None if scale is None else scale.clone(), before, shares))

    def _measure_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._pending:
            self._pending[-1].finish()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copy what was measured to the host, once, and log it."""
        self._detach()
        if self._pending:
            self._flush(trainer)

    def _detach(self) -> None:
        if self._meter is not None:
            self._meter.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _flush(self, trainer: Trainer) -> None:
        keys, parts = [], []
        squares, streams = self._over_ranks(trainer)
        for step, whole in zip(self._pending, squares, strict=True):
            groups = [step.prefix + group for group in (*step.norms.groups, "total")]
            for key, part in step.results(whole):
                keys += [key.of(group) for group in groups]
                parts.append(part)
        if self._meter is not None and streams is not None:
            keys += [STREAM_RMS.of(group) for group in self._meter.groups]
            parts.append(self._meter.rms(streams))
        numbers = torch.cat([part.to(parts[0].device) for part in parts]).tolist()  # the only copy to the host
        values = {key: value for key, value in zip(keys, numbers, strict=True) if value != StreamMeter.NOT_SEEN}
        logged_step = max(_logged_step(trainer), *self.history.logged_steps[-1:], 0)
        self.history.add(self._pending[0].count, logged_step, values)
        self._pending, self._unreported = [], True
        for logger in trainer.loggers:
            logger.log_metrics(values, step=logged_step)

    def _over_ranks(self, trainer: Trainer) -> tuple[list[list[Tensor]], Tensor | None]:
        """Squares of every pending step, and the stream: of all ranks, with one collective for all of it."""
        squares = [step.shares for step in self._pending]
        device = squares[0][0].device
        streams = None if self._meter is None else self._meter.take(device)
        sharded = [n for n, step in enumerate(self._pending) if step.norms.is_sharded]
        parts = [share.to(device) for n in sharded for share in squares[n]]
        if streams is not None and streams.numel() and trainer.world_size > 1:
            parts.append(streams)
        whole = iter(sum_over_ranks(parts, trainer.strategy) if parts else ())
        for n in sharded:
            squares[n] = [next(whole) for _ in squares[n]]
        return squares, next(whole, streams)

    def _map(self, pl_module: LightningModule) -> DepthMap:
        if self._depth is None:
            self._depth = DepthMap.of(pl_module)
            if not self._depth.stacks:
                rank_zero_warn(f"DepthMonitor: there are no depths to tell apart. {describe(pl_module)}")
        return self._depth

    def _norms_of(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, number: int, prefix: str
    ) -> GroupNorms:
        """The optimizer's trainable parameters by group."""
        trained = self._trained.setdefault(number, TrainedParameters(pl_module))
        if trained.have_changed(optimizer) or number not in self._norms:
            depth = self._map(pl_module)
            named = sorted(trained.named(), key=lambda pair: depth.groups.index(depth.group_of(pair[0])))
            for key in (GRAD_NORM, UPDATE_RATIO):
                self.history.declare([key.of(prefix + group) for group in (*depth.groups, "total")])
            if any(name.endswith("_flat_param") for name, _ in named):
                rank_zero_warn(
                    "DepthMonitor: FSDP with use_orig_params=False makes one tensor of all that it wraps: blocks that "
                    "are wrapped one by one are measured as ever, the rest together as `other`."
                )
            groups, ranks = [depth.group_of(name) for name, _ in named], sharding_group(trainer.strategy.model)
            self._norms[number] = GroupNorms([p for _, p in named], groups, ranks)
        return self._norms[number]

    # --- state ------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Step counts and history: plain lists and tensors."""
        return {"counts": list(self._counts), "history": self.history.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting and recording where the checkpoint's run stood."""
        self._counts = list(state_dict["counts"])
        self.history.load_state_dict(state_dict["history"])

    # --- showing ----------------------------------------------------------------------------------------------------

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the run, and let go of the network."""
        self._show(trainer)
        self._start_afresh()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Show a run that was killed, too: that is the one whose picture matters."""
        self._detach()
        self._show(trainer)
        self._start_afresh()

    def _show(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or not self._unreported:
            return
        self._unreported = False
        try:
            if self.table:
                self._print_table()
            if self.picture and not getattr(trainer, "fast_dev_run", False):
                self._draw(trainer.loggers)
        except Exception as error:  # a picture must never be what a finished run dies of
            rank_zero_warn(f"DepthMonitor: the run is fine, but its table or picture failed: {error!r}")

    def _print_table(self) -> None:
        from rich.console import Console

        from lightning_norms.reports.console import depth_table, ratio_readings

        profile = self.history.profile(GRAD_NORM.of(""))
        console = Console(file=sys.stdout)
        console.print(depth_table(profile, TITLE))
        for line in ratio_readings(profile, "gradient"):
            console.print(line, highlight=False)

    def _draw(self, loggers: Iterable[Any]) -> None:
        from lightning_norms.reports.depth_picture import depth_heat_map, pixels, save_png

        figure = depth_heat_map(self.history.profile(GRAD_NORM.of("")), TITLE, "L2 norm of the gradient")
        path = save_png(figure, (self._folder or Path.cwd()) / PICTURE)
        print(f"Gradient norm by depth, as a picture: {path}")
        for logger in loggers:
            add_image = getattr(getattr(logger, "experiment", None), "add_image", None)
            if add_image is not None:
                add_image("grad_norm_by_depth", pixels(figure), self.history.logged_steps[-1], dataformats="HWC")


def _with_total(norms: Tensor) -> Tensor:
    return torch.cat([norms, total_norm(norms).reshape(1)])


def _logged_step(trainer: Trainer) -> int:
    """The loggers' step axis, the one that ``self.log`` and Lightning's own monitors use."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
