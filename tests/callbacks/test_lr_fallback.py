"""Faults in small healthy runs: which event, at which step, and that no weight had moved."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.cli.main import main
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import Learner, Watch, assert_same, fit, is_finite, what
from tests.callbacks.test_warmup import Module as Scheduled
from tests.callbacks.test_warmup import Numbers
from tests.stand_ins import seeded, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*", "ignore:Warmup takes .* optimizer steps, but"
)
STEPS = [1, 5, 30, 70, 200]
CAUSES = {"spike": "spike", "huge": "spike", "nan": "non_finite", "inf_gradient": "non_finite", "oversized": "spike"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """210 steps without a fault."""
    module = Learner()
    return fit(tmp_path_factory.mktemp("undisturbed"), module, steps=210), module


def test_a_healthy_run_has_no_event_and_is_bit_for_bit_that_without_the_callback(undisturbed, tmp_path):
    """Zero events over 210 steps, and not one bit of difference."""
    fallback, module = undisturbed
    assert fallback.events == []
    plain = Learner()
    trainer(tmp_path, max_steps=210).fit(plain)
    assert_same(dict(plain.named_parameters()), dict(module.named_parameters()))
    assert plain.losses == module.losses
    assert plain.losses[-1] < 1.0 < 2.4 < plain.losses[0]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", CAUSES)
def test_a_fault_is_one_event_and_the_step_is_skipped_exactly(kind, step, tmp_path):
    """Acceptance 4: caught before the weights move; one event; the run goes on in training mode."""
    module, watch = Learner({step: kind}), Watch(step)
    fallback = fit(tmp_path, module, watch, steps=step + 6)
    assert what(fallback) == [(step, CAUSES[kind], "skip")]
    assert_same(watch.before[step], watch.after[step])
    assert is_finite(module)
    assert all(module.modes)
    assert (fallback.rescue.ladder.factor, fallback.rescue.ladder.skips) == (1.0, 1)


@pytest.mark.parametrize(("step", "events"), [(1, 0), (5, 0), (30, 0), (70, 1), (200, 1)])
def test_random_labels_are_named_once_the_model_has_learnt(step, events, tmp_path):
    """Before that their loss is like any other, so nothing is to be seen, and the step does no harm."""
    module = Learner({step: "poison"})
    assert what(fit(tmp_path, module, steps=step + 10)) == [(step, "spike", "skip")] * events
    assert is_finite(module)


@pytest.mark.parametrize("step", STEPS[:4])
def test_a_tenfold_learning_rate_for_one_step_does_no_harm_here_and_is_no_event(step, undisturbed, tmp_path):
    """It cannot be seen before its step; afterwards the loss says nothing unusual."""
    module = Learner({step: "glitch"})
    assert fit(tmp_path, module, steps=step + 10).events == []
    assert module.losses[-1] < 1.3 * undisturbed[1].losses[step + 9]


@pytest.mark.parametrize("step", STEPS[:4])
def test_a_learning_rate_glitch_that_ruins_the_weights_is_named_one_step_later_and_undone(step, tmp_path):
    """The documented delay: three bad steps are skipped from the next one on, the fourth goes back to a snapshot."""
    module = Learner({step: "large glitch"})
    fallback = fit(tmp_path, module, steps=step + 20)
    assert what(fallback) == [(step + 1, "spike", "skip"), (step + 4, "divergence", "rollback")]
    assert fallback.rescue.ladder.factor == 0.5
    assert module.losses[step + 1] > 3.5
    assert module.losses[-1] < 2.4


@pytest.mark.parametrize("kind", ["nan", "inf_gradient"])
def test_a_fault_at_every_step_ends_with_a_report(kind, tmp_path):
    """Case 26: 3 skips before each of 3 rollbacks, 3 restarts and the end: 28 steps, weights finite."""
    module, fallback = Learner(dict.fromkeys(range(4, 1000), kind)), LRFallback()
    with pytest.raises(
        FallbackExhaustedError, match=r"not healthy .non_finite: loss .* nothing is left to try"
    ) as error:
        fit(tmp_path, module, fallback=fallback, steps=1000)
    assert len(module.losses) == 4 + 7 * 3 + 7
    actions = [action for _, _, action in what(fallback)]
    assert actions == ["skip", "rollback"] * 3 + ["skip", "restart"] * 3 + ["skip", "stop"]
    assert all(event.message in str(error.value) for event in fallback.events)
    assert is_finite(module)
    assert fallback.rescue.ladder.factor == 0.5**6


class Hopeless(Scheduled):
    """For the command line, which finds it by its path."""

    def __init__(self):
        super().__init__()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")


def test_exit_code_three(tmp_path, capsys):
    """The command line says in a few lines what was tried."""
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.accelerator=cpu"]
    quiet += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.devices=1"]
    model = [f"--model={__name__}.Hopeless", f"--data={__name__}.Data", "--trainer.callbacks+=LRFallback"]
    with pytest.raises(SystemExit) as end:
        main(["fit", *model, *quiet, f"--trainer.default_root_dir={tmp_path}", "--trainer.max_steps=100"])
    assert end.value.code == 3
    message = capsys.readouterr().err
    assert message.count("error: the run is not healthy (non_finite: loss unknown") == 1
    assert "starting again from step 0, learning rate x 0.0625, with a fresh warmup" in message


def _data():
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(6))

    Data.__module__, Data.__qualname__ = __name__, "Data"
    return Data


Data = _data()


# Case 30, and other levels by script.


class Scripted(Scheduled):
    """A loss of a given value at each step, with a small honest gradient."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step >= len(self.values):
            return None
        loss = super().training_step(batch, batch_idx)
        return loss - loss.detach() + self.values[self.trainer.global_step]


