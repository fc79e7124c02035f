"""What the weights and the configuration tell before anything has run, each in one sentence with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_norms.anatomy.fresh_weights import already_scaled, looks_trained
from lightning_norms.anatomy.stacks import Stack
from lightning_norms.anatomy.writers import Matrix
from lightning_norms.reports.diagnosis.data import Facts, Flag
from lightning_norms.rescale_rules import GPT2Rescale

TRAINED = "trained weights"


@torch.no_grad()
def identical_blocks(stacks: Sequence[Stack]) -> Iterator[Flag]:
    """Blocks that are copies of the first one, as ``nn.TransformerEncoder`` makes them.

    Example:
        >>> from lightning_norms.anatomy.stacks import find_stacks
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 3, enable_nested_tensor=False)
        >>> [flag.name for flag in identical_blocks(find_stacks(encoder))]
        ['identical blocks']
    """
    for stack in stacks:
        first = _matrices(stack.blocks[0].module)
        copies = [_are_equal(first, _matrices(block.module)) for block in stack.blocks[1:]]
        if first and copies and all(copies):
            count = len(stack.blocks)
            where = f" of {stack.label}" if stack.label else ""
            sentence = (
                f"all {count} blocks{where} start with the same weights, bit for bit (nn.TransformerEncoder copies its "
                "layer): initialise each one anew"
            )
            yield Flag("identical blocks", sentence, {"blocks": float(count)})


def rescaled_already(module: nn.Module, writers: Sequence[Matrix]) -> Iterator[Flag]:
    """Whether the init has the 1/sqrt(2L) of GPT-2 in it."""
    rule = GPT2Rescale()
    if writers and not getattr(module, "residual_rescaled", False) and already_scaled(writers, rule):
        factor = rule.gain(1, max(matrix.layers for matrix in writers))
        sentence = f"this init already has 1/sqrt(2L) = {factor:.3g} on its {len(writers)} residual writers"
        yield Flag("rescaled init", sentence, {"factor": factor})


def trained_already(module: nn.Module) -> Iterator[Flag]:
    """Whether the weights are no longer at an init."""
    if looks_trained(module):
        yield Flag(TRAINED, "these weights have been trained: a norm's gain or bias is no longer one constant")


def traps(optimizers: Sequence[Optimizer], facts: Facts) -> Iterator[Flag]:
    """Frozen parts, an eps that its dtype cannot hold, and lengths that do not fit together."""
    if facts.trainable < facts.parameters:
        share = 1 - facts.trainable / facts.parameters
        sentence = f"{share:.0%} of the parameters are frozen: {facts.trainable:,} of {facts.parameters:,} train"
        yield Flag("frozen", sentence, {"share": share})
    yield from _eps(optimizers)
    yield from _lengths(facts)
    if not facts.blocks:
        sentence = "no list of repeated blocks (nn.ModuleList, nn.Sequential): only losses and the whole gradient count"
        yield Flag("no blocks", sentence)
    if len(optimizers) > 1:
        sentence = f"{len(optimizers)} optimizers: only the steps of the first are counted and judged"
        yield Flag("several optimizers", sentence, {"optimizers": float(len(optimizers))})


def _eps(optimizers: Sequence[Optimizer]) -> Iterator[Flag]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps, kinds = group.get("eps"), {p.dtype for p in group["params"]}
            for kind in kinds & {torch.float16}:
                if isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=kind)) == 0:
                    sentence = f"the optimizer's eps {eps:g} is 0 in {kind}: its steps divide by zero"
                    yield Flag("optimizer eps", sentence, {"eps": eps})
                    return


def _lengths(facts: Facts) -> Iterator[Flag]:
    if not facts.warmup_steps:
        return
    if facts.total_steps is not None and facts.warmup_steps >= facts.total_steps:
        numbers = {"warmup_steps": float(facts.warmup_steps), "total_steps": float(facts.total_steps)}
        sentence = (
            f"the warmup of {facts.warmup_steps} steps is not over when the run ends, at step {facts.total_steps}"
        )
        yield Flag("warmup longer than the run", sentence, numbers)
    if facts.beta2 is not None and facts.beta2 < 1 and facts.warmup_steps < 0.5 * (wanted := 2 / (1 - facts.beta2)):
        numbers = {"warmup_steps": float(facts.warmup_steps), "wanted": wanted}
        sentence = f"the warmup of {facts.warmup_steps} steps is short of 2/(1 - beta2) = {wanted:.0f}"
        yield Flag("short warmup", sentence, numbers)


def _matrices(block: nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in block.parameters() if parameter.ndim > 1]


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )
