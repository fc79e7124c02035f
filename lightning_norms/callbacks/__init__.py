"""Callbacks for anybody's LightningModule, one file each. They never import each other, the model or our module."""

from lightning_norms.callbacks.admin_profile import AdminProfile
from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.run_record import RunRecord
from lightning_norms.callbacks.unit_matrices import UnitMatrices
from lightning_norms.callbacks.warmup import Warmup

__all__ = [
    "AdminProfile",
    "AfterStep",
    "DepthMonitor",
    "FallbackExhaustedError",
    "LRFallback",
    "ResidualRescale",
    "RunRecord",
    "UnitMatrices",
    "Warmup",
]
