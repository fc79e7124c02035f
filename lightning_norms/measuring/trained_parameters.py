"""The parameters that an optimizer trains, by depth; looked up again only when some were added, frozen or unfrozen."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.sharding import sharding_group
from lightning_norms.measuring.norms_by_group import GroupNorms


class TrainedParameters:
    """The trainable parameters of one optimizer that ``module`` names, and their norms by depth.

    Cheap enough for every step: the network is walked only after parameters were added, frozen or unfrozen.
    """

    def __init__(self, module: nn.Module, depth: DepthMap | None = None) -> None:
        self.depth = DepthMap.of(module) if depth is None else depth
        self._module = module
        self._owned: list[Tensor] = []  # kept, so that no other tensor can get the id of one of them
        self._state: list[tuple[int, bool]] = []
        self._norms: GroupNorms | None = None

    def norms(self, optimizer: Optimizer, model: nn.Module | None = None) -> GroupNorms:
        """Norms of the parameters that ``optimizer`` trains now, lowest depth first; the same object until they change.

        ``optimizer`` is the same one at every call, ``model`` the module as the strategy has wrapped it.
        """
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [(id(parameter), parameter.requires_grad) for parameter in owned]
        if self._norms is None or state != self._state:
            self._owned, self._state = owned, state
            ids = {id(parameter) for parameter in owned if parameter.requires_grad}
            grouped = [(self.depth.group_of(name), p) for name, p in self._module.named_parameters() if id(p) in ids]
            order = {group: position for position, group in enumerate(self.depth.groups)}
            grouped.sort(key=lambda pair: order.get(pair[0], len(order)))
            self._norms = GroupNorms([p for _, p in grouped], [group for group, _ in grouped], sharding_group(model))
        return self._norms
