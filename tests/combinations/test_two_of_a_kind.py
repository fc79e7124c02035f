"""Case 48: a module's ``configure_callbacks`` beside the Trainer's callbacks, and two of a kind."""

import logging

import pytest

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.learning_rate import factors_of
from lightning_norms.schedules import LinearWarmup
from tests.combinations.four import BASE, Naive, assert_norms, assert_rescaled, learner, weights
from tests.stand_ins import trainer


class MyWarmup(Warmup):
    """For Lightning a class of its own."""


class MyFallback(LRFallback):
    """For Lightning a class of its own."""


def configured(*callbacks):
    module = learner()
    module.configure_callbacks = lambda: list(callbacks)
    return module


@pytest.mark.parametrize("kind", [Warmup, MyWarmup])
def test_a_module_that_brings_its_own_replaces_ours_and_one_line_says_so(kind, tmp_path, caplog):
    """Lightning's rule, also for a subclass: the module's W = 2 is used, and Lightning's line names what it dropped."""
    module = configured(kind(LinearWarmup(2)))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer(tmp_path, Warmup(LinearWarmup(4))).fit(module)
    assert [rate for (rate,) in module.trainer.optimizers[0].trace] == pytest.approx([BASE / 2, BASE, BASE, BASE])
    said = "in `LightningModule.configure_callbacks` will override existing callbacks passed to Trainer: Warmup"
    assert [line for line in caplog.messages if said in line]


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        (
            MyWarmup(LinearWarmup(4)),
            Warmup(LinearWarmup(2)),
            "Warmup: another Warmup is on this optimizer already; keep one",
        ),
        (MyFallback(), LRFallback(), "LRFallback: another LRFallback acts in this run already; keep one"),
    ],
)
def test_a_subclass_in_the_trainer_is_kept_by_lightning_and_refused_by_us(ours, theirs, sentence, tmp_path):
    """Nobody drops it, so there are two; the second one to start says so, and the optimizer is left as it was."""
    module = configured(theirs)
    with pytest.raises(ValueError, match=sentence):
        trainer(tmp_path, ours).fit(module)
    optimizer = module.trainer.optimizers[0]
    assert optimizer.param_groups[0]["lr"] == BASE
    assert factors_of(optimizer).names() == ()
    assert module.losses == []


def test_two_in_one_list_is_lightnings_own_error(tmp_path):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `LRFallback`"):
        trainer(tmp_path, LRFallback(), LRFallback())


class MyRescale(ResidualRescale):
    """For Lightning a class of its own."""


class MyMonitor(DepthMonitor):
    """For Lightning a class of its own."""


def test_a_second_rescale_changes_nothing_and_a_second_monitor_sees_the_same(tmp_path):
    """Harmless, so not refused: the writers x 1/sqrt(6) once, and two equal records."""
    quiet = {"every_n_steps": 1, "table": False, "picture": False}
    module, naive, monitors = learner(), Naive(), (MyMonitor(**quiet), DepthMonitor(**quiet))
    before = weights(module)
    trainer(tmp_path, naive, MyRescale(), ResidualRescale(), *monitors).fit(module)
    assert_rescaled(before, naive.start)
    for monitor in monitors:
        assert_norms(monitor, naive.norms)
