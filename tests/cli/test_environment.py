"""Zero-code use: the entry points that Lightning asks, and what the variable adds to somebody's Trainer."""

import copy
import importlib.metadata
import inspect
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import lightning.pytorch.trainer.connectors.callback_connector as connector
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor

import lightning_norms_entry_point
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.cli import environment
from lightning_norms.cli.environment import FromEnvironment
from lightning_norms.cli.main import main
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.test_warmup import STEPS, Memory, Module, SaveAt, W, linear, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch.*"),
    pytest.mark.filterwarnings("ignore:.*Be aware that when using `ckpt_path`.*"),
    pytest.mark.filterwarnings("ignore:DepthMonitor. there are no depths to tell apart"),
]

ROOT = Path(__file__).parents[2]
VARIABLE = "LIGHTNING_NORMS_CALLBACKS"
WARMUP = {
    "class_path": "Warmup",
    "init_args": {"schedule": {"class_path": "LinearWarmup", "init_args": {"warmup_steps": W}}},
}
QUIET = {"class_path": "DepthMonitor", "init_args": {"every_n_steps": 5, "table": False, "picture": False}}
GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")


def declared():
    """Group -> lines, as pyproject.toml has them."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


def test_both_sides_read_the_same_variable():
    assert lightning_norms_entry_point.VARIABLE == environment.VARIABLE == VARIABLE


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """What ``pip install`` would leave: the declared entry points among the metadata on sys.path."""
    folder = tmp_path / "site" / "lightning_norms-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-norms\nVersion: 0.1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in declared().items()]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder.parent


def names(run):
    return [type(callback).__name__ for callback in run.callbacks]


def fit(*callbacks, module=None, ckpt_path=None, **options):
    module = Module() if module is None else module
    run = trainer(*callbacks, **options)
    run.fit(module, ckpt_path=ckpt_path)
    return module, run


def test_the_declared_groups_are_those_that_lightning_asks():
    """Both lead to the same function, and each group's name stands in its package's source."""
    other = pytest.importorskip("pytorch_lightning.trainer.connectors.callback_connector")
    assert tuple(declared()) == GROUPS
    for group, package in zip(GROUPS, (connector, other), strict=True):
        assert f'"{group}"' in inspect.getsource(package)
        (value,) = declared()[group].values()
        found = importlib.metadata.EntryPoint("lightning_norms", value, group).load()
        assert found is lightning_norms_entry_point.callbacks


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_the_variable_nothing_is_added_or_imported(installed, value):
    """Not even torch: a Trainer that did not ask for us pays one look at the environment."""
    code = f"import sys, {lightning_norms_entry_point.__name__} as e; print(e.callbacks(), 'torch' in sys.modules, 'lightning_norms' in sys.modules)"  # noqa: E501
    env = {key: each for key, each in os.environ.items() if key != VARIABLE} | {"PYTHONPATH": str(ROOT)}
    env |= {} if value is None else {VARIABLE: value}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] False False"
    assert names(trainer()) == []


def test_a_script_that_does_not_know_us_gets_warmup_monitor_and_fallback(installed, monkeypatch, caplog, tmp_path):
    """The learning rates are base x min(1, (t+1)/8), the monitor records steps 0, 5, 10, and one line says so."""
    monkeypatch.setenv(VARIABLE, yaml.safe_dump([WARMUP, QUIET, "LRFallback"]))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        module, run = fit(default_root_dir=tmp_path)
    assert names(run) == ["Warmup", "DepthMonitor", "LRFallback"]
    assert [rates[0] for rates in module.optimizer.trace] == pytest.approx([0.1 * linear(t) for t in range(STEPS)])
    assert run.callbacks[1].history.steps == [0, 5, 10]
    assert run.callbacks[2].rescue.state.steps == STEPS
    assert "LIGHTNING_NORMS_CALLBACKS adds Warmup, DepthMonitor, LRFallback." in caplog.messages


@pytest.mark.parametrize("place", ["trainer", "module", "subclass"])
def test_what_the_script_has_already_is_not_added_twice(place, installed, monkeypatch, caplog):
    """The script's own W = 2 is used, and not the environment's 8; the rest is added."""

    class Mine(Warmup):
        pass

    class Configures(Module):
        def configure_callbacks(self):
            return [Warmup(LinearWarmup(2))]

    monkeypatch.setenv(VARIABLE, yaml.safe_dump([WARMUP, QUIET]))
    own = {"trainer": [Warmup(LinearWarmup(2))], "module": [], "subclass": [Mine(LinearWarmup(2))]}[place]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        module, run = fit(*own, module=Configures() if place == "module" else None)
    assert names(run).count("Warmup") + names(run).count("Mine") == 1
    assert names(run)[0] == "DepthMonitor"
    assert [rates[0] for rates in module.optimizer.trace][:3] == pytest.approx([0.05, 0.1, 0.1])
    said = "LIGHTNING_NORMS_CALLBACKS adds DepthMonitor; leaves out Warmup, which the script already has."
    assert said in caplog.messages


def test_a_file_and_a_monitor_of_the_script(installed, monkeypatch, tmp_path):
    """A path works as well as the list; the script's own monitor shows the effective learning rate."""
    (tmp_path / "callbacks.yaml").write_text(yaml.safe_dump([WARMUP]))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "callbacks.yaml"))
    logger = Memory()
    fit(LearningRateMonitor(), logger=logger, log_every_n_steps=1)
    shown = dict(logger.of("lr-Recording/pg1"))
    assert [shown[step] for step in range(STEPS)] == pytest.approx([0.1 * linear(step) for step in range(STEPS)])


