"""What a norm computes: ``from lightning_norms.norms import RMSNorm``. :class:`Norm` is the base of your own."""

from lightning_norms.model.norms import *
from lightning_norms.model.norms import Norm

__all__ = ["Norm", *(cls.__name__ for cls in Norm.__subclasses__() if cls.__module__ == Norm.__module__)]
