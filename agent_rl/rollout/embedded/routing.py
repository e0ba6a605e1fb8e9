"""Which experts the tokens in each slot were routed to."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from agent_rl.records import ShortArray
from agent_rl.rollout.embedded.kv_cache import Step
from agent_rl.routers import routers


class RoutingTable:
    """Experts of every token in the cache, int16 [slots, max_tokens, layers, k], as a hook on each router sees them.

    What a running request has computed stays as it was when weights change under it and its prefix is computed
    again: the log-probs of its tokens came from the first routing.
    """

    def __init__(self, model: Any, num_slots: int, max_tokens: int) -> None:
        found = routers(model)
        shape = (model.config.num_hidden_layers, model.config.num_experts_per_tok) if found else (0, 0)
        self._experts = np.full((num_slots, max_tokens, *shape), -1, np.int16)
        self._known = np.zeros(num_slots, np.int64)
        self._chosen: dict[int, Tensor] = {}
        for layer, router in found.items():
            router.register_forward_hook(self._keep(layer))

    @property
    def supported(self) -> bool:
        """Whether the model has routers that this table knows."""
        return bool(self._experts.shape[2])

    def _keep(self, layer: int) -> Callable[[Any, Any, tuple[Tensor, Tensor, Tensor]], None]:
        def hook(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._chosen[layer] = output[2]

        return hook

    def begin(self, slot: int, computed: int) -> None:
        """Start a request in `slot`, whose first `computed` tokens need not be computed again."""
        self._known[slot] = computed

    def store(self, step: Step) -> None:
        """Store what the routers chose in the step that was just computed."""
        if not self._chosen:
            return
        slots, positions = step.slots.numpy(), step.positions.numpy()
        new = positions >= self._known[slots]
        slots, positions = slots[new], positions[new]
        for layer, experts in self._chosen.items():
            self._experts[slots, positions, layer] = experts.numpy()[new]
        np.maximum.at(self._known, slots, positions + 1)

    def rows(self, slot: int, first: int, last: int) -> ShortArray:
        """Experts of the tokens at positions first to last - 1: int16 [last - first, layers, k], -1 in dense layers."""
        return self._experts[slot, first:last].copy()
