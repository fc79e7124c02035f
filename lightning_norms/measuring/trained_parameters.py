"""Which parameters an optimizer trains, by name; looked up again only when some were added, frozen or unfrozen."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer


class TrainedParameters:
    """The trainable parameters of an optimizer, under the names that a module has for them.

    Asked every step, so what is asked often is cheap: walking a network of a thousand parts costs one per cent of a
    small network's step.

    Args:
        module: whose names count. Parameters that it does not have are left out.

    Example:
        >>> from torch.optim import SGD
        >>> layer = nn.Linear(2, 1)
        >>> trained, optimizer = TrainedParameters(layer), SGD(layer.parameters(), lr=0.1)
        >>> trained.have_changed(optimizer), trained.have_changed(optimizer)
        (True, False)
        >>> _ = layer.bias.requires_grad_(False)
        >>> trained.have_changed(optimizer), [name for name, _ in trained.named()]
        (True, ['weight'])
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._all: list[Tensor] = []  # kept, so that no other tensor can get the id of one of them
        self._ids: list[int] = []
        self._trainable: list[bool] = []

    def have_changed(self, optimizer: Optimizer) -> bool:
        """Whether they are others than at the last call; at the first call, whether there are any."""
        ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if ids != self._ids:
            self._all = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trainable = [parameter.requires_grad for parameter in self._all]
        changed = ids != self._ids or trainable != self._trainable
        self._ids, self._trainable = ids, trainable
        return changed

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter, each once, in the module's order."""
        owned = {each for each, trainable in zip(self._ids, self._trainable, strict=True) if trainable}
        return [(name, parameter) for name, parameter in self._module.named_parameters() if id(parameter) in owned]
