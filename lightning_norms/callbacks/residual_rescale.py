"""Scale the matrices that write into the residual stream, exactly once, before training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_norms.anatomy.fresh_weights import already_scaled, evidence_of_training
from lightning_norms.anatomy.rescaling import check_rule, is_rescaled, mark_rescaled, matrices_of, rescale
from lightning_norms.anatomy.sharding import is_deepspeed
from lightning_norms.anatomy.writers import Matrix
from lightning_norms.checks import check_pattern
from lightning_norms.rescale_rules import GPT2Rescale, RescaleRule

TUNERS = re.compile(r"\.(lr_find|scale_batch_size)_")  # files that Lightning's tuners leave in trainer.ckpt_path
SETTLED = "_residual_rescale_settled"


class ResidualRescale(Callback):
    r"""Multiplies fresh residual writers by a factor of depth before the first step, as GPT-2 and DeepNorm do.

    ::

        fit ── on_fit_start ──┬─ resumed, or fitted before ────────> untouched
                              ├─ trained weights ──────────────────> refused
                              ├─ the init already has the factor ──> untouched, one line says so
                              └─ fresh ────────────────────────────> W <- gain(layer, layers) * W, one line says so

    Only these matrices change, with equal copies of them that the module or a callback keeps (a teacher, a moving
    average). Other frozen tensors stay as they are; a tied tensor is scaled once. Validate, test and
    predict change no weight. The module is marked with ``residual_rescaled = True``, and the callback's state goes into
    checkpoints. A learning rate from ``Tuner.lr_find`` belongs to the model before the rescale.

    Args:
        rule: the factor, see :mod:`lightning_norms.rescale_rules`.
        pattern: regular expression for the parameter names of the writers, where they are not recognised without it:
            see :func:`lightning_norms.describe`.
        value_pattern: regular expression for the rest of the value path (value or fused qkv, MLP up): DeepNorm only.
        when: ``"auto"`` refuses trained weights and skips an init that already has the factor; ``"always"`` checks
            neither. Both leave a resumed run and a second fit alone; but ``ddp_spawn`` trains a copy, so that a second
            fit looks like the first: use ``"auto"`` there.

    Raises:
        TypeError: ``rule`` is no rule.
        ValueError: another argument is not usable; at fit start: no match, an uneven match, or trained weights.

    Example:
        >>> callback = ResidualRescale(GPT2Rescale())
        >>> callback = ResidualRescale(GPT2Rescale(), pattern=r"(o_proj|down_proj)\.weight")

    Source:
        Radford et al. 2019 (GPT-2), section 2.3; Wang et al. 2022, arXiv:2203.00555.
    """

    def __init__(
        self,
        rule: RescaleRule = GPT2Rescale(),  # noqa: B008  frozen, and LightningCLI shows it as the default
        pattern: str | None = None,
        value_pattern: str | None = None,
        when: Literal["auto", "always"] = "auto",
    ) -> None:
        super().__init__()
        check_rule("ResidualRescale", rule)
        if when not in ("auto", "always"):
            raise ValueError(f"ResidualRescale: when must be 'auto' or 'always', got {when!r}")
        if value_pattern is not None and not rule.whole_value_path:
            raise ValueError(f"ResidualRescale: {type(rule).__name__} scales writers only: leave out value_pattern")
        check_pattern("ResidualRescale", "pattern", pattern)
        check_pattern("ResidualRescale", "value_pattern", value_pattern)
        self.rule, self.pattern, self.value_pattern, self.when = rule, pattern, value_pattern, when
        self._state: dict[str, Any] = {"rescaled": False}
        self._resumed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._resumed = False  # nothing is restored yet

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning's tuners restore the first weights at step 0, which is no resume.
        self._resumed = self._resumed or checkpoint.get("global_step", 1) > 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Every strategy has built and wrapped the model here, and nothing has trained yet. FSDP and model-parallel
        # strategies restore after this hook, which overwrites what is done here.
        resumed = self._resumed or not (trainer.ckpt_path is None or TUNERS.match(Path(trainer.ckpt_path).name))
        if resumed and self._state["rescaled"]:
            mark_rescaled(pl_module)
        if resumed or is_rescaled(pl_module) or hasattr(pl_module, SETTLED):
            setattr(pl_module, SETTLED, True)
            return
        if is_deepspeed(trainer.strategy):
            raise ValueError("ResidualRescale: DeepSpeed has copied the weights by now: rescale in configure_model")
        matrices = matrices_of(self.rule, pl_module, self.pattern, self.value_pattern)
        if any(matrix.parameter.is_meta for matrix in matrices):
            raise ValueError("ResidualRescale: the weights are still on the meta device: give them values before fit")
        evidence = evidence_of_training(pl_module) if self.when == "auto" else None
        if trainer.strategy.reduce_boolean_decision(evidence is not None, all=False):
            raise ValueError(
                f"ResidualRescale: these weights have been trained ({evidence or 'another rank says so'}), "
                "and rescaling them would change the model; remove the callback, or say `when: always`."
            )
        if self.when == "auto" and already_scaled(matrices, self.rule):
            self._settle(pl_module, [])
            rank_zero_info(f"ResidualRescale: this init already has {self.rule}; nothing changed.")
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        factors = rescale(matrices, self.rule, holders=[pl_module, *callbacks])
        if factors:
            self._settle(pl_module, factors)
        rank_zero_info(_line(self.rule, matrices, factors))

    @override
    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = dict(state_dict)

    def _settle(self, module: nn.Module, factors: list[float]) -> None:
        mark_rescaled(module)
        self._state = {"rescaled": True, "rule": repr(self.rule), "matrices": len(factors)}
        if factors:
            self._state |= {"lowest_factor": min(factors), "highest_factor": max(factors)}


def _line(rule: RescaleRule, matrices: Sequence[Matrix], factors: Sequence[float]) -> str:
    depths = dict.fromkeys((matrix.stack, matrix.layers) for matrix in matrices)
    layers = ", ".join(f"L={layers}{f' ({stack})' if stack else ''}" for stack, layers in depths)
    span = f"factor {min(factors):.4g} to {max(factors):.4g}" if factors else "all frozen"
    return f"ResidualRescale: {rule}, {layers}: {len(factors)} of {len(matrices)} matrices, {span}."