@pytest.mark.filterwarnings("ignore:Warmup takes 10 optimizer steps")
def test_on_our_own_command_line_too(installed, monkeypatch, tmp_path):
    """The file's Warmup stays, and the LRFallback of the variable joins it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, yaml.safe_dump([WARMUP, "LRFallback"]))
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.logger=false"]
    short = ["--trainer.max_steps=3", "--trainer.limit_val_batches=0", "--trainer.accelerator=cpu"]
    main(["fit", "--config", "tiny.yaml", *quiet, *short, "--trainer.callbacks.every_n_train_steps=1"])
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert saved["callbacks"]["LRFallback"]["steps"] == 3
    assert saved["callbacks"]["Warmup"] == {"steps": [3]}


def test_resume_and_second_fit(installed, monkeypatch, tmp_path):
    """State goes into the checkpoint under the callbacks' own names, so it does not matter who added them."""
    monkeypatch.setenv(VARIABLE, yaml.safe_dump([WARMUP]))
    fit(SaveAt(tmp_path, 4), steps=8)
    resumed, run = fit(ckpt_path=tmp_path / "4.ckpt", steps=8)
    assert [rates[0] for rates in resumed.optimizer.trace] == pytest.approx(
        [0.1 * linear(step) for step in range(4, 8)]
    )
    trace = resumed.optimizer.trace
    run.fit_loop.epoch_loop.max_steps = 9
    run.fit(resumed)
    assert names(run) == ["Warmup"]
    monkeypatch.delenv(VARIABLE)
    by_hand, _ = fit(Warmup(LinearWarmup(W)), ckpt_path=tmp_path / "4.ckpt", steps=8)
    assert by_hand.optimizer.trace == trace


def test_the_other_distribution_of_lightning(installed, monkeypatch, tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    monkeypatch.setenv(VARIABLE, yaml.safe_dump([WARMUP, QUIET, "LRFallback"]))
    body = {name: vars(Module)[name] for name in ("train_dataloader", "configure_optimizers", "training_step")}
    module = type("Other", (other.LightningModule,), body)()
    module.layer, module.scheduler, module.make, module.accumulate = Module().layer, None, None, 1
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = other.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, default_root_dir=tmp_path, **options)
    run.fit(module)
    assert names(run) == ["Warmup", "DepthMonitor", "LRFallback"]
    assert [rates[0] for rates in module.optimizer.trace] == pytest.approx([0.1 * linear(step) for step in range(12)])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("Warmup", "'Warmup' is neither a list nor a file. Give a list such as [LRFallback, "),
        ("nowhere.yaml", "'nowhere.yaml' is neither a list nor a file."),
        ("[", "its value is not YAML: "),
        ("[3]", "3 is not a callback."),
        ("[LRFallback, LRFallback]", "'LRFallback' is listed twice."),
        ("[Warmupp]", "callbacks is 'Warmupp', but it must be "),
        ("[os.system]", "Import path os.system does not correspond to a subclass of Callback."),
        ("[{class_path: LRFallback, init_args: {cuts: 1}}]", "no key 'callbacks.cuts'. Did you mean cut"),
        ("[{class_path: LRFallback, init_args: {cut: abc}}]", "callbacks.cut is 'abc', but it must be a number."),
        (
            "[{class_path: LRFallback, init_args: {cut: .nan}}]",
            "cut must be a number above 0 and below 1, got nan",
        ),
    ],
)
def test_a_bad_value_is_one_sentence_when_the_trainer_is_made(value, words, installed, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=VARIABLE) as caught:
        trainer()
    message = str(caught.value)
    assert message.startswith("LIGHTNING_NORMS_CALLBACKS: ")
    assert words in message
    assert len(message) < 400
    assert "\n" not in message


