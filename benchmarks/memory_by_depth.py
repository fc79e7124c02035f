"""Peak memory of one training step by depth, with and without activation checkpointing; each in a process of its own.

    python benchmarks/memory_by_depth.py --depths 125 250 500 1000

The network of the recipe deepnorm1000: width 32, 64 tokens, batch 8, AdamW, float32. Peak resident memory includes
Python and torch (the row with 1 block); the time is one step's, after one step of warming up.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.designs import DeepNorm
from lightning_norms.model.initialization import Xavier


def step(layers: int, checkpointing: bool) -> dict[str, float]:
    """Two steps of training; peak memory in MiB and seconds of the second."""
    torch.set_num_threads(1)
    config = DecoderConfig(
        vocab_size=256, d_model=32, n_layers=layers, placement=DeepNorm(), initialization=Xavier(), tied_head=False,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    decoder = Decoder(config)
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    tokens, labels = torch.randint(256, (2, 8, 64))
    for _ in range(2):
        began = time.perf_counter()
        nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak": peak, "seconds": time.perf_counter() - began}


def main() -> None:
    """One line for each depth and setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[125, 250, 500, 1000])
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(step(arguments.one[0], bool(arguments.one[1]))))
        return
    print("| blocks | checkpointing | peak memory, MiB | a step, s |\n|---|---|---|---|")
    for layers in (1, *arguments.depths):
        for on in (0, 1):
            done = subprocess.run(
                [sys.executable, __file__, "--one", str(layers), str(on)], capture_output=True, text=True, check=True
            )
            row = json.loads(done.stdout)
            print(f"| {layers} | {'on' if on else 'off'} | {row['peak']:.0f} | {row['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
