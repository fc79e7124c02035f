"""``lightning_norms generate``: text from a checkpoint, without its data and without its configuration file."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lightning_norms.model.generation import Sampling
from lightning_norms.module import DecoderModule


def command(arguments: list[str]) -> int:
    """``lightning_norms generate --ckpt_path FILE [--prompt TEXT] ...``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lightning_norms generate", description="Text from a trained DecoderModule.")
    parser.add_argument("--ckpt_path", required=True, help="a checkpoint that fit has written")
    parser.add_argument("--prompt", default="", help="what the text starts with; empty starts a document")
    parser.add_argument(
        "--max_new_tokens", type=int, default=200, help="most tokens to add; context_length ends it too"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=None, help="draw from this many likeliest tokens")
    parser.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest tokens with this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    chosen = parser.parse_args(arguments)
    if not Path(chosen.ckpt_path).is_file():
        raise FileNotFoundError(
            f"ckpt_path {chosen.ckpt_path} is not a file: fit writes checkpoints to its log folder."
        )
    module = DecoderModule.load_from_checkpoint(chosen.ckpt_path, map_location="cpu").eval()
    module.sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p)
    module.max_new_tokens = chosen.max_new_tokens
    print(module.continue_text(chosen.prompt, torch.Generator().manual_seed(chosen.seed)))
    return 0
