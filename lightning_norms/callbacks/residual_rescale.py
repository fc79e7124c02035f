"""Scale the matrices that write into the residual stream, once in the life of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.depth import is_norm
from lightning_norms.rescale_rules import GPT2Rescale, RescaleRule
from lightning_norms.writers import Matrix, residual_writers, value_path

FUSED = re.compile(r"c_attn|in_proj|qkv|query_key_value")
TUNERS = re.compile(r"\.(lr_find|scale_batch_size)_")  # files that Lightning's tuners leave in trainer.ckpt_path
MARK = "residual_rescaled"
SETTLED = "_residual_rescale_settled"


class ResidualRescale(Callback):
    r"""Multiplies fresh residual writers by a factor of depth before the first step, as GPT-2 and DeepNorm do.

    ::

        fit ── on_fit_start ──┬─ resumed, or fitted before ────────> untouched
                              ├─ trained weights ──────────────────> refused
                              ├─ the init already has the factor ──> untouched, one line says so
                              └─ fresh ────────────────────────────> W <- gain(layer, layers) * W, one line says so

    Only these matrices change. Frozen tensors stay as they are; a tied tensor is scaled once. Validate, test and
    predict never touch a weight. The module is marked with ``residual_rescaled = True`` and the callback's state goes
    into the checkpoint. Learning rates found by ``Tuner.lr_find`` belong to the model before the rescale.

    Args:
        rule: the factor, see :mod:`lightning_norms.rescale_rules`.
        pattern: regular expression for the writers' parameter names, for models that do not name them themselves.
        value_pattern: the same for the rest of the value path (value or fused qkv, MLP up): DeepNorm only.
        when: ``"auto"`` refuses trained weights and skips an init that already has the factor; ``"always"`` trusts you.
            Neither applies it on a resume or on a second fit.

    Raises:
        TypeError: ``rule`` is no rule.
        ValueError: another argument is not usable; at fit start: no match, an uneven match, or trained weights.

    Example:
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
        if not isinstance(rule, RescaleRule):
            raise TypeError(f"ResidualRescale: rule must be a RescaleRule such as GPT2Rescale(), got {rule!r}")
        if when not in ("auto", "always"):
            raise ValueError(f"ResidualRescale: when must be 'auto' or 'always', got {when!r}")
        if value_pattern is not None and not rule.whole_value_path:
            raise ValueError(f"ResidualRescale: {type(rule).__name__} scales writers only: leave out value_pattern")
        for given in filter(None, (pattern, value_pattern)):
            try:
                re.compile(given)
            except re.error as error:
                raise ValueError(f"ResidualRescale: {given!r} is not a regular expression: {error}") from None
        self.rule, self.pattern, self.value_pattern, self.when = rule, pattern, value_pattern, when
        self._state: dict[str, Any] = {"rescaled": False}
        self._resumed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before anything is restored: no checkpoint has been seen in this run."""
        self._resumed = False

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Tell a resume from the restore at step 0 by which Lightning's tuners put the first weights back."""
        self._resumed = self._resumed or checkpoint.get("global_step", 1) > 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rescale fresh weights; here every strategy has built and wrapped the model, and nothing has trained yet."""
        # FSDP and model-parallel strategies restore after this hook, which overwrites what is done here.
        resumed = self._resumed or not (trainer.ckpt_path is None or TUNERS.match(Path(trainer.ckpt_path).name))
        if resumed and self._state["rescaled"]:
            setattr(pl_module, MARK, True)
        if resumed or getattr(pl_module, MARK, False) or getattr(pl_module, SETTLED, False):
            setattr(pl_module, SETTLED, True)
            return
        if "DeepSpeed" in type(trainer.strategy).__name__:
            raise ValueError("ResidualRescale: DeepSpeed has copied the weights by now: rescale in configure_model")
        matrices = self._matrices(pl_module)
        if self.when == "auto" and trainer.strategy.reduce_boolean_decision(looks_trained(pl_module), all=False):
            raise ValueError(
                "ResidualRescale: these weights have been trained (a norm's gain or bias is no longer one constant), "
                "and rescaling them would change the model; remove the callback, or say `when: always`."
            )
        if self.when == "auto" and already_scaled(matrices, self.rule, self._is_fused):
            self._settle(pl_module, [])
            rank_zero_info(f"ResidualRescale: this init already has {self.rule}; nothing changed.")
            return
        factors = self._scale(matrices)
        if factors:
            self._settle(pl_module, factors)
        rank_zero_info(_line(self.rule, matrices, factors))

    @override
    def state_dict(self) -> dict[str, Any]:
        """What was done: plain data."""
        return dict(self._state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember what the checkpoint's run did."""
        self._state = dict(state_dict)

    def _matrices(self, module: nn.Module) -> tuple[Matrix, ...]:
        if self.rule.whole_value_path:
            return value_path(module, self.pattern, self.value_pattern)
        return residual_writers(module, self.pattern)

    def _is_fused(self, matrix: Matrix) -> bool:
        """Whether only the value part of a matrix belongs to the rule: a fused qkv that is no writer."""
        writer = self.pattern is not None and re.search(self.pattern, matrix.name) is not None
        return self.rule.whole_value_path and not writer and FUSED.search(matrix.name) is not None

    def _scale(self, matrices: Sequence[Matrix]) -> list[float]:
        free = [matrix for matrix in matrices if matrix.parameter.requires_grad]
        factors = [self.rule.gain(matrix.layer, matrix.layers) for matrix in free]
        for matrix, factor in zip(free, factors, strict=True):
            scale_(matrix, factor, value_third_only=self._is_fused(matrix))
        return factors

    def _settle(self, module: nn.Module, factors: list[float]) -> None:
        setattr(module, MARK, True)
        self._state = {"rescaled": True, "rule": repr(self.rule), "matrices": len(factors)}
        if factors:
            self._state |= {"lowest_factor": min(factors), "highest_factor": max(factors)}


