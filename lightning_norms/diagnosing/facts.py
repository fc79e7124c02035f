"""A run as it is configured, and the flags that its configuration, its weights and its first step raise.

A flag is a notable property of the run: one sentence with its numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_norms.anatomy.depth import DepthMap, is_norm
from lightning_norms.anatomy.fresh_weights import already_scaled, evidence_of_training
from lightning_norms.anatomy.stacks import Stack
from lightning_norms.anatomy.writers import Matrix
from lightning_norms.diagnosing.depth_probe import DepthProbe
from lightning_norms.learning_rate import factors_of
from lightning_norms.reports.diagnosis.data import DepthProfile, Facts, Flag
from lightning_norms.rescale_rules import GPT2Rescale

TRAINED = "trained weights"


def refuse(trainer: Any) -> None:
    """Raise for runs that cannot be measured."""
    kinds = [type(optimizer).__name__ for optimizer in trainer.optimizers if optimizer.param_groups]
    if not kinds:
        raise ValueError("diagnose: the module has no optimizer (configure_optimizers returns none): nothing trains.")
    if "LBFGS" in kinds:
        raise ValueError("diagnose: LBFGS is not supported: it computes several losses per step.")
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise ValueError("diagnose: DeepSpeed does not expose gradients; use ddp or a single device for the diagnosis.")


def facts_of(
    trainer: Any, module: Any, depth: DepthMap, callbacks: Sequence[Callback], left_out: Sequence[str]
) -> Facts:
    """Read the configuration when training starts, after all its callbacks."""
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    configs = trainer.strategy.lr_scheduler_configs
    total = trainer.estimated_stepping_batches if module.automatic_optimization else trainer.max_steps
    parameters = {id(p): p for p in module.parameters()}.values()
    return Facts(
        module=type(module).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        blocks={stack.label: len(stack.blocks) for stack in depth.stacks},
        norms=dict(Counter(_norm_kind(part) for part in module.modules() if is_norm(part))),
        optimizer=type(optimizer).__name__,
        learning_rate=float(group.get("initial_lr", group["lr"])),
        beta2=float(group["betas"][1]) if "betas" in group else None,
        scheduler=type(configs[0].scheduler).__name__ if configs else None,
        warmup_steps=getattr(factors_of(optimizer).get("warmup"), "warmup_length", lambda: None)(),
        total_steps=int(total) if 0 < total < math.inf else None,
        precision=str(trainer.precision),
        ranks=trainer.world_size,
        accumulate=trainer.accumulate_grad_batches,
        manual=not module.automatic_optimization,
        callbacks=tuple(type(callback).__name__ for callback in callbacks),
        left_out=tuple(left_out),
    )


def facts_of_frozen(module: nn.Module) -> Facts | None:
    """Facts of a module without trainable parameters, for which no optimizer can be built; None for any other."""
    parameters = list(module.parameters())
    if not parameters or any(parameter.requires_grad for parameter in parameters):
        return None
    return Facts(module=type(module).__name__, parameters=sum(p.numel() for p in parameters), trainable=0)


def initial_flags(
    module: nn.Module,
    stacks: Sequence[Stack],
    writers: Sequence[Matrix],
    optimizers: Sequence[Optimizer],
    facts: Facts,
) -> Iterator[Flag]:
    """What the weights and the configuration show before anything has run."""
    yield from identical_blocks(stacks)
    yield from _rescaled_init(module, writers)
    evidence = evidence_of_training(module)
    if evidence:
        yield Flag(TRAINED, f"these weights have been trained: {evidence}")
    if facts.trainable < facts.parameters:
        share = 1 - facts.trainable / facts.parameters
        sentence = f"{share:.0%} of the parameters are frozen: {facts.trainable:,} of {facts.parameters:,} train"
        yield Flag("frozen", sentence, {"share": share})
    yield from _eps(optimizers)
    yield from _warmup_length(facts)
    if not facts.blocks:
        sentence = (
            "no repeated blocks were found (nn.ModuleList, nn.Sequential): only losses and the whole gradient count"
        )
        yield Flag("no blocks", sentence)
    if len(optimizers) > 1:
        sentence = f"{len(optimizers)} optimizers: only the steps of the first are counted and judged"
        yield Flag("several optimizers", sentence, {"optimizers": float(len(optimizers))})


def first_step_flags(gradient: DepthProfile | None, unchanged: float, optimizer: Optimizer) -> Iterator[Flag]:
    """What the first gradient and the first update show.

    Args:
        gradient: profile of the gradient norms of the parameters.
        unchanged: share of the half-precision weights that the update left as they were.
        optimizer: the one that made the update.
    """
    norms = dict(zip(gradient.groups, gradient.values, strict=True)) if gradient else {}
    zero = [group for group, norm in norms.items() if norm == 0]
    if zero:
        names = ", ".join(zero[:4]) + (", ..." if len(zero) > 4 else "")
        sentence = f"the first gradient is exactly 0 in {len(zero)} of {len(norms)} groups ({names})"
        yield Flag("no gradient", sentence, {"groups": float(len(zero))})
    if unchanged > 0.5:
        sentence = f"the first update is too small for {unchanged:.0%} of the half-precision weights: they do not move"
        yield Flag("rounded updates", sentence, {"share": unchanged})
    rates = factors_of(optimizer).used()
    if rates and rates[0] == 0:
        yield Flag("idle first step", "the learning rate of the first step is 0, which wastes that batch", {"lr": 0.0})


def norm_flags(stacks: Sequence[Stack], probe: DepthProbe) -> Iterator[Flag]:
    """What the first pass shows of the norms: none or two after the last block, or an input as small as its eps."""
    if len(stacks) == 1 and probe.norm_names:
        yield from _end_of_stack(stacks[0], probe)
    smallest = probe.smallest_eps_ratio
    if smallest is not None and smallest[0] < 10:
        sentence = (
            f"the input of {smallest[1]} has a variance of only {smallest[0]:.2g} x the norm's eps of {smallest[2]:g}, "
            "so eps determines its output"
        )
        yield Flag("eps", sentence, {"variance_over_eps": smallest[0]})


@torch.no_grad()
def identical_blocks(stacks: Sequence[Stack]) -> Iterator[Flag]:
    """Blocks that are copies of the first one, as ``nn.TransformerEncoder`` makes them.

    Example:
        >>> from torch import nn
        >>> from lightning_norms.anatomy.stacks import find_stacks
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 3, enable_nested_tensor=False)
        >>> [flag.name for flag in identical_blocks(find_stacks(encoder))]
        ['identical blocks']
    """
    for stack in stacks:
        matrices = [_matrices(block.module) for block in stack.blocks]
        first = max(matrices, key=lambda some: sum(_are_equal(some, other) for other in matrices))
        others = [other for other in matrices if other is not first]
        copies = 1 + sum(_are_equal(first, other) for other in others)
        if first and copies > 1:
            where = f" of {stack.label}" if stack.label else ""
            which = "all" if copies == len(stack.blocks) else f"{copies} of"
            sentence = (
                f"{which} {len(stack.blocks)} blocks{where} start with identical weights (nn.TransformerEncoder copies "
                "its layer): initialize each block separately"
            )
            yield Flag("identical blocks", sentence, {"blocks": float(copies)})


def _norm_kind(norm: nn.Module) -> str:
    eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
    return f"{type(norm).__name__} without eps" if eps is None else f"{type(norm).__name__} with eps {eps:g}"


def _rescaled_init(module: nn.Module, writers: Sequence[Matrix]) -> Iterator[Flag]:
    rule = GPT2Rescale()
    if writers and not getattr(module, "residual_rescaled", False) and already_scaled(writers, rule):
        factor = rule.gain(1, max(matrix.layers for matrix in writers))
        sentence = f"this init already has 1/sqrt(2L) = {factor:.3g} on its {len(writers)} residual writers"
        yield Flag("rescaled init", sentence, {"factor": factor})


def _eps(optimizers: Sequence[Optimizer]) -> Iterator[Flag]:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        eps = group.get("eps")
        is_half = any(parameter.dtype is torch.float16 for parameter in group["params"])
        if is_half and isinstance(eps, float) and eps > 0 and not torch.tensor(eps, dtype=torch.float16):
            sentence = f"the optimizer's eps {eps:g} is 0 in {torch.float16}: its steps divide by zero"
            yield Flag("optimizer eps", sentence, {"eps": eps})
            return


def _warmup_length(facts: Facts) -> Iterator[Flag]:
    warmup, total = facts.warmup_steps, facts.total_steps
    if not warmup:
        return
    if total is not None and warmup >= total:
        sentence = f"the warmup of {warmup} steps is not over when the run ends, at step {total}"
        numbers = {"warmup_steps": float(warmup), "total_steps": float(total)}
        yield Flag("warmup longer than the run", sentence, numbers)
    if facts.beta2 is not None and facts.beta2 < 1 and warmup < 0.5 * (wanted := 2 / (1 - facts.beta2)):
        sentence = f"the warmup of {warmup} steps is shorter than the recommended 2/(1 - beta2) = {wanted:.0f}"
        yield Flag("short warmup", sentence, {"warmup_steps": float(warmup), "wanted": wanted})


def _end_of_stack(stack: Stack, probe: DepthProbe) -> Iterator[Flag]:
    last = stack.groups[-1]
    if last not in probe.order or last not in probe.spreads:
        return
    after = [name for name in probe.order[probe.order.index(last) + 1 :] if name in probe.squares["norm"]]
    rms, spread = float(probe.squares["stream"][last].sqrt()), float(probe.spreads[last])
    evidence = {"stream_rms": rms, "spread": spread}
    if not after and spread > 0.01:
        sentence = (
            f"no norm runs after the last block, whose output has RMS {rms:.3g} and varies by {spread:.0%} "
            "from position to position: the head reads an unnormalized stream"
        )
        yield Flag("no final norm", sentence, evidence)
    if after and spread < 1e-3:
        sentence = f"the last block already ends in a norm (RMS {rms:.3g} at every position), and {after[0]} follows"
        yield Flag("double final norm", sentence, evidence)


def _matrices(block: nn.Module) -> list[Tensor]:
    return [parameter for parameter in block.parameters() if parameter.ndim > 1]


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
