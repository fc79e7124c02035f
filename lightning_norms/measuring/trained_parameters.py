"""The parameters that an optimizer trains, by depth; looked up again only when some were added, frozen or unfrozen."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.sharding import sharding_group
from lightning_norms.measuring.norms_by_group import GroupNorms


class TrainedParameters:
    """The trainable parameters of one optimizer, under the names that a module has for them, and their norms by depth.

    Cheap enough for every step: the network is walked only after parameters were added, frozen or unfrozen. Walking a
    network of a thousand parts costs one per cent of a small network's step.

    Args:
        module: parameters that it does not have are left out.
        depth: the depths of ``module``, where they are known already.

    Example:
        >>> from torch.optim import SGD
        >>> layer = nn.Linear(2, 1)
        >>> trained, optimizer = TrainedParameters(layer), SGD(layer.parameters(), lr=0.1)
        >>> first = trained.norms(optimizer)
        >>> trained.norms(optimizer) is first
        True
        >>> _ = layer.bias.requires_grad_(False)
        >>> len(first.parameters), len(trained.norms(optimizer).parameters)
        (2, 1)
    """

    def __init__(self, module: nn.Module, depth: DepthMap | None = None) -> None:
        self.depth = DepthMap.of(module) if depth is None else depth
        self._module = module
        self._owned: list[Tensor] = []  # kept, so that no other tensor can get the id of one of them
        self._ids: list[int] = []
        self._trainable: list[bool] = []
        self._norms: GroupNorms | None = None

    def norms(self, optimizer: Optimizer, model: nn.Module | None = None) -> GroupNorms:
        """Norms of the parameters that ``optimizer`` trains now, lowest depth first; the same object until they change.

        Args:
            optimizer: the same one at every call.
            model: ``module`` as the strategy has wrapped it.
        """
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids = [id(parameter) for parameter in owned]
        trainable = [parameter.requires_grad for parameter in owned]
        if self._norms is None or ids != self._ids or trainable != self._trainable:
            self._owned, self._ids, self._trainable = owned, ids, trainable
            self._norms = self._look_up(model)
        return self._norms

    def _look_up(self, model: nn.Module | None) -> GroupNorms:
        ids = {id(parameter) for parameter in self._owned if parameter.requires_grad}
        named = [(name, parameter) for name, parameter in self._module.named_parameters() if id(parameter) in ids]
        order = {group: position for position, group in enumerate(self.depth.groups)}
        grouped = [(self.depth.group_of(name), parameter) for name, parameter in named]
        grouped.sort(key=lambda pair: order.get(pair[0], len(order)))
        return GroupNorms([p for _, p in grouped], [group for group, _ in grouped], sharding_group(model))