def test_it_can_be_copied_and_sent_to_another_process():
    for twin in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        named = twin(FromEnvironment(yaml.safe_dump([WARMUP, QUIET, "LRFallback"]))).named
        assert [type(each) for each in named] == [Warmup, DepthMonitor, LRFallback]
        assert named[0].schedule == LinearWarmup(W)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_processes_that_lightning_starts_have_them_too(strategy, installed, tmp_path):
    """Both ranks of two: the same callbacks, and the closed form of the learning rate."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import json, pathlib, warnings
            warnings.simplefilter("ignore")
            from lightning.pytorch import Callback, Trainer
            from tests.callbacks.test_warmup import Module

            class Tell(Callback):
                def on_fit_end(self, trainer, pl_module):
                    said = [[type(each).__name__ for each in trainer.callbacks], pl_module.optimizer.trace]
                    pathlib.Path({str(tmp_path)!r}, f"{{trainer.global_rank}}.json").write_text(json.dumps(said))

            if __name__ == "__main__":
                Trainer(accelerator="cpu", devices=2, strategy={strategy!r}, max_steps=10, max_epochs=-1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[Tell()], default_root_dir={str(tmp_path)!r}).fit(Module())
            """
        )
    )
    paths = os.pathsep.join([str(installed), str(ROOT)])
    env = os.environ | {
        "PYTHONPATH": paths,
        VARIABLE: yaml.safe_dump([WARMUP, "LRFallback"]),
        "MASTER_ADDR": "127.0.0.1",
    }
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        found, trace = yaml.safe_load((tmp_path / f"{rank}.json").read_text())
        assert found == ["Warmup", "LRFallback", "Tell"]
        assert [rates[0] for rates in trace] == pytest.approx([0.1 * linear(step) for step in range(10)])


class Two(Module):
    """Two optimizers by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


class AlwaysNaN(Module):
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean() * torch.nan


REFUSED = {
    "several optimizers": ("[LRFallback]", Two, "LRFallback is switched off, and the run goes on. .*several"),
    "LBFGS": (
        "[LRFallback]",
        lambda: Module(optimizer=torch.optim.LBFGS),
        "LRFallback is switched off, and the run goes on. .*LBFGS",
    ),
    "no blocks": ("[ResidualRescale]", Module, "ResidualRescale is switched off, and the run goes on. "),
    "no beta2": ("[Warmup]", Module, "Warmup is switched off, and the run goes on. .*beta2"),
    "nothing left to try": (
        "[{class_path: LRFallback, init_args: {max_skips: 1, max_rollbacks: 0, max_restarts: 0}}]",
        AlwaysNaN,
        "LRFallback is switched off, and the run goes on. ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nobody_put_there_by_hand_ends_no_run(case, installed, monkeypatch, tmp_path):
    """Where the callback would raise it leaves, and the run is the one without the variable, bit for bit."""
    value, make, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    plain, _ = fit(module=make(), default_root_dir=tmp_path)
    monkeypatch.setenv(VARIABLE, value)
    with pytest.warns(UserWarning, match=words) as caught:
        module, run = fit(module=make(), default_root_dir=tmp_path)
    assert sum("switched off" in str(warning.message) for warning in caught) == 1
    assert names(run) == []
    assert run.global_step >= STEPS
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_by_hand_the_same_callback_raises():
    with pytest.raises(ValueError, match="several"):
        fit(LRFallback(), module=Two())
