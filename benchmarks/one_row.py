"""One new token is one row: what a matrix and a GELU take for it, torch's way and that of ``token_by_token``.

    python benchmarks/one_row.py                 half a minute on 2 cores

Many matrices in turn, 60 MB of them, so that weights come from memory, as in a decoder that is larger than the cache.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import paired
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_norms.model.cpu.token_by_token import FASTER, product

Call = Callable[[Tensor], Tensor]
SHAPES = ((384, 384), (384, 1152), (384, 1536), (1536, 384), (128, 384), (128, 512), (512, 128), (64, 256))
BYTES = 60_000_000
ROUNDS = 15


def seconds(calls: list[Call], x: Tensor) -> float:
    """Of one call, in the mean."""
    begun = time.perf_counter()
    for call in calls:
        call(x)
    return (time.perf_counter() - begun) / len(calls)


def row(name: str, torchs: list[Call], ours: list[Call], x: Tensor) -> list[object]:
    """Microseconds of both, in turn."""
    made = {"torch": lambda: seconds(torchs, x), "ours": lambda: seconds(ours, x)}
    figures = paired.in_turn(made, ROUNDS)
    middle = [f"{1e6 * statistics.median(figures[each]):.1f}" for each in made]
    return [name, *middle, paired.told(paired.ratios(figures["torch"], figures["ours"]))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    rows = []
    with torch.inference_mode():
        for width, out in SHAPES:
            weights = [torch.randn(out, width) for _ in range(min(200, BYTES // (4 * out * width)))]
            bias, x = torch.randn(out), torch.randn(1, 1, width)
            usual = [functools.partial(F.linear, weight=w, bias=bias) for w in weights]
            rows.append(row(f"{width} -> {out}", usual, [product(w, bias) for w in weights], x))
        gelu = torch.nn.GELU()
        for width in (256, 1536):
            x = torch.randn(1, 1, width)
            rows.append(row(f"exact GELU of {width}", [gelu.forward] * 200, [FASTER[torch.nn.GELU](gelu)] * 200, x))
    print(paired.table(["one row", "torch, µs", "ours, µs", "torch's time / ours"], rows))
    print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
