"""Real SGLang servers on the CPU for tests, and engines that use them."""

import os
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_rl.config import model_directory
from agent_rl.ports import free_port
from agent_rl.rollout.engines.sglang import SGLangEngine
from agent_rl.rollout.sglang.config import SGLangConfig
from agent_rl.rollout.sglang.server import ServerProcess, launch_command, launch_environment

ROOT = Path(__file__).parents[2]
CONTEXT = 256
TINY = model_directory("builtin:tiny-qwen3")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_START_S = 1000
ANSWER_S = 600
"""How long a server that works may take to answer a test's own request."""


def interpreter() -> Path:
    """Where SGLang lives: SGLANG_PYTHON, or what `make sglang-cpu` makes."""
    return Path(os.environ.get("SGLANG_PYTHON", ROOT / ".sglang" / "bin" / "python"))


def cpu_config(**keys: Any) -> SGLangConfig:
    """The engine's config of the shipped SGLang quickstart, with other keys."""
    shipped = yaml.safe_load((ROOT / "configs" / "quickstart_sglang.yaml").read_text())["rollout"]["engine"]
    own = {"python": str(interpreter()), "max_sequence_tokens": CONTEXT}
    environment = shipped["environment"] | {"PYTHONPATH": str(ROOT / shipped["environment"]["PYTHONPATH"])}
    return SGLangConfig.model_validate(shipped | own | {"environment": environment} | keys)


def launch(model: Path, log: Path, report_routing: bool = False) -> ServerProcess:
    """A server of no engine's own, still starting."""
    config, port = cpu_config(), free_port()
    command = launch_command(config, str(model), port, "nobody", report_routing)
    server = ServerProcess(command, launch_environment(config, 0, os.environ), port, log)
    server.start()
    return server


def wait_until_healthy(server: ServerProcess) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        assert server.alive, server.last_words()
        assert time.monotonic() < deadline, server.last_words()
        try:
            if httpx.get(f"{server.url}/health", timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)


def engine_on(url: str, model: Path, report_routing: bool = False, **keys: Any) -> SGLangEngine:
    """A new engine at version 0 on a shared server: it begins by loading the weights of `model`."""
    return SGLangEngine(cpu_config(urls=[url], **keys), str(model), report_routing=report_routing)


def other_weights(directory: Path) -> Path:
    """A safetensors file that `make_model` made for the model in `directory`."""
    return directory.with_name(f"{directory.name}-other.safetensors")


def make_model(directory: Path, kind: str) -> Path:
    """A random model of the quickstart's vocabulary, without end tokens. Other weights for it lie beside its directory:
    SGLang would load a second file inside.

    `dense` has the shape of tiny-qwen3, so that a server of it can serve those weights too.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(TINY, eos_token_id=None, bos_token_id=None))
    else:
        shape = {"vocab_size": len(tokenizer), "hidden_size": 48, "num_hidden_layers": 3, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
        ends = {"eos_token_id": None, "bos_token_id": None, "intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **ends, **EXPERTS))
    for name, parameter in model.named_parameters():
        parameter.data.uniform_(0.5, 1.5) if "norm" in name else parameter.data.normal_(0, 0.25)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    save_file(
        {n: (0.9 * w + 0.05 * torch.randn_like(w)).contiguous() for n, w in weights.items()},
        other_weights(directory),
    )
    return directory
