"""Files in a log folder: a path, a file:// URL, or a bucket (here fsspec's memory://)."""

import json
import warnings
from types import SimpleNamespace

import fsspec
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_norms.callbacks import run_record
from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.run_record import RunRecord
from lightning_norms.files.log_folder import append_line, find_log_folder, has_file, read_file, write_file
from lightning_norms.rescue.events import Event, EventLog
from tests.callbacks.test_run_record import Mine, loader

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
QUIET["enable_checkpointing"] = False


@pytest.fixture(params=["path", "file", "memory"])
def folder(request, tmp_path, monkeypatch):
    """A folder that does not exist yet; the current folder must stay empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    bucket = f"memory://bucket/{tmp_path.name}/a b"
    yield {"path": tmp_path / "a b", "file": f"file://{tmp_path}/a b", "memory": bucket}[request.param]
    assert list((tmp_path / "here").iterdir()) == []
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_a_file_is_replaced_as_a_whole(folder):
    assert not has_file(folder, "record.json")
    with pytest.raises(FileNotFoundError):
        read_file(folder, "record.json")
    for content in (b"first", b"second"):
        assert write_file(folder, "record.json", content).endswith("a b/record.json")
        assert read_file(folder, "record.json") == content
    assert not has_file(folder, "record.part")


def test_lines_follow_each_other_and_a_broken_one(folder):
    append_line(folder, "events.jsonl", "one")
    append_line(folder, "events.jsonl", "two")
    assert read_file(folder, "events.jsonl") == b"one\ntwo\n"
    write_file(folder, "events.jsonl", b"one\ntw")  # killed in the middle
    append_line(folder, "events.jsonl", "three")
    assert read_file(folder, "events.jsonl") == b"one\ntw\nthree\n"


def test_a_resumed_run_goes_on_in_the_same_file(folder):
    log = EventLog(folder)
    log.append(Event(31, "spike", "skip"))
    resumed = EventLog(folder)
    resumed.resume(log.state_dict(), 40)
    resumed.append(Event(50, "stall", "restart"))
    lines = [json.loads(line) for line in read_file(folder, "events.jsonl").splitlines()]
    assert [line.get("step", line.get("resumed_at")) for line in lines] == [31, 40, 50]


class NaNAtTwo(Mine):
    def __init__(self):
        super().__init__()
        parts = ([torch.nn.Linear(3, 3), torch.nn.Tanh()] for _ in range(3))
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*part) for part in parts)

    def training_step(self, batch, batch_idx):
        x = self.weight
        for block in self.blocks:
            x = x + block(x)
        return x.sum() * (float("nan") if batch_idx == 2 else 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_everything_of_a_run_goes_where_its_logger_writes(folder):
    callbacks = [DepthMonitor(every_n_steps=1, table=False), LRFallback(), RunRecord()]
    logger = CSVLogger(str(folder), name="run", version=0)
    trainer = Trainer(max_steps=4, logger=logger, log_every_n_steps=1, callbacks=callbacks, **QUIET)
    trainer.fit(NaNAtTwo(), loader(), loader(1))
    place = f"{folder}/run/version_0"
    files = ("metrics.csv", "events.jsonl", "record.json", "grad_norm_by_depth.png")
    assert all(has_file(place, name) for name in files)
    assert run_record.read(place)["events"] == {"skip": 1}


def test_a_record_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", "nowhere://bucket/logs"):
        trainer = Trainer(max_steps=2, logger=False, callbacks=[RunRecord(folder)], **QUIET)
        with pytest.warns(UserWarning, match=r"RunRecord: the run is fine, but record.json cannot be written to .*"):
            trainer.fit(Mine(), loader(), loader(1))
        assert trainer.global_step == 2


def test_a_trial_run_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = [DepthMonitor(every_n_steps=1, table=False), LRFallback(), RunRecord()]
    Trainer(fast_dev_run=3, callbacks=callbacks, **QUIET).fit(NaNAtTwo(), loader(), loader(1))
    assert [event.action for event in callbacks[1].events] == ["skip"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"max_steps": 0}, {"max_epochs": 0}, {"max_steps": 3}])
def test_a_run_with_nothing_to_tell_leaves_nothing(options, tmp_path):
    """No step was taken, or there are no depths and nothing happened."""
    callbacks = [DepthMonitor(every_n_steps=1, table=False), LRFallback()]
    callbacks += [] if options == {"max_steps": 3} else [RunRecord()]
    trainer = Trainer(**options, logger=False, default_root_dir=tmp_path, callbacks=callbacks, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Mine(), loader(), loader(1))
    assert list(tmp_path.iterdir()) == []


def test_loggers_without_a_folder_leave_files_in_the_root(tmp_path):
    trainer = SimpleNamespace(log_dir=None, default_root_dir=tmp_path, fast_dev_run=False)
    assert find_log_folder(trainer) == str(tmp_path)
