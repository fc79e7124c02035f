"""The root namespace is short, its families have their modules, and nothing at the root shadows torch."""

import inspect

import pytest
from torch import nn

import lightning_norms
from lightning_norms import callbacks, norms, placements, rescale_rules, schedules
from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Placement
from lightning_norms.rescale_rules import RescaleRule
from lightning_norms.schedules import Schedule


def test_the_root_is_short_and_shadows_nothing():
    assert 20 <= len(lightning_norms.__all__) <= 30
    assert not [name for name in lightning_norms.__all__ if hasattr(nn, name) or hasattr(nn.functional, name)]
    assert set(callbacks.__all__) <= set(lightning_norms.__all__)


@pytest.mark.parametrize(
    ("module", "base"),
    [(placements, Placement), (norms, Norm), (schedules, Schedule), (rescale_rules, RescaleRule)],
    ids=lambda value: value.__name__,
)
def test_a_family_module_has_every_class_of_its_family(module, base):
    pending, classes = [base], []
    while pending:
        children = pending.pop().__subclasses__()
        pending += children
        classes += [cls for cls in children if cls.__module__.startswith("lightning_norms.")]
    assert len(classes) >= 6
    for cls in [base, *classes]:
        assert not inspect.isabstract(cls) or cls is base
        assert getattr(module, cls.__name__) is cls
        assert cls.__name__ in getattr(module, "__all__", dir(module))
