"""DecoderModule under ddp and FSDP2 learns what one process learns, and its checkpoints are whole."""

import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_norms.cli.main import generate
from lightning_norms.module import DecoderModule
from tests.strategies import decoders
from tests.strategies.launch import launch

pytestmark = pytest.mark.slow


@functools.cache
def ran(kind):
    folder = Path(tempfile.mkdtemp(prefix=f"decoder_{kind}_"))
    launch(folder, "tests.strategies.decoders", kind, folder)
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(decoders.RANKS.get(kind, 2))]
    return ranks, folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_learn_what_one_process_learns(kind):
    (single,), _ = ran("single")
    for run in ran(kind)[0]:
        assert run["sharded"] == (len(single["start"]) if kind == "fsdp2" else 0)
        assert run["start"].keys() == single["start"].keys()
        for name, weight in single["start"].items():
            assert torch.equal(run["start"][name], weight), name
        for name, weight in single["end"].items():
            torch.testing.assert_close(run["end"][name], weight, rtol=1e-4, atol=1e-5)
        assert run["losses"] == pytest.approx(single["losses"], rel=1e-4)
        assert run["history"]["columns"] == single["history"]["columns"]
        # The first step's norms are exact; later ones follow weights that Adam has let drift apart by rounding.
        first = run["history"]["values"][:1], single["history"]["values"][:1]
        torch.testing.assert_close(*first, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp2"])
def test_resume_is_bit_equal(kind):
    ranks, folder = ran(kind)
    saved = torch.load(folder / "run.ckpt", weights_only=True)["state_dict"]
    for run in ranks:
        for name, weight in run["resumed"]["start"].items():
            assert torch.equal(weight, saved[name]), name
        for name, weight in run["resumed"]["end"].items():
            assert torch.equal(weight, run["end"][name]), name


def test_a_sharded_run_leaves_a_checkpoint_for_one_process(capsys):
    """Loaded without a strategy: same weights, and the text that the single process's checkpoint says."""
    said = {}
    for kind in ("single", "fsdp2"):
        path = ran(kind)[1] / "run.ckpt"
        loaded = DecoderModule.load_from_checkpoint(path)
        assert loaded.residual_rescaled
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.equal(weight, saved[name]) for name, weight in loaded.state_dict().items())
        assert loaded.decoder.head.weight is loaded.decoder.embedding.weight
        generate.command(["--ckpt_path", str(path), "--prompt", "The ", "--max_new_tokens", "8", "--temperature", "0"])
        said[kind] = capsys.readouterr().out
    assert said["fsdp2"].startswith("The ")
    assert said["fsdp2"] == said["single"]


def test_weights_from_the_meta_device_are_rescaled_once():
    """FSDP2 fills them in before fit starts; every writer is then scaled once, nothing else."""
    for run in ran("meta")[0]:
        assert run["marked"]
        check_rescaled_once(run)


def test_a_validation_before_fit_does_not_swallow_the_rescale():
    """FSDP2's root then shows passing copies of its weights."""
    for run in ran("meta")[0]:
        check_rescaled_once(run["validated_before"])


def check_rescaled_once(run):
    for name, weight in run["start"].items():
        factor = 0.5 if re.search(r"writer\.weight", name) else 1.0
        assert weight.norm() > 0 or name.endswith("bias")
        assert torch.equal(weight, run["filled"][name] * factor), name


def test_what_cannot_be_sharded_is_refused_in_a_sentence():
    for run in ran("meta")[0]:
        assert run["refusal"].startswith("the decoder is on the meta device, where its initialization is lost")
        assert run["tensor_parallel"].startswith(
            "tensor_parallel_size is 2, but this decoder is sharded over data ranks"
        )
