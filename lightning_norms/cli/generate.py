"""``lightning_norms generate``: text from a checkpoint, without its data and without its configuration file."""

from __future__ import annotations

from pathlib import Path

import torch
from jsonargparse import ArgumentParser

from lightning_norms.files.log_folder import is_url
from lightning_norms.model.generation import Sampling
from lightning_norms.module import DecoderModule


def command(arguments: list[str]) -> int:
    """Run ``lightning_norms generate --ckpt_path FILE [--prompt TEXT] ...``; return the exit code."""
    text = "Generate text with a trained DecoderModule."
    parser = ArgumentParser(prog="lightning_norms generate", description=text, exit_on_error=False)
    parser.add_argument("--ckpt_path", type=str, required=True, help="a checkpoint that fit has written")
    parser.add_argument("--prompt", type=str, default="", help="start of the text; empty starts a document")
    text = "most tokens to add; the text also ends at context_length"
    parser.add_argument("--max_new_tokens", type=int, default=200, help=text)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the most likely token")
    parser.add_argument("--top_k", type=int | None, default=None, help="draw from this many most likely tokens")
    text = "draw from the most likely tokens that together have this probability"
    parser.add_argument("--top_p", type=float, default=1.0, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    options = parser.parse_args(arguments)
    if not is_url(options.ckpt_path) and not Path(options.ckpt_path).is_file():
        raise FileNotFoundError(
            f"ckpt_path {options.ckpt_path} is not a file: fit writes checkpoints to its log folder."
        )
    module = DecoderModule.load_from_checkpoint(options.ckpt_path, map_location="cpu").eval()
    module.sampling = Sampling(options.temperature, options.top_k, options.top_p)
    module.max_new_tokens = options.max_new_tokens
    print(module.continue_text(options.prompt, torch.Generator().manual_seed(options.seed)))
    return 0
