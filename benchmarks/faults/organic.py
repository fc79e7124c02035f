"""Runs that really die of their own settings, each beside the same network fixed by hand.

A run has died if it ends with less than half of what the fixed one learned, or not finite; all of these do, at every
seed that counts. The fix is what a person would do: a lower learning rate, a warmup, momentum 0.9, a schedule without a
jump. A run is saved if it ends within a tenth of what the fixed one learned, with what is left of the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from benchmarks.faults.goals import Near
from benchmarks.faults.rows import Row
from benchmarks.faults.yardsticks import held_out
from benchmarks.zoo.dense import classifier, points, regressor, table
from benchmarks.zoo.kinds import Jump, Kind, Learner, Loss, adam, loader
from benchmarks.zoo.language import few_sentences, sentences
from benchmarks.zoo.losses import classes, gaussian, squares
from benchmarks.zoo.nets import EncoderStack, Residual, Transformer, mlp
from benchmarks.zoo.recurrent import Recurrent, series
from benchmarks.zoo.set_ups import scaled
from benchmarks.zoo.sick import clean
from benchmarks.zoo.tasks import noisy_teacher
from benchmarks.zoo.vision import album, plain_cnn, vision_transformer

STEPS, SEEDS = 300, 3


class CountedSGD(SGD):
    """SGD that counts its steps in its state, as Adam does; so a rollback takes the count back."""

    @override
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    state["step"] = state.get("step", 0) + 1
        return loss


def sgd(rate: float, momentum: float = 0.0) -> Callable[..., Optimizer]:
    """SGD at a learning rate, still to be given its parameters."""
    return partial(CountedSGD, lr=rate, momentum=momentum)


@dataclass(frozen=True)
class Warmup:
    """Linear from 0 to 1, then 1."""

    steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        return min(1.0, (step + 1) / self.steps)


def sweep(step: int) -> float:
    """Factor of a learning rate range test that was left on: 1e4 after 300 steps."""
    return float(10 ** (4 * step / STEPS))


class HalfPrecision(nn.Module):
    """An MLP whose activations pass through float16, where anything above 65,504 is Inf."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(16, 64, 64, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).half().float()
        return x


def bare_residual() -> nn.Sequential:
    """Twenty-four residual blocks without a norm."""
    blocks = [Residual(mlp(32, 32, 32)) for _ in range(24)]
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 10))


def counts(outputs: Tensor, batch: Any) -> Tensor:
    """Poisson regression: the exponential of the outputs is the rate."""
    losses: Tensor = outputs.exp() - batch[1].exp().round() * outputs
    return losses.mean()


def narrow_table(seed: int) -> Any:
    """A regression with little noise, so that a fitted variance is small."""
    return loader(*noisy_teacher(seed, noise=0.05), seed=seed, batch=32)


@dataclass(frozen=True)
class Recipe:
    """An optimizer, and a factor on its learning rate by step."""

    optimizer: Callable[..., Optimizer]
    factor: Callable[[int], float] | None = None

    def kind(
        self, name: str, network: Callable[[], nn.Module], loss: Loss, data: Any, trainer: Callable[[], dict[str, Any]]
    ) -> Kind:
        """A run under this recipe."""
        schedule = None if self.factor is None else partial(LambdaLR, lr_lambda=self.factor)
        return Kind(name, lambda: Learner(network(), loss, self.optimizer, schedule), data, trainer=trainer)


def dies(
    name: str, network: Callable[[], nn.Module], loss: Loss, data: Any, sick: Recipe, fixed: Recipe,
    trainer: Callable[[], dict[str, Any]] = dict,
) -> Row:  # fmt: skip
    """A row: the sick recipe, and the one that a person would use."""
    kind = sick.kind(name, network, loss, data, trainer)
    twin = fixed.kind(f"{name}, fixed", network, loss, data, trainer)
    return Row(
        name=name, group="organic", kind=kind, twin=twin, steps=STEPS, seeds=SEEDS, goal=Near(share=0.1),
        yardstick=held_out,
    )  # fmt: skip


