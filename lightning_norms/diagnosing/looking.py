"""The first step of a run seen from inside: every size by depth before it, and what the first update changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.sharding import grad_scaler, pending_scale
from lightning_norms.anatomy.writers import Matrix, residual_writers
from lightning_norms.diagnosing.depth_probe import DepthProbe
from lightning_norms.diagnosing.initial_flags import identical_blocks, rescaled_already, trained_already, traps
from lightning_norms.diagnosing.labels import LossWatcher
from lightning_norms.diagnosing.pass_flags import (
    end_of_stack,
    idle_first_step,
    rounded_updates,
    ruled_by_eps,
    without_gradient,
)
from lightning_norms.diagnosing.run_facts import facts_of, refuse
from lightning_norms.measuring.norms_by_group import update_ratio
from lightning_norms.measuring.step_observer import StepObserver
from lightning_norms.measuring.trained_parameters import TrainedParameters
from lightning_norms.reports.diagnosis.data import DepthProfile, Facts, Flag, Look
from lightning_norms.reports.statistics import growths

MEANINGS = {
    "stream_rms": ("1", "root mean square of the residual stream after the block"),
    "block_change": ("1", "size of what the block changes in the stream / size of the stream before it"),
    "branch_ratio": ("1", "root mean square of the block's branches / that of the stream before it"),
    "parameter_gradient": ("1", "L2 norm of the gradient with respect to the parameters"),
    "stream_gradient": ("1", "L2 norm of the gradient with respect to the stream after the block"),
    "norm_input": (
        "1",
        "standard deviation of what a norm divides (RMS norms: root mean square); its Jacobian is 1/it",
    ),
    "first_update": ("1", "L2 norm of the first update / L2 norm of the weights"),
}


class Looker(Callback):
    """Looks at the run up to its first optimizer update, and ends it there.

    Stands after all callbacks of the configuration, so that it sees the weights that these have made. Reads only.

    Args:
        given: callbacks of the configuration.
        left_out: names of those that do not run here.
        constant_loss: of the best constant prediction, if the data told it.
    """

    def __init__(
        self, given: Sequence[Callback] = (), left_out: Sequence[str] = (), constant_loss: float | None = None
    ) -> None:
        self._given, self._left_out, self._constant_loss = given, left_out, constant_loss
        self.facts: Facts | None = None
        self.look: Look | None = None
        self._watcher = LossWatcher()
        self._watching = False
        self._flags: list[Flag] = []
        self._profiles: dict[str, tuple[list[str], Tensor]] = {}
        self._before: list[Tensor] = []
        self._updates: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._batch: tuple[Any, int, Tensor | None, list[Tensor]] | None = None
        self._rounded = 0.0
        self._first_loss: float | None = None
        self._is_done = False

    # --- before the first step ------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Facts, and what the weights alone tell."""
        refuse(trainer)
        self._depth = DepthMap.of(pl_module)
        self.facts = facts_of(trainer, pl_module, self._depth, self._given, self._left_out)
        writers = _writers(pl_module)
        self._probe = DepthProbe(pl_module, self._depth.stacks, writers)
        self._observer = StepObserver(pl_module)
        self._flags += identical_blocks(self._depth.stacks)
        self._flags += rescaled_already(pl_module, writers)
        self._flags += trained_already(pl_module)
        self._flags += traps(trainer.optimizers, self.facts)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch and its random numbers, for the second look at it."""
        devices = [torch.cuda.get_rng_state()] if pl_module.device.type == "cuda" else []
        self._batch = (batch, batch_idx, torch.get_rng_state(), devices)
        if not self._is_done:
            self._probe.attach()
            self._watcher.start()
            self._watching = True

    @override
    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        """The forward pass is over."""
        self._close()
        self._observer.add_loss(trainer, loss, pl_module.automatic_optimization)

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are whole here; keep the weights that the update will change."""
        if self._is_done or optimizer is not trainer.optimizers[0]:
            return
        self._is_done = True
        self._probe.detach()
        seen = self._observer.observe(trainer, optimizer)
        self._first_loss = seen.loss
        self._norms = TrainedParameters(pl_module, self._depth).norms(optimizer, trainer.strategy.model)
        gradients, scale = self._norms.of(self._norms.gradients()), pending_scale(trainer, optimizer)
        self._gradients = gradients if scale is None else gradients / scale.to(gradients)
        self._before = [parameter.detach().clone() for parameter in self._norms.parameters]
        self._handles.append(optimizer.register_step_post_hook(self._measure_update))
        self._take_probe(trainer)

    def _measure_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._updates is None:
            parameters = [parameter.detach() for parameter in self._norms.parameters]
            self._rounded = _share_unchanged(self._before, parameters)
            weights = self._norms.of(self._before)
            torch._foreach_sub_(self._before, parameters)
            self._updates, self._before = update_ratio(self._norms.of(self._before), weights), []

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the first update: the same batch once more, and the end."""
        self._close()
        self._probe.detach()
        if self._is_done and self.look is None:
            change = self._logit_change(trainer, pl_module)
            self._leave()
            self.look = self._result(trainer, change)
            trainer.should_stop = True

    @override
    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no hook and no mode behind."""
        self._close()
        self._leave()

    # --- measuring ------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._watching:
            self._watching = False
            self._watcher.stop()

    def _leave(self) -> None:
        if getattr(self, "_probe", None) is not None:
            self._probe.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _logit_change(self, trainer: Any, pl_module: LightningModule) -> float | None:
        """RMS change of the logits of the last batch by the update, with the same dropout."""
        before = self._watcher.logits
        if before is None or self._batch is None or not pl_module.automatic_optimization or self._updates is None:
            return None
        batch, batch_idx, state, devices = self._batch
        again = LossWatcher()
        with isolate_rng(), trainer.precision_plugin.train_step_context():
            if state is not None:
                torch.set_rng_state(state)
            for each in devices:
                torch.cuda.set_rng_state(each)
            with again:
                pl_module.training_step(batch, batch_idx)
        after = again.logits
        if after is None or after.shape != before.shape:
            return None
        square = (after.float() - before.float()).square().mean()
        return float(_mean_over_ranks(trainer, square).sqrt())

    def _take_probe(self, trainer: Any) -> None:
        """Means over ranks of what the hooks saw, as roots."""
        probe, device = self._probe, self._gradients.device
        blocks, norms = list(probe.blocks), probe.norm_names
        keys = ("stream", "input", "change", "branch", "gradient")
        seen = {key: _mean_over_ranks(trainer, probe.vector(key, blocks, device)) for key in keys}
        counts = torch.tensor([float(probe.branches(group) or math.nan) for group in blocks], device=device)
        scaler = grad_scaler(trainer)
        scale = 1.0 if scaler is None or scaler._scale is None else float(scaler._scale)
        self._profiles = {
            "stream_rms": (blocks, seen["stream"].sqrt()),
            "block_change": (blocks, (seen["change"] / seen["input"]).sqrt()),
            "branch_ratio": (blocks, (seen["branch"] / counts / seen["input"]).sqrt()),
            "stream_gradient": (blocks, seen["gradient"].sqrt() / scale),
            "norm_input": (norms, _mean_over_ranks(trainer, probe.vector("norm", norms, device)).sqrt()),
        }
        self._flags += end_of_stack(self._depth, probe)
        self._flags += ruled_by_eps(probe)

    def _post_norm(self) -> bool | None:
        """Whether every block ends in a norm; None if no block was seen."""
        spreads = [float(spread) for spread in self._probe.closed.values()]
        return max(spreads) < 1e-2 if spreads else None

    def _result(self, trainer: Any, change: float | None) -> Look:
        groups = list(self._norms.groups)
        self._profiles["parameter_gradient"] = (groups, self._gradients)
        if self._updates is not None:
            self._profiles["first_update"] = (groups, self._updates)
        profiles = tuple(
            DepthProfile(name, *MEANINGS[name], tuple(names), tuple(values.tolist()))
            for name in MEANINGS
            if name in self._profiles
            for names, values in [self._profiles[name]]
            if names and bool(values.isfinite().any())
        )
        gradient = next((each for each in profiles if each.name == "parameter_gradient"), None)
        if gradient is not None:
            self._flags += without_gradient(gradient)
        self._flags += rounded_updates(self._rounded)
        self._flags += idle_first_step(trainer.optimizers[0])
        classes, logits = self._watcher.classes, self._watcher.logits
        constant = self._constant_loss if self._constant_loss is not None else self._watcher.constant_loss()
        return Look(
            self._first_loss,
            classes,
            None if classes is None else math.log(classes),
            constant,
            0 if self._constant_loss is not None else self._watcher.labels,
            None if logits is None else float(_mean_over_ranks(trainer, logits.float().square().mean()).sqrt()),
            change,
            self._post_norm(),
            profiles,
            tuple(growth for each in profiles if each.name in GROWING for growth in growths(each)),
            tuple(self._flags),
        )


GROWING = ("stream_rms", "stream_gradient", "parameter_gradient", "block_change")


def _writers(module: Any) -> tuple[Matrix, ...]:
    try:
        return residual_writers(module)
    except ValueError:
        return ()


def _share_unchanged(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Of the weights kept in half precision, the share that the update left as they were; 0 if there are none."""
    half = [(a, b) for a, b in zip(before, after, strict=True) if a.dtype in (torch.float16, torch.bfloat16)]
    total = sum(a.numel() for a, _ in half)
    return sum(int((a == b).sum()) for a, b in half) / total if total else 0.0


def _mean_over_ranks(trainer: Any, values: Tensor) -> Tensor:
    mean: Tensor = trainer.strategy.reduce(values.clone(), reduce_op="mean") if trainer.world_size > 1 else values
    return mean
