"""The facts of a run, as its trainer, optimizer and callbacks tell them; and which runs cannot be looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.learning_rate import factors_of
from lightning_norms.reports.diagnosis.data import Facts


def refuse(trainer: Any) -> None:
    """Say at once what cannot be looked at."""
    kinds = [type(optimizer).__name__ for optimizer in trainer.optimizers if optimizer.param_groups]
    if not kinds:
        raise ValueError("diagnose: the module has no optimizer (configure_optimizers gives none), so nothing trains.")
    if "LBFGS" in kinds:
        raise ValueError("diagnose: LBFGS computes many losses for one step, so its steps cannot be told apart.")
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise ValueError("diagnose: DeepSpeed keeps gradients to itself; use ddp or a single device for the diagnosis.")


def facts_of(trainer: Any, module: Any, depth: DepthMap, given: Sequence[Callback], left_out: Sequence[str]) -> Facts:
    """What a run is, read when its training starts, after all its callbacks.

    Args:
        trainer: the Lightning Trainer.
        module: on its way into training.
        depth: its stacks.
        given: callbacks of the configuration.
        left_out: names of those that do not run here.
    """
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    warmup = factors_of(optimizer).get("warmup")
    configs = trainer.strategy.lr_scheduler_configs
    total = trainer.estimated_stepping_batches if module.automatic_optimization else trainer.max_steps
    parameters = {id(p): p for p in module.parameters()}.values()
    return Facts(
        module=type(module).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        blocks={stack.label: len(stack.blocks) for stack in depth.stacks},
        optimizer=type(optimizer).__name__,
        learning_rate=float(group.get("initial_lr", group["lr"])),
        beta2=float(group["betas"][1]) if "betas" in group else None,
        scheduler=type(configs[0].scheduler).__name__ if configs else None,
        warmup_steps=getattr(warmup, "warmup_length", lambda: None)(),
        total_steps=int(total) if 0 < total < math.inf else None,
        precision=str(trainer.precision),
        ranks=trainer.world_size,
        accumulate=trainer.accumulate_grad_batches,
        manual=not module.automatic_optimization,
        callbacks=tuple(type(callback).__name__ for callback in given),
        left_out=tuple(left_out),
    )
