"""The same run on one process and under every strategy: the same norms, decisions, learning rates and weights."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from tests.stand_ins import Decoder
from tests.strategies import runs
from tests.strategies.launch import launch

pytestmark = pytest.mark.slow

WHOLE = ("ddp", "fsdp2", "fsdp1", "tp", "hsdp", "tp_fsdp")
# A softmax is blind to a shift of all its scores, so a key bias has no gradient but rounding, which Adam makes big.
NAMES = [name for name, _ in Decoder().named_parameters()]
SEEN = [number for number, name in enumerate(NAMES) if not name.endswith("key.bias")]


@functools.cache
def launched(ranks):
    """One launch for all strategies of as many ranks: importing takes longer than training."""
    folder = Path(tempfile.mkdtemp(prefix=f"strategies_{ranks}_"))
    launch(folder, "tests.strategies.runs", folder, *runs.LAUNCHES[ranks], timeout=280)
    return folder


@functools.cache
def ran(kind):
    """What every rank saw."""
    folder = launched(runs.RANKS[kind]) / kind
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(runs.RANKS[kind])]


def columns(history, key):
    """Values [steps, columns] of one quantity."""
    chosen = [number for number, column in enumerate(history["columns"]) if column.startswith(key)]
    return history["values"][:, chosen]


@pytest.mark.parametrize("kind", WHOLE)
def test_norms_by_depth_are_those_of_one_process(kind):
    """Acceptance 2, case 39: 1e-5 relative, every group and every recorded step, and every rank the same."""
    single, ranks = ran("single")[0]["history"], [run["history"] for run in ran(kind)]
    assert single["steps"] == list(range(0, runs.STEPS, 2))
    for history in ranks:
        assert (history["columns"], history["steps"]) == (single["columns"], single["steps"])
        assert torch.equal(history["values"].nan_to_num(), ranks[0]["values"].nan_to_num())
    for key, tolerance in (("grad_norm", 1e-5), ("stream_rms", 1e-5)):
        torch.testing.assert_close(columns(ranks[0], key), columns(single, key), rtol=tolerance, atol=0.0)
    # Adam divides rounding by rounding where a gradient is nearly zero, so steps agree less well than gradients.
    steps = [number for number, step in enumerate(single["steps"]) if step < runs.HIGH]
    ratios = columns(ranks[0], "update_ratio")[steps], columns(single, "update_ratio")[steps]
    torch.testing.assert_close(*ratios, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("kind", WHOLE)
def test_one_collective_a_logging_step(kind):
    """Acceptance 2: gradients, weights, changes and streams travel together; other steps cost none."""
    for run in ran(kind):
        recorded, others = run["collectives"][::2], run["collectives"][1::2]
        assert {tuple(step) for step in recorded} == {("c10d::allreduce_",)}
        assert {tuple(step) for step in others} == {()}
        assert {tuple(step) for step in run["fallback_collectives"]} == {("c10d::allreduce_",)}


def test_ddp_without_streams_needs_no_collective():
    assert {tuple(step) for step in ran("ddp")[0]["collectives_without_stream"]} == {()}


def test_flat_parameters_of_fsdp1():
    """use_orig_params=False: wrapped blocks and the total are exact, and what FSDP merged is `other`."""
    flat, single = ran("fsdp1_flat")[0], ran("single")[0]["plain"]
    groups = [f"grad_norm/{name}" for name in ("block_00", "block_01", "block_02", "total")]
    for group in groups:
        torch.testing.assert_close(columns(flat["history"], group), columns(single, group), rtol=1e-5, atol=0.0)
    merged = [columns(single, f"grad_norm/{name}") for name in ("embedding", "final_norm", "head")]
    root = torch.stack(merged).square().sum(0).sqrt()
    torch.testing.assert_close(columns(flat["history"], "grad_norm/other"), root, rtol=1e-5, atol=0.0)
    assert {tuple(step) for step in flat["collectives"][::2]} == {("c10d::allreduce_",)}
    assert flat["warned"].startswith("DepthMonitor: FSDP with use_orig_params=False makes one tensor of all")
    assert flat["refusal"], "no matrix is there to be rescaled"


def test_two_sharded_copies_of_fsdp1():
    """HYBRID_SHARD on 4 ranks: what two ranks hold alike counts once."""
    single = ran("single")[0]["plain"]
    for run in ran("fsdp1_hybrid"):
        assert run["history"]["columns"] == single["columns"]
        for key in ("grad_norm", "stream_rms"):
            torch.testing.assert_close(columns(run["history"], key), columns(single, key), rtol=1e-5, atol=0.0)
        assert {tuple(step) for step in run["collectives"][::2]} == {("c10d::allreduce_",)}


@pytest.mark.parametrize("kind", WHOLE)
def test_rescaled_once_and_alike(kind):
    """Acceptance 3: the fresh weights of one process, times the factor, once."""
    single = ran("single")[0]
    for run in ran(kind):
        assert run["marked"]
        assert run["rescale"] == single["rescale"]
        for name, one, other in zip(NAMES, run["start"], single["start"], strict=True):
            assert torch.equal(one, other), name
    fresh = dict(runs.seeded(Decoder).named_parameters())
    for name, start in zip(NAMES, single["start"], strict=True):
        factor = 6**-0.5 if name.endswith("writer.weight") else 1.0
        torch.testing.assert_close(start, fresh[name].detach() * factor)


@pytest.mark.parametrize("kind", ["single", *WHOLE])
def test_resume_is_bit_equal(kind):
    """Acceptance 3: the checkpoint's weights, no second rescale, the same decisions and last weights."""
    for run in ran(kind):
        again = run["resumed"]
        for one, other in ((again["start"], run["saved"]), (again["end"], run["end"])):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert again["marked"]
        assert again["rescale"] == run["rescale"]
        assert again["events"] == run["events"]
        assert again["rates"] == run["rates"][runs.SAVED :]


@pytest.mark.parametrize("kind", WHOLE)
def test_decisions_and_learning_rates_are_those_of_one_process(kind):
    """Acceptance 3: warmup, three skips, a rollback to step 12, and half the learning rate from there."""
    single = ran("single")[0]
    assert single["events"] == [(20, "spike", "skip"), (23, "divergence", "rollback")]
    assert [rates["learning_rate/effective/0"] for rates in single["rates"][:9]] == pytest.approx(
        [0.01 * min(1.0, (step + 1) / 8) for step in range(9)]
    )
    assert single["rates"][-1]["learning_rate/effective/0"] == pytest.approx(0.005)
    for run in ran(kind):
        assert run["events"] == single["events"]
        assert run["rates"] == single["rates"]
        assert run["factor"] == single["factor"] == 0.5
        for one, other in zip(run["evidence"], single["evidence"], strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        for number in SEEN:
            torch.testing.assert_close(run["end"][number], single["end"][number], rtol=0.0, atol=1e-5)
