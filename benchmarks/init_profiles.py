"""Every placement before training: how large the stream gets, and how gradients lie over depth; one table, one picture.

    python benchmarks/init_profiles.py --folder benchmarks

Xavier-normal weights, embeddings of variance 1, GELU, width 128, 4 heads, 64 tokens, batch 2, random labels, 3 seeds;
about five minutes on one core. No training: what these numbers say about a run is for the runs to say.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_norms.measuring.stream import stream_of
from lightning_norms.model.attention import QKNorm
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import GELU, ReLU
from lightning_norms.model.initialization import Xavier
from lightning_norms.model.placements.catalogue import designs
from lightning_norms.model.placements.learned_gates import AdminResidual
from lightning_norms.model.positions import Rotary
from lightning_norms.model.residual import Placement
from lightning_norms.placements import (
    Admin,
    OutputNorm,
    PostNorm,
    PreNorm,
    ProRes,
    ResPostNorm,
    ReZero,
    SkipInit,
)

DEPTHS, SEEDS, VOCABULARY = (6, 24, 48), (0, 1, 2), 256
SILENT = (ReZero, SkipInit, ResPostNorm, ProRes)
"""Identities at the start: their branches get no gradient at step 0."""


@dataclass(frozen=True)
class Start:
    """One network before its first step."""

    rms: float
    """Of the stream after the last block."""
    gradients: tuple[float, ...]
    """Frobenius norm of the gradient of W_2, the feed-forward's writer, block by block."""


def network(
    placement: Placement, layers: int, width: int = 128, heads: int = 4, ff: float = 4.0, **options: object
) -> Decoder:
    """A decoder in the setting of this page."""
    config = {"feed_forward": GELU(), "qk_norm": QKNorm() if placement.wants_qk_norm else None} | options
    return Decoder(
        DecoderConfig(
            vocab_size=VOCABULARY, context_length=64, d_model=width, n_heads=heads, n_layers=layers, ff_multiplier=ff,
            tied_head=False, placement=placement, positions=Rotary(), initialization=Xavier(1.0), **config,
        )
    )  # fmt: skip


def start(placement: Placement, layers: int, seed: int, width: int = 128, **options: object) -> Start:
    """Build, run once, and read off."""
    torch.manual_seed(seed)
    decoder = network(placement, layers, width, **options)
    tokens, labels = torch.randint(VOCABULARY, (2, 2, 64))
    if isinstance(placement, Admin):
        profile_omegas(decoder, tokens)
    last: list[Tensor] = []
    handle = decoder.blocks[-1].register_forward_hook(lambda *arguments: last.append(newest(arguments[2])))
    nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten()).backward()
    handle.remove()
    gradients = tuple(float(block.feed_forward.writer.weight.grad.norm()) for block in decoder.blocks)
    return Start(float(last[0].detach().square().mean().sqrt()), gradients)


@torch.no_grad()
def profile_omegas(decoder: Decoder, tokens: Tensor) -> None:
    """Set Admin's omegas from one batch, as the callback AdminProfile does."""
    residuals = [module for module in decoder.modules() if isinstance(module, AdminResidual)]
    for residual in residuals:
        residual.begin_profile()
    decoder(tokens)
    omega = 1.0
    for residual in residuals:
        omega = residual.end_profile(omega)


def newest(output: object) -> Tensor:
    """The stream in a block's output; of attention over depth, whose tuple is a list of the past, the mean."""
    if isinstance(output, tuple) and len(output) > 2:
        return torch.stack(output).mean(0)
    stream = stream_of(output)
    assert stream is not None
    return stream


