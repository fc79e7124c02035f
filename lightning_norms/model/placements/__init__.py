"""Where norms sit: every published placement, by family."""

from lightning_norms.model.placements.attention_residuals import *
from lightning_norms.model.placements.combinations import *
from lightning_norms.model.placements.depth_constants import *
from lightning_norms.model.placements.hyper_connections import *
from lightning_norms.model.placements.learned_gates import *
from lightning_norms.model.placements.ngpt import *
from lightning_norms.model.placements.single_stream import *
from lightning_norms.model.placements.two_streams import *
