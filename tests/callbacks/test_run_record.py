"""RunRecord: what a fit leaves behind, and that an interrupted one leaves the same."""

import json
import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_norms.callbacks import run_record
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.run_record import RunRecord
from lightning_norms.data.text import TextDataModule
from lightning_norms.model.decoder import DecoderConfig
from lightning_norms.module import DecoderModule


class Mine(LightningModule):
    """Somebody else's: losses 1, 2, 3, ... and a validation loss of its own name."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        self.count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        return self.weight.sum() * 0 + self.count

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(0.5))
        self.log("val_accuracy", torch.tensor(0.9))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder, *callbacks, **arguments):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    given = {"max_steps": 4, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    callbacks = [RunRecord(str(folder)), *callbacks]
    return Trainer(default_root_dir=folder, callbacks=callbacks, **{**quiet, **given, **arguments})


def loader(count=4):
    return DataLoader(list(range(count)), batch_size=1)


def test_anybodys_module(tmp_path):
    trainer(tmp_path).fit(Mine(), loader(), loader(1))
    record = run_record.read(tmp_path)
    assert (record["losses"], record["loss_stride"]) == ([1.0, 2.0, 3.0, 4.0], 1)
    assert record["scores"] == {"val_loss": 0.5}
    assert record["curve"] == [{"step": 4.0, "val_loss": 0.5}]
    assert (record["steps"], record["parameters"], record["kv_cache_bytes"]) == (4, 3, None)
    assert record["events"] is record["gradient_first"] is record["spike_score"] is None
    assert record["seconds_per_step"] > 0


def test_losses_are_not_divided_by_accumulation(tmp_path):
    trainer(tmp_path, max_steps=2, accumulate_grad_batches=2).fit(Mine(), loader(), loader(1))
    assert run_record.read(tmp_path)["losses"] == [1.0, 2.0, 3.0, 4.0]


def test_a_second_fit_has_a_record_of_its_own(tmp_path):
    record = RunRecord(str(tmp_path))
    for _ in range(2):
        made = trainer(tmp_path)
        made.callbacks[0] = record
        made.fit(Mine(), loader(), loader(1))
    assert run_record.read(tmp_path)["losses"] == [1.0, 2.0, 3.0, 4.0]


class Crash(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise RuntimeError("it crashed")


def test_a_crash_leaves_no_record(tmp_path):
    with pytest.raises(RuntimeError, match="it crashed"):
        trainer(tmp_path, Crash()).fit(Mine(), loader(), loader(1))
    assert not (tmp_path / run_record.FILE).exists()


def test_nan_is_strict_json(tmp_path):
    module = Mine()
    module.count = math.nan
    trainer(tmp_path).fit(module, loader(), loader(1))
    text = (tmp_path / run_record.FILE).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["losses"] == ["nan"] * 4


def ours(folder, steps, **arguments):
    (folder / "train.txt").write_text("".join(f"line {i}: {i * i % 97}\n" for i in range(900)))
    seed_everything(3, verbose=False)
    module = DecoderModule(DecoderConfig(d_model=8, n_heads=2, n_layers=2, context_length=16))
    data = TextDataModule(str(folder / "train.txt"), context_length=16, batch_size=2)
    made = trainer(
        folder, DepthMonitor(1), max_steps=steps, val_check_interval=2, check_val_every_n_epoch=None,
        limit_val_batches=1, log_every_n_steps=1, logger=False,
    )  # fmt: skip
    made.fit(module, data, **arguments)
    return made


def test_ours_and_a_resumed_run_leaves_the_same_record(tmp_path, recwarn):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    ours(whole, 6)
    ours(cut, 3).save_checkpoint(cut / "three.ckpt")
    ours(cut, 6, ckpt_path=cut / "three.ckpt")
    first, second = run_record.read(whole), run_record.read(cut)
    first.pop("seconds_per_step"), second.pop("seconds_per_step")
    assert [point["step"] for point in second["curve"]] == [2, 4, 6]
    assert first == second
    assert list(first["scores"]) == ["val"]
    assert list(first["gradient_first"]) == ["embedding", "block_00", "block_01", "final_norm"]
    assert first["kv_cache_bytes"] == 2 * 2 * 8 * 4096 * 2


def test_many_validations_are_thinned_and_the_last_one_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "POINTS", 4)
    trainer(tmp_path, max_steps=20, max_epochs=-1).fit(Mine(), loader(1), loader(1))
    record = run_record.read(tmp_path)
    assert len(record["curve"]) <= 4
    assert record["curve"][-1] == {"step": 20.0, "val_loss": 0.5}
    assert record["scores"] == {"val_loss": 0.5}


def test_losses_of_a_longer_run_say_their_stride(tmp_path):
    record = RunRecord(str(tmp_path))
    made = trainer(tmp_path, max_steps=20, max_epochs=-1)
    made.callbacks[0] = record
    record._reset = lambda: None
    record.history.losses.limit = 8
    made.fit(Mine(), loader(20), loader(1))
    written = run_record.read(tmp_path)
    assert (written["losses"], written["loss_stride"]) == ([1.0, 5.0, 9.0, 13.0, 17.0], 4)
