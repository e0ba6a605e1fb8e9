"""Requests to SGLang's /generate, and its answers as records. Checked against SGLang 0.5.23."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_rl.records import Completion, FinishReason, FloatArray, IntArray, SamplingMask, SamplingParams, ShortArray
from agent_rl.rollout.engines.base import EngineError

_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True)
class ModelShape:
    """What the engine needs from a model's config.json. `routed_layers`: which decoder layers are routed, bool
    [layers]; `experts_per_token` is 0 for a dense model."""

    vocab_size: int
    max_positions: int
    routed_layers: tuple[bool, ...]
    experts_per_token: int

    @staticmethod
    def of(model_path: Path) -> "ModelShape":
        config = json.loads((model_path / "config.json").read_text())
        dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        layers = range(config["num_hidden_layers"])
        routed = tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)
        positions = config.get("max_position_embeddings", 1 << 30)
        return ModelShape(config["vocab_size"], positions, routed, config.get("num_experts_per_tok", 0))


def request_body(
    token_ids: IntArray, params: SamplingParams, max_new_tokens: int, top_k: int, routed_from: int | None
) -> dict[str, Any]:
    """The body of /generate. `top_k` is what is sent for `params.top_k`: kept sets are reported for a finite one."""
    sampling = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": params.seed,
    }
    body: dict[str, Any] = {"input_ids": token_ids.tolist(), "sampling_params": sampling}
    body |= {"return_logprob": True, "logprob_start_len": -1, "return_text_in_logprobs": False}
    if params.cuts_support and params.temperature > 0:
        body["return_sampling_mask"] = True
    if routed_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": routed_from}
    return body


def read_part(answer: dict[str, Any], body: dict[str, Any], versions: "VersionLabels", shape: ModelShape) -> Completion:
    """The answer to `body`; its end is ABORT if the server aborted it: the rest is still to come.

    Raises `EngineError` if something that was asked for is missing."""
    meta = answer["meta_info"]
    ids = np.asarray(answer.get("output_ids") or [], np.int32)
    logprobs, kept = _behavior(meta, body, ids)
    return Completion(
        token_ids=ids,
        behavior_logprobs=logprobs,
        sampling_mask=kept,
        policy_versions=versions.per_token(meta, len(ids)),
        routed_experts=_routed_experts(meta, body, len(ids), shape),
        finish_reason=_finish_reason(meta, body, ids),
    )


def _finish_reason(meta: dict[str, Any], body: dict[str, Any], ids: IntArray) -> FinishReason:
    """How a part ended. SGLang calls it aborted also where the token of its last step ended it all the same."""
    found = _FINISHED.get(meta["finish_reason"]["type"], FinishReason.ABORT)
    if found is FinishReason.ABORT and len(ids):
        if int(ids[-1]) in body["sampling_params"]["stop_token_ids"]:
            return FinishReason.STOP
        if len(ids) >= body["sampling_params"]["max_new_tokens"]:
            return FinishReason.LENGTH
    return found


def _behavior(meta: dict[str, Any], body: dict[str, Any], ids: IntArray) -> tuple[FloatArray, SamplingMask]:
    """Log-probs of what was sampled from, and the kept sets.

    `output_token_logprobs` is after temperature but over the whole vocabulary: it is the behaviour log-prob only
    where nothing was cut. Where something was, that is `output_token_sampling_logprobs`.
    """
    if body["sampling_params"]["temperature"] == 0:  # the likeliest token and nothing else
        return np.zeros(len(ids), np.float32), SamplingMask.from_rows(list(ids[:, None]))
    if body.get("return_sampling_mask"):
        rows = [np.sort(np.asarray(row, np.int32)) for row in meta.get("output_token_sampling_mask") or []]
        logprobs, kept = meta.get("output_token_sampling_logprobs") or [], SamplingMask.from_rows(rows)
    else:
        logprobs, kept = [entry[0] for entry in meta.get("output_token_logprobs") or []], SamplingMask.full(len(ids))
    if not len(logprobs) == len(kept) == len(ids):
        raise EngineError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probs and {len(kept)} kept sets")
    return np.asarray(logprobs, np.float32), kept


def _routed_experts(meta: dict[str, Any], body: dict[str, Any], count: int, shape: ModelShape) -> ShortArray | None:
    """int16 [inputs from `routed_experts_start_len` on, layers, k]; -1 on layers without a router.

    No inputs of a request that was aborted while it waited: the part that follows reports them.
    """
    if "return_routed_experts" not in body:
        return None
    layers, k = len(shape.routed_layers), shape.experts_per_token
    aborted = meta["finish_reason"]["type"] not in _FINISHED
    if aborted and count == 0 and not meta.get("routed_experts"):
        return np.zeros((0, layers, k), np.int16)
    flat = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), np.int32)
    expected = max(len(body["input_ids"]) + count - 1 - body["routed_experts_start_len"], 0)
    if len(flat) != expected * layers * k:
        raise EngineError(f"routing of {len(flat) / max(layers * k, 1):g} inputs was reported instead of {expected}")
    routed = flat.reshape(expected, layers, k).astype(np.int16)
    routed[:, ~np.asarray(shape.routed_layers, np.bool_)] = -1
    return routed


class VersionLabels:
    """Policy versions as the server's weight versions: with a tag of this engine's own, so that weights which
    someone else has put there are not taken for ours.

    `as_served`: the weight version of a server that is taken as it is, which is version 0 then, and the only one.
    """

    def __init__(self, tag: str, as_served: str | None = None) -> None:
        self._prefix = f"{tag}-"
        self._as_served = as_served

    def of(self, policy_version: int) -> str:
        return f"{self._prefix}{policy_version}"

    def per_token(self, meta: dict[str, Any], count: int) -> IntArray:
        """The policy version of each of `count` tokens, int32 [count]. Raises `EngineError` for a foreign one.

        Raises `ValueError` if the weights of a server that is taken as it is have changed.
        """
        whole = [{"version": meta["weight_version"], "start": 0, "end": count}]
        versions = np.full(count, -1, np.int32)
        for span in meta.get("weight_versions") or whole:
            versions[span["start"] : span["end"]] = self._number(str(span["version"]))
        if count and versions.min() < 0:
            raise EngineError("the server left sampled tokens without a weight version")
        return versions

    def _number(self, label: str) -> int:
        """The policy version that a weight version stands for."""
        if self._as_served is not None:
            if label != self._as_served:
                raise ValueError(
                    f"the server's weights changed from version {self._as_served!r} to {label!r} under the evaluation; "
                    "evaluate it while nobody updates it"
                )
            return 0
        number = label.removeprefix(self._prefix)
        if not label.startswith(self._prefix) or not number.isdigit():
            raise EngineError(f"the server stamped tokens {label!r}, which are weights that this run did not load")
        return int(number)
