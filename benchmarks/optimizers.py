"""Does everything that an optimizer changes go back, and does a skipped step change nothing? A table of many kinds.

    python benchmarks/optimizers.py                         the table below, about three minutes on 2 cores
    python benchmarks/optimizers.py --all --json all.json   every optimizer of pytorch_optimizer besides

Each row is four real fits of a small network with :class:`LRFallback`: a NaN loss at one step (skip), at four (roll
back to the last snapshot), a loss whose stack is dead (restart), and a run that is stopped and resumed before it rolls
back. "equal" means bit for bit: weights, buffers, and the whole ``optimizer.state_dict()`` but its learning rates.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_norms import LRFallback

NAN_AT = 6
ODD = ("DIFFERS", "no skip", "no rollback", "no restart")


class CountingSGD(torch.optim.Optimizer):
    """Counts in its groups, expects every gradient, keeps a quantized moment with its scale and a list of numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.updates = 0

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.updates += 1
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                before = state["codes"].float() * state["scale"] if state else torch.zeros_like(parameter)
                moment = 0.9 * before + parameter.grad
                state["scale"] = moment.abs().max().clamp(min=1e-12) / 127
                state["codes"] = (moment / state["scale"]).round().to(torch.int8)
                state["history"] = [*state.get("history", []), float(moment.abs().mean())][-4:]
                parameter.sub_(moment, alpha=group["lr"])
        return loss


class Lookahead(torch.optim.Optimizer):
    """Slow weights that the fast ones of a wrapped optimizer are pulled to, kept in a list of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        self.optimizer = torch.optim.Adam(params, lr=lr)
        super().__init__(self.optimizer.param_groups, {"lr": lr})
        self.param_groups = self.optimizer.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.calls = 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "slow": self.slow, "calls": self.calls}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow, self.calls = [slow.clone() for slow in state_dict["slow"]], state_dict["calls"]
        self.optimizer.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.param_groups = self.optimizer.param_groups

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optimizer.step(closure)
        self.calls += 1
        if self.calls % 3 == 0:
            fast = [parameter for group in self.param_groups for parameter in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return loss


class TwoStepSAM(torch.optim.Optimizer):
    """Sharpness-aware minimization by a closure that is called twice."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any]) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moves = [0.05 * parameter.grad for parameter in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
        closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
        self.base_optimizer.step()
        return loss


class Sharp(TwoStepSAM):
    """The same under a name that does not tell."""


def _from(package: str, name: str, **options: Any) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        library = __import__(package)
        return getattr(library, name)(module.parameters(), **{"lr": 1e-2, **options})

    return make


def _of(cls: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda module: cls(module.parameters(), **{"lr": 1e-2, **options})


def _wrapped(name: str) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(torch.optim.AdamW(module.parameters(), lr=1e-2))

    return make


def _muon(module: nn.Module) -> Any:
    import pytorch_optimizer

    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return pytorch_optimizer.Muon(groups, lr=1e-2)


def _by_name(name: str, module: nn.Module) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.load_optimizer(name)(module.parameters(), lr=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch SGD, momentum": _of(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "torch AdamW": _of(torch.optim.AdamW),
    "torch AdamW, fused": _of(torch.optim.AdamW, fused=True),
    "torch AdamW, amsgrad, capturable off": _of(torch.optim.AdamW, amsgrad=True),
    "torch NAdam": _of(torch.optim.NAdam),
    "torch RAdam": _of(torch.optim.RAdam),
    "torch Adafactor": _of(torch.optim.Adafactor),
    "torch RMSprop, centered": _of(torch.optim.RMSprop, centered=True, momentum=0.9),
    "torch Muon": lambda module: torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=1e-2),
    "schedulefree AdamW": _from("schedulefree", "AdamWScheduleFree", warmup_steps=4),
    "schedulefree SGD": _from("schedulefree", "SGDScheduleFree"),
    "schedulefree RAdam": _from("schedulefree", "RAdamScheduleFree"),
    "prodigyopt Prodigy": _from("prodigyopt", "Prodigy", lr=1.0),
    "lion_pytorch Lion": _from("lion_pytorch", "Lion", lr=1e-3),
    "pytorch_optimizer Adafactor": _from("pytorch_optimizer", "AdaFactor"),
    "pytorch_optimizer Muon": _muon,
    "pytorch_optimizer Shampoo": _from("pytorch_optimizer", "Shampoo"),
    "pytorch_optimizer SOAP": _from("pytorch_optimizer", "SOAP"),
    "pytorch_optimizer DAdaptAdam": _from("pytorch_optimizer", "DAdaptAdam", lr=1.0),
    "pytorch_optimizer Lookahead of AdamW": _wrapped("Lookahead"),
    "Lookahead by hand, a list": _of(Lookahead),
    "8-bit moments, counts in groups": _of(CountingSGD),
    "SAM, closure": _of(TwoStepSAM),
    "SAM under another name": _of(Sharp),
    "torch LBFGS": _of(torch.optim.LBFGS),
}


