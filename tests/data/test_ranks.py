"""Two real processes under DDP: no batch twice, no window twice, and Lightning's own sampler stays out."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lightning_norms.data.text import TextDataModule

RUN = """
import json, sys
import torch
from pathlib import Path
from lightning.pytorch import LightningModule, Trainer
from lightning_norms.data.text import TextDataModule

class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = {"train": [], "val": []}
    def training_step(self, batch, index):
        self.seen["train"].append(batch["inputs"].tolist())
        return self.weight.sum()
    def validation_step(self, batch, index):
        self.seen["val"].append(batch["targets"].tolist())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

folder = Path(sys.argv[1])
def run(steps, ckpt=None):
    data = TextDataModule(str(folder / "train.txt"), {"v": str(folder / "val.txt")}, 4, 2, cache_dir=str(folder / "c"))
    model = Recorder()
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        default_root_dir=folder, use_distributed_sampler=True)
    trainer.fit(model, data, ckpt_path=ckpt)
    return trainer, model

trainer, model = run(7)
trainer.save_checkpoint(folder / "seven.ckpt")
_, resumed = run(10, folder / "seven.ckpt")
model.seen["resumed"] = resumed.seen["train"]
(folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(model.seen))
"""


@pytest.mark.slow
def test_two_processes_share_every_pass_and_every_validation_window(tmp_path):
    (tmp_path / "train.txt").write_bytes(bytes(range(1, 84)))
    (tmp_path / "val.txt").write_bytes(bytes(range(100, 117)))
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    one = TextDataModule(str(tmp_path / "train.txt"), {"v": str(tmp_path / "val.txt")}, 4, 4, cache_dir=str(tmp_path))
    one.setup("fit")
    loader = one.train_dataloader()
    for step in range(10):
        shared = [row for rank in ranks for row in (rank["train"] + rank["resumed"])[step]]
        assert sorted(shared) == sorted(loader.dataset[step]["inputs"].tolist())
    assert [len(rank["train"]) for rank in ranks] == [7, 7]

    # 17 targets are 5 windows: three batches for one rank alone, and as many for each of two.
    counts = [len(rank["val"]) for rank in ranks]
    assert counts[0] == counts[1] > 0
    first = [[target for batch in rank["val"][:2] for row in batch for target in row] for rank in ranks]
    assert sorted(t for targets in first for t in targets if t != -100) == list(range(100, 117))
    assert torch.tensor(ranks[1]["val"][1]).eq(-100).all()
