"""Train deep Transformers in PyTorch Lightning whatever the norm placement.

The public names. A YAML file needs none of these imports: there a class is named by one word.
"""

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.data.text import TextDataModule
from lightning_norms.data.tokens import BytePairs, Bytes
from lightning_norms.metrics import BitsPerByte
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import GELU, SwiGLU
from lightning_norms.model.generation import Sampling
from lightning_norms.model.initialization import GPT2, Normal, Xavier
from lightning_norms.model.norms import LayerNorm, Norm, RMSNorm
from lightning_norms.model.placements import DeepNorm, Placement, PostNorm, PreNorm
from lightning_norms.model.positions import Learned, Rotary, Sinusoidal
from lightning_norms.model.residual import Inner, Residual, Site
from lightning_norms.module import DecoderModule
from lightning_norms.rescale_rules import ConstantRescale, DeepNormRescale, DepthRescale, GPT2Rescale, RescaleRule
from lightning_norms.schedules import (
    Constant,
    CosineDecay,
    Exponential,
    InverseSqrt,
    Linear,
    LinearDecay,
    Noam,
    Schedule,
    Then,
    Untuned,
    WarmupStableDecay,
    then,
)

__version__ = "0.1.0"

__all__ = [
    "GELU",
    "GPT2",
    "BitsPerByte",
    "BytePairs",
    "Bytes",
    "Constant",
    "ConstantRescale",
    "CosineDecay",
    "Decoder",
    "DecoderConfig",
    "DecoderModule",
    "DeepNorm",
    "DeepNormRescale",
    "DepthMonitor",
    "DepthRescale",
    "Exponential",
    "FallbackExhaustedError",
    "GPT2Rescale",
    "Inner",
    "InverseSqrt",
    "LRFallback",
    "LayerNorm",
    "Learned",
    "Linear",
    "LinearDecay",
    "Noam",
    "Norm",
    "Normal",
    "Placement",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "RescaleRule",
    "Residual",
    "ResidualRescale",
    "Rotary",
    "Sampling",
    "Schedule",
    "Sinusoidal",
    "Site",
    "SwiGLU",
    "TextDataModule",
    "Then",
    "Untuned",
    "Warmup",
    "WarmupStableDecay",
    "Xavier",
    "then",
]