class Net(LightningModule):
    """A stack of three residual blocks whose loss is NaN, or whose blocks get no gradient, at some batches."""

    def __init__(self, make: Callable[[nn.Module], Any], nan_at: tuple[int, ...] = (), dead_from: int = 10**9) -> None:
        super().__init__()
        self.make, self.nan_at, self.dead_from = make, nan_at, dead_from
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))
        self.moments: dict[int, Any] = {}

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(batch_idx))  # the same after resuming
        self.moments[batch_idx] = everything(self, self.trainer.optimizers[0])
        x = self.inp(batch)
        for block in self.blocks:
            x = x + (1e-8 * block(x) if self.is_dead(block) else block(x))
        loss = nn.functional.mse_loss(self.out(x), batch[:, :1])
        return loss * float("nan") if self.trainer.fit_loop.epoch_loop.batch_idx in self.nan_at else loss

    def is_dead(self, block: nn.Module) -> bool:
        """Whether this block gets nearly no gradient any more."""
        return self.trainer.fit_loop.epoch_loop.batch_idx >= self.dead_from and block is not self.blocks[-1]

    @override
    def on_fit_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            if callable(getattr(optimizer, "train", None)):
                optimizer.train()

    @override
    def configure_optimizers(self) -> Any:
        return self.make(self)


def everything(module: nn.Module, optimizer: Any) -> Any:
    """Return copies of the weights and of the optimizer's state, but for its learning rates."""
    state = copy.deepcopy(optimizer.state_dict())
    for group in state.get("param_groups", []):
        for name in ("lr", "scheduled_lr", "initial_lr"):
            group.pop(name, None)
    state["state"] = {key: value for key, value in state.get("state", {}).items() if value}  # looking makes empty ones
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        state["inner"] = copy.deepcopy(inner.state_dict()["state"])
    return [[parameter.detach().clone() for parameter in module.parameters()], state]


