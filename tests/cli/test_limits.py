"""How long ``fit`` trains, what it says before, and that its files are UTF-8."""

import locale
import logging
import os
import subprocess
import sys
import types

import pytest

from lightning_norms.cli import main as entry
from lightning_norms.cli.main import main
from lightning_norms.cli.norms_cli import describe_fit

MINE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule

class Mine(LightningModule):
    steps = 0

    def __init__(self, width: int = 1):
        super().__init__()
        self.net = torch.nn.Linear(1, width)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_train_end(self):
        Mine.steps = self.trainer.global_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(330, 1), batch_size=1)
"""
QUIET = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
SHORT = [*(f"--trainer.{name}=false" for name in QUIET), "--trainer.accelerator=cpu"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MINE)
    return name


def fit(mine, *options):
    main(["fit", f"--model={mine}.Mine", f"--data={mine}.Data", *SHORT, *options])
    return sys.modules[mine].Mine.steps


@pytest.mark.parametrize(
    ("options", "steps", "words"),
    [
        ([], 300, "for 300 steps, since neither max_steps nor max_epochs nor max_time is set"),
        (["--trainer.max_epochs=1"], 330, "until max_epochs 1"),
        (["--trainer.max_steps=-1", "--trainer.max_epochs=1"], 330, "until max_epochs 1"),
        (["--trainer.max_steps=7", "--trainer.max_epochs=1"], 7, "until max_steps 7 or max_epochs 1"),
        (
            ["--trainer.max_time=00:00:00:00", "--trainer.max_epochs=-1"],
            0,
            "until max_epochs -1 or max_time 00:00:00:00",
        ),
        (["--config=limit.yaml"], 330, "until max_epochs 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:You defined")
def test_only_a_run_without_a_limit_gets_ours(options, steps, words, mine, tmp_path, caplog):
    (tmp_path / "limit.yaml").write_text("trainer: {max_epochs: 1}")
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        assert fit(mine, *options) == steps
    (line,) = [line for line in caplog.messages if line.startswith("fit: ")]
    assert line == f"fit: trains Mine on Data {words}."


def test_a_saved_configuration_keeps_no_limit_that_nobody_set(mine, tmp_path):
    fit(mine, "--trainer.limit_train_batches=2", "--trainer.max_time=00:00:00:00")
    assert "max_steps: -1" in (tmp_path / "config.yaml").read_text(encoding="utf-8")


def test_a_bare_fit_points_to_the_recipes():
    line = describe_fit("", None, {}, is_bare=True)
    assert line.endswith("is set. Everything is a default: lightning_norms recipes lists complete files for --config.")


@pytest.mark.parametrize(
    ("encoding", "mode", "restarts"), [("ascii", 0, 1), ("cp1252", 0, 1), ("utf8", 0, 0), ("ascii", 1, 0)]
)
def test_another_locale_starts_python_anew(encoding, mode, restarts, monkeypatch):
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: encoding)
    python = {"flags": types.SimpleNamespace(utf8_mode=mode), "executable": "python", "orig_argv": ["py", "-m", "x"]}
    monkeypatch.setattr(entry, "sys", types.SimpleNamespace(**python))
    monkeypatch.setenv("PYTHONUTF8", "0")
    started = []
    monkeypatch.setattr(os, "execve", lambda file, words, env: started.append((file, words, env["PYTHONUTF8"])))
    entry._use_utf8()
    assert started == [("python", ["python", "-m", "x"], "1")] * restarts


@pytest.mark.slow
def test_a_file_with_umlauts_in_an_ascii_locale(tmp_path):
    (tmp_path / "größe.txt").write_text("Das ist ein Täst. " * 200, encoding="utf-8")
    model = "model: {decoder: {n_layers: 1, d_model: 16, n_heads: 2, context_length: 16}}"
    data = "data: {train: 'größe.txt', val: {c: 'größe.txt'}, batch_size: 4, context_length: 16}"
    (tmp_path / "läuft.yaml").write_text(f"{model}\n{data}\ntrainer: {{max_steps: 2}}\n", encoding="utf-8")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "lightning_norms", "fit", "--config", "läuft.yaml", *SHORT]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "größe.txt" in (tmp_path / "config.yaml").read_text(encoding="utf-8")
