"""Save a run by itself: skip a bad step, go back to a healthy one, start again lower; and say why."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.rescaling import check_rule
from lightning_norms.anatomy.sharding import grad_scaler
from lightning_norms.checks import check_pattern, check_switches, check_whole
from lightning_norms.files.log_folder import find_log_folder
from lightning_norms.learning_rate import KeepsConfiguration, UnseenSteps, configured_of
from lightning_norms.measuring.step_observer import StepObserver
from lightning_norms.rescale_rules import GPT2Rescale, RescaleRule
from lightning_norms.rescue.events import Event, EventLog
from lightning_norms.rescue.intervention import Intervention
from lightning_norms.rescue.ladder import Limits
from lightning_norms.rescue.optimizer_parts import moves_within_step
from lightning_norms.rescue.rescue import Decision, FallbackExhaustedError, Rescue

__all__ = ["FallbackExhaustedError", "LRFallback"]

NO_BLOCKS = "LRFallback: no repeated blocks found, so stalls by depth cannot be detected; spikes and NaN still are."
MOVES_WITHIN_STEP = (
    "LRFallback cannot judge {name}, which takes a second gradient inside its step, at weights that it has moved:"
    " LRFallback is off in this run."
)
NO_LOSS = "LRFallback sees no loss and judges gradients only: call self.manual_backward(loss), not loss.backward()"


class LRFallback(KeepsConfiguration):
    """Skips, rolls back, or restarts at a lower learning rate, decided before the bad step is taken.

    ::

        loss, gradients -> observe: which cause? -> decide: which action? -> act, before the optimizer moves
                           non_finite, spike        skip
                           divergence               roll back to the last healthy snapshot, lr x cut
                           stall                    restart from step 0, lr x cut, fresh warmup
                                                    stop: FallbackExhaustedError, with what was tried

    All ranks decide on the same reduced numbers. A skip changes no tensor (buffers go back, too) and no factor; hooks
    see its gradients, but ``configure_gradient_clipping`` is not called. What no loss or gradient shows yet (a wrong
    learning rate for one step) is seen at the next step. A rollback puts back weights, buffers, all optimizer state
    with its counters, the GradScaler, weight averages, teachers; step counters, schedulers, random numbers and data
    go on, so the bad batches are passed by. The lower learning rate is a factor on top of any scheduler. For 16 steps
    after it only the rule for early steps can fire. A GradScaler may skip 20 non-finite steps in a row by itself. No
    checkpoint holds weights that are not finite. SAM, which takes a second gradient inside its step, switches it off:
    a warning.

    Every event is a line in ``events.jsonl`` and on the console, and ``fallback/...`` for the loggers. Under
    ``ddp_spawn`` :attr:`events` stay in the processes that trained; ``events.jsonl`` has them all.

    Args:
        cut: the learning rate is multiplied by it at each rollback and restart.
        max_skips: steps skipped in a row before that counts as a divergence.
        max_rollbacks: rollbacks in a run.
        max_restarts: restarts in a run.
        lowest_factor: no cut goes below this share of the planned learning rate.
        snapshot_every_n_steps: optimizer steps between two snapshots of a healthy run.
        restart_within: optimizer steps for which the weights of step 0 are kept; after that a stall rolls back.
        restart_warmup_steps: length of the fresh warmup after a restart, unless a ``Warmup`` starts its own again.
        rescale_on_restart: also apply ``rule`` to the residual writers at a restart, if that was not done before.
        rule: factor for ``rescale_on_restart``.
        pattern: regular expression for the writers' names, where they are not found without it.
        recovery_steps: quiet optimizer steps over which the factor climbs back to 1 in a straight line; None for never.
        dry_run: only report.

    Raises:
        TypeError: ``rule`` is no rule.
        ValueError: an argument is out of range; at fit start, for LBFGS, several optimizers or DeepSpeed.
        FallbackExhaustedError: in training, when nothing is left to try.

    Example:
        >>> fallback = LRFallback(cut=0.3, snapshot_every_n_steps=20)

    Source: by hand in Chowdhery et al. 2022, arXiv:2204.02311, section 5.1, and Zhang et al. 2022, arXiv:2205.01068.
    """

    def __init__(
        self,
        cut: float = 0.5,
        max_skips: int = 3,
        max_rollbacks: int = 3,
        max_restarts: int = 3,
        lowest_factor: float = 0.01,
        snapshot_every_n_steps: int = 50,
        restart_within: int = 500,
        restart_warmup_steps: int = 100,
        rescale_on_restart: bool = False,
        rule: RescaleRule = GPT2Rescale(),  # noqa: B008 - frozen, and YAML shows it by name
        pattern: str | None = None,
        recovery_steps: int | None = None,
        dry_run: bool = False,
    ) -> None:
        super().__init__()
        every = check_whole("LRFallback", "snapshot_every_n_steps", snapshot_every_n_steps, 1)
        within = check_whole("LRFallback", "restart_within", restart_within, 0)
        check_switches("LRFallback", rescale_on_restart=rescale_on_restart, dry_run=dry_run)
        check_pattern("LRFallback", "pattern", pattern)
        check_rule("LRFallback", rule)
        attempts = {"max_skips": max_skips, "max_rollbacks": max_rollbacks, "max_restarts": max_restarts}
        limits = Limits(cut=cut, lowest_factor=lowest_factor, **attempts)
        self._new_rescue = partial(Rescue, limits, recovery_steps, restart_warmup_steps, dry_run)
        self._new_intervention = partial(Intervention, every_n_steps=every, start_within=within)
        self.rule, self.pattern = rule if rescale_on_restart else None, pattern
        self._start_over()

    def _start_over(self) -> None:
        self.rescue = self._new_rescue()
        self._events = EventLog()
        self._logged = 0  # steps observed when numbers were last logged
        self._restored: dict[str, Any] = {}
        self._observer: StepObserver | None = None
        self._intervention: Intervention | None = None
        self._unseen: UnseenSteps | None = None

    @property
    def events(self) -> list[Event]:
        """Everything done in this run, oldest first."""
        return list(self._events.events)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._start_over()  # a checkpoint is loaded after this

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        configured_of(trainer).warn(trainer)
        for optimizer in filter(moves_within_step, trainer.optimizers):
            self._switch_off(trainer, optimizer)
            return
        intervention = self._new_intervention(trainer, pl_module, self.rescue, rule=self.rule, pattern=self.pattern)
        folder = find_log_folder(trainer)  # a collective: on every rank
        self._events = EventLog(folder if trainer.is_global_zero else None)
        if self._restored:
            self.rescue.load_state_dict(self._restored)
            self._events.resume(self._restored["events"], self.rescue.state.steps)
            intervention.load_state_dict(self._restored)
        self._observer, self._intervention = StepObserver(pl_module), intervention
        if not self._observer.has_depths:
            rank_zero_info(f"{NO_BLOCKS} {describe(pl_module)}")
        intervention.begin(partial(self._before_checkpoint, trainer))
        self._unseen = UnseenSteps(pl_module, "LRFallback", "nothing is watched")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._intervention is None or self._observer is None:
            return
        self._intervention.begin_batch(batch, batch_idx)
        if not self._observer.is_within_window:
            self._intervention.keep_buffers()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._observer is not None:
            self._observer.add_loss(trainer, loss, pl_module.automatic_optimization)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # Gradients are reduced and unscaled here, not yet clipped, and nothing has moved.
        if self._observer is None or self._intervention is None:
            return
        if self._intervention.is_second_look(optimizer):
            self._switch_off(trainer, optimizer)
            return
        self._intervention.begin_step(optimizer)
        observation = self._observer.observe(trainer, optimizer)
        if self.rescue.state.steps == 0 and observation.lacks_loss and not pl_module.automatic_optimization:
            rank_zero_warn(NO_LOSS)
        finding = self.rescue.observe(observation, has_scaler=grad_scaler(trainer) is not None)
        intervention = self._intervention
        decision = self.rescue.decide(finding, intervention.snapshots.ways_back, intervention.compare)
        self._report(trainer, decision, intervention)
        self._intervention.act(decision, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._intervention is None:
            return
        self._intervention.end_step()
        if self._unseen is not None:
            self._unseen.end_batch(trainer, self.rescue.state.steps)
        has_stepped, self._logged = self.rescue.state.steps > self._logged, self.rescue.state.steps
        if has_stepped and trainer.loggers and trainer._logger_connector.should_update_logs:
            self._log(trainer, self._intervention)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_weights(trainer)  # of the last step, for whatever is saved after fit

    def _switch_off(self, trainer: Trainer, optimizer: Any) -> None:
        name = type(getattr(optimizer, "_optimizer", optimizer)).__name__
        rank_zero_warn(MOVES_WITHIN_STEP.format(name=name))
        self._leave()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restored = self.state_dict()  # for a checkpoint that is saved after fit
        self._leave()

    def _leave(self) -> None:
        if self._intervention is not None:
            self._intervention.leave()
        self._observer = self._intervention = self._unseen = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)  # Lightning calls neither this nor teardown after an exception

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._intervention is None:
            return self._restored
        events = self._events.state_dict()
        return {**self.rescue.state_dict(), "events": events, **self._intervention.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)  # for on_train_start: there every strategy has restored everything

    def __getstate__(self) -> dict[str, Any]:
        of_this_fit = dict.fromkeys(("_observer", "_intervention", "_unseen"))
        return {**self.__dict__, **of_this_fit, "_restored": self.state_dict()}

    def _before_checkpoint(self, trainer: Trainer, is_weights_only: bool) -> None:
        self._check_weights(trainer)
        if self._intervention is not None and not is_weights_only:
            self._intervention.keep_checkpoint()

    def _check_weights(self, trainer: Trainer) -> None:
        intervention = self._intervention
        if intervention is None or self.rescue.dry_run or intervention.are_weights_finite():
            return
        decision = self.rescue.decide_on_bad_weights(intervention.snapshots.ways_back)
        self._report(trainer, decision, intervention)
        intervention.go_back(decision.action)

    def _report(self, trainer: Trainer, decision: Decision, intervention: Intervention) -> None:
        if decision.is_new:
            event = decision.event()
            self._events.append(event)
            rank_zero_info(event.message)
            self._log(trainer, intervention)
        if decision.action == "stop":
            raise FallbackExhaustedError(decision.last_words(self.events))

    def _log(self, trainer: Trainer, intervention: Intervention) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics=intervention.metrics(), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
