"""Tokens per second of greedy generation: with our cache, without, and Hugging Face's ``generate`` on the same weights.

    python benchmarks/generate.py                            about 2 minutes on 2 cores
    python benchmarks/generate.py --shapes 6x384 --rounds 9

All three must say the same tokens before anything is timed. The second table is the time by length: with a cache a
token costs the same wherever it stands but for the attention over what is there, so the time is linear in the length.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import time
import warnings
from collections.abc import Callable

import numpy
import paired
import peers
import torch
from peers import Shape
from torch import Tensor

from lightning_norms.model.decoder import Decoder
from lightning_norms.model.generation import Sampling, generate

SHAPES = {
    "6x384": Shape(6, 384, 6, 512, 1, 512),
    "12x128": Shape(12, 128, 4, 512, 1, 512),
    "48x64": Shape(48, 64, 4, 512, 1, 256),
}
PROMPT = 16
GREEDY = Sampling(temperature=0)


def without_cache(decoder: Decoder, prompt: Tensor, new: int) -> Tensor:
    """Everything again for each token."""
    tokens = prompt
    for _ in range(new):
        tokens = torch.cat((tokens, decoder(tokens)[:, -1].argmax(-1)[:, None]), dim=1)
    return tokens


def hugging_face(model: peers.HuggingFace, prompt: Tensor, new: int) -> Tensor:
    """Its own loop and cache."""
    tokens: Tensor = model.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        use_cache=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return tokens


def candidates(shape: Shape) -> dict[str, Callable[[int], Tensor]]:
    """Number of new tokens -> all tokens; of the same weights."""
    torch.manual_seed(0)
    decoder = peers.ours(shape).eval()
    for parameter in decoder.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)  # so that the likeliest token is likely
    theirs = peers.HuggingFace(shape, decoder).eval()
    prompt = torch.randint(shape.vocabulary, (shape.batch, PROMPT))
    return {
        "ours, with cache": lambda new: generate(decoder, prompt, new, GREEDY),
        "Hugging Face generate": lambda new: hugging_face(theirs, prompt, new),
        "ours, without cache": lambda new: without_cache(decoder, prompt, new),
    }


def seconds(run: Callable[[int], Tensor], new: int) -> float:
    """Of one text."""
    begun = time.perf_counter()
    run(new)
    return time.perf_counter() - begun


def speeds(name: str, made: dict[str, Callable[[int], Tensor]], new: int, rounds: int) -> list[list[object]]:
    """A row for each candidate."""
    said = [run(new) for run in made.values()]
    if not all(torch.equal(said[0], other) for other in said):
        raise SystemExit(f"{name}: the same weights say different tokens.")
    figures = paired.in_turn({each: functools.partial(seconds, run, new) for each, run in made.items()}, rounds)
    ours = figures["ours, with cache"]
    return [
        [name, each, f"{new / statistics.median(times):,.0f}", paired.told(paired.ratios(times, ours))]
        for each, times in figures.items()
    ]


def by_length(name: str, run: Callable[[int], Tensor], rounds: int) -> list[object]:
    """Seconds of several lengths, and how well a straight line fits."""
    lengths = (60, 120, 240, 480)
    figures = paired.in_turn({str(new): functools.partial(seconds, run, new) for new in lengths}, rounds)
    middle = [statistics.median(times) for times in figures.values()]
    fit = numpy.corrcoef(lengths, middle)[0, 1] ** 2
    return [name, *(f"{1e3 * each:.0f}" for each in middle), f"{fit:.4f}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--new", type=int, default=240, help="tokens to add to a prompt of 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rows, lengths = [], []
    with torch.inference_mode():
        for name in chosen.shapes:
            made = candidates(SHAPES[name])
            rows += speeds(name, made, chosen.new, chosen.rounds)
            lengths.append(by_length(name, made["ours, with cache"], chosen.rounds))
    print(paired.table(["shape", "", "tokens/s", "its time / ours"], rows), end="\n\n")
    print(paired.table(["shape", "60 tokens, ms", "120", "240", "480", "R² of a line"], lengths))
    print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
