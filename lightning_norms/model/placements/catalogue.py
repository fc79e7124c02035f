"""Every published placement that we build, in one table, and where its class lives.

:func:`table` writes it as Markdown; ``lightning_norms/model/placements.md`` is its output.
"""

from __future__ import annotations

import inspect

from lightning_norms.model.placements.attention_residuals import AttentionResiduals
from lightning_norms.model.placements.combinations import MixNorm, ProRes
from lightning_norms.model.placements.depth_constants import LNS, BeamNorm, CompleteP, DSInit, TFixup
from lightning_norms.model.placements.hyper_connections import MHC, DynamicHyperConnections, HyperConnections
from lightning_norms.model.placements.learned_gates import Admin, NormFormer, ReZero, SkipInit
from lightning_norms.model.placements.ngpt import NGPT
from lightning_norms.model.placements.single_stream import (
    KEEL,
    DeepNorm,
    GLMDeepNorm,
    HybridNorm,
    HybridNormStar,
    OutputNorm,
    PeriNorm,
    PostNorm,
    PreNorm,
    ResPostNorm,
    Sandwich,
    SubNorm,
)
from lightning_norms.model.placements.two_streams import B2T, ParallelBlock, ResiDual, SiameseNorm
from lightning_norms.model.residual import Placement

__all__ = [
    "B2T",
    "KEEL",
    "LNS",
    "MHC",
    "NGPT",
    "Admin",
    "AttentionResiduals",
    "BeamNorm",
    "CompleteP",
    "DSInit",
    "DeepNorm",
    "DynamicHyperConnections",
    "GLMDeepNorm",
    "HybridNorm",
    "HybridNormStar",
    "HyperConnections",
    "MixNorm",
    "NormFormer",
    "OutputNorm",
    "ParallelBlock",
    "PeriNorm",
    "PostNorm",
    "PreNorm",
    "ProRes",
    "ReZero",
    "ResPostNorm",
    "ResiDual",
    "Sandwich",
    "SiameseNorm",
    "SkipInit",
    "SubNorm",
    "TFixup",
]

