"""Popular sentences about norms, held against numbers of this machine: which are true of a 24-block decoder?

    python examples/popular_sentences.py     about three minutes; --seeds 1 for a third of that

What you see: `diagnose` on a post-norm and a pre-norm decoder (bytes of Python's library, Xavier init, AdamW at 1e-3,
no warmup), three seeds, and a table: the sentence, on how many seeds it holds, and what was measured on the last one.
"""

import argparse

import torch
from lightning.pytorch import Trainer, seed_everything
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_norms import DecoderConfig, DecoderModule, TextDataModule, Xavier, diagnose
from lightning_norms.placements import PostNorm, PreNorm


def found(placement: PostNorm | PreNorm, seed: int, layers: int, steps: int) -> list[tuple[str, bool | None, str]]:
    """Each popular sentence with its answer and its numbers."""
    seed_everything(seed, verbose=False)
    config = DecoderConfig(
        n_layers=layers, d_model=32, n_heads=4, context_length=32, placement=placement, initialization=Xavier()
    )
    module = DecoderModule(config, learning_rate=1e-3)
    trainer = Trainer(max_steps=300, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    diagnosis = diagnose(module, TextDataModule(context_length=32, batch_size=8), trainer, steps=steps)
    return [(claim.popular, claim.holds, claim.measured) for claim in diagnosis.claims]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(box=box.SIMPLE_HEAD, title=f"{chosen.layers} blocks, {chosen.seeds} seeds")
    for column in ("placement", "popular sentence", "holds on", "measured on the last seed"):
        table.add_column(column)
    for placement in (PostNorm(), PreNorm()):
        answers: dict[str, list[bool | None]] = {}
        measured: dict[str, str] = {}
        for seed in range(chosen.seeds):
            for sentence, holds, numbers in found(placement, seed, chosen.layers, chosen.steps):
                answers.setdefault(sentence, []).append(holds)
                measured[sentence] = numbers
        for sentence, holds in answers.items():
            undecided = f", {holds.count(None)} undecided" if None in holds else ""
            yes = f"{holds.count(True)} of {len(holds)}{undecided}"
            table.add_row(type(placement).__name__, sentence, yes, measured[sentence])
    Console().print(table)


if __name__ == "__main__":
    main()