def script(folder, values, **options):
    return fit(folder, Scripted(values), steps=len(values), **options)


def test_a_jump_that_stays_is_one_rollback_within_five_steps(tmp_path):
    """Case 30: three steps are skipped, the fourth goes back; then the level is accepted."""
    fallback = script(tmp_path, [3.6] * 30 + [9.0] * 10)
    assert what(fallback) == [(30, "spike", "skip"), (33, "divergence", "rollback")]


def test_a_jump_that_stays_for_long_is_still_one_rollback(tmp_path):
    """A real change of level is accepted, and does not empty the ladder."""
    assert [action for *_, action in what(script(tmp_path, [3.6] * 30 + [9.0] * 120))] == ["skip", "rollback"]


def test_one_high_value_is_one_skip(tmp_path):
    """The documented answer of case 30."""
    assert what(script(tmp_path, [3.6] * 30 + [9.0] + [3.6] * 30)) == [(30, "spike", "skip")]


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*")
@pytest.mark.parametrize("form", ["tensor", "dict", "dict with more", "sometimes none"])
def test_losses_of_every_form(form, tmp_path):
    """Case 27: a tensor, a dict, or None, which is no step to judge."""

    class Forms(Scripted):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if form == "sometimes none" and self.trainer.global_step % 10 > 3:
                return None
            return {"loss": loss, **({"extra": batch} if "more" in form else {})} if "dict" in form else loss

    values = [3.6] * 52 + [9.0] + [3.6] * 8
    fallback = fit(tmp_path, Forms(values), steps=len(values))
    assert what(fallback) == [(52, "spike", "skip")]


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*")
def test_no_loss_at_all_for_a_while_is_no_stall(tmp_path):
    """Eight steps without a loss have no gradient by depth either."""

    class Absent(Learner):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if 10 <= self.trainer.global_step < 40 else loss

    assert fit(tmp_path, Absent(), steps=60).events == []


def test_an_accumulation_that_changes_is_no_jump(tmp_path):
    """Case 27: raw values go from 0.75 to 3.0, and there are zero events."""
    values = [3.0] * 50
    module = Scripted(values)
    module.train_dataloader = lambda: torch.utils.data.DataLoader(torch.ones(96, 2))
    raw = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: raw.append(float(outputs["loss"]))
    fallback = fit(tmp_path, module, GradientAccumulationScheduler({0: 4, 1: 1}), steps=50)
    assert (raw[0], raw[-1]) == (0.75, 3.0)
    assert fallback.events == []
    assert fallback.rescue.watch.spike.losses == [3.0] * 16


def test_one_bad_micro_batch_skips_its_window(tmp_path):
    """With 3 micro-batches a step: the step is skipped, and the event names the optimizer step."""

    class Window(Learner):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if len(self.losses) == 3 * 3 + 2 else loss

    module, watch = Window(), Watch(3)
    fallback = fit(tmp_path, module, watch, steps=12, accumulate_grad_batches=3)
    assert what(fallback) == [(3, "non_finite", "skip")]
    assert_same(watch.before[3], watch.after[3])


def mixed(**more):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **more))]}


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_is_the_scalers_affair(fused, tmp_path):
    """Case 32: the scale falls from 2^30 for several steps: zero events, and no mark on the spike score."""
    module = Learner(fused=fused)
    fallback = fit(tmp_path, module, steps=60, **mixed(init_scale=2.0**30))
    assert fallback.events == []
    assert fallback.rescue.watch.scores["grad_norm"].value() == 0.0
    assert is_finite(module)
    taken = {float(state["step"]) for state in module.trainer.optimizers[0].state.values()}
    assert taken <= {float(step) for step in range(45, 58)}


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_stays_nan_under_a_scaler_ends_too(fused, tmp_path):
    """The scaler has twenty steps for itself; then the ladder begins, and ends."""
    fallback = LRFallback()
    with pytest.raises(FallbackExhaustedError, match="non_finite"):
        fit(
            tmp_path, Learner(dict.fromkeys(range(4, 999), "nan"), fused=fused), fallback=fallback, steps=999, **mixed()
        )
    assert what(fallback)[:2] == [(24, "non_finite", "skip"), (27, "non_finite", "rollback")]
    assert what(fallback)[2] == (48, "non_finite", "skip")  # and twenty more after each time that it went back


def test_the_clock_counts_the_steps_that_were_taken_under_a_scaler(tmp_path):
    """22 steps of NaN: 20 are the scaler's, 2 are skipped here, and none of the 8 healthy ones is lost."""
    module, watch, warmup = Learner(dict.fromkeys(range(4, 26), "nan")), Watch(), Warmup(LinearWarmup(20))
    fallback = fit(tmp_path, module, warmup, watch, steps=30, **mixed())
    assert what(fallback) == [(24, "non_finite", "skip")]
    taken = {float(state["step"]) for state in module.trainer.optimizers[0].state.values()}
    assert taken == {8.0}
    assert warmup.state_dict() == {"steps": [8]}


def test_one_seed_is_one_run(tmp_path):
    """The documented answer is the same each time."""
    first, second = (fit(tmp_path, seeded(lambda: Learner({9: "huge"})), steps=20) for _ in range(2))
    assert [event.to_plain() for event in first.events] == [event.to_plain() for event in second.events]
