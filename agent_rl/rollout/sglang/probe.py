"""Checks, before a run starts, that a server can report what it samples from."""

import math
from typing import Any

from agent_rl.rollout.sglang.client import Client, RefusedError
from agent_rl.rollout.sglang.config import SGLangConfig

_ANSWER_S = 120.0
_TOLERANCE = 0.05
_SERVED = "SGLang 0.5.23"


async def check_server(client: Client, config: SGLangConfig, report_routing: bool) -> None:
    """Check a server. Raises `ValueError`, with the reason, if training cannot use it."""
    info = await client.get("/server_info", _ANSWER_S)
    if problem := _problem_of_settings(info, config, report_routing):
        raise ValueError(f"the SGLang server at {client.url} cannot serve this run: {problem}")
    try:
        problem = _problem_of_kept_sets(await _one_token(client, top_p=0.9)) or _problem_of_temperature(
            *[await _one_token(client, temperature=t) for t in (1.0, 0.5)]
        )
    except RefusedError as refusal:
        problem = f"a request for behaviour log-probs was refused: {refusal}"
    if problem:
        raise ValueError(f"the SGLang server at {client.url} cannot serve this run: {problem}")


def _problem_of_settings(info: dict[str, Any], config: SGLangConfig, report_routing: bool) -> str | None:
    cap = info.get("sampling_mask_max_tokens")
    if cap is None:
        return f"version {info.get('version')} reports no kept sets (return_sampling_mask); use {_SERVED}"
    if cap < config.sampling_mask_max_tokens:
        return (
            f"it reports kept sets of at most {cap} tokens, rollout.engine.sampling_mask_max_tokens is "
            f"{config.sampling_mask_max_tokens}; lower that, or start it with --sampling-mask-max-tokens"
        )
    if report_routing and not info.get("enable_return_routed_experts"):
        return "it reports no routing, which routing_replay needs; start it with --enable-return-routed-experts"
    if config.deterministic and not info.get("enable_deterministic_inference"):
        return "rollout.engine.deterministic needs --enable-deterministic-inference"
    return None


async def _one_token(client: Client, temperature: float = 1.0, top_p: float = 1.0) -> dict[str, Any]:
    """The server's answer to a request for one token after token 0."""
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    if top_p < 1:
        sampling["top_k"] = 50
        body["return_sampling_mask"] = True
    meta: dict[str, Any] = (await client.post("/generate", body, _ANSWER_S))["meta_info"]
    return meta


def _problem_of_kept_sets(meta: dict[str, Any]) -> str | None:
    rows, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if not rows or not logprobs:
        return f"it reports no kept sets (return_sampling_mask); use {_SERVED}"
    if meta["output_token_logprobs"][0][1] not in rows[0] or not logprobs[0] <= 0:
        return "the kept set that it reports does not hold the token that it sampled"
    return None


def _problem_of_temperature(at_one: dict[str, Any], at_half: dict[str, Any]) -> str | None:
    """What is wrong if log-probs ignore temperature: at half of it, two of them must lie twice as far apart."""
    gaps = [_gap(meta) for meta in (at_one, at_half)]
    if math.isclose(gaps[1], 2 * gaps[0], rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        return None
    return (
        "its log-probs are not those after temperature; start it without SGLANG_RETURN_ORIGINAL_LOGPROB and "
        "without speculative decoding"
    )


def _gap(meta: dict[str, Any]) -> float:
    """Log-prob of the likeliest next token minus that of the second."""
    first, second = meta["output_top_logprobs"][0][:2]
    return float(first[0] - second[0])
