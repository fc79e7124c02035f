"""Cases 28, 39: two processes see the same, decide the same at the same step, and end with the same weights."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.rescue.event_file import lines

pytestmark = pytest.mark.slow

LAUNCHES = (("nan", "spike", "high", "stall", "hopeless"), ("resume", "stall_after_resume"), ("late_resume",))
FLAKY = ("flaky nan", "flaky inf", "flaky spike")
KINDS = ("ddp", "fsdp2", "fsdp1")


@functools.cache
def launch(kind, faults):
    """Two processes for several faults; nothing of them is left after 60 s a fault."""
    folder = Path(tempfile.mkdtemp(prefix=f"ranks_{kind}_"))
    command = [sys.executable, "-m", "tests.callbacks.fallback_on_two_ranks", kind, str(folder), *faults]
    root = Path(__file__).parents[2]
    with (folder / "output").open("w") as output:
        both = subprocess.Popen(command, cwd=root, stdout=output, stderr=output, start_new_session=True)
        try:
            code = both.wait(timeout=60 * len(faults))
        except subprocess.TimeoutExpired:
            code = "a hang"
        finally:
            if both.poll() is None or code:  # the other rank waits for ever
                os.killpg(both.pid, signal.SIGKILL)
    assert code == 0, f"{kind}: {code}\n{(folder / 'output').read_text()[-3000:]}"
    return folder


def seen(kind, fault):
    """What both ranks saw, after the checks that hold for every fault."""
    folder = launch(kind, next(faults for faults in (*LAUNCHES, FLAKY) if fault in faults)) / fault
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]
    assert ranks[0]["events"] == ranks[1]["events"]
    assert repr(ranks[0]["evidence"]) == repr(ranks[1]["evidence"])  # as text: NaN equals itself
    assert ranks[0]["factor"] == ranks[1]["factor"]
    assert ranks[0]["returned"] == ranks[1]["returned"]
    assert equal(*(rank["weights"] for rank in ranks))
    assert all(weight.isfinite().all() for weight in ranks[0]["weights"])
    return ranks[0], folder


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_on_one_rank(kind):
    run, folder = seen(kind, "nan")
    assert run["events"] == [(5, "non_finite", "skip")]
    assert run["returned"] == {5: 5}, "step 5 moves nothing, every other step does"
    assert [(line["step"], line["action"]) for line in lines(folder)] == [(5, "skip")], "only rank 0 writes"


@pytest.mark.parametrize("kind", KINDS)
def test_spike_on_one_rank(kind):
    run, _ = seen(kind, "spike")
    assert run["events"] == [(20, "spike", "skip")]
    assert run["returned"] == {20: 20}


@pytest.mark.parametrize("fault", FLAKY)
def test_a_gradient_that_only_one_rank_gets_wrong(fault):
    """Behind the reduction, by a hook or a flaky device: both ranks skip, and their weights stay alike."""
    run, _ = seen("ddp", fault)
    assert run["events"] == [(20, "spike" if fault == "flaky spike" else "non_finite", "skip")]
    assert run["returned"] == {20: 20}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_stays_high_on_one_rank(kind):
    run, _ = seen(kind, "high")
    assert run["events"] == [(20, "spike", "skip"), (23, "divergence", "rollback")]
    assert run["returned"] == {20: 20, 21: 20, 22: 20, 23: 0}, "three skips, then the start bit for bit"
    assert run["factor"] == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_stall(kind):
    run, _ = seen(kind, "stall")
    assert run["events"] == [(8, "stall", "restart")]
    assert run["returned"] == {8: 0}
    assert run["factor"] == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_stop_when_nothing_is_left(kind):
    run, _ = seen(kind, "hopeless")
    assert "nothing is left to try" in run["error"]
    assert run["events"][-1] == (32, "non_finite", "stop")
    assert run["returned"] == {step: 5 if step < 8 else 0 for step in range(5, 32)}


@pytest.mark.parametrize("fault", ["nan", "spike", "high", "stall"])
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_sharded_as_whole(kind, fault):
    """Case 39: norms of shards are norms of the whole, so evidence and outcome are those of ddp."""
    sharded, whole = seen(kind, fault)[0], seen("ddp", fault)[0]
    assert sharded["events"] == whole["events"]
    for one, other in zip(sharded["evidence"], whole["evidence"], strict=True):
        assert one == pytest.approx(other, rel=1e-3, nan_ok=True)
    for one, other in zip(sharded["weights"], whole["weights"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fault"), [("ddp", "late_resume"), ("ddp", "resume"), ("fsdp2", "resume"), ("fsdp1", "resume")]
)
def test_resume_equals_the_uninterrupted_run(kind, fault):
    run, _ = seen(kind, fault)
    assert run["events"] == [(20, "spike", "skip"), (23, "divergence", "rollback")]
    for again in run["resumed"].values():
        assert again["events"] == run["events"]
        assert again["factor"] == run["factor"] == 0.5
        assert equal(again["weights"], run["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_after_a_resume(kind):
    """The checkpoint holds the start, unless it is in shards: rank 0 writes it and has only its own."""
    run, _ = seen(kind, "stall_after_resume")
    again = run["resumed"][10]
    assert run["events"] == [(16, "stall", "restart")]
    if kind == "ddp":
        assert again["events"] == run["events"]
        assert equal(again["weights"], run["weights"])
    else:
        assert again["events"] == [(16, "stall", "rollback")]
        assert again["returned"] == {16: 0}, "back to the weights of the checkpoint, in every shard"