DESIGNS: dict[type[Placement], tuple[str, str]] = {
    PreNorm: ("x + f(N x)", "trains at almost any depth; late blocks change a growing stream less and less"),
    PostNorm: ("N(x + f(x))", "the stream keeps its size; deep stacks die without warmup and small branches"),
    DeepNorm: ("N(a x + f(x)), a = (2L)^(1/4), weights (8L)^(-1/4)", "post-norm whose first updates are bounded"),
    GLMDeepNorm: ("N(a x + f(x)), a = (2L)^(1/2), weights 1/a", "a heavier stream; trained a 130B model"),
    KEEL: ("N(2L x + f(N x))", "passes gradients through all norms; learns more slowly early on (in the paper)"),
    B2T: ("y = N(b + att(b)); N(y + ff(y) + b)", "one norm a block on the way down, still post-norm"),
    DSInit: ("N(x + f(x)), weights a/sqrt(l)", "post-norm with less variance in the sum; deep blocks start small"),
    Admin: ("N(w x + f(x)), w profiled", "a branch starts as a small share of its sum; needs a batch before training"),
    Sandwich: ("x + N(f(N x))", "every branch has the size of a gain; two norms more a block"),
    PeriNorm: ("x + N(f(N x)), norm of the embedding if wanted", "stream variance grows by 1 a sublayer; as Sandwich"),
    OutputNorm: ("x + N(f(x))", "as cheap as pre-norm; needs qk-norm"),
    ResPostNorm: ("x + N(f(x)), gains start at 0", "starts as the identity; blocks wait for their gains"),
    SubNorm: ("x + W N(...N x), weights sqrt(ln 2L)", "bounded updates; d + d_ff gains more a block"),
    NormFormer: ("x + N(W c_h head_h(N x)); x + W N(act(N x))", "evens out pre-norm's gradients; d + d_ff gains more"),
    HybridNorm: (
        "x + att(Nq, Nk, Nv); N x + ff(N x)",
        "one pass of the stream through a norm a block; tried to 16 blocks",
    ),
    HybridNormStar: ("HybridNorm, block 1 also pre-norm", "the first attention sees no raw embedding"),
    MixNorm: (
        "post-norm in the first L/4 blocks, pre-norm above",
        "larger gradients for late blocks; lower learning rates",
    ),
    ParallelBlock: ("x + att(N x) + ff(N x)", "both sublayers at once; the feed-forward does not see attention"),
    LNS: ("x + f(N x / sqrt(l))", "bounds the stream; not with writers that shrink with depth"),
    CompleteP: ("x + (L/L0)^(-1) f(N x)", "learning rates carry over to deeper networks; small branches"),
    BeamNorm: ("x sqrt(1 - 1/n) + N(f(N x)) / sqrt(n)", "variance stays 1; the embedding's share shrinks"),
    ReZero: ("x + w f(x), w = 0", "starts as the identity, no norm; nothing bounds the stream later"),
    SkipInit: ("x + w f(x), one w a branch", "as ReZero"),
    TFixup: ("x + f(x), weights (9L)^(-1/4)", "no norm, no warmup; nothing bounds the stream later"),
    ProRes: ("a(l, t) f, a from 0 to 1", "shallow blocks settle first; deep ones idle for T l steps"),
    ResiDual: ("x = N(x + f), r = r + f; x + N(r)", "a path without norms beside post-norm; one tensor more"),
    SiameseNorm: (
        "x = N x; f = F(N(x + N y)); x + f/sqrt(2l), y + f",
        "pre- and post-norm at once; three norms a sublayer",
    ),
    HyperConnections: ("H = B' f(A H) + R' H, n streams", "learned mixing; nothing bounds products of R"),
    DynamicHyperConnections: (
        "HyperConnections + tanh of the token",
        "better than static (in the paper); about 2d(n+2) more",
    ),
    MHC: ("H = M H + p' f(r H), M doubly stochastic", "no drift in depth; n times the stream, Sinkhorn's time"),
    AttentionResiduals: ("softmax over depth of what was written", "chooses its inputs; memory grows with depth"),
    NGPT: ("l2(h + a (l2 f(h) - h))", "no growth by construction; matrices must be renormalised each step"),
}
"""Equation and trade-off of every design, families together."""

LEFT_OUT = {
    "SpanNorm (arXiv:2601.22580), GeoNorm (arXiv:2601.22095)": "no formula found that we could verify",
    "Fixup (arXiv:1901.09321)": "made for convolutions; TFixup and SkipInit are its idea here",
    "LayerScale, DenseFormer, GPAS, Frac-Connections": "not built yet: no norm placement, or not verified",
    "B2T without norms, SiameseNorm's form for language models": "variants; the main form is here",
}

INTRODUCTION = """\
# Where norms sit

Each is one word: `--model.decoder.placement=KEEL`. N is a norm, f a sublayer, L the number of blocks, l a block's
number, n a sublayer's. This page is the output of `lightning_norms.model.placements.catalogue.table()`; a test holds it
to that.
"""


def source(placement: type[Placement]) -> str:
    """What its docstring names as the source.

    Example:
        >>> source(DeepNorm)
        'Wang et al. 2022, arXiv:2203.00555, decoder-only column of table 1 there.'
    """
    return " ".join(inspect.getdoc(placement).partition("Source: ")[2].split())  # type: ignore[union-attr]


def table() -> str:
    """All designs as Markdown, one line each.

    Example:
        >>> print(table().splitlines()[8])
        | `PreNorm` | `x + f(N x)` | trains at almost any depth; ... | GPT-2 (Radford et al. 2019); ... |
    """
    lines = [INTRODUCTION, "| placement | sublayer | trade-off | source |", "|---|---|---|---|"]
    for placement, (equation, trade_off) in DESIGNS.items():
        lines.append(f"| `{placement.__name__}` | `{equation}` | {trade_off} | {source(placement)} |")
    return "\n".join([*lines, "", "Left out:", "", *(f"- {what}: {why}." for what, why in LEFT_OUT.items())])
