"""Tied weights: measured once, scaled once, and still tied after a rollback and a resume."""

import pytest
import torch

from tests.callbacks.fallback_runs import RESUMING, Watch, assert_same, what
from tests.callbacks.test_lr_fallback_resume import ByStep
from tests.callbacks.test_warmup import SaveAt
from tests.combinations.four import BASE, FACTOR, Taken, assert_norms, assert_rates, run, warm, weights
from tests.stand_ins import Decoder, seeded

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in RESUMING]


def tied(faults=()):
    """Head and embedding share a matrix, and so do the attention writers of blocks 0 and 2."""
    decoder = seeded(lambda: Decoder(3))
    decoder.embedding.weight.data *= 0.3
    decoder.head.weight = decoder.embedding.weight
    decoder.blocks[2].attention.writer.weight = decoder.blocks[0].attention.writer.weight
    return ByStep(faults, decoder=decoder, learning_rate=BASE, optimizer=Taken)


def test_counted_once_scaled_once_and_tied_to_the_end(tmp_path):
    """The shared writer is x 1/sqrt(6) and not x 1/6; its gradient counts in block 0 only, the head's as embedding."""
    # The checkpoint at 10 counts as a snapshot, so the next one is at 16.
    module, watch = tied({20: "huge"}), Watch(16, 20)
    before = weights(module)
    four = run(tmp_path, module, watch, SaveAt(tmp_path, 10))
    for name, old in before.items():
        assert torch.equal(four.naive.start[name], old * FACTOR if name.endswith("writer.weight") else old), name
    assert four.rescale.state_dict()["matrices"] == 5
    assert what(four.fallback) == [(20, "divergence", "rollback")]
    assert_same(watch.before[16], watch.after[20])
    assert_rates(module.trainer.optimizers[0].trace, [warm(step, cut_at=20) for step in range(23)])
    assert_norms(four.monitor, four.naive.norms)
    true_total = [sum(norm**2 for group, norm in each.items() if group != "total") ** 0.5 for each in four.naive.norms]
    assert [each["total"] for each in four.naive.norms] == pytest.approx(true_total)
    resumed = tied({20: "huge"})
    run(tmp_path, resumed, SaveAt(tmp_path / "again", 10), ckpt_path=tmp_path / "10.ckpt")
    assert_same(weights(module), weights(resumed))
    for each in (module, resumed):
        assert each.decoder.head.weight is each.decoder.embedding.weight
        assert each.decoder.blocks[2].attention.writer.weight is each.decoder.blocks[0].attention.writer.weight


def test_the_gradient_of_a_tied_matrix_is_the_sum_over_its_uses(tmp_path):
    """Untied twins with the same numbers: the norm of the tied gradient is that of the sum of both of theirs."""
    module = tied()
    four = run(tmp_path, module, max_steps=8)
    apart = tied()
    apart.decoder.head.weight = torch.nn.Parameter(apart.decoder.head.weight.detach().clone())
    for block in apart.decoder.blocks:
        for writer in (block.attention.writer, block.feed_forward.writer):
            writer.weight = torch.nn.Parameter(writer.weight.detach() * FACTOR)
    batch = module.train_dataloader().dataset[:][0].unflatten(0, (16, 8))[0]
    logits = apart.decoder(batch)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    expected = (apart.decoder.head.weight.grad + apart.decoder.embedding.weight.grad).norm().item()
    history = four.monitor.history.state_dict()
    assert history["values"][0, history["columns"].index("grad_norm/embedding")].item() == pytest.approx(
        expected, rel=1e-5
    )


def test_the_monitor_leaves_no_trace(tmp_path):
    modules = [tied({20: "huge"}) for _ in range(2)]
    for module, monitored in zip(modules, (True, False), strict=True):
        run(tmp_path, module, monitored=monitored)
    assert_same(weights(modules[0]), weights(modules[1]))
