"""Train deep Transformers in PyTorch Lightning whatever the norm placement.

The public names. A YAML file needs none of these imports: there a class is named by one word.
"""

from lightning_norms.anatomy.describe import describe
from lightning_norms.callbacks.admin_profile import AdminProfile
from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.run_record import RunRecord
from lightning_norms.callbacks.unit_matrices import UnitMatrices
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.data.text import TextDataModule
from lightning_norms.data.tokens import BytePairs, Bytes
from lightning_norms.diagnosing.diagnose import diagnose
from lightning_norms.metrics import BitsPerByte
from lightning_norms.model.attention import QKNorm
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import GELU, ReLU, SwiGLU
from lightning_norms.model.generation import Sampling
from lightning_norms.model.initialization import GPT2, Normal, Xavier
from lightning_norms.model.norms import Derf, DyT, L2Norm, LayerNorm, Norm, RMSNorm, ScaleNorm
from lightning_norms.model.placements.catalogue import (
    B2T,
    KEEL,
    LNS,
    MHC,
    NGPT,
    Admin,
    AttentionResiduals,
    BeamNorm,
    CompleteP,
    DeepNorm,
    DSInit,
    DynamicHyperConnections,
    GLMDeepNorm,
    HybridNorm,
    HybridNormStar,
    HyperConnections,
    MixNorm,
    NormFormer,
    OutputNorm,
    ParallelBlock,
    PeriNorm,
    PostNorm,
    PreNorm,
    ProRes,
    ResiDual,
    ResPostNorm,
    ReZero,
    Sandwich,
    SiameseNorm,
    SkipInit,
    SubNorm,
    TFixup,
)
from lightning_norms.model.positions import Learned, Rotary, Sinusoidal
from lightning_norms.model.residual import Inner, Placement, Residual, Site
from lightning_norms.module import DecoderModule
from lightning_norms.rescale_rules import (
    AdminRescale,
    ConstantRescale,
    DeepNormRescale,
    DepthRescale,
    GPT2Rescale,
    RescaleRule,
    SubNormRescale,
    TFixupRescale,
)
from lightning_norms.schedules import (
    Constant,
    CosineDecay,
    ExponentialWarmup,
    InverseSqrtDecay,
    LinearDecay,
    LinearWarmup,
    Noam,
    Schedule,
    Then,
    UntunedWarmup,
    WarmupStableDecay,
)

__version__ = "0.1.0"

__all__ = [
    "B2T",
    "GELU",
    "GPT2",
    "KEEL",
    "LNS",
    "MHC",
    "NGPT",
    "Admin",
    "AdminProfile",
    "AdminRescale",
    "AfterStep",
    "AttentionResiduals",
    "BeamNorm",
    "BitsPerByte",
    "BytePairs",
    "Bytes",
    "CompleteP",
    "Constant",
    "ConstantRescale",
    "CosineDecay",
    "DSInit",
    "Decoder",
    "DecoderConfig",
    "DecoderModule",
    "DeepNorm",
    "DeepNormRescale",
    "DepthMonitor",
    "DepthRescale",
    "Derf",
    "DyT",
    "DynamicHyperConnections",
    "ExponentialWarmup",
    "FallbackExhaustedError",
    "GLMDeepNorm",
    "GPT2Rescale",
    "HybridNorm",
    "HybridNormStar",
    "HyperConnections",
    "Inner",
    "InverseSqrtDecay",
    "L2Norm",
    "LRFallback",
    "LayerNorm",
    "Learned",
    "LinearDecay",
    "LinearWarmup",
    "MixNorm",
    "Noam",
    "Norm",
    "NormFormer",
    "Normal",
    "OutputNorm",
    "ParallelBlock",
    "PeriNorm",
    "Placement",
    "PostNorm",
    "PreNorm",
    "ProRes",
    "QKNorm",
    "RMSNorm",
    "ReLU",
    "ReZero",
    "ResPostNorm",
    "RescaleRule",
    "ResiDual",
    "Residual",
    "ResidualRescale",
    "Rotary",
    "RunRecord",
    "Sampling",
    "Sandwich",
    "ScaleNorm",
    "Schedule",
    "SiameseNorm",
    "Sinusoidal",
    "Site",
    "SkipInit",
    "SubNorm",
    "SubNormRescale",
    "SwiGLU",
    "TFixup",
    "TFixupRescale",
    "TextDataModule",
    "Then",
    "UnitMatrices",
    "UntunedWarmup",
    "Warmup",
    "WarmupStableDecay",
    "Xavier",
    "describe",
    "diagnose",
]
