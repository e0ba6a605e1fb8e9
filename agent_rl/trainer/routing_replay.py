"""Rollout routing replay (R3): the trainer's routers choose the experts that the engine chose.

Membership is the recorded one, the weights come from the current logits, so the gradient reaches the router
(arXiv 2510.11370): g_e = I_e exp(z_e) / sum over e' of I_e' exp(z_e'), with I the recorded membership.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agent_rl.routers import routers

RouterOutput = tuple[Tensor, Tensor, Tensor]
Counts = dict[tuple[int, int], tuple[int, int]]
"""By (layer, turn): inputs whose routing was reported, and how many of them differ."""


def replayed_weights(logits: Tensor, experts: Tensor, normalised: bool = True) -> Tensor:
    """Weights of recorded `experts` [T, k] from current `logits` [T, E], in the dtype of `logits`: [T, k].

    With `normalised` (the model's norm_topk_prob) they sum to 1 over the recorded experts; without, they are the
    probabilities over all experts, as the model itself weighs what it chose.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if normalised:
        return precise.gather(1, experts).softmax(-1).to(logits.dtype)
    return precise.softmax(-1).gather(1, experts).to(logits.dtype)


class RoutingReplay:
    """Hooks on the routers of a model. What `replay` was given holds until it is called again.

    So it still holds in the backward pass, where gradient checkpointing runs the routers a second time.
    `differed`: by decoder layer, bool [T] of the last forward pass, where the model's own set of experts was
    another than the recorded one; `reported` likewise, where there was a recorded one. `logits` [T, E] of the router,
    with gradient, and the experts `chosen` [T, k], whether replayed or its own.
    """

    def __init__(self, model: Any) -> None:
        found = routers(model)
        self._num_layers = model.config.num_hidden_layers
        self._num_experts = model.config.num_experts if found else 0
        self._experts: Tensor | None = None
        self.logits: dict[int, Tensor] = {}
        self.chosen: dict[int, Tensor] = {}
        self.differed: dict[int, Tensor] = {}
        self.reported: dict[int, Tensor] = {}
        for layer, router in found.items():
            router.register_forward_hook(self._hook(layer))

    def replay(self, routed_experts: Tensor | None) -> None:
        """Set what is replayed from the next forward pass on: int [T, layers, k], -1 where the model's own choice
        stands; None replays nothing. Raises `ValueError` if it cannot be the routing of this model."""
        self.differed, self.reported, self._experts = {}, {}, routed_experts
        if routed_experts is None:
            return
        if not self._num_experts:
            raise ValueError("the batch has recorded routing, but the model is no mixture of experts")
        layers, highest = routed_experts.shape[1], int(routed_experts.max())
        if layers != self._num_layers or highest >= self._num_experts:
            raise ValueError(
                f"the recorded routing has {layers} layers and expert {highest}, but the model has {self._num_layers} "
                f"layers of {self._num_experts} experts; it was recorded with another model"
            )

    def _hook(self, layer: int) -> Callable[[Any, Any, RouterOutput], RouterOutput]:
        def hook(router: Any, _inputs: Any, output: RouterOutput) -> RouterOutput:
            logits, weights, own = output
            self.logits[layer], self.chosen[layer] = logits, own
            if self._experts is None:
                return output
            recorded = self._experts[:, layer].long()
            reported = recorded[:, :1] >= 0
            experts = torch.where(reported, recorded, own)
            other = (own.sort(-1).values != experts.sort(-1).values).any(-1)
            self.differed[layer], self.reported[layer] = other, reported.squeeze(1)
            self.chosen[layer] = experts
            replayed = replayed_weights(logits, experts, router.norm_topk_prob)
            return logits, torch.where(reported, replayed, weights), experts

        return hook


def replay_routing(model: Any, routed_experts: Tensor | None) -> None:
    """Call `RoutingReplay.replay` of a model from `load_model`; does nothing for a model without routers."""
    if (routing := getattr(model, "routing_replay", None)) is not None:
        routing.replay(routed_experts)


class RoutingTally:
    """Counts, over the micro-batches of a step, how often the model's own experts differed from the recorded ones."""

    def __init__(self) -> None:
        self.counts: Counts = {}

    def join(self, shares: "Sequence[Counts]") -> None:
        """Take the counts of all ranks in place of this one's."""
        self.counts = {}
        for key in sorted(set().union(*shares)):
            found = [share[key] for share in shares if key in share]
            self.counts[key] = (sum(known for known, _ in found), sum(other for _, other in found))

    def add(self, model: Any, turn_ids: Tensor) -> None:
        """Count the forward pass that `model` has just made; turn_ids int64 [T] of its inputs, -1 on the prompt."""
        replay: RoutingReplay = model.routing_replay
        length = int(turn_ids.max()) + 2
        for layer, reported in replay.reported.items():
            masks = [mask.to(turn_ids.device) for mask in (reported, reported & replay.differed[layer])]
            known, other = (torch.bincount(turn_ids[mask] + 1, minlength=length).tolist() for mask in masks)
            for turn in range(-1, length - 1):
                before = self.counts.get((layer, turn), (0, 0))
                self.counts[layer, turn] = (before[0] + known[turn + 1], before[1] + other[turn + 1])

    def rows(self) -> list[dict[str, Any]]:
        """Rows of mismatch.parquet with `part` routing: n inputs of a layer and turn, the fraction that differed."""
        place = {"part": "routing", "scope": "layer", "num_turns": -1, "lag": -1}
        return [
            {**place, "layer": layer, "turn": turn, "n": known, "routing_differed": other / known}
            for (layer, turn), (known, other) in sorted(self.counts.items())
            if known
        ]

    def metrics(self) -> dict[str, float]:
        """`routing_differed`: the fraction over all layers and inputs; nothing where no routing was replayed."""
        known, other = (sum(counts) for counts in zip(*self.counts.values(), strict=True)) if self.counts else (0, 0)
        return {"routing_differed": other / known} if known else {}
