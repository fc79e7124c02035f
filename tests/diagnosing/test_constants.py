"""The loss of the best constant prediction under any loss, from the loss itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_norms.diagnosing.constants import Micro, constant_losses
from lightning_norms.diagnosing.loss_tail import TailRecorder

CLASSES, STEPS = 7, 6


def labels():
    shares = torch.arange(1.0, CLASSES + 1) ** 2
    return torch.multinomial(shares, STEPS * 400, True, generator=torch.Generator().manual_seed(0)).view(STEPS, 40, 10)


SHARES = torch.bincount(labels().flatten(), minlength=CLASSES) / labels().numel()
WEIGHTS = torch.linspace(0.2, 2.0, CLASSES)
WEIGHTED = WEIGHTS * SHARES / (WEIGHTS * SHARES).sum()
ENTROPY = -float((SHARES * SHARES.log()).sum())
VALUES = torch.arange(CLASSES).float()
VARIANCE = float((SHARES * VALUES.square()).sum() - (SHARES * VALUES).sum() ** 2)


class Net(nn.Module):
    """Heads that share no weights with what is before them, or all of them."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding, self.head, self.tied = nn.Embedding(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES), tied

    def forward(self, tokens):
        x = self.embedding(tokens)
        return x @ self.embedding.weight.T if self.tied else self.head(x.relu())


def entropy(outputs, target, **options):
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten(), **options)


def by_hand(outputs, target):
    return -outputs.log_softmax(-1).gather(-1, target[..., None]).mean()


def in_place(outputs, target):
    outputs = outputs / 2
    outputs[:, 0] = 0.0
    loss = entropy(outputs[:, 1:], target[:, 1:])
    loss += 1.0
    return loss


LOSSES = {
    "cross-entropy": (entropy, ENTROPY, ENTROPY),
    "x 0.1 - 2": (lambda o, y: 0.1 * entropy(o, y) - 2, 0.1 * ENTROPY - 2, 0.1 * ENTROPY),
    "summed": (lambda o, y: entropy(o, y, reduction="sum"), 400 * ENTROPY, 400 * ENTROPY),
    "class weights": (lambda o, y: entropy(o, y, weight=WEIGHTS), -float((WEIGHTED * WEIGHTED.log()).sum()), None),
    "by hand": (by_hand, ENTROPY, ENTROPY),
    "in place": (in_place, ENTROPY + 1, ENTROPY),
    "bits": (
        lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, CLASSES).float()),
        -float((SHARES * SHARES.log() + (1 - SHARES) * (1 - SHARES).log()).mean()),
        None,
    ),
    "squares": (lambda o, y: F.mse_loss(o.mean(-1), y.float()), VARIANCE, VARIANCE),
    "large squares": (lambda o, y: (1000 * (o[..., 0] - y.float())).square().mean(), 1e6 * VARIANCE, None),
    "distances": (lambda o, y: F.l1_loss(o[..., 0], y.float()), float((SHARES * (VALUES - 5).abs()).sum()), None),
}


def losses_of(net, loss, data=None):
    steps = []
    for target in labels() if data is None else data:
        recorder = TailRecorder()
        recorder.start()
        value = loss(net(target), target)
        recorder.stop()
        tail = recorder.tail(value)
        steps.append([] if tail is None else [Micro(tail, 1.0)])
    return constant_losses(steps)


@pytest.mark.parametrize("name", LOSSES)
def test_the_best_constant_of_any_loss(name):
    loss, constant, scale = LOSSES[name]
    fit = losses_of(Net(), loss)
    assert len(fit.by_step) == STEPS
    assert fit.loss == pytest.approx(constant, rel=0.01)
    if scale is not None:
        assert fit.scale == pytest.approx(scale, rel=0.5)  # a yardstick


def test_a_head_that_shares_its_weights_with_the_embedding():
    assert losses_of(Net(tied=True), entropy).loss == pytest.approx(ENTROPY, rel=0.01)


def test_two_heads_and_a_fixed_teacher():
    net, other, teacher = Net(), Net(), Net().requires_grad_(False)

    def loss(outputs, target):
        with torch.no_grad():
            soft = teacher(target)
        return entropy(outputs, target) + (other(target) - soft).square().mean()

    rest = teacher(labels()).detach()
    expected = ENTROPY + float(rest.flatten(0, 2).var(0, correction=0).mean())
    assert losses_of(net, loss).loss == pytest.approx(expected, rel=0.02)


def test_a_contrastive_loss_costs_the_logarithm_of_the_batch():
    left, right = nn.Linear(4, 8), nn.Linear(4, 8)
    data = torch.randn(STEPS, 16, 4, generator=torch.Generator().manual_seed(0))

    def loss(outputs, x):
        similarity = 10 * F.normalize(outputs, dim=-1) @ F.normalize(right(x), dim=-1).T
        return F.cross_entropy(similarity, torch.arange(16))

    assert losses_of(left, loss, data).loss == pytest.approx(torch.tensor(16.0).log().item(), rel=1e-3)


def test_a_loss_that_is_not_computed_from_outputs_says_nothing():
    net = Net()
    assert losses_of(net, lambda outputs, target: net.head.weight.square().sum()) is None
    assert losses_of(net, lambda outputs, target: torch.tensor(1.0)) is None


def test_recording_changes_neither_the_loss_nor_a_gradient():
    net = Net()
    plain = in_place(net(labels()[0]), labels()[0])
    expected = torch.autograd.grad(plain, list(net.parameters()))
    recorder = TailRecorder()
    recorder.start()
    loss = in_place(net(labels()[0]), labels()[0])
    recorder.stop()
    assert torch.equal(loss, plain)
    assert all(map(torch.equal, torch.autograd.grad(loss, list(net.parameters())), expected))