def post(blocks: int) -> Callable[[], nn.Module]:
    """Post-norm encoder layers from Xavier's init."""
    return partial(EncoderStack, blocks, xavier=True)


def jump(factor: float, rate: float) -> tuple[Recipe, Recipe]:
    """A schedule that multiplies a healthy rate by a factor from step 150 on; and the rate."""
    return Recipe(adam(rate), Jump(factor)), Recipe(adam(rate))


SLOW_START = Recipe(adam(1e-3), Warmup(100))
POST_6 = Recipe(adam(3e-2)), Recipe(adam(1e-3))  # Adam's beta2 is 0.999
LSTM, CNN = partial(Recurrent, nn.LSTM), partial(plain_cnn, norm=False)
DECODER = partial(Transformer, 3)

ROWS = (
    dies("post-norm 12, 6e-3", post(12), classes, clean, Recipe(adam(6e-3)), SLOW_START),
    dies("post-norm 18, 3e-3", post(18), classes, clean, Recipe(adam(3e-3)), SLOW_START),
    dies("post-norm 24, 3e-3", post(24), classes, clean, Recipe(adam(3e-3)), Recipe(adam(5e-4), Warmup(150))),
    dies("post-norm 6, 3e-2, no warmup", partial(EncoderStack, 6), classes, few_sentences, *POST_6),
    dies("post-norm 6, 3e-2, GradScaler", partial(EncoderStack, 6), classes, few_sentences, *POST_6, trainer=scaled),
    dies("pre-norm 12, 0.1", partial(Transformer, 12), classes, few_sentences, Recipe(adam(0.1)), Recipe(adam(2e-3))),
    dies("pre-norm 3, 1.0", DECODER, classes, sentences, Recipe(adam(1.0)), Recipe(adam(2e-3))),
    dies("pre-norm 3, range test left on", DECODER, classes, sentences, Recipe(adam(1e-4), sweep), Recipe(adam(2e-3))),
    dies("pre-norm 3, x20 at step 150", DECODER, classes, sentences, *jump(20, 2e-2)),
    dies("ViT, 0.3", vision_transformer, classes, album, Recipe(adam(0.3)), Recipe(adam(2e-3))),
    dies("MLP, 1.0", classifier, classes, points, Recipe(adam(1.0)), Recipe(adam(2e-3))),
    dies("MLP, x20 at step 150", classifier, classes, points, *jump(20, 2e-2)),
    dies("MLP, momentum 0.99, 1.0", classifier, classes, points, Recipe(sgd(1.0, 0.99)), Recipe(sgd(0.05, 0.9))),
    dies("MLP in float16, 0.3", HalfPrecision, classes, points, Recipe(adam(0.3)), Recipe(adam(2e-3))),
    dies("residual MLP 24, no norm, SGD 0.2", bare_residual, classes, points, Recipe(sgd(0.2)), Recipe(adam(3e-4))),
    dies("CNN, 0.1", CNN, classes, album, Recipe(adam(0.1)), Recipe(adam(3e-3))),
    dies("CNN, x300 at step 150", CNN, classes, album, *jump(300, 1e-2)),
    dies("LSTM, x20 at step 150", LSTM, squares, series, *jump(20, 5e-2)),
    dies("regression, SGD 3", regressor, squares, table, Recipe(sgd(3.0)), Recipe(sgd(0.1))),
    dies("Poisson regression, SGD 1", regressor, counts, table, Recipe(sgd(1.0)), Recipe(adam(3e-3))),
    dies(
        "fitted variance, 0.3",
        partial(mlp, 8, 32, 32, 2),
        gaussian,
        narrow_table,
        Recipe(adam(0.3)),
        Recipe(adam(3e-3)),
    ),
)
