"""Acceptance 5: examples/ddp.yaml and fsdp2.yaml from a clean shell, by Lightning's own launcher and by torchrun."""

import functools
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_norms.cli.main import generate
from tests.strategies.launch import ROOT, launch

pytestmark = pytest.mark.slow

TINY = {
    "model.decoder.n_layers": 2, "model.decoder.d_model": 16, "trainer.max_steps": 6, "trainer.val_check_interval": 3,
    "trainer.limit_val_batches": 2, "trainer.log_every_n_steps": 2,
}  # fmt: skip
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", 2, "-m")


@functools.cache
def ran(example, by_torchrun):
    """What the run printed, and its folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"{example}_"))
    clean = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(folder)}
    overrides = [f"--{key}={value}" for key, value in ({**TINY, "trainer.default_root_dir": folder}).items()]
    words = ("lightning_norms", "fit", "--config", ROOT / "examples" / f"{example}.yaml", *overrides)
    printed = launch(folder, *(TORCHRUN if by_torchrun else ()), *words, environment=clean)
    return printed, folder / "lightning_logs" / "version_0"


def numbers(printed):
    """The table at the end of the run, without the speed."""
    rows = re.findall(r"│ (\S+/(?:loss|perplexity|bits_per_byte)) +│ +([\d.]+) │", printed)
    return {key: float(value) for key, value in rows}


@pytest.mark.parametrize("by_torchrun", [False, True], ids=["lightning", "torchrun"])
@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_two_processes_from_a_clean_shell(example, by_torchrun, capsys):
    printed, folder = ran(example, by_torchrun)
    assert "Starting with 2 processes" in printed
    assert printed.count("ResidualRescale: GPT2Rescale(), L=2: 4 of 4 matrices, factor 0.5 to 0.5.") == 1
    assert printed.count("Gradient norm by depth (L2, before clipping)") == 1, "rank 0 alone prints"
    assert "sync_dist" not in printed
    assert (folder / "grad_norm_by_depth.png").exists()
    assert len(numbers(printed)) == 7
    # Sharded or not, launched by whom: the same run.
    assert numbers(printed) == pytest.approx(numbers(ran("ddp", False)[0]), rel=1e-5)
    checkpoint = folder / "checkpoints" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 6
    generate.command(["--ckpt_path", str(checkpoint), "--prompt", "def ", "--max_new_tokens", "4"])
    assert capsys.readouterr().out.startswith("def ")


@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_header(example):
    lines = (ROOT / "examples" / f"{example}.yaml").read_text().splitlines()
    assert lines[1] == f"#   command   python -m lightning_norms fit --config examples/{example}.yaml"
    assert lines[2].endswith(f"torchrun --nproc_per_node 2 -m lightning_norms fit --config examples/{example}.yaml")
    assert re.match(r"#   runtime   about .* on 2 CPU cores", lines[3])
    assert lines[4].startswith("#   expect    ")


def test_the_two_differ_in_the_strategy_alone():
    ddp, fsdp2 = ((ROOT / "examples" / f"{name}.yaml").read_text().splitlines()[5:] for name in ("ddp", "fsdp2"))
    assert [line for line in ddp if line not in fsdp2] == ["  strategy: ddp"]
    assert len(fsdp2) - len(ddp) == 5
