"""ddp_spawn: the same run as on one process, in processes that got everything by pickle."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from tests.rescue.event_file import lines
from tests.strategies import runs
from tests.strategies.launch import launch
from tests.strategies.test_every_strategy import SEEN, columns

pytestmark = pytest.mark.slow


@functools.cache
def spawned():
    folder = Path(tempfile.mkdtemp(prefix="spawned_"))
    launch(folder, "tests.strategies.spawned", folder)
    return folder


@functools.cache
def single():
    return runs.everything("single", Path(tempfile.mkdtemp()))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_ranks_do_what_one_process_does():
    expected = single()
    for rank in range(2):
        run = torch.load(spawned() / f"rank_{rank}.pt", weights_only=False)
        assert run["events"] == expected["events"]
        assert run["rates"] == expected["rates"]
        assert {tuple(step) for step in run["collectives"][::2]} == {("c10d::allreduce_",)}
        assert {tuple(step) for step in run["collectives"][1::2]} == {()}
        for key in ("grad_norm", "stream_rms"):
            pair = columns(run["history"], key), columns(expected["history"], key)
            torch.testing.assert_close(*pair, rtol=1e-5, atol=0.0)
        assert all(torch.equal(one, other) for one, other in zip(run["start"], expected["start"], strict=True))
        for number in SEEN:
            torch.testing.assert_close(run["end"][number], expected["end"][number], rtol=0.0, atol=1e-5)


def test_what_a_user_reads_afterwards():
    """Weights come back; histories are in the checkpoint, events in their file, the picture in its folder."""
    folder = spawned()
    main = torch.load(folder / "main.pt", weights_only=True)
    rank = torch.load(folder / "rank_0.pt", weights_only=False)
    assert all(torch.equal(one, other) for one, other in zip(main["end"], rank["end"], strict=True))
    assert main["recorded"] == []
    saved = torch.load(folder / "saved" / f"step={2 * runs.SAVED}.ckpt", weights_only=True)["callbacks"]
    history = next(state["history"] for name, state in saved.items() if "Monitor" in name)
    assert history["steps"] == rank["history"]["steps"][: runs.SAVED]
    found = [(line["step"], line["cause"], line["action"]) for line in lines(folder)]
    assert found == rank["events"]
    assert (folder / "grad_norm_by_depth.png").exists()
    assert "these weights have been trained" in main["second"], "never rescaled a second time"
