"""Time and memory of a training step by depth, with and without activation checkpointing; each in its own process.

    python benchmarks/depth.py                                  about 4 minutes on 2 cores
    python benchmarks/depth.py --depths 125 250 --batches 8

The network of the recipe deepnorm1000: width 32, 64 tokens a window, AdamW, float32. Peak resident memory includes
Python and torch; what a block adds is the slope of a line through all depths, and R² says how straight it is.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy
import paired
import torch
from torch import nn

from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.initialization import Xavier
from lightning_norms.placements import DeepNorm

STEPS = 4


def measure(layers: int, batch: int, checkpointing: bool, threads: int) -> dict[str, float]:
    """Peak memory in MiB, that of parameters with gradients and AdamW's state alone, and seconds of a step."""
    torch.set_num_threads(threads)
    config = DecoderConfig(
        vocab_size=256, d_model=32, n_layers=layers, placement=DeepNorm(), initialization=Xavier(), tied_head=False,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    decoder = Decoder(config)
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    tokens, labels = torch.randint(256, (2, batch, 64))
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
    held = 4 * sum(p.numel() * p.element_size() for p in decoder.parameters()) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak": peak, "held": held, "seconds": statistics.median(times[1:])}


def in_a_process(*numbers: int) -> dict[str, float]:
    """Peak memory is the process's, so each measurement gets one."""
    words = [sys.executable, __file__, "--one", *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def slope(depths: list[int], values: list[float]) -> tuple[float, float]:
    """What a block adds, and R²."""
    return float(numpy.polyfit(depths, values, 1)[0]), float(numpy.corrcoef(depths, values)[0, 1] ** 2)


def main() -> None:
    """One row for each depth and setting, then what a block adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[48, 200, 500, 1000])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="windows of 64 tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", type=int, nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        layers, batch, checkpointing, threads = chosen.one
        print(json.dumps(measure(layers, batch, bool(checkpointing), threads)))
        return
    torch.set_num_threads(chosen.threads)
    rows, added = [], []
    for batch in chosen.batches:
        for on in (0, 1):
            found = [in_a_process(layers, batch, on, chosen.threads) for layers in chosen.depths]
            setting = [batch, "on" if on else "off"]
            for layers, each in zip(chosen.depths, found, strict=True):
                rows.append([*setting, layers, f"{each['peak']:.0f}", f"{each['seconds']:.3f}"])
            memory, straight = slope(chosen.depths, [each["peak"] for each in found])
            held, _ = slope(chosen.depths, [each["held"] for each in found])
            seconds, line = slope(chosen.depths, [each["seconds"] for each in found])
            time_words = [f"{1e3 * seconds:.2f}", f"{line:.4f}"]
            added.append([*setting, *time_words, f"{memory:.3f}", f"{straight:.4f}", f"{held:.3f}"])
    print(paired.table(["batch", "checkpointing", "blocks", "peak memory, MiB", "a step, s"], rows), end="\n\n")
    header = ["batch", "checkpointing", "a block adds, ms", "R²", "a block adds, MiB", "R²", "of it weights and AdamW"]
    print(paired.table(header, added))
    print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
