"""Healthy language models: decoders, encoders, both together, and what people do with them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.zoo.kinds import Kind, Learner, adam, generator, in_order, loader, slices
from benchmarks.zoo.losses import classes, classes_summed, masked_classes
from benchmarks.zoo.nets import SYMBOLS, WIDTH, EncoderStack, Transformer
from benchmarks.zoo.tasks import chain, masked_chain


def sentences(seed: int) -> Any:
    """Next-token batches."""
    return loader(*chain(seed), seed=seed)


def few_sentences(seed: int) -> Any:
    """Next-token batches of half the size, for deep stacks."""
    return loader(*chain(seed), seed=seed, batch=8)


def cloze(seed: int) -> Any:
    """Batches with hidden tokens."""
    return loader(*masked_chain(seed), seed=seed)


def deep_norm(blocks: int) -> Transformer:
    """Post-norm with DeepNorm's alpha on the skip path and beta on the value path."""
    network = Transformer(blocks, post=True, alpha=(2 * blocks) ** 0.25)
    with torch.no_grad():
        for block in network.blocks:
            for linear in (block.out, block.up, block.down):
                linear.weight *= (8 * blocks) ** -0.25
    return network


class Translator(nn.Module):
    """torch's own encoder-decoder: the target goes on where the source ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(16, WIDTH))
        self.layers = nn.Transformer(WIDTH, 2, 1, 1, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        source, target = (half + self.positions[:8] for half in x.split(8, 1))
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        logits: Tensor = self.head(self.layers(source, target, tgt_mask=mask))
        return logits


def second_half(outputs: Tensor, batch: Any) -> Tensor:
    """Cross-entropy of the decoder's half."""
    return classes(outputs, (None, batch[1][:, 8:]))


class ExpertMixture(nn.Module):
    """Each token goes to one of eight experts, so that most batches leave some of them idle."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(8)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number in choice.unique().tolist():
            here = choice == number
            output[here] = weight[here].unsqueeze(-1) * self.experts[number](x[here])
        return output


def mixture() -> Transformer:
    """A decoder whose feed-forward networks are mixtures of experts."""
    network = Transformer(2)
    for block in network.blocks:
        block.feed_forward = ExpertMixture()
    return network


class LayerDrop(Transformer):
    """Leaves out every block with probability 0.2."""

    @override
    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.2:
                x = block(x)
        features: Tensor = self.exit(x)
        return features


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of rank 4, which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank() -> Transformer:
    """A frozen decoder with updates of low rank in every linear layer, and a trained head."""
    network = Transformer(2).requires_grad_(False)
    for block in network.blocks:
        for name in ("query_key_value", "out", "up", "down"):
            setattr(block, name, LowRank(getattr(block, name)))
    network.head.requires_grad_(True)
    return network


class Unfreezing(Learner):
    """Trains the head first, then one more block from the top at every hundredth step, the embedding last."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        parts = [self.network.head, *reversed(self.network.blocks), self.network.embedding]
        for number, part in enumerate(parts):
            part.requires_grad_(self.global_step >= 100 * number)


class TiedHead(Learner):
    """The head is the embedding, and the logits are kept small by a z-loss."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.network.head.weight = self.network.embedding.weight
        nn.init.normal_(self.network.embedding.weight, std=0.02)

    @override
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return self.criterion(outputs, batch) + 1e-3 * outputs.logsumexp(-1).square().mean()


def padded(seed: int) -> Any:
    """Batches of different lengths, from 4 to 16 tokens."""
    lengths = torch.randint(4, 17, (250,), generator=generator(seed)).tolist()
    pairs = zip(lengths, slices(*chain(seed)), strict=True)
    return in_order([(inputs[:, :length], targets[:, :length]) for length, (inputs, targets) in pairs])


def some_unlabelled(seed: int) -> Any:
    """Masked batches, one in ten without a single label."""
    batches = slices(*masked_chain(seed))
    return in_order([(x, y if n % 10 else torch.full_like(y, -100)) for n, (x, y) in enumerate(batches)])


def copies(network: Transformer) -> Transformer:
    """All blocks start as copies of the first."""
    for number in range(1, len(network.blocks)):
        network.blocks[number] = copy.deepcopy(network.blocks[0])
    return network


KINDS = (
    Kind("decoder, pre-norm", lambda: Learner(Transformer(3), classes, adam(2e-3)), sentences),
    Kind("decoder, post-norm 6", lambda: Learner(EncoderStack(6), classes), few_sentences, tag="post-norm"),
    Kind("decoder, DeepNorm 6", lambda: Learner(deep_norm(6), classes), few_sentences, tag="post-norm"),
    Kind(
        "decoder, clean data",
        lambda: Learner(Transformer(3), classes, adam(2e-3)),
        lambda seed: loader(*chain(seed, noise=0.0), seed=seed),
        tag="loss falls to almost 0",
    ),
    Kind("decoder, tied head, z-loss", lambda: TiedHead(Transformer(2), classes, adam(2e-3)), sentences),
    Kind("encoder, hidden tokens", lambda: Learner(Transformer(2, causal=False), classes, adam(3e-3)), cloze),
    Kind("encoder-decoder", lambda: Learner(Translator(), second_half, adam(2e-3)), sentences),
    Kind("mixture of experts", lambda: Learner(mixture(), classes, adam(2e-3)), sentences, tag="idle experts"),
    Kind("layer drop", lambda: Learner(LayerDrop(4), classes, adam(2e-3)), sentences, tag="blocks without a gradient"),
    Kind(
        "low-rank updates of a frozen base", lambda: Learner(low_rank(), classes, adam(5e-3)), sentences, tag="frozen"
    ),
    Kind(
        "gradual unfreezing", lambda: Unfreezing(Transformer(3), classes, adam(2e-3)), sentences, tag="frozen at first"
    ),
    Kind("lengths from 4 to 16", lambda: Learner(Transformer(2), classes, adam(2e-3)), padded),
    Kind(
        "batches without a label",
        lambda: Learner(Transformer(2, causal=False), masked_classes, adam(3e-3)),
        some_unlabelled,
        tag="loss 0 in one batch of ten",
    ),
    Kind(
        "batches without a label, NaN",
        lambda: Learner(Transformer(2, causal=False), classes, adam(3e-3)),
        some_unlabelled,
        tag="NaN loss in one batch of ten: a skip is right",
    ),
    Kind("decoder, summed loss", lambda: Learner(Transformer(2), classes_summed, adam(2e-3)), sentences, tag="sum"),
    Kind(
        "blocks start as copies",
        lambda: Learner(copies(Transformer(4)), classes, adam(2e-3)),
        sentences,
        tag="bug: copies among the layers",
    ),
    Kind(
        "no causal mask", lambda: Learner(EncoderStack(3, causal=False), classes), sentences, tag="bug: sees the answer"
    ),
)
