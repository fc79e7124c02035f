"""Attention in bfloat16 on a CPU, forward and backward: torch's kernel, float32 by torch, and what the decoder uses.

    python benchmarks/half_precision_attention.py            about a minute; one thread

Errors are L2 norms of the difference to float64 over the norm of the exact: of the result, and the largest of the three
gradients. Queries and keys are three times standard normal, as in a model that has learnt.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import paired
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_norms.model.cpu.half_precision_attention import attend

SHAPES = ((8, 6, 256, 64), (8, 4, 256, 32), (8, 4, 64, 16), (2, 6, 1024, 64))
"""Windows, heads, tokens, head width; the first three are those of step.py."""


def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The library's, in the inputs' precision."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The library's, in float32."""
    return torchs(query.float(), key.float(), value.float()).to(query.dtype)


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": torchs,
    "torch in float32": in_float32,
    "ours": attend,
}


def both(kind: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Result and gradients."""
    mixed = kind(*inputs)
    return [mixed, *torch.autograd.grad(mixed, inputs, gradient)]


def seconds(kind: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor, times: int) -> float:
    """Of one forward and backward."""
    begun = time.perf_counter()
    for _ in range(times):
        both(kind, inputs, gradient)
    return (time.perf_counter() - begun) / times


def rows(shape: tuple[int, int, int, int], rounds: int) -> list[list[object]]:
    """One for each kind."""
    batch, heads, length, width = shape
    torch.manual_seed(0)
    drawn = [(spread * torch.randn(batch, length, heads, width)).bfloat16().transpose(1, 2) for spread in (3, 3, 1)]
    inputs = [each.detach().requires_grad_() for each in drawn]
    gradient = torch.randn(batch, length, heads, width).bfloat16().transpose(1, 2)
    exact = both(torchs, [each.detach().double().requires_grad_() for each in inputs], gradient.double())
    times = 20 if length < 128 else 3
    timed = {name: functools.partial(seconds, kind, inputs, gradient, times) for name, kind in KINDS.items()}
    figures = paired.in_turn(timed, rounds)
    found: list[list[object]] = []
    for name, kind in KINDS.items():
        pairs = zip(both(kind, inputs, gradient), exact, strict=True)
        first, *others = (float(((ours.double() - right).norm() / right.norm()).detach()) for ours, right in pairs)
        ratio = paired.told(paired.ratios(figures["torch"], figures[name]))
        middle = f"{1e3 * statistics.median(figures[name]):.2f}"
        found.append([" x ".join(map(str, shape)), name, middle, ratio, f"{first:.4f}", f"{max(others):.4f}"])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = [row for shape in SHAPES for row in rows(shape, chosen.rounds)]
    header = ["windows x heads x tokens x width", "", "ms", "torch's time / its", "error", "error of gradients"]
    print(paired.table(header, found))
    print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
