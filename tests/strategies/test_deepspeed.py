"""DeepSpeed is not installed here: every callback that could do nothing under it says so, in one sentence."""

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_norms.callbacks.admin_profile import AdminProfile
from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.unit_matrices import UnitMatrices
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.placements import Admin, ProRes
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.test_placement_callbacks import decoder_module, tokens
from tests.stand_ins import Module, loader, trainer


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Only by its name."""

    strategy_name = "fake"


class Tuned(DeepSpeedStrategy):
    """A user's own child of it."""


def fit(folder, module, callback, data, strategy=DeepSpeedStrategy):
    options = {"strategy": strategy(device=torch.device("cpu")), "accelerator": "auto"}
    trainer(folder, callback, max_steps=2, **options).fit(module, data)


@pytest.mark.parametrize(
    ("callback", "build", "sentence"),
    [
        (
            Warmup(LinearWarmup(2)),
            None,
            "Warmup: DeepSpeed steps an optimizer of its own, which this callback does not reach",
        ),
        (ResidualRescale(), None, "ResidualRescale: DeepSpeed has copied the weights by now"),
        (LRFallback(), None, "LRFallback cannot act under DeepSpeed"),
        (UnitMatrices(), None, "UnitMatrices: DeepSpeed keeps the weights in flat pieces"),
        (AdminProfile(), Admin(), "AdminProfile: DeepSpeed keeps the weights elsewhere"),
        (AfterStep(), ProRes(), "AfterStep: DeepSpeed steps an optimizer of its own, so a placement that changes"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_refused_before_a_step(tmp_path, callback, build, sentence):
    module = decoder_module(build) if build else Module()
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=f"^{sentence}") as refusal:
        fit(tmp_path, module, callback, tokens() if build else loader())
    assert str(refusal.value).count(". ") == 0, "one sentence"
    assert all(torch.equal(now, old) for now, old in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, Tuned])
def test_the_monitor_records_nothing_and_says_so(tmp_path, strategy):
    monitor = DepthMonitor(every_n_steps=1)
    with pytest.warns(UserWarning, match="DepthMonitor: DeepSpeed keeps gradients to itself, so nothing is recorded"):
        fit(tmp_path, Module(), monitor, loader(), strategy)
    assert monitor.history.steps == []


def test_a_child_of_deepspeed_is_deepspeed(tmp_path):
    for callback in (Warmup(LinearWarmup(2)), LRFallback(), UnitMatrices()):
        with pytest.raises(ValueError, match="DeepSpeed"):
            fit(tmp_path, Module(), callback, loader(), Tuned)
    with pytest.raises(ValueError, match="ResidualRescale: DeepSpeed"):
        fit(tmp_path, Module(), ResidualRescale(), loader(), Tuned)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_callbacks_with_nothing_to_do_do_not_refuse(tmp_path):
    """AfterStep is in every run of the command line."""
    for callback in (AfterStep(), AdminProfile()):
        module = Module()
        fit(tmp_path, module, callback, loader())
        assert len(module.losses) == 2, "the run went on to its end"
