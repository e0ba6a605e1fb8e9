"""Every record that crosses a stage. Numpy only, frozen, validated on construction.

Ragged data is CSR. L counts the tokens of a trajectory, N those that the policy sampled. Column t of
every [L] array describes token t; a missing value is NaN (floats) or -1 (ints), never a default.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.base import ToolResult

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
ShortArray = npt.NDArray[np.int16]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class StopReason(enum.StrEnum):
    """Why an episode ended. One that the infrastructure broke has no stop reason: it is issued again."""

    ANSWER = "answer"
    MAX_TOOL_TURN = "max_tool_turn"
    MAX_TOKENS = "max_tokens"
    DEADLINE = "deadline"


class FinishReason(enum.StrEnum):
    """Why one completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _readonly(owner: object, **arrays: npt.NDArray[Any]) -> None:
    """Store arrays on a frozen record and forbid writing to them (a view: the caller's own array is untouched)."""
    for name, array in arrays.items():
        view = array.view()
        view.flags.writeable = False
        object.__setattr__(owner, name, view)


def _checked_routing(routed_experts: npt.ArrayLike, owner: str) -> ShortArray:
    """int16 [rows, layers, k], where each [row, layer] is either k experts or, if not reported, k times -1."""
    found = np.asarray(routed_experts, np.int16)
    _check(found.ndim == 3, f"{owner}: routed experts must be [rows, layers, k], got shape {found.shape}")
    reported = found >= 0
    whole = np.array_equal(reported.all(-1), reported.any(-1)) and bool(np.all(found >= -1))
    _check(whole, f"{owner}: a layer's routing of a token must be whole, or -1 throughout where it was not reported")
    return found


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: logits / temperature, then top-k, then top-p, then renormalised. top_k -1 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _check(0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}; 1 samples the full vocabulary")
        _check(self.temperature >= 0, f"temperature must be 0 (greedy) or more, got {self.temperature}")
        _check(self.top_k == -1 or self.top_k >= 1, f"top_k must be -1 (off) or at least 1, got {self.top_k}")
        _check(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {self.max_new_tokens}")

    @property
    def cuts_support(self) -> bool:
        """Whether sampling leaves part of the vocabulary out, so that kept sets must be recorded."""
        return self.top_p < 1 or self.top_k != -1 or self.temperature == 0


@dataclass(frozen=True)
class SamplingMask:
    """Kept sets of N sampled tokens: row i is token_ids[offsets[i]:offsets[i+1]]; empty means full vocabulary."""

    token_ids: IntArray
    offsets: LongArray

    def __post_init__(self) -> None:
        _readonly(self, token_ids=np.asarray(self.token_ids, np.int32), offsets=np.asarray(self.offsets, np.int64))
        _check(len(self.offsets) >= 1 and self.offsets[0] == 0, "sampling mask offsets must start at 0")
        _check(bool(np.all(np.diff(self.offsets) >= 0)), "sampling mask offsets must not decrease")
        _check(self.offsets[-1] == len(self.token_ids), "sampling mask offsets must end at len(token_ids)")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> LongArray:
        """Kept-set size per row, int64 [N]; 0 means full vocabulary."""
        return np.diff(self.offsets)

    def row(self, index: int) -> IntArray:
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]]

    @staticmethod
    def full(num_rows: int) -> "SamplingMask":
        """Kept sets with full support in every row."""
        return SamplingMask(np.empty(0, np.int32), np.zeros(num_rows + 1, np.int64))

    @staticmethod
    def from_rows(rows: list[IntArray]) -> "SamplingMask":
        flat = np.concatenate(rows) if rows else np.empty(0, np.int32)
        return SamplingMask(flat, np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64))

    @staticmethod
    def concat(masks: "list[SamplingMask]") -> "SamplingMask":
        sizes = np.concatenate([np.empty(0, np.int64), *(m.sizes for m in masks)])
        ids = np.concatenate([np.empty(0, np.int32), *(m.token_ids for m in masks)])
        return SamplingMask(ids, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one request: N sampled tokens with everything needed to replay them.

    `behavior_logprobs` are after temperature and renormalised over the kept set.

    `routed_experts` int16 [M, layers, k], if it was asked for: which experts every decoder layer chose for the
    inputs from position `routed_from` of the request on. The last sampled token is never an input, so M is
    prompt + N - 1 - `routed_from`. Row and layer hold -1 where there is nothing to report (a dense layer).
    """

    token_ids: IntArray
    behavior_logprobs: FloatArray
    sampling_mask: SamplingMask
    policy_versions: IntArray
    finish_reason: FinishReason
    routed_experts: ShortArray | None = None

    def __post_init__(self) -> None:
        _readonly(
            self,
            token_ids=np.asarray(self.token_ids, np.int32),
            behavior_logprobs=np.asarray(self.behavior_logprobs, np.float32),
            policy_versions=np.asarray(self.policy_versions, np.int32),
        )
        n = len(self.token_ids)
        lengths = (len(self.behavior_logprobs), len(self.sampling_mask), len(self.policy_versions))
        _check(lengths == (n, n, n), f"completion of {n} tokens: lengths of log-probs, kept sets, versions {lengths}")
        _check(bool(np.all(np.isfinite(self.behavior_logprobs))), "a sampled token has no finite behaviour log-prob")
        _check(bool(np.all(self.policy_versions >= 0)), "a sampled token has no policy version")
        if self.routed_experts is not None:
            _readonly(self, routed_experts=_checked_routing(self.routed_experts, f"completion of {n} tokens"))


@dataclass(frozen=True)
class ToolCall:
    """A call as parsed from the model's text; `error` says why a malformed one could not be parsed."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class Turn:
    """One assistant turn: the new prompt ids that were appended before it, what was sampled, what tools answered."""

    turn_id: int
    prompt_token_ids: IntArray
    completion: Completion
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    generate_s: float = 0.0
    tool_s: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """One problem: a chat, its reference answer, its place in the stream, and tags for analysis."""

    index: int
    messages: tuple[dict[str, str], ...]
    answer: str
    tags: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(bool(self.messages), f"prompt {self.index} has no messages")
        _check(self.answer != "", f"prompt {self.index} has no answer; give each line a non-empty `answer`")


@dataclass(frozen=True)
class Trajectory:
    """One episode as tokens, ready for training: built by `TrajectoryBuilder`, or read back from rollout facts.

    `turn_ids`: -1 on the prompt; k on what turn k wrote and on the tool output that answers it.
    `behavior_logprobs` / `policy_versions` are NaN / -1 where `loss_mask` is False. `sampling_mask` has
    one row for each token with `loss_mask` True, in order; a row is empty exactly if `sampling_params`
    sample the full vocabulary. `mask_reason`: why the trajectory is recorded but must not be trained on, None if it is.
    `routed_experts` int16 [L, layers, k], where routing was recorded: row t is the routing of input t, which produces
    the prediction of token t + 1, on prompt and tool tokens too; -1 where the engine did not report it, as for the
    last sampled token, which never was an input.
    """

    group_id: int
    episode_id: int
    attempt: int
    token_ids: IntArray
    loss_mask: BoolArray
    behavior_logprobs: FloatArray
    turn_ids: IntArray
    policy_versions: IntArray
    sampling_mask: SamplingMask
    sampling_params: SamplingParams
    reward: float
    reward_parts: dict[str, float]
    stop_reason: StopReason
    routed_experts: ShortArray | None = None
    mask_reason: str | None = None

    def __post_init__(self) -> None:
        _readonly(
            self,
            token_ids=np.asarray(self.token_ids, np.int32),
            loss_mask=np.asarray(self.loss_mask, np.bool_),
            behavior_logprobs=np.asarray(self.behavior_logprobs, np.float32),
            turn_ids=np.asarray(self.turn_ids, np.int32),
            policy_versions=np.asarray(self.policy_versions, np.int32),
        )
        n = len(self.token_ids)
        for name in ("loss_mask", "behavior_logprobs", "turn_ids", "policy_versions"):
            length = len(getattr(self, name))
            _check(length == n, f"trajectory {self.episode_id}: {name} has {length} entries for {n} tokens")
        active = self.loss_mask
        _check(n == 0 or not active[0], f"trajectory {self.episode_id}: the first token cannot be a sampled one")
        _check(len(self.sampling_mask) == active.sum(), f"trajectory {self.episode_id}: one kept set a sampled token")
        finite, versions = np.isfinite(self.behavior_logprobs), self.policy_versions >= 0
        _check(bool(np.all(finite == active)), f"trajectory {self.episode_id}: log-probs exactly on sampled tokens")
        _check(bool(np.all(versions == active)), f"trajectory {self.episode_id}: versions exactly on sampled tokens")
        _check(bool(np.all(self.turn_ids[active] >= 0)), f"trajectory {self.episode_id}: a sampled token has no turn")
        cut = self.sampling_mask.sizes > 0
        right = bool(np.all(cut == self.sampling_params.cuts_support))
        _check(right, f"trajectory {self.episode_id}: kept sets exactly where top-p or top-k cut the support")
        if self.routed_experts is not None:
            _readonly(self, routed_experts=_checked_routing(self.routed_experts, f"trajectory {self.episode_id}"))
            rows = len(self.routed_experts)
            _check(rows == n, f"trajectory {self.episode_id}: routed_experts has {rows} rows for {n} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def outcome(self) -> float:
        """1 for a right answer, 0 for any other; the reward, if its parts do not say."""
        return self.reward_parts.get("outcome", self.reward)

    @property
    def num_turns(self) -> int:
        return int(self.turn_ids.max(initial=-1)) + 1


class TrajectoryBuilder:
    """Grows all per-token fields of one episode together; nothing else appends to a trajectory."""

    def __init__(self) -> None:
        self._token_ids: list[IntArray] = []
        self._loss_mask: list[BoolArray] = []
        self._logprobs: list[FloatArray] = []
        self._turn_ids: list[IntArray] = []
        self._versions: list[IntArray] = []
        self._masks: list[SamplingMask] = []
        self._routing: list[ShortArray] = []

    def append(self, token_ids: npt.ArrayLike, turn_id: int, completion: Completion | None = None) -> None:
        """Append `token_ids` of turn `turn_id`: sampled ones with their completion, forced ones without."""
        ids = np.asarray(token_ids, np.int32)
        n, sampled = len(ids), completion is not None
        self._token_ids.append(ids)
        self._loss_mask.append(np.full(n, sampled))
        self._turn_ids.append(np.full(n, turn_id, np.int32))
        self._logprobs.append(completion.behavior_logprobs if completion else np.full(n, np.nan, np.float32))
        self._versions.append(completion.policy_versions if completion else np.full(n, -1, np.int32))
        if completion is not None:
            _check(np.array_equal(ids, completion.token_ids), "sampled ids must be the completion's own")
            self._masks.append(completion.sampling_mask)
            self._append_routing(completion.routed_experts, turn_id)

    def _append_routing(self, routed: ShortArray | None, turn_id: int) -> None:
        """Append a turn's rows, which must reach from the last reported row to the last input."""
        if routed is None:
            _check(not self._routing, f"turn {turn_id} has no routed experts, but the turns before it have")
            return
        missing = len(self.token_ids) - 1 - self.num_routed
        _check(len(routed) == missing, f"turn {turn_id} has routed experts for {len(routed)} of {missing} new inputs")
        same = not self._routing or self._routing[0].shape[1:] == routed.shape[1:]
        _check(same, f"turn {turn_id} has routed experts of shape {routed.shape}, unlike the turns before it")
        self._routing.append(routed)

    @property
    def num_routed(self) -> int:
        """Inputs whose routing is recorded: the next request's `routed_from`."""
        return sum(map(len, self._routing))

    @property
    def token_ids(self) -> IntArray:
        """All ids so far, int32 [L]: the next request's prompt."""
        return np.concatenate([np.empty(0, np.int32), *self._token_ids])

    def _padded_routing(self) -> ShortArray | None:
        """The routing of all turns in one array, with -1 rows for the tokens after the last input."""
        if not self._routing:
            return None
        rest = np.full((len(self.token_ids) - self.num_routed, *self._routing[0].shape[1:]), -1, np.int16)
        return np.concatenate([*self._routing, rest])

    def build(self, **facts: Any) -> Trajectory:
        """The finished trajectory; `facts` are the remaining fields of `Trajectory`."""
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=np.concatenate([np.empty(0, np.bool_), *self._loss_mask]),
            behavior_logprobs=np.concatenate([np.empty(0, np.float32), *self._logprobs]),
            turn_ids=np.concatenate([np.empty(0, np.int32), *self._turn_ids]),
            policy_versions=np.concatenate([np.empty(0, np.int32), *self._versions]),
            sampling_mask=SamplingMask.concat(self._masks),
            routed_experts=self._padded_routing(),
            **facts,
        )


@dataclass(frozen=True)
class Episode:
    """An episode for people to read: the problem and each turn. Its trajectory has the reward and the stop reason.

    `final_text` is what the policy wrote in its last turn if it ended with an answer; `answer` is what the reward
    reads in it, None if it finds none.
    """

    prompt: Prompt
    turns: tuple[Turn, ...]
    trajectory: Trajectory
    final_text: str | None = None
    answer: str | None = None
