"""The only writer of learning rates: what the optimizer, its scheduler or the user's code says x all named factors."""

from lightning_norms.learning_rate.configured import KeepsConfiguration, configured_of
from lightning_norms.learning_rate.factors import Factors
from lightning_norms.learning_rate.monitors import HideFactors, ShowFactors, show_to_monitors
from lightning_norms.learning_rate.registry import effective_learning_rates, factors_of, follow, is_cancelled
from lightning_norms.learning_rate.step_hooks import StepHooks
from lightning_norms.learning_rate.taken_steps import ActsAfterSteps, TakenSteps, UnseenSteps

__all__ = [
    "ActsAfterSteps",
    "Factors",
    "HideFactors",
    "KeepsConfiguration",
    "ShowFactors",
    "StepHooks",
    "TakenSteps",
    "UnseenSteps",
    "configured_of",
    "effective_learning_rates",
    "factors_of",
    "follow",
    "is_cancelled",
    "show_to_monitors",
]
