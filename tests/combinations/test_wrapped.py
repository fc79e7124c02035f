"""Case 42: compiled or checkpointed parts put words into parameter names; all four callbacks see through them."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_norms.anatomy.names import clean_name
from tests.callbacks.fallback_runs import RESUMING, Watch, assert_same, what
from tests.callbacks.test_warmup import SaveAt
from tests.combinations.four import FACTOR, assert_norms, assert_rates, learner, run, warm, weights

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in RESUMING]
pytestmark += [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]  # dynamo itself


def compiled(decoder):
    return torch.compile(decoder, backend="eager")  # the names, without a compiler


def compiled_block(decoder):
    decoder.blocks[1] = torch.compile(decoder.blocks[1], backend="eager")
    return decoder


def checkpointed(decoder):
    for number, block in enumerate(decoder.blocks):
        decoder.blocks[number] = checkpoint_wrapper(block)
    return decoder


def wrapped(wrap, faults=()):
    module = learner(faults)
    module.decoder = wrap(module.decoder)
    return module


def by_clean_name(found):
    return {clean_name(name): each for name, each in found.items()}


@pytest.mark.parametrize("wrap", [compiled, compiled_block, checkpointed])
def test_all_four(wrap, tmp_path):
    """The same six matrices, rates, norms and event as of the plain network, and its end weights."""
    module, watch, plain = wrapped(wrap, {20: "huge"}), Watch(18, 20), learner({20: "huge"})
    before = weights(module)
    assert any(name != clean_name(name) for name in before)
    four = run(tmp_path, module, watch)
    for name, old in before.items():
        assert torch.equal(four.naive.start[name], old * FACTOR if name.endswith("writer.weight") else old), name
    assert what(four.fallback) == [(20, "divergence", "rollback")]
    assert_same(watch.before[18], watch.after[20])
    assert_rates(module.trainer.optimizers[0].trace, [warm(step, cut_at=20) for step in range(23)])
    assert_norms(four.monitor, four.naive.norms)
    run(tmp_path, plain)
    ends = by_clean_name(weights(module))
    for name, each in weights(plain).items():
        torch.testing.assert_close(ends[name], each, rtol=1e-4, atol=1e-5)


def test_our_state_does_not_know_the_wrapper(tmp_path):
    """Saved with checkpoint wrappers (whose names Lightning's checkpoint does not hold), resumed without them."""
    straight = wrapped(checkpointed)
    run(tmp_path, straight, SaveAt(tmp_path, 10))
    resumed = learner()
    four = run(tmp_path, resumed, ckpt_path=tmp_path / "10.ckpt")
    assert_rates(resumed.trainer.optimizers[0].trace, [warm(step) for step in range(10, 24)])
    assert four.monitor.history.steps == list(range(24))
    assert (four.fallback.rescue.state.steps, what(four.fallback)) == (24, [])
    assert four.rescale.state_dict()["rescaled"]