def _line(rule: RescaleRule, matrices: Sequence[Matrix], factors: Sequence[float]) -> str:
    depths = dict.fromkeys((matrix.stack, matrix.layers) for matrix in matrices)
    layers = ", ".join(f"L={layers}{f' ({stack})' if stack else ''}" for stack, layers in depths)
    span = f"factor {min(factors):.4g} to {max(factors):.4g}" if factors else "all frozen"
    return f"ResidualRescale: {rule}, {layers}: {len(factors)} of {len(matrices)} matrices, {span}."


@torch.no_grad()
def scale_(matrix: Matrix, factor: float, value_third_only: bool = False) -> None:
    """Multiply a matrix in place; of a fused qkv matrix [3d, d] (HF Conv1D: [d, 3d]) only the value third.

    Raises:
        ValueError: the fused matrix is not three equal parts in the order query, key, value.
    """
    parameter: Any = matrix.parameter
    if value_third_only:
        scaling = _third(matrix, factor)
        if hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            scaling = distribute_tensor(scaling.expand_as(parameter), parameter.device_mesh, parameter.placements)
        parameter.mul_(scaling)
    else:
        local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.mul_(factor)


def _third(matrix: Matrix, factor: float) -> Tensor:
    parameter, shape = matrix.parameter, tuple(matrix.parameter.shape)
    dimension = _output_dimension(matrix.owner)
    mixed = "query_key_value" in matrix.name  # GPT-NeoX, BLOOM, Falcon: query, key and value alternate by head
    if mixed or len(shape) != 2 or shape[dimension] != 3 * shape[1 - dimension]:
        raise ValueError(
            f"ResidualRescale: cannot find the value third of {matrix.name} {list(shape)}: expected [3d, d] in the "
            "order query, key, value. Leave it out of value_pattern."
        )
    third = shape[dimension] // 3
    scaling = torch.ones(shape[dimension], device=parameter.device, dtype=parameter.dtype)
    scaling[-third:] = factor
    return scaling.unsqueeze(1 - dimension)


def _output_dimension(owner: nn.Module) -> int:
    return 1 if type(owner).__name__ == "Conv1D" else 0  # HF GPT-2 keeps its weights transposed


@torch.no_grad()
def looks_trained(module: nn.Module) -> bool:
    """Whether some norm's gain or bias is no longer one constant, as it is in every published init."""
    for part in module.modules():
        if is_norm(part):
            for name, parameter in part.named_parameters(recurse=False):
                if name in ("weight", "gain", "gamma", "scale", "bias", "beta", "shift") and parameter.numel() > 1:
                    whole = _whole(parameter)
                    if whole.numel() and bool(whole.min() != whole.max()):
                        return True
    return False


@torch.no_grad()
def already_scaled(
    matrices: Sequence[Matrix], rule: RescaleRule, is_fused: Callable[[Matrix], bool] = lambda _: False
) -> bool:
    """Whether the init already contains the rule's factor, as Hugging Face's GPT-2 does.

    Compares every matrix with others of the same fan-in in its block that the rule leaves alone (a fused value third
    with its query third): the ratio of their standard deviations is the factor if it is in, and 1 if it is not.
    """
    chosen = {id(matrix.parameter) for matrix in matrices}
    ratios, misses = [], []
    for matrix in matrices:
        spread, reference = _spreads(matrix, chosen, is_fused(matrix))
        if spread > 0 and reference > 0:
            ratios.append(math.log(spread / reference))
            misses.append(ratios[-1] - math.log(rule.gain(matrix.layer, matrix.layers)))
    if not ratios:
        return False
    miss, distance = (sum(map(abs, each)) / len(each) for each in (misses, ratios))
    return miss < 0.5 * distance and abs(sum(misses)) / len(misses) < 0.2


def _spreads(matrix: Matrix, chosen: set[int], fused: bool) -> tuple[float, float]:
    """Standard deviations of a matrix and of its untouched peers; 0 where there is none to compare with."""
    if matrix.parameter.ndim != 2:
        return 0.0, 0.0
    if fused:
        query, _, value = _whole(matrix.parameter).float().chunk(3, dim=_output_dimension(matrix.owner))
        return float(value.std()), float(query.std())
    fan_in = matrix.parameter.shape[1 - _output_dimension(matrix.owner)]
    peers = []
    for name, other in matrix.block.named_parameters():
        owner = matrix.block.get_submodule(name.rpartition(".")[0])
        if other.ndim == 2 and id(other) not in chosen and other.shape[1 - _output_dimension(owner)] == fan_in:
            peers.append(other)
    # Xavier depends on both sides of a matrix, so one of the very same shape is the better witness.
    peers = [other for other in peers if other.shape == matrix.parameter.shape] or peers
    return _spread(matrix.parameter), max(map(_spread, peers), default=0.0)


def _spread(parameter: Tensor) -> float:
    return float(_whole(parameter).float().std())


def _whole(parameter: Tensor) -> Tensor:
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole
