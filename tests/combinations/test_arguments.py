"""Case 49: YAML lets ``.nan``, ``.inf`` and ``null`` through to any argument, so our constructors refuse them."""

import inspect
import math

import pytest
from lightning.pytorch import Callback

from lightning_norms import callbacks, rescale_rules, schedules
from lightning_norms.rescale_rules import RescaleRule
from lightning_norms.schedules import LinearDecay, LinearWarmup, Schedule

NEEDED = {"LinearWarmup": (4,), "InverseSqrtDecay": (4,), "Noam": (16, 4), "CosineDecay": (4,),
          "LinearDecay": (4,), "WarmupStableDecay": (4, 4), "Then": (LinearWarmup(2), LinearDecay(2)),
          "ConstantRescale": (0.5,)}  # fmt: skip
"""Arguments of those that have no default."""


def classes():
    """Every public callback, schedule and rule that can be built."""
    public = [value for module in (callbacks, schedules, rescale_rules) for value in vars(module).values()]
    classes = [value for value in public if isinstance(value, type) and value.__module__.startswith("lightning_norms.")]
    return [
        cls for cls in classes if issubclass(cls, (Callback, Schedule, RescaleRule)) and not inspect.isabstract(cls)
    ]


def arguments():
    """(class, argument, value) for every value that makes no sense there; None does where it is the default."""
    for cls in classes():
        for name, parameter in inspect.signature(cls).parameters.items():
            for value in (math.nan, math.inf, -math.inf, None):
                if not (value is None and parameter.default is None):
                    yield pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{value}")


def build(cls, **changed):
    parameters = list(inspect.signature(cls).parameters)
    given = dict(zip(parameters, NEEDED.get(cls.__name__, ()), strict=False))
    return cls(**(given | changed))


@pytest.mark.parametrize(("cls", "name", "value"), list(arguments()))
def test_refused_when_built_in_words_that_name_the_argument(cls, name, value):
    with pytest.raises((ValueError, TypeError)) as caught:
        build(cls, **{name: value})
    message = str(caught.value)
    if cls.__name__ in ("ResidualRescale", "UnitMatrices"):
        return  # refused by re.compile, in its own words
    assert name in message
    assert str(value) in message
    assert "\n" not in message


def test_every_argument_is_asked():
    assert {cls.__name__ for cls in classes()} >= {"Warmup", "LRFallback", "DepthMonitor", "ResidualRescale", "Then"}
    assert len(list(arguments())) > 120
    for cls in classes():
        build(cls)
