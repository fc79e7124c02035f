"""Train deep Transformers in PyTorch Lightning whatever the norm placement.

Families have their module: :mod:`~lightning_norms.placements`, :mod:`~lightning_norms.norms`,
:mod:`~lightning_norms.schedules`, :mod:`~lightning_norms.rescale_rules` and :mod:`~lightning_norms.callbacks`. A YAML
file needs none of these imports: there a class is named by one word.
"""

from lightning_norms import norms, placements, rescale_rules, schedules
from lightning_norms.anatomy.describe import describe
from lightning_norms.callbacks import (
    AdminProfile,
    AfterStep,
    DepthMonitor,
    FallbackExhaustedError,
    LRFallback,
    ResidualRescale,
    RunRecord,
    UnitMatrices,
    Warmup,
)
from lightning_norms.data.text import TextDataModule
from lightning_norms.data.tokens import BytePairs, Bytes
from lightning_norms.diagnosing.diagnose import diagnose
from lightning_norms.metrics import BitsPerByte
from lightning_norms.model.attention import QKNorm
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.generation import Sampling
from lightning_norms.model.initialization import Xavier
from lightning_norms.module import DecoderModule
from lightning_norms.schedules import LinearWarmup

__version__ = "0.1.0"

__all__ = [
    "AdminProfile",
    "AfterStep",
    "BitsPerByte",
    "BytePairs",
    "Bytes",
    "Decoder",
    "DecoderConfig",
    "DecoderModule",
    "DepthMonitor",
    "FallbackExhaustedError",
    "LRFallback",
    "LinearWarmup",
    "QKNorm",
    "ResidualRescale",
    "RunRecord",
    "Sampling",
    "TextDataModule",
    "UnitMatrices",
    "Warmup",
    "Xavier",
    "describe",
    "diagnose",
    "norms",
    "placements",
    "rescale_rules",
    "schedules",
]
