"""The first step of a run from inside: every size by depth before it, and what the first update changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.sharding import grad_scaler, pending_scale
from lightning_norms.anatomy.writers import Matrix, residual_writers
from lightning_norms.diagnosing.causality import NextTokenWatcher
from lightning_norms.diagnosing.constants import Micro, constant_losses, read_micro
from lightning_norms.diagnosing.depth_probe import DepthProbe
from lightning_norms.diagnosing.facts import facts_of, first_step_flags, initial_flags, norm_flags, refuse
from lightning_norms.diagnosing.labels import LossWatcher
from lightning_norms.diagnosing.loss_tail import TailRecorder
from lightning_norms.measuring.norms_by_group import update_ratio
from lightning_norms.measuring.step_observer import StepObserver
from lightning_norms.measuring.trained_parameters import TrainedParameters
from lightning_norms.reports.diagnosis.data import DepthProfile, Facts, Flag, Look
from lightning_norms.reports.statistics import growths

MEANINGS = {
    "stream_rms": "root mean square of the residual stream after the block",
    "block_change": "size of the block's change to the stream / size of the stream before it",
    "branch_ratio": "root mean square of the block's branches / that of the stream before it",
    "parameter_gradient": "L2 norm of the gradient with respect to the parameters",
    "stream_gradient": "L2 norm of the gradient with respect to the stream after the block",
    "norm_input": "standard deviation of a norm's input (RMS norms: root mean square); its Jacobian is 1/it",
    "first_update": "L2 norm of the first update / L2 norm of the weights",
}
"""What each :class:`DepthProfile` shows; all are without a unit."""
GROWING = ("stream_rms", "stream_gradient", "parameter_gradient", "block_change")
"""Profiles whose growth from block to block is reported."""


class Looker(Callback):
    """Measures a run up to its first optimizer update, and ends it there.

    It must come after all callbacks of the configuration, so that it sees the weights as these leave them. It only
    reads.

    Args:
        callbacks: callbacks of the configuration.
        left_out: names of the callbacks that do not run here.
        constant_loss: loss of the best constant prediction, if the data provides it.

    Attributes:
        facts: the run as configured; None before training starts.
        look: the measurements; None before the first update.
    """

    def __init__(
        self, callbacks: Sequence[Callback] = (), left_out: Sequence[str] = (), constant_loss: float | None = None
    ) -> None:
        self._callbacks, self._left_out, self._constant_loss = callbacks, left_out, constant_loss
        self.facts: Facts | None = None
        self.look: Look | None = None
        self._watcher, self._tails = LossWatcher(), TailRecorder()
        self._micro: Micro | None = None
        self._hooks = ExitStack()
        self._flags: list[Flag] = []
        self._profiles: dict[str, tuple[list[str], Tensor]] = {}
        self._before: list[Tensor] = []
        self._unchanged = 0.0
        self._first_loss: float | None = None
        self._is_done = False
        self._batches, self._epoch_start = 0, -1  # so far, and before the current epoch

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        refuse(trainer)
        self._depth = DepthMap.of(pl_module)
        self.facts = facts_of(trainer, pl_module, self._depth, self._callbacks, self._left_out)
        writers = _writers(pl_module)
        self._probe = DepthProbe(pl_module, self._depth.stacks, writers)
        self._hooks.callback(self._probe.detach)
        self._observer = StepObserver(pl_module)
        self._flags += initial_flags(pl_module, self._depth.stacks, writers, trainer.optimizers, self.facts)

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """End the fit after an epoch without a batch, as such data would be read for ever."""
        trainer.should_stop |= self._epoch_start == self._batches
        self._epoch_start = self._batches

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        # Kept for a second pass over this batch with the same dropout.
        self._rng_states = (
            torch.get_rng_state(),
            *([torch.cuda.get_rng_state()] if pl_module.device.type == "cuda" else []),
        )
        if not self._is_done:
            self._probe.attach()
            self._watcher.start()
            self._tails.start()

    @override
    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        self._stop_watching()
        if not self._is_done:
            self._micro = read_micro(self._tails, trainer, pl_module, loss)
        self._observer.add_loss(trainer, loss, pl_module.automatic_optimization)

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure the whole gradient; keep the weights that the update is about to change."""
        if self._is_done or optimizer is not trainer.optimizers[0]:
            return
        self._is_done = True
        self._probe.detach()
        self._first_loss = self._observer.observe(trainer, optimizer).loss
        self._norms = TrainedParameters(pl_module, self._depth).norms(optimizer, trainer.strategy.model)
        grads, scale = self._norms.of(self._norms.gradients()), pending_scale(trainer, optimizer)
        grads = grads if scale is None else grads / scale.to(grads)
        self._profiles["parameter_gradient"] = (list(self._norms.groups), grads)
        self._profiles |= _probe_profiles(trainer, self._probe, grads.device)
        self._flags += norm_flags(self._depth.stacks, self._probe)
        self._before = [parameter.detach().clone() for parameter in self._norms.parameters]
        self._hooks.callback(optimizer.register_step_post_hook(self._measure_update).remove)

    def _measure_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if "first_update" not in self._profiles:
            parameters = [parameter.detach() for parameter in self._norms.parameters]
            self._unchanged = _share_unchanged(self._before, parameters)
            weights = self._norms.of(self._before)
            torch._foreach_sub_(self._before, parameters)
            ratio, self._before = update_ratio(self._norms.of(self._before), weights), []
            self._profiles["first_update"] = (list(self._norms.groups), ratio)

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the first update, run the same batch once more and end the fit."""
        self._stop_watching()
        self._probe.detach()
        if self._is_done and self.look is None:
            change = self._logit_change(trainer, pl_module, batch, batch_idx)
            self._hooks.close()
            self.look = self._result(trainer, change)
            trainer.should_stop = True

    @override
    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_watching()
        self._hooks.close()

    def _stop_watching(self) -> None:
        self._tails.stop()
        self._watcher.stop()

    @torch.no_grad()
    def _logit_change(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> float | None:
        """RMS by which the update changes the logits of the batch."""
        before = self._watcher.logits
        if before is None or not pl_module.automatic_optimization or "first_update" not in self._profiles:
            return None
        step = pl_module.training_step
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            return None  # its batch has been consumed
        arguments = (batch, batch_idx) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else (batch,)
        with isolate_rng(), trainer.precision_plugin.train_step_context():
            for restore, state in zip((torch.set_rng_state, torch.cuda.set_rng_state), self._rng_states, strict=False):
                restore(state)
            # Several ranks share gradients in hooks of their own, so there the pass is without them.
            with torch.set_grad_enabled(trainer.world_size == 1), LossWatcher() as watcher, NextTokenWatcher() as ahead:
                step(*arguments)
            self._flags += ahead.flags()
        after = watcher.logits
        return None if after is None or after.shape != before.shape else _rms(trainer, after.float() - before.float())

    def _result(self, trainer: Any, change: float | None) -> Look:
        profiles = tuple(
            DepthProfile(name=name, unit="1", meaning=meaning, groups=tuple(names), values=tuple(values.tolist()))
            for name, meaning in MEANINGS.items()
            if name in self._profiles
            for names, values in [self._profiles[name]]
            if names and bool(values.isfinite().any())
        )
        gradient = next((profile for profile in profiles if profile.name == "parameter_gradient"), None)
        self._flags += first_step_flags(gradient, self._unchanged, trainer.optimizers[0])
        watcher, is_exact = self._watcher, self._constant_loss is not None
        fit = None if self._micro is None else constant_losses([[self._micro]])
        uniform = None if watcher.classes is None else math.log(watcher.classes)
        measured = math.nan if self._micro is None else self._micro.uniform_loss
        is_negated = uniform is not None and math.isclose(measured, -uniform, rel_tol=0.01)
        if uniform is None or not math.isclose(measured, uniform, rel_tol=0.01):
            uniform = None  # the loss is scaled, shifted, summed, or no cross-entropy
        spreads = [float(spread) for spread in self._probe.spreads.values()]
        return Look(
            first_loss=self._first_loss,
            classes=watcher.classes,
            uniform_loss=uniform,
            is_negated=is_negated,
            constant_loss=self._constant_loss if is_exact else None if fit is None else fit.loss,
            labels=0 if is_exact else watcher.labels,
            logits_rms=None if watcher.logits is None else _rms(trainer, watcher.logits.float()),
            logit_change=change,
            post_norm=max(spreads) < 1e-2 if spreads and self._probe.norm_names else None,
            profiles=profiles,
            growths=tuple(growth for profile in profiles if profile.name in GROWING for growth in growths(profile)),
            flags=tuple(self._flags),
        )


def _writers(module: Any) -> tuple[Matrix, ...]:
    try:
        return residual_writers(module)
    except (ValueError, AttributeError):
        return ()


def _probe_profiles(trainer: Any, probe: DepthProbe, device: torch.device) -> dict[str, tuple[list[str], Tensor]]:
    """Root mean squares over ranks, by block and by norm."""
    blocks, norms = list(probe.blocks), probe.norm_names
    kinds = ("stream", "input", "change", "branch", "gradient")
    squares = {kind: _mean_over_ranks(trainer, probe.vector(kind, blocks, device)) for kind in kinds}
    branches = torch.tensor([float(probe.branches[group] or math.nan) for group in blocks], device=device)
    scaler = grad_scaler(trainer)
    scale = 1.0 if scaler is None or scaler._scale is None else float(scaler._scale)
    return {
        "stream_rms": (blocks, squares["stream"].sqrt()),
        "block_change": (blocks, (squares["change"] / squares["input"]).sqrt()),
        "branch_ratio": (blocks, (squares["branch"] / branches / squares["input"]).sqrt()),
        "stream_gradient": (blocks, squares["gradient"].sqrt() / scale),
        "norm_input": (norms, _mean_over_ranks(trainer, probe.vector("norm", norms, device)).sqrt()),
    }


def _share_unchanged(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Share of the half-precision weights that the update left as they were; 0 if there are none."""
    half = [(a, b) for a, b in zip(before, after, strict=True) if a.dtype in (torch.float16, torch.bfloat16)]
    total = sum(a.numel() for a, _ in half)
    return sum(int((a == b).sum()) for a, b in half) / total if total else 0.0


def _rms(trainer: Any, values: Tensor) -> float:
    return float(_mean_over_ranks(trainer, values.square().mean()).sqrt())


def _mean_over_ranks(trainer: Any, values: Tensor) -> Tensor:
    mean: Tensor = trainer.strategy.reduce(values.clone(), reduce_op="mean") if trainer.world_size > 1 else values
    return mean