def is_equal(one: Any, other: Any) -> bool:
    """Whether two nested states are the same, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if type(one) is type(other) and hasattr(one, "__dict__"):  # an object of the optimizer's own
        return is_equal(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)


def fit(module: Net, steps: int, ckpt_path: str | None = None, **options: Any) -> tuple[LRFallback, Trainer]:
    """Train for some steps with a fallback that keeps a snapshot every four."""
    seed_everything(0, verbose=False)
    fallback = LRFallback(snapshot_every_n_steps=4, **options)
    trainer = Trainer(
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        callbacks=[fallback],
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(module, DataLoader(torch.zeros(1000), 8), ckpt_path=ckpt_path)
    return fallback, trainer


def _new(make: Callable[[nn.Module], Any], **options: Any) -> Net:
    seed_everything(0, verbose=False)
    return Net(make, **options)


def _answer(is_right: bool, fallback: LRFallback, action: str) -> str:
    if action not in [event.action for event in fallback.events]:
        return f"no {action}"
    return "equal" if is_right else "DIFFERS"


def skip(make: Callable[[nn.Module], Any]) -> str:
    """One NaN batch: what is before the next step is what was before the skipped one."""
    module = _new(make, nan_at=(NAN_AT,))
    fallback, _ = fit(module, NAN_AT + 3)
    return _answer(is_equal(module.moments[NAN_AT], module.moments[NAN_AT + 1]), fallback, "skip")


def rollback(make: Callable[[nn.Module], Any]) -> str:
    """Four NaN batches: after them stands what stood at the last snapshot."""
    module = _new(make, nan_at=tuple(range(NAN_AT, NAN_AT + 4)))
    fallback, _ = fit(module, NAN_AT + 6)
    events = [event for event in fallback.events if event.action == "rollback"]
    if not events:
        return "no rollback"
    (to,) = re.findall(r"rolled back to step (\d+)", events[0].message)
    return _answer(is_equal(module.moments[int(to)], module.moments[events[0].step + 1]), fallback, "rollback")


def restart(make: Callable[[nn.Module], Any]) -> str:
    """Blocks without gradient: after the restart stands what stood before the first step."""
    module = _new(make, dead_from=4)
    fallback, _ = fit(module, 30, max_restarts=1)
    steps = [event.step for event in fallback.events if event.action == "restart"]
    return _answer(bool(steps) and is_equal(module.moments[0], module.moments[steps[0] + 1]), fallback, "restart")


def resume(make: Callable[[nn.Module], Any]) -> str:
    """Stopped at step 5 and resumed, rolled back at step 9: the end is that of the run that was not stopped."""
    bad = tuple(range(NAN_AT, NAN_AT + 4))
    whole = _new(make, nan_at=bad)
    folder = Path(tempfile.mkdtemp())
    whole.on_train_batch_end = lambda *_: (  # type: ignore[method-assign]
        whole.trainer.save_checkpoint(folder / "5.ckpt") if whole.trainer.global_step == 5 else None
    )
    fallback, _ = fit(whole, NAN_AT + 8)
    again = _new(make, nan_at=bad)
    fallback, _ = fit(again, NAN_AT + 8, ckpt_path=str(folder / "5.ckpt"))
    last = NAN_AT + 7
    return _answer(is_equal(whole.moments[last], again.moments[last]), fallback, "rollback")


CHECKS = {"skip": skip, "rollback": rollback, "restart": restart, "resume": resume}


def check(make: Callable[[nn.Module], Any]) -> dict[str, str]:
    """Return the answer of every check, or the sentence that LRFallback says instead."""
    answers = {}
    for name, function in CHECKS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answers[name] = function(make)
            except Exception as error:  # the table shows what it was
                answers[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        said = [str(warning.message) for warning in caught if "LRFallback cannot" in str(warning.message)]
        answers[name] = said[0] if said else answers[name]
    return answers


def table(rows: dict[str, dict[str, str]]) -> str:
    """Return the answers as a Markdown table; a sentence that all checks share stands once."""
    lines = ["| optimizer | skip | rollback | restart | resume |", "|---|---|---|---|---|"]
    for name, answers in rows.items():
        same = len(set(answers.values())) == 1 and "equal" not in answers.values()
        cells = [next(iter(answers.values())), "", "", ""] if same else list(answers.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def counts(rows: dict[str, dict[str, str]]) -> str:
    """One line: how many are equal, and which differ where; the table shows what the rest say."""
    odd = [f"{name} ({check})" for name, row in rows.items() for check, text in row.items() if text in ODD]
    equal = sum(set(row.values()) == {"equal"} for row in rows.values())
    return f"{len(rows)} optimizers, {equal} equal in all checks; different or no event: {', '.join(odd) or 'none'}"


def main() -> None:
    """Run the checks of the chosen optimizers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every optimizer of pytorch_optimizer besides")
    parser.add_argument("--only", default="", help="names that hold this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = dict(OPTIMIZERS)
    if options.all:
        import pytorch_optimizer

        kinds |= {f"sweep {name}": partial(_by_name, name) for name in pytorch_optimizer.get_supported_optimizers()}
    rows: dict[str, dict[str, str]] = {}
    for name, make in kinds.items():
        if options.only in name:
            rows[name] = check(make)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    print(counts(rows))


if __name__ == "__main__":
    import logging

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main()
