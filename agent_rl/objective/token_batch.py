"""One packed micro-batch, and the compact view of its active tokens that every formula reads."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from agent_rl.objective.errors import ObjectiveError

POSITIVE_TOLERANCE = 1e-4
"""A log-prob may exceed 0 by rounding: the sampled logit and the normaliser often come from different kernels."""


@dataclass(frozen=True, eq=False)
class ActiveTokens:
    """The A tokens the policy sampled, in batch order. Nothing downstream ever reads another token.

    `index` int64 [A]: positions in the batch. `sequence` int64 [A]: segment of each token, and
    `sequence_lengths` int64 [A] the number of active tokens in it. `trajectory_ids` int64 [A]; `sequences` int64:
    the trajectories that have an active token, one entry a segment.
    `kept_sizes` int64 [A]: size of the kept set, 0 for full vocabulary.
    """

    index: Tensor
    sequence: Tensor
    sequence_lengths: Tensor
    trajectory_ids: Tensor
    sequences: Tensor
    turn_ids: Tensor
    kept_sizes: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    proximal_logprobs: Tensor | None
    ref_logprobs: Tensor | None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """T tokens of S trajectories, one segment each, packed without padding. Column t describes token t.

    token_ids, position_ids, segment_ids (0..S-1), trajectory_ids (global), turn_ids (-1 on the prompt) and
    policy_versions: int64 [T]. loss_mask: bool [T], True on active tokens, those the policy sampled.
    behavior_logprobs, advantages, temperature: float [T]; on other tokens they may hold anything.
    cu_seqlens: int32 [S + 1]. Optional: proximal_logprobs, ref_logprobs [T]; kept_ids int64 [K] with
    kept_offsets int64 [A + 1], one row an active token in order, an empty row for full vocabulary; routed_experts
    int [T, layers, k], of each input, -1 where none were recorded.

    Raises `ObjectiveError` on lengths that disagree, a non-finite or positive log-prob of an active token, a
    non-finite advantage, a sampled token outside its kept set, and a token routed to one expert twice.
    """

    token_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    trajectory_ids: Tensor
    loss_mask: Tensor
    turn_ids: Tensor
    policy_versions: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    temperature: Tensor
    cu_seqlens: Tensor
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kept_ids: Tensor | None = None
    kept_offsets: Tensor | None = None
    routed_experts: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_segments()
        self.check_logprobs("behavior_logprobs", self.behavior_logprobs)
        self.check_finite("advantages", self.advantages)
        for name in ("proximal_logprobs", "ref_logprobs"):
            if (values := getattr(self, name)) is not None:
                self.check_logprobs(name, values)
        self._check_kept()
        self._check_routing()

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def active(self) -> ActiveTokens:
        index = self.loss_mask.nonzero().squeeze(1)
        sequence = self.segment_ids[index]
        counts = torch.bincount(sequence, minlength=len(self.cu_seqlens) - 1)
        return ActiveTokens(
            index=index,
            sequence=sequence,
            sequence_lengths=counts[sequence],
            trajectory_ids=self.trajectory_ids[index],
            sequences=self.trajectory_ids[self.cu_seqlens[:-1][counts > 0].long()],
            turn_ids=self.turn_ids[index],
            kept_sizes=torch.zeros_like(index) if self.kept_offsets is None else self.kept_offsets.diff(),
            behavior_logprobs=self.behavior_logprobs[index],
            advantages=self.advantages[index],
            proximal_logprobs=None if self.proximal_logprobs is None else self.proximal_logprobs[index],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[index],
        )

    def check_finite(self, name: str, values: Tensor) -> None:
        """Raise `ObjectiveError` if `values` [T] is not finite on an active token."""
        self._reject("nonfinite", name, values, ~torch.isfinite(values), "a sampled token needs a finite one")

    def check_logprobs(self, name: str, values: Tensor) -> None:
        """Raise `ObjectiveError` if `values` [T] is not a log-probability on an active token."""
        if values.shape != self.loss_mask.shape:
            raise ObjectiveError("shape_mismatch", f"{name} has shape {tuple(values.shape)} for {len(self)} tokens")
        self.check_finite(name, values)
        positive = values > POSITIVE_TOLERANCE
        self._reject("positive_logp", name, values, positive, "a log-probability cannot be above 0")

    def check_turns(self) -> None:
        """Raise `ObjectiveError` if an active token has no turn."""
        bad = self.turn_ids < 0
        self._reject("active_token_without_turn", "turn_ids", self.turn_ids, bad, "a sampled token belongs to a turn")

    def _reject(self, code: str, name: str, values: Tensor, bad: Tensor, why: str) -> None:
        bad = bad & self.loss_mask
        if bool(bad.any()):
            t = int(bad.nonzero()[0, 0])
            where = f"of trajectory {int(self.trajectory_ids[t])} at position {int(self.position_ids[t])}"
            raise ObjectiveError(code, f"{name} {where} is {values[t].item()}; {why}")

    def _check_lengths(self) -> None:
        per_token = ("position_ids", "segment_ids", "trajectory_ids", "loss_mask", "turn_ids", "policy_versions")
        for name in (*per_token, "behavior_logprobs", "advantages", "temperature"):
            shape = tuple(getattr(self, name).shape)
            if shape != (len(self),):
                raise ObjectiveError("shape_mismatch", f"{name} has shape {shape} for {len(self)} tokens")
        if self.loss_mask.dtype != torch.bool:
            raise ObjectiveError("shape_mismatch", f"loss_mask must be bool, got {self.loss_mask.dtype}")

    def _check_segments(self) -> None:
        lengths = self.cu_seqlens.diff()
        spans = int(self.cu_seqlens[0]) == 0 and int(self.cu_seqlens[-1]) == len(self) and bool((lengths >= 0).all())
        if not spans:
            raise ObjectiveError("shape_mismatch", f"cu_seqlens must rise from 0 to the {len(self)} tokens")
        owner = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths.long())
        if not torch.equal(owner, self.segment_ids):
            raise ObjectiveError("shape_mismatch", "segment_ids disagree with cu_seqlens; segment s is the s-th span")
        inside = self.segment_ids.diff() == 0
        if bool((inside & (self.trajectory_ids.diff() != 0)).any()):
            raise ObjectiveError("shape_mismatch", "a segment holds more than one trajectory; give each its own")

    def _check_kept(self) -> None:
        if self.kept_ids is None or self.kept_offsets is None:
            if self.kept_ids is not self.kept_offsets:
                raise ObjectiveError("shape_mismatch", "kept_ids and kept_offsets come together or not at all")
            return
        sampled = self.token_ids[self.loss_mask]
        sizes = self.kept_offsets.diff()
        fits = len(sizes) == len(sampled) and bool((sizes >= 0).all()) and int(sizes.sum()) == len(self.kept_ids)
        if not fits or int(self.kept_offsets[0]) != 0:
            raise ObjectiveError(
                "shape_mismatch", f"kept_offsets need one row for each of {len(sampled)} active tokens"
            )
        row = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        found = torch.zeros_like(sizes).index_add(0, row, (self.kept_ids == sampled[row]).long())
        wrong = (found != 1) & (sizes > 0)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0, 0])
            t = int(self.loss_mask.nonzero()[first, 0])
            where = f"of trajectory {int(self.trajectory_ids[t])} at position {int(self.position_ids[t])}"
            if found[first] > 1:
                raise ObjectiveError("repeated_in_mask", f"the token {where} is in its kept set more than once")
            raise ObjectiveError("sampled_token_outside_mask", f"the token {where} is not in its own kept set")

    def _check_routing(self) -> None:
        if self.routed_experts is None:
            return
        shape = tuple(self.routed_experts.shape)
        if len(shape) != 3 or shape[0] != len(self):
            raise ObjectiveError("shape_mismatch", f"routed_experts has shape {shape}, need [{len(self)}, layers, k]")
        ordered = self.routed_experts.sort(-1).values
        twice = ((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)).any(-1)
        if bool(twice.any()):
            t, layer = twice.nonzero()[0].tolist()
            where = f"position {int(self.position_ids[t])} of trajectory {int(self.trajectory_ids[t])}"
            chosen = self.routed_experts[t, layer].tolist()
            raise ObjectiveError("duplicate_expert", f"layer {layer} routes {where} to an expert twice: {chosen}")