def exponent(depths: Iterable[int], values: Iterable[float]) -> float:
    """P of ``value = c L^p``: slope of a straight line through the logarithms."""
    x, y = [math.log(d) for d in depths], [math.log(v) for v in values]
    middle = statistics.fmean(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def geometric(values: Iterable[float]) -> float:
    """Geometric mean; 0 if one is 0."""
    listed = list(values)
    return 0.0 if min(listed) <= 0 else statistics.geometric_mean(listed)


def lemma_2(placement: Placement, layers: int = 24, width: int = 128, seed: int = 0) -> list[float]:
    """Mean square of the stream by block in the setting of Xiong et al.: one head, W_Q = W_K = 0, ReLU, all d x d.

    Post-norm: of what the second norm of a block is given. Pre-norm: of the block's output.
    """
    torch.manual_seed(seed)
    decoder = network(placement, layers, width, heads=1, ff=1.0, feed_forward=ReLU())
    found: list[float] = []
    for block in decoder.blocks:
        nn.init.zeros_(block.attention.query.weight)
        nn.init.zeros_(block.attention.key.weight)
        closing = block.feed_forward_residual.closing
        closing.register_forward_pre_hook(lambda _, inputs: found.append(float(inputs[0].square().mean())))
    with torch.no_grad():
        decoder(torch.randint(VOCABULARY, (8, 64)))
    return found


def lines(starts: dict[str, dict[int, list[Start]]]) -> list[str]:
    """The table's rows."""
    rows = []
    for name, by_depth in starts.items():
        rms = [geometric(s.rms for s in by_depth[depth]) for depth in DEPTHS]
        last = [geometric(s.gradients[-1] for s in by_depth[depth]) for depth in DEPTHS]
        first = [geometric(s.gradients[0] for s in by_depth[depth]) for depth in DEPTHS]
        if min(last) > 0:
            cells = [
                " / ".join(f"{a / b:.2g}" for a, b in zip(last, first, strict=True)),
                f"{last[-1]:.2g}",
                f"{exponent(DEPTHS, last):+.2f}",
            ]
        else:
            cells = ["0 at step 0", "0", ""]
        rows.append(f"| {name} | {' / '.join(f'{value:.2f}' for value in rms)} | {' | '.join(cells)} |")
    return rows


def lemma_lines() -> list[str]:
    """Lemma 2, checked."""
    post, pre = lemma_2(PostNorm()), lemma_2(PreNorm())
    inside = all(1 + layer / 2 <= value <= 1 + 3 * layer / 2 for layer, value in enumerate(pre, start=1))
    return [
        "Lemma 2 of Xiong et al. 2020 (one head, W_Q = W_K = 0, ReLU, d x d, 24 blocks, seed 0). Post-norm: 1.5 in",
        f"front of the second norm of every block, measured {min(post):.3f} to {max(post):.3f}. Pre-norm: between",
        f"1 + l/2 and 1 + 3l/2 behind block l, {'all' if inside else 'NOT all'} 24 inside, {pre[-1]:.2f} at the end.",
    ]


def picture(starts: dict[str, dict[int, list[Start]]]) -> Figure:
    """One panel a design: gradient of W_2 by depth, one line for each number of blocks."""
    shown = {name: by for name, by in starts.items() if min(by[6][0].gradients) > 0}
    columns = 6
    figure = Figure(figsize=(15, 2.1 * math.ceil(len(shown) / columns)), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(math.ceil(len(shown) / columns), columns, sharex=True, sharey=True).flatten()
    for axes, (name, by_depth) in zip(grid, shown.items(), strict=False):
        for depth, colour in zip(DEPTHS, ("tab:green", "tab:orange", "tab:blue"), strict=True):
            means = [geometric(column) for column in zip(*(s.gradients for s in by_depth[depth]), strict=True)]
            axes.plot([i / (depth - 1) for i in range(depth)], means, color=colour, label=f"{depth} blocks")
        axes.set_title(name, fontsize=9)
        axes.set_yscale("log")
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    grid[0].legend(fontsize=7)
    figure.supxlabel("depth: 0 is the bottom block, 1 the top")
    figure.supylabel("norm of the gradient of W_2 (loss in nats), geometric mean of 3 seeds")
    return figure


def main() -> None:
    """Measure all, write ``init_profiles.md`` and ``init_profiles.png``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("benchmarks"))
    folder = parser.parse_args().folder
    warnings.filterwarnings("ignore", message=".*give `qk_norm")
    variants: dict[str, tuple[Placement, dict[str, object]]] = {name: (cls(), {}) for name, cls in designs().items()}
    variants["OutputNorm without qk-norm"] = (OutputNorm(), {"qk_norm": None})
    starts = {}
    for name, (placement, options) in variants.items():
        starts[name] = {depth: [start(placement, depth, seed, **options) for seed in SEEDS] for depth in DEPTHS}
        print(lines({name: starts[name]})[0], flush=True)
    head = [
        "# Before the first step",
        "",
        *(__doc__ or "").strip().splitlines()[4:],
        "Written by `python benchmarks/init_profiles.py`. W_2 is the second matrix of the feed-forward; three numbers",
        "are for 6 / 24 / 48 blocks, geometric means over seeds; p is the fit of the last block's gradient to L^p,",
        "which theorem 1 of Xiong et al. 2020 bounds by 0 for post-norm and by -1/2 for pre-norm.",
        "",
        "| placement | RMS of the stream at the end | gradient of W_2, last / first block | last block, L=48 | p |",
        "|---|---|---|---|---|",
    ]
    page = [*head, *lines(starts), "", *lemma_lines(), "", "![gradients by depth](init_profiles.png)"]
    (folder / "init_profiles.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    picture(starts).savefig(folder / "init_profiles.png")


if __name__ == "__main__":
    main()
