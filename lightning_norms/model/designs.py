r"""Every published placement that we build, in one table, and where its class lives.

N is a norm, f a sublayer, L the number of blocks, l a block's number; a "final norm" stands in front of the head.

TABLE

Left out, because no formula that we could verify was found: SpanNorm (arXiv:2601.22580) and GeoNorm (arXiv:2601.22095).
Left out on purpose: LayerScale and DenseFormer (no norm placement), Fixup (made for convolutions; its idea is
:class:`TFixup` and :class:`SkipInit`).
"""

from lightning_norms.model.attention_residuals import AttentionResiduals
from lightning_norms.model.combinations import MixNorm, ProRes
from lightning_norms.model.gates import Admin, NormFormer, ReZero, SkipInit
from lightning_norms.model.hyper_connections import MHC, DynamicHyperConnections, HyperConnections
from lightning_norms.model.hypersphere import NGPT
from lightning_norms.model.placements import (
    KEEL,
    LNS,
    BeamNorm,
    CompleteP,
    DeepNorm,
    DSInit,
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
    TFixup,
)
from lightning_norms.model.streams import B2T, ParallelBlock, ResiDual, SiameseNorm

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
