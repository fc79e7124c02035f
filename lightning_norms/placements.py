"""Norm placements: ``from lightning_norms.placements import PostNorm``.

The table of all is ``lightning_norms/model/placements.md``. :class:`Placement`, :class:`Residual`, :class:`Inner` and
:class:`Site` are what a placement of your own is made of.
"""

from lightning_norms.model.placements import *
from lightning_norms.model.placements.catalogue import designs
from lightning_norms.model.residual import Inner, Placement, Residual, Site

__all__ = ["Inner", "Placement", "Residual", "Site"]
__all__ += [name for name, cls in designs().items() if cls.__module__.startswith("lightning_norms.")]
